"""What the callbacks share: where plans are kept, and what is logged of a limited model, the highest peak of
the steps since it was logged last.
"""

from __future__ import annotations

from lowtide.run.limit.handle import Handle
from lowtide.run.messages import warn

MIB = 1 << 20
PEAK = "memory_peak_mib"
PLANS = "_lowtide_plans"
"""The folder for plans, beside a run's checkpoints."""

_UNCALLED = (
    "a step has run without a call of the limited {}: another module trains, and no budget is held. "
    "accelerate's regional compilation trains a copy of the model: turn it off "
    "(ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION), since torch_compile=True compiles within the "
    "budget. With Lightning, name the submodule that is called: LimitMemory(budget, module=...)"
)


class Peaks:
    """Gathers the peaks of a limited model's steps.

    Args:
        handle: of the limited model.
    """

    def __init__(self, handle: Handle) -> None:
        self._handle = handle
        self._highest: int | None = None
        self._first = True

    def note(self) -> None:
        """A step is over."""
        limiter = getattr(
            self._handle, "_limiter", None
        )  # what a compiled model is called by cannot be missed
        if self._first and limiter is not None and not limiter.called:
            warn(_UNCALLED.format(type(self._handle.model).__name__))
        self._first = False
        measured = self._handle.measured_peak_bytes
        if measured is not None:
            self._highest = max(measured, self._highest or 0)

    def take(self) -> dict[str, float]:
        """In MiB by name, and begin anew: ``memory_peak_mib`` as measured (where there is a meter),
        ``memory_predicted_mib`` of the latest plan, and ``memory_budget_mib`` of all (when there is one).
        """
        plan, highest = self._handle.plan, self._highest
        self._highest = None
        found = {
            PEAK: highest,
            "memory_predicted_mib": plan.predicted_peak_bytes if plan is not None else None,
            "memory_budget_mib": self._handle.budget_bytes if plan is not None else None,
        }
        return {name: round(count / MIB, 3) for name, count in found.items() if count is not None}
