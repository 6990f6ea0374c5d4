"""A forecast, without a card: the longest sequence of a 4B model of Qwen3's shape on one H100 whose optimizer
state is on the host, by recomputing, in tiles, with moves, and with all.

python -m benchmarks.long_context_forecast [OUT.json]
python -m benchmarks.long_context_forecast smoke    (two layers, and nothing is written)

Each step is traced on fake tensors at one length, and planned for the least memory. What is resident does not
depend on the length, nor do gradients; other bytes grow in proportion to it. Nothing ran on a card.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import lowtide
from benchmarks.long_context_steps import LAYERS, PIECES
from lowtide import policies
from lowtide.estimate.devices import device
from lowtide.estimate.fitted import fitted
from lowtide.estimate.suggest import RESERVE
from lowtide.graph import StepGraph
from lowtide.plan.data import Link
from lowtide.steps.planning import ScriptOptions, trace_and_plan_script

CARD = device("h100")
HOST_BYTES = 256 << 30
OUT = Path(__file__).parent / "results" / "long_context_forecast.json"


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


def room() -> int:
    """What the card has for PyTorch's tensors, as `lowtide plan --budget auto` takes it."""
    return int(CARD.memory_bytes * (1 - RESERVE) / (1 + fitted()["reserved"]["plain"]))


def longest(tokens: int, fixed: int, peak: int, moved: int) -> int:
    """The longest sequence, whether all gradients stand at the peak or none: the shorter one. What moves
    has to find room in main memory.

    Args:
        tokens: of the step that was traced.
        fixed: what is resident: weights, workspaces, and the tokens.
        peak, moved: the least memory of that step, and what of it is in main memory.
    """
    gradients = fixed - CARD.workspaces_bytes
    lengths = [(room() - f) * tokens // (peak - f) for f in (fixed, fixed + gradients)]
    return min(*lengths, HOST_BYTES * tokens // moved if moved else lengths[0])


def rows(tokens: int, tiled: bool, layers: int) -> list[dict[str, Any]]:
    """One row for recomputing alone, and one with moves."""
    begin = time.perf_counter()
    graph = traced(tokens, tiled, layers)
    link = Link(CARD.host_bandwidth, CARD.host_bandwidth)
    moving: Any = policies.auto(links={"host": link}, host_budget=HOST_BYTES)
    recomputing: Any = policies.optimal(20.0)
    found = []
    for name, policy in (("recomputing", recomputing), ("moves", moving.hurried(20.0, "cpu"))):
        least: lowtide.Plan = policy(graph, None)
        fixed, peak = graph.resident_bytes, least.predicted_peak_bytes
        moved = sum(m.bytes for m in least.moves)
        found.append({
            "way": {"recomputing": "tiles", "moves": "all"}[name] if tiled else name,
            "layers": layers,
            "traced_tokens": tokens,
            "pieces": PIECES if tiled else 1,
            "fixed_bytes": fixed,
            "least_peak_bytes": peak,
            "room_bytes": room(),
            "longest_tokens": longest(tokens, fixed, peak, moved),
            "moved_bytes": moved,
            "host_budget_bytes": HOST_BYTES,
            "extra_at_least": least.predicted_extra,
            "peak_at": f"{least.peak_operation} in {least.peak_module}",
            "took_seconds": time.perf_counter() - begin,
            "forecast": "planned on fake tensors; nothing ran on a card",
        })  # fmt: skip
        print(found[-1], flush=True)
    return found


def main(arguments: list[str]) -> None:
    """Make the forecast, and write it down."""
    smoke = arguments[:1] == ["smoke"]
    layers = 2 if smoke else LAYERS
    found = [*rows(131_072, True, layers), *rows(16_384, False, layers)]
    if not smoke:
        out = Path(arguments[0]) if arguments else OUT
        out.write_text(json.dumps({"card": CARD.name, "rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
