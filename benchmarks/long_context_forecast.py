"""A forecast, without a card: the longest sequence of a 4B model of Qwen3's shape on one H100 whose optimizer
state is on the host, by recomputing, in tiles, with moves, and with all.

python -m benchmarks.long_context_forecast [OUT.json]
python -m benchmarks.long_context_forecast smoke    (two layers, and nothing is written)

Each step is traced on fake tensors at one length. For other lengths the trace is scaled: weights and their
gradients keep their sizes, other tensors grow in proportion to the length, and attention's time with its
square. Each length is then planned within what the card has. Nothing ran on a card.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.common import machine
from benchmarks.long_context_steps import LAYERS
from lowtide import policies
from lowtide.errors import BudgetError
from lowtide.estimate.devices import device
from lowtide.estimate.fitted import fitted
from lowtide.estimate.suggest import RESERVE
from lowtide.graph import StepGraph
from lowtide.plan.data import Link, Plan
from lowtide.plan.policies.build import Policy
from lowtide.steps.planning import ScriptOptions, trace_and_plan_script

CARD = device("h100")
HOST_BYTES = 256 << 30
OUT = Path(__file__).parent / "results" / "long_context_forecast.json"
AIMS = {"tiles": 131_072, "all": 262_144}
PATIENCE = 10.0
"""Seconds for each plan."""

MISSED = 0.02
"""Share of the longest length by which it may be missed."""


def traced(tokens: int, tiled: bool, layers: int) -> StepGraph:
    """The step on the card, on fake tensors."""
    os.environ |= {
        "LONG_TOKENS": str(tokens),
        "LONG_TILED": "1" if tiled else "",
        "LONG_LAYERS": str(layers),
    }
    script = "benchmarks.long_context_steps:step"
    graph, _ = trace_and_plan_script(ScriptOptions(script, budget="100%", policy="keep_all", device="h100"))
    assert graph is not None
    return graph


def scaled(graph: StepGraph, by: float) -> StepGraph:
    """The same step with ``by`` times as many tokens."""
    sizes = {value.id: tuple(size for size in value.shape if size > 1) for value in graph.values}
    weights = {sizes[v.id] for v in graph.values if graph.storages[v.storage].kind == "parameter"}
    fixed = {value.storage for value in graph.values if sizes[value.id] in weights}
    storages = tuple(
        storage if storage.id in fixed else replace(storage, bytes=int(storage.bytes * by))
        for storage in graph.storages
    )
    operations = tuple(
        replace(op, seconds=op.seconds * by ** (2 if "attention" in op.name else 1))
        for op in graph.operations
    )
    plain = sum(op.seconds for op in operations)
    return replace(graph, storages=storages, operations=operations, plain_seconds=plain)


def room() -> int:
    """What the card has for PyTorch's tensors, as `lowtide plan --budget auto` takes it."""
    return int(CARD.memory_bytes * (1 - RESERVE) / (1 + fitted()["reserved"]["plain"]))


def plan_at(graph: StepGraph, by: float, policy: Policy) -> Plan | None:
    """A plan for ``by`` times as many tokens within the card's memory, or ``None`` where none fits."""
    try:
        return policy(scaled(graph, by), room())
    except BudgetError:
        return None


def longest(graph: StepGraph, tokens: int, policy: Policy) -> int:
    """The longest sequence that fits: the smallest peak of any plan is taken at three lengths, each where the
    one before would just fit.
    """
    length = tokens
    for _ in range(3):
        least = policy(scaled(graph, length / tokens), None).predicted_peak_bytes
        length = int(length * (room() - graph.resident_bytes) / (least - graph.resident_bytes))
    while plan_at(graph, length / tokens, policy) is None:
        length = int(length * (1 - MISSED))
    return length


def facts(plan: Plan | None) -> dict[str, Any]:
    """What a row says of a plan."""
    if plan is None:
        return {"fits": False}
    return {
        "fits": True,
        "peak_bytes": plan.predicted_peak_bytes,
        "extra": plan.predicted_extra,
        "plain_seconds": plan.plain_seconds,
        "moved_bytes": sum(m.bytes for m in plan.moves),
        "peak_at": f"{plan.peak_operation} in {plan.peak_module}",
    }


def rows(tokens: int, tiled: bool, layers: int) -> list[dict[str, Any]]:
    """One row for recomputing alone, and one with moves."""
    begin = time.perf_counter()
    graph = traced(tokens, tiled, layers)
    link = Link(CARD.host_bandwidth, CARD.host_bandwidth)
    moving: Any = policies.auto(links={"host": link}, host_budget=HOST_BYTES)
    recomputing: Any = policies.optimal(PATIENCE)
    found = []
    ways = ("tiles", "all") if tiled else ("recomputing", "moves")
    for way, policy in zip(ways, (recomputing, moving.hurried(PATIENCE, "cpu")), strict=True):
        length = longest(graph, tokens, policy)
        row = {
            "way": way,
            "layers": layers,
            "traced_tokens": tokens,
            "resident_bytes": graph.resident_bytes,
            "room_bytes": room(),
            "host_budget_bytes": HOST_BYTES,
            "longest_tokens": length,
            "at_longest": facts(plan_at(graph, length / tokens, policy)),
        }
        if way in AIMS:
            row |= {"aim_tokens": AIMS[way], "at_aim": facts(plan_at(graph, AIMS[way] / tokens, policy))}
        found.append({
            **row,
            "took_seconds": time.perf_counter() - begin,
            "forecast": "planned on fake tensors; nothing ran on a card",
        })  # fmt: skip
        print(json.dumps(found[-1], indent=1), flush=True)
    return found


def main(arguments: list[str]) -> None:
    """Make the forecast, and write it down."""
    smoke = arguments[:1] == ["smoke"]
    layers = 2 if smoke else LAYERS
    found = [*rows(131_072, True, layers), *rows(16_384, False, layers)]
    if not smoke:
        out = Path(arguments[0]) if arguments else OUT
        out.write_text(json.dumps({"card": CARD.name, "machine": machine(), "rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
