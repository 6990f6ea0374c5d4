"""Memory from the profiler's events: what there is where no compiler is. The same bytes, 12 to 79 % slower
while it watches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch._C._autograd import DeviceType, _profiler_enabled
from torch.profiler import ProfilerActivity, profile

from .errors import MeterError


@dataclass(frozen=True, slots=True)
class Watched:
    """What the profiler saw, in bytes above the start.

    Attributes:
        peak_bytes: most bytes live.
        end_bytes: bytes live at the end.
        allocations: blocks allocated.
        events: (seconds since the start, bytes live after the event).
    """

    peak_bytes: int
    end_bytes: int
    allocations: int
    events: tuple[tuple[float, int], ...]


class ProfilerWatch:
    """Watch the CPU's allocations from `start` to `stop`. Frees of blocks from before the start are not
    seen.
    """

    def __init__(self) -> None:
        self._profile: Any = None

    def start(self) -> None:
        """Begin. Raises MeterError while another profiler runs."""
        if _profiler_enabled():
            raise MeterError(
                "memory cannot be measured here: without the counting allocator (which needs a C++ "
                "compiler) the profiler measures it, and a profiler is running already (nested peaks need "
                "the allocator too)"
            )
        watch = profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True)
        watch.__enter__()
        self._profile = watch

    def stop(self) -> Watched:
        """End, and say what was seen."""
        watch, self._profile = self._profile, None
        watch.__exit__(None, None, None)
        results = watch.profiler.kineto_results
        begin = results.trace_start_ns()
        seen = [
            (e.start_ns(), e.nbytes())
            for e in results.events()
            if e.name() == "[memory]" and e.device_type() == DeviceType.CPU
        ]
        seen.sort(key=lambda event: event[0])
        live, peak, count = 0, 0, 0
        events: list[tuple[float, int]] = []
        for at, size in seen:
            live += size
            peak = max(peak, live)
            count += size > 0
            events.append(((at - begin) * 1e-9, live))
        return Watched(peak, live, count, tuple(events))
