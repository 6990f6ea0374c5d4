"""What the callbacks log of a limited model: the highest peak of the steps since they last did."""

from __future__ import annotations

from lowtide.run.limit.handle import Handle

MIB = 1 << 20
PEAK = "memory_peak_mib"


class Peaks:
    """Gathers the peaks of a limited model's steps.

    Args:
        handle: of the limited model.
    """

    def __init__(self, handle: Handle) -> None:
        self._handle = handle
        self._highest: int | None = None

    def note(self) -> None:
        """A step is over."""
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
