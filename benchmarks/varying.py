"""Steps whose program varies from one to the next: how many are profiled, whether each keeps the budget, and
how much longer they take than with a plan prepared for each program.

python -m benchmarks varying [--quick] [--resume]

Two hundred seeded steps of each of five kinds (`benchmarks.varying_kinds`) run within 60 % of the plain peak
of the largest, and within 1.1 times the smallest budget: the largest "min" of the seven steps with the
largest plain peaks, and of the first. Gradients are compared bit by bit with those of a plain twin, and each
step's peak with the budget. Then some of the programs run in turn on that model and on one that has a plan
prepared for the program: processor time counts, the shorter of some runs. The same once more with larger
models, whose operations take as long as those of real steps.
"""

from __future__ import annotations

import time
import warnings
from typing import Any

import torch
from torch import nn

from benchmarks.common import kept_rows, quick, run_key, save, total_peak
from benchmarks.varying_kinds import KINDS, LARGE, ROWS, WIDTH, batch_of, draws_of, run, same
from lowtide import Handle, limit_memory

STEPS, QUICK_STEPS = 200, 50
TIMED, QUICK_TIMED, ROUNDS = 12, 4, 7
LARGE_SEEN, LARGE_TIMED = 12, 3
SMALL = WIDTH, ROWS
LARGEST = 7
SLACK_BYTES = 8192
"""What a step may take above its budget: Python's random state and the like."""
MOST_PROFILED, LAST_PROFILED, MOST_ABOVE = 5, 50, 2


def peak_of(model: nn.Module, x: torch.Tensor, how: Any) -> int:
    """The peak of one step in bytes, with what is resident before it."""
    model.zero_grad(set_to_none=True)
    return total_peak(model, {"x": x}, lambda: model(x, how).backward())


def budgets_of(kind: Any, draws: list[Any], size: tuple[int, int] = SMALL) -> dict[str, int]:
    """The two budgets."""
    plain, x = kind(size[0]), batch_of(0, *size)
    sizes = sorted(((peak_of(plain, x, how), place) for place, how in enumerate(draws)), reverse=True)
    smallest = 0
    for place in {0, *(place for _, place in sizes[:LARGEST])}:
        plan = limit_memory(kind(size[0]), "min", progress=False).prepare(x, draws[place])
        smallest = max(smallest, plan.budget_bytes or 0)
    return {"60%": int(0.6 * sizes[0][0]), "1.1 min": int(1.1 * smallest)}


def row_of(name: str, share: str, budget: int, draws: list[Any], timed: int = 0) -> dict[str, Any]:
    """Seeded steps of one kind under one budget, the last of them timed."""
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
    ratio, operation = time_ratio(kind, model, budget, draws[-timed:]) if timed else (None, None)
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
        "time_ratio": ratio,
        "operation_us": operation,
    }


def large_row(name: str, share: str) -> dict[str, Any]:
    """The time of a large model's steps, once it has seen some."""
    kind, draws = KINDS[name], draws_of(KINDS[name], LARGE_SEEN + LARGE_TIMED)
    budget = budgets_of(kind, draws, LARGE)[share]
    model = kind(LARGE[0])
    handle = limit_memory(model, budget, progress=False)
    for number, how in enumerate(draws[:LARGE_SEEN]):
        run(model, batch_of(number, *LARGE), how)
    ratio, operation = time_ratio(kind, model, budget, draws[LARGE_SEEN:], LARGE)
    handle.remove()
    return {"large_width_and_rows": LARGE, "large_time_ratio": ratio, "large_operation_us": operation}


def profiles(handle: Handle) -> int:
    """How many steps were profiled."""
    return sum(entry.listened for entry in handle._limiter.book.known.values())


def time_ratio(
    kind: Any, model: nn.Module, budget: int, draws: list[Any], size: tuple[int, int] = SMALL
) -> tuple[float, float]:
    """Processor time of the programs on a model that has seen many, over that with a plan for each; and of an
    operation in the second, in microseconds.
    """
    varying = prepared = operations = 0.0
    for how in draws:
        other, x = kind(size[0]), batch_of(0, *size)
        handle = limit_memory(other, budget, progress=False)
        handle.prepare(x, how)
        run(other, x, how)
        times = [[seconds(one, x, how) for one in (model, other)] for _ in range(ROUNDS)]
        operations += len(handle.graph.operations)
        handle.remove()
        varying += min(mine for mine, _ in times)
        prepared += min(theirs for _, theirs in times)
    return round(varying / prepared, 3), round(prepared / operations * 1e6)


def seconds(model: nn.Module, x: torch.Tensor, how: Any) -> float:
    """Processor time of a step."""
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
                timed = QUICK_TIMED if quick() else TIMED
                rows.append(row_of(name, share, budgets[share], draws, timed) | {"run": run_key()})
            print(rows[-1], flush=True)
            save("varying", rows)
    for row in rows:
        if "large_time_ratio" not in row:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                row |= large_row(row["kind"], row["budget"])
            print(row, flush=True)
            save("varying", rows)
    torch.set_num_threads(threads)
    return 0 if all(map(holds, rows)) else 1
