"""Steps whose program varies from one to the next: how many are profiled, whether each keeps the budget, and
how much longer they take than with a plan prepared for each program.

python -m benchmarks varying [--quick] [--resume]

Two hundred seeded steps of each of five kinds (`benchmarks.varying_kinds`) run within 60 % of the plain peak
of the largest, and within 1.1 times the smallest budget: the largest "min" of the seven steps with the
largest plain peaks, and of the first. Gradients are compared bit by bit with those of a plain twin, and each
step's peak with the budget. Then some of the programs run in turn on that model and on one that has a plan
prepared for the program: processor time counts, the shorter of some runs.
"""

from __future__ import annotations

import time
import warnings
from typing import Any

import torch
from torch import nn

from benchmarks.common import kept_rows, quick, run_key, save, total_peak
from benchmarks.varying_kinds import KINDS, batch_of, draws_of, run, same
from lowtide import Handle, limit_memory

STEPS, QUICK_STEPS = 200, 50
TIMED, ROUNDS = 12, 5
LARGEST = 7
SLACK_BYTES = 8192
"""What a step may take above its budget: Python's random state and the like."""
MOST_PROFILED, LAST_PROFILED, MOST_ABOVE = 5, 50, 2


def peak_of(model: nn.Module, x: torch.Tensor, how: Any) -> int:
    """The peak of one step in bytes, with what stands before it."""
    model.zero_grad(set_to_none=True)
    return total_peak(model, {"x": x}, lambda: model(x, how).backward())


def budgets_of(kind: Any, draws: list[Any]) -> dict[str, int]:
    """The two budgets."""
    plain, x = kind(), batch_of(0)
    sizes = sorted(((peak_of(plain, x, how), place) for place, how in enumerate(draws)), reverse=True)
    smallest = 0
    for place in {0, *(place for _, place in sizes[:LARGEST])}:
        plan = limit_memory(kind(), "min", progress=False).prepare(x, draws[place])
        smallest = max(smallest, plan.budget_bytes or 0)
    return {"60%": int(0.6 * sizes[0][0]), "1.1 min": int(1.1 * smallest)}


def row_of(name: str, share: str, budget: int, draws: list[Any]) -> dict[str, Any]:
    """Seeded steps of one kind under one budget."""
    kind = KINDS[name]
    plain, model = kind(), kind()
    handle: Handle = limit_memory(model, budget, progress=False)
    profiled, above, silent, differ = [], [], [], 0
    for number, how in enumerate(draws):
        before, x = profiles(handle), batch_of(number)
        expected = run(plain, x, how)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            peak = peak_of(model, x, how)
        differ += not same(expected, [parameter.grad for parameter in model.parameters()])
        if profiles(handle) > before:
            profiled.append(number)
        elif peak > budget + SLACK_BYTES:
            above.append([number, round(peak / budget - 1, 4)])
            if not any("above the budget" in str(one.message) for one in caught):
                silent.append(number)
    ratio = time_ratio(kind, model, budget, draws[-TIMED:])
    handle.remove()
    return {
        "kind": name,
        "budget": share,
        "budget_bytes": budget,
        "steps": len(draws),
        "profiled": profiled,
        "above": above,
        "not_said": silent,
        "other_gradients": differ,
        "time_ratio": round(ratio, 3),
    }


def profiles(handle: Handle) -> int:
    """How many steps were profiled."""
    return sum(entry.profiles for entry in handle._limiter.cache.known.values())


def time_ratio(kind: Any, model: nn.Module, budget: int, draws: list[Any]) -> float:
    """Processor time of the programs on a model that has seen many, over that with a plan for each."""
    varying = prepared = 0.0
    for how in draws:
        other = kind()
        handle = limit_memory(other, budget, progress=False)
        handle.prepare(batch_of(0), how)
        run(other, batch_of(0), how)
        times = [[seconds(one, how) for one in (model, other)] for _ in range(ROUNDS)]
        handle.remove()
        varying += min(mine for mine, _ in times)
        prepared += min(theirs for _, theirs in times)
    return varying / prepared


def seconds(model: nn.Module, how: Any) -> float:
    """Processor time of a step."""
    x = batch_of(0)
    begin = time.process_time()
    run(model, x, how)
    return time.process_time() - begin


def holds(row: dict[str, Any]) -> bool:
    """Whether a row is as it should be, its time aside."""
    profiled = row["profiled"]
    few = len(profiled) <= MOST_PROFILED and max(profiled) <= LAST_PROFILED
    return few and len(row["above"]) <= MOST_ABOVE and not (row["not_said"] or row["other_gradients"])


def main() -> int:
    """Run and write benchmarks/results/varying.json."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    rows = kept_rows("varying")
    for name, kind in KINDS.items():
        draws, budgets = draws_of(kind, QUICK_STEPS if quick() else STEPS), {}
        for share in ("60%", "1.1 min"):
            if any((row["kind"], row["budget"]) == (name, share) for row in rows):
                continue
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                budgets = budgets or budgets_of(kind, draws)
                rows.append(row_of(name, share, budgets[share], draws) | {"run": run_key()})
            print(rows[-1], flush=True)
            save("varying", rows)
    torch.set_num_threads(threads)
    return 0 if all(map(holds, rows)) else 1
