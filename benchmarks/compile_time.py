"""What a budget adds to compiling: seconds until the second step is done, cold and from the cache on disk, of
planning among them, and what a step takes where the budget asks for nothing.

python -m benchmarks compile_time [--quick]

Each figure of compiling is a process of its own with a cache folder of its own; the second process of a
folder is the warm one. The budget is a share, and the same in bytes, where the plain step need not be known.
Planning is all that happens where a plan is made: ``lowering`` is the part in which Inductor says what it
would allocate, ``reading`` the one in which what it generates is read, ``solving`` the search for the plan;
timing operations, looking at the graph, and compiling what is compiled as soon as it is tried are the rest.
GPT-2 of transformers with labels is two graphs: its first step is recorded, and planned for after it. A step
at ``100%`` is compared with the plain compiled one in paired rounds. The models' steps are short on purpose:
compiling does not depend on sizes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

import lowtide
from benchmarks.cases import gpt, gpt2, llama3
from benchmarks.common import Case, keep_pages, median_difference, paired, quick, save, step_of
from lowtide.compiled import choose_cuts
from lowtide.compiled.flow import Flow
from lowtide.compiled.lower import Generated
from lowtide.private import inductor

BUDGET = "75%"
MODELS = ("gpt 12", "gpt 24", "gpt2 8", "llama3 8")
PLANNED_LAYERS = (12, 24, 48, 96)
"""Those that are planned for under ``aot_eager``, which compiles no kernel."""

RATE_ROUNDS = 301


def case_of(model: str) -> Case:
    """A model by its family and depth: ours of one graph, or one of transformers with labels."""
    family, depth = model.split()
    if family == "gpt":
        return gpt(int(depth), 128, batch=2, sequence=128)
    made = {"gpt2": gpt2, "llama3": llama3}[family]
    return made(size=1, layers=int(depth), width=128)


class Watch:
    """Adds up seconds by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def of(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """``call``, timed."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begin

        return timed


def child(which: str, backend: str, budget: str) -> dict[str, Any]:
    """Compile and step twice; an empty budget is plain `torch.compile`."""
    case, watch = case_of(which), Watch()
    model, batch = case.build(), case.batch()
    with (
        mock.patch.object(Flow, "_find", watch.of("planning", Flow._find)),
        mock.patch.object(Generated, "__call__", watch.of("reading", Generated.__call__)),
        mock.patch.object(inductor, "generated", watch.of("lowering", inductor.generated)),
        mock.patch.object(choose_cuts, "at_or_smallest", watch.of("solving", choose_cuts.at_or_smallest)),
    ):
        begin = time.perf_counter()
        if budget:
            callee = lowtide.compile(model, int(budget) if budget.isdigit() else budget, backend=backend)
        else:
            callee: Any = torch.compile(model, backend=backend)
        for _ in range(2):
            callee(**batch).loss.backward()
            model.zero_grad(set_to_none=True)
        whole = time.perf_counter() - begin
    found: dict[str, Any] = {"seconds": whole, "planning": 0.0, **watch.seconds}
    if budget:
        handle = lowtide.handle_of(callee)
        assert handle is not None and handle.plan is not None
        plan = handle.plan
        found |= {
            "gap_of_step": plan.gap,
            "peak_over_plain": plan.predicted_peak_bytes / plan.plain_peak_bytes,
            "budget_bytes": plan.budget_bytes,
            "operations": len(plan.stored) + len(plan.replayed),
        }
    return found


def in_a_process(folder: str, model: str, backend: str, budget: str) -> dict[str, Any]:
    """What `child` returns, run in a process of its own that keeps what it compiles in ``folder``."""
    places = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"}
    ran = subprocess.run(
        [sys.executable, "-m", "benchmarks.compile_time", model, backend, budget],
        env={**os.environ, **places},
        capture_output=True,
        text=True,
    )
    if ran.returncode:
        raise RuntimeError(ran.stderr)
    return json.loads(ran.stdout.splitlines()[-1])


def compiling(model: str) -> list[dict[str, Any]]:
    """Two rows, a share and bytes: plain and under a budget, cold and warm."""

    def both(budget: str) -> tuple[dict[str, float], dict[str, Any]]:
        with tempfile.TemporaryDirectory() as folder:
            cold = in_a_process(folder, model, "inductor", budget)
            warm = in_a_process(folder, model, "inductor", budget)
        seconds = {"cold_seconds": cold["seconds"], "warm_seconds": warm["seconds"]}
        return seconds, {**cold, "warm_planning": warm["planning"]}

    (plain, _), rows, budget = both(""), [], BUDGET
    for kind in ("share", "bytes"):
        ours, found = both(budget)
        row = {"kind": "inductor", "model": model, "budget": BUDGET if kind == "share" else kind}
        row |= {"plain": plain, "lowtide": ours, **found}
        row["cold_ratio"] = ours["cold_seconds"] / plain["cold_seconds"]
        row["warm_ratio"] = ours["warm_seconds"] / plain["warm_seconds"]
        rows.append(row)
        budget = str(found["budget_bytes"])
    return rows


def planning(layers: int) -> list[dict[str, Any]]:
    """One row: planning alone, call by call."""
    with tempfile.TemporaryDirectory() as folder:
        found = in_a_process(folder, f"gpt {layers}", "aot_eager", BUDGET)
    return [{"kind": "aot_eager", "layers": layers, "budget": BUDGET, **found}]


def step_rate() -> list[dict[str, Any]]:
    """One row: a step at 100 % beside a plain compiled one."""
    case = case_of("gpt 4")
    plain, limited, batch = case.build(), case.build(), case.batch()
    compiled: Any = torch.compile(plain)
    steps = [step_of(compiled, batch), step_of(lowtide.compile(limited, "100%"), batch)]
    for step in steps:
        step()
        step()
    rounds = 31 if quick() else RATE_ROUNDS
    first, second = paired(steps, rounds)
    base = sorted(first)[rounds // 2]
    more = median_difference(second, first) / base
    return [{"kind": "100%", "rounds": rounds, "plain_seconds": base, "more_of_step": more}]


def main() -> None:
    """Run and write benchmarks/results/compile_time.json."""
    warnings.simplefilter("ignore")
    keep_pages()
    rows: list[dict[str, Any]] = []
    jobs: list[Callable[[], list[dict[str, Any]]]] = [step_rate]
    jobs += [lambda layers=layers: planning(layers) for layers in PLANNED_LAYERS[: 2 if quick() else None]]
    jobs += [lambda model=model: compiling(model) for model in MODELS[: 1 if quick() else None]]
    for job in jobs:
        rows += job()
        print(rows[-1], flush=True)
        save("compile_time", rows)


if __name__ == "__main__":
    if len(sys.argv) == 4:
        warnings.simplefilter("ignore")
        print(json.dumps(child(sys.argv[1], sys.argv[2], sys.argv[3])))
    else:
        main()
