"""What to say of limited models when their device has no memory left."""

from __future__ import annotations

from functools import cache, partial
from typing import Any
from weakref import WeakSet

from lowtide import private
from lowtide.budget import format_bytes
from lowtide.extension import sources
from lowtide.plan.simulate.holders import planned_holders
from lowtide.remedies import in_lines
from lowtide.run.limit.entry import Planned
from lowtide.run.messages import warn


class OutOfMemory:
    """Tells of limited models when their device is out of memory. PyTorch knows no way to take an observer
    away, so there is one a process: `out_of_memory`.
    """

    def __init__(self) -> None:
        self._limiters: WeakSet[Any] = WeakSet()
        self._attached = False

    def follow(self, limiter: Any) -> None:
        """Tell of this limiter's plan in force from now on; its model is on a CUDA device."""
        self._limiters.add(limiter)
        if not self._attached:
            self._attached = True
            private.on_cuda_out_of_memory(self.warn)

    def warn(self, device: int, asked_bytes: int) -> None:
        """Warn of each limited model that has a plan; ``asked_bytes`` more were not to be had."""
        for limiter in tuple(self._limiters):
            planned = limiter.book.latest
            if planned is not None and not limiter.removed:
                warn(_out_of_memory_text(planned, limiter.maker, device, asked_bytes), each_time=True)


@cache
def out_of_memory() -> OutOfMemory:
    """The observer of this process."""
    return OutOfMemory()


def _out_of_memory_text(planned: Planned, maker: Any, device: int, asked_bytes: int) -> str:
    plan, claimed = planned.plan, maker.claim.resident_bytes
    holders = planned_holders(planned.step_graph, plan, claimed, partial(sources, maker.extensions))
    limit = "no budget" if plan.budget_bytes is None else f"a budget of {format_bytes(plan.budget_bytes)}"
    lines = [
        f"CUDA device {device} has no {format_bytes(asked_bytes)} free. A model of this process is "
        f"limited to {limit}, and its plan takes {format_bytes(plan.predicted_peak_bytes)}. A budget "
        "does not count other tensors, fragments of the allocator, and the driver's memory. Give a "
        "smaller budget, or 'auto'",
        "Largest at the plan's peak, with the bytes that a remedy frees:",
        *(f"  - {line}" for line in in_lines(holders)),
    ]
    return "\n".join(lines)
