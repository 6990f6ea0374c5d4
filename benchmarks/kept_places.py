"""Kept values in a slab: how many of their bytes operations can write there, what the slab adds to the peak, and to the time.

python -m benchmarks kept_places

Each model runs with everything kept and with a quarter of the peak saved by recomputing; loose and in a slab in the same process, a step of each in turn.
Where a plan recomputes, two models are compared, which differ by several percent from where their memory lies. Pages are faulted in by the C library's
defaults (*given back*: large blocks are mapped anew in every step) and with freed memory kept (see `benchmarks.common.keep_pages`). Also how long one
operation takes: as it is, intercepted, and intercepted and placed.
"""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.cases import bert, gpt, llama, resnet
from benchmarks.common import (
    UNSETTLED,
    Case,
    keep_pages,
    median_difference,
    paired,
    rounds_within,
    save,
    step_of,
    total_peak,
    unlimited_step_of,
)
from lowtide import apply, limit_memory, policies, trace
from lowtide.graph import StepGraph
from lowtide.plan.kept import LEAST_BYTES, placeable
from lowtide.plan.plan import Plan
from lowtide.plan.simulate import Simulator

SECONDS = 12.0
SHARE = 0.75
REPEATS = 3000


def cases() -> list[Case]:
    """One of each kind."""
    return [gpt(4, 384), llama(4, 384), bert(), resnet()]


def kept_bytes(graph: StepGraph, plan: Plan) -> tuple[int, int, int]:
    """Bytes of the storages that a plan keeps, of those that can be written into a slab, and how many these are."""
    sim = Simulator(graph)
    kept = {sim.storage_of[v] for v in plan.stored} - set(graph.outputs)
    made = {s for s in kept if graph.storages[s].kind == "forward"}
    can = placeable(sim, plan.stored)
    return sum(graph.storages[s].bytes for s in made), sum(graph.storages[s].bytes for s in can), len(can)


def faults(step: Any) -> int:
    """Pages that one step faults in."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    step()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def measured(case: Case, kept_pages: bool, names: Sequence[str] = ("keep_all", "optimal")) -> list[dict[str, Any]]:
    """A row of a model for each policy."""
    rows = []
    for name in names:
        loose, slabbed = case.build(), case.build()
        batch = case.batch()
        budget = None if name == "keep_all" else f"{SHARE:.0%}"
        handles = [limit_memory(loose, budget=budget, policy=name), limit_memory(slabbed, policy=_same(loose, batch, name))]
        steps = [step_of(loose, batch), step_of(slabbed, batch)]
        if name == "keep_all":  # the same model without its slab: two models differ from where their memory lies
            steps[0] = unlimited_step_of(slabbed, batch)
        for _ in range(UNSETTLED):
            for step in steps:
                step()
        stores = handles[1]._limiter.stores
        graph, plan = handles[1].graph, handles[1].plan
        assert graph is not None and plan is not None and stores.slab is not None
        every, can, count = kept_bytes(graph, plan)
        before, placed = stores.slab_allocations, stores.slab.placed
        seconds = paired(steps, rounds_within(steps, SECONDS))
        ran = len(seconds[0]) + 1 + 1  # warm rounds
        pages = [statistics.median(faults(step) for _ in range(5)) for step in steps]
        peak = total_peak(slabbed, batch, steps[1])
        row = {
            "model": case.name,
            "policy": name,
            "pages": "kept" if kept_pages else "given back",
            "kept_bytes": every,
            "placed_bytes": can,
            "placed_share": can / every,
            "values": count,
            "slab_bytes": plan.slab_bytes,
            "unplaced": stores.unplaced,
            "slab_allocations_after_the_first_step": stores.slab_allocations - before,
            "placed_in_a_step": (stores.slab.placed - placed) / (ran + 6),
            "loose_peak_bytes": plan.loose_peak_bytes,
            "predicted_peak_bytes": plan.predicted_peak_bytes,
            "measured_peak_bytes": peak,
            "peak_added": plan.predicted_peak_bytes / plan.loose_peak_bytes - 1,
            "loose_seconds": statistics.median(seconds[0]),
            "added": median_difference(seconds[1], seconds[0]) / statistics.median(seconds[0]),
            "loose_page_faults": pages[0],
            "page_faults": pages[1],
        }
        rows.append(row)
        print(row, flush=True)
        for handle in handles:
            handle.remove()
    return rows


def _same(loose: torch.nn.Module, batch: dict[str, Any], name: str) -> Any:
    """The policy that makes the decisions of the limited model ``loose``, in a slab."""
    if name == "keep_all":
        return policies.in_slab(name)

    def policy(graph: StepGraph, budget: int | None = None) -> Plan:
        limiter = loose.__dict__["forward"]
        stored = limiter.planned((), batch).plan.stored
        return policies.make_plan(graph, stored=stored, policy=name, budget=budget, slab="kept")

    return policy


class One(torch.nn.Module):
    """An operation whose result is kept."""

    def __init__(self, call: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.call = call
        self.scale = torch.nn.Parameter(torch.randn(64, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A loss."""
        return (self.call(x, x) * self.scale).sum()


CALLS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "addmm": lambda x, y: torch.addmm(x, x, y),
    "mul": lambda x, y: x * y,
    "gelu": lambda x, y: torch.nn.functional.gelu(x),
}


def operations() -> list[dict[str, Any]]:
    """Microseconds of one operation in a loop of its own, alone, intercepted, and placed."""
    rows = []
    x = torch.randn(64, 64)
    for name, call in CALLS.items():
        model = One(call)
        graph = trace(model, x)
        slabbed = policies.in_slab("keep_all")(graph)
        loose = policies.make_plan(graph, stored=slabbed.stored)
        found: dict[str, Any] = {"operation": name, "alone": _micros(lambda call=call: call(x, x))}
        for kind, around in {"intercepted": apply(loose, verify="never"), "placed": apply(slabbed, verify="never")}.items():
            with around:
                director: Any = around._director

                def again(call: Any = call, director: Any = director) -> None:
                    director.at = 0
                    call(x, x)

                found[kind] = _micros(again)
            assert kind == "intercepted" or (
                around.stores.slab is not None and around.stores.slab.placed > REPEATS and not around.stores.unplaced
            )
        rows.append(found)
        print(found, flush=True)
    return rows


def _micros(call: Any) -> float:
    call()
    best = float("inf")
    for _ in range(5):
        begin = time.perf_counter()
        for _ in range(REPEATS // 5):
            call()
        best = min(best, time.perf_counter() - begin)
    return 1e6 * best / (REPEATS // 5)


def main() -> None:
    """Run and write benchmarks/results/kept_places.json."""
    torch.set_num_threads(1)
    single = operations()
    rows = [row for case in cases() for row in measured(case, False)]
    if keep_pages():
        rows += [row for case in cases() for row in measured(case, True)]
    save("kept_places", rows, operations=single, least_bytes=LEAST_BYTES)
