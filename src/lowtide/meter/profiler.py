"""Memory from the profiler's events: what there is where no compiler is. The same bytes, 12 to 79 % slower
while it watches.
"""

from __future__ import annotations

from typing import Any

from torch.profiler import ProfilerActivity, profile

from lowtide import private
from lowtide.errors import MeterError

from .reading import Reading


class ProfilerRegister:
    """The CPU's allocations as the profiler sees them. Frees of blocks from before the start are not seen.

    Args:
        timeline: whether to keep every event.
    """

    def __init__(self, timeline: bool = False) -> None:
        self._timeline = timeline
        self._profile: Any = None

    def open(self) -> None:
        """Begin. Raises MeterError while another profiler runs."""
        if private.is_profiler_enabled():
            raise MeterError(
                "memory cannot be measured here: without the counting allocator (which needs a C++ "
                "compiler) the profiler measures it, and a profiler is running already (nested peaks need "
                "the allocator too)"
            )
        watch = profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True)
        watch.__enter__()
        self._profile = watch

    def read(self) -> Reading:
        """Raises MeterError: it is known at the end only."""
        raise MeterError(
            "without the counting allocator (which needs a C++ compiler) the peak is known only after the "
            "with-block"
        )

    def close(self) -> Reading:
        """End, and say what there was."""
        watch, self._profile = self._profile, None
        watch.__exit__(None, None, None)
        results = watch.profiler.kineto_results
        begin = results.trace_start_ns()
        seen = [
            (e.start_ns(), e.nbytes())
            for e in results.events()
            if e.name() == "[memory]" and e.device_type() == private.cpu_device_type
        ]
        seen.sort(key=lambda event: event[0])
        live = peak = 0
        moments = []
        for at, size in seen:
            live += size
            peak = max(peak, live)
            moments.append(((at - begin) * 1e-9, live))
        return Reading(peak, live, timeline=tuple(moments) if self._timeline else ())
