"""Watch one step from outside: when its backward begins and ends, what it really took, and how long."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from lowtide import private
from lowtide.meter import MeterError, Peak, available, peak


class _Mark:
    """Lives as long as one of the nodes of autograd's graph that it was left in."""


class StepWatch:
    """Follows one step of a limited model, from before its forward to the end of its backward, or of each of
    its backwards.

    Args:
        on_end: called each time that a backward through the step has ended.
        device: whose memory and time are watched.
        on_gone: called when nobody can run backward through the step any more; ``None`` ends the watch then,
            or the meter would stand after the last step.

    Attributes:
        began: whether a backward through the step is under way, or has failed.
        backwards: how many backwards through the step have ended.
        recording_seconds: time around the forward; it says nothing on a GPU, where the host runs ahead.
        replays: knows how long the compiled recorder's replays took, or ``None``.
    """

    def __init__(
        self, on_end: Callable[[], None], device: torch.device, on_gone: Callable[[], None] | None = None
    ) -> None:
        self.device = device
        self.began = False
        self.backwards = 0
        self.recording_seconds = 0.0
        self.replays: Any = None
        self._replay_seconds = 0.0
        self._on_end, self._on_gone = on_end, on_gone
        self._awaited: weakref.ref[_Mark] | None = None
        self._peak = open_peak(device)
        self._marks = [_now(device)]

    @property
    def peak_bytes(self) -> int | None:
        """Most live bytes of the step so far, above those at its start; ``None`` where it cannot be
        measured.
        """
        return self._peak.peak_bytes if self._peak is not None else None

    @property
    def replay_seconds(self) -> float:
        """Time that bringing values back took; it says nothing on a GPU."""
        return self._replay_seconds + (self.replays.seconds if self.replays is not None else 0.0)

    def forward_ends(self, outputs: Iterable[torch.Tensor]) -> None:
        """The forward returned ``outputs``: backward is expected to come from there."""
        if len(self._marks) == 1:
            self._marks.append(_now(self.device))
        mark = _Mark()
        self._awaited = weakref.ref(mark, self._let_go)
        for output in outputs:
            if output.grad_fn is not None:
                output.grad_fn.register_prehook(self.backward_begins)
                output.grad_fn.metadata["lowtide", id(self)] = mark  # pyright: ignore

    def pending(self) -> bool:
        """Whether the step's backward is still to come: it has not begun, and someone can still begin it."""
        alive = self._awaited is not None and self._awaited() is not None
        return alive and not (self.backwards or self.began)

    def failed(self) -> bool:
        """Whether a backward has begun and, to go by who asks, ended with an error: nobody calls back
        then.
        """
        return self.began and not private.in_backward()

    def backward_begins(self, *_: object) -> None:
        """Backward reaches the step."""
        if self.began or not private.in_backward():  # a debugger may look at a saved tensor, too
            return
        self.began = True
        if len(self._marks) == 2:
            self._marks.append(_now(self.device))
        private.at_backward_end(self._backward_ends)

    def unpacks(self, unpack: Callable[[], torch.Tensor]) -> torch.Tensor:
        """What ``unpack`` brings back for backward, timed."""
        self.backward_begins()
        begin = time.perf_counter()
        found = unpack()
        self._replay_seconds += time.perf_counter() - begin
        return found

    def _backward_ends(self) -> None:
        self.began = False
        self.backwards += 1
        if len(self._marks) == 3:
            self._marks.append(_now(self.device))
        self._on_end()
        self._let_go()

    def _let_go(self, *_: object) -> None:
        under_way = self.began and not self.failed()
        if not under_way and self._awaited is not None and self._awaited() is None:
            (self._on_gone or self.close)()

    def over(self) -> bool:
        """Whether the time is known without waiting; of a step whose backward never ended it never will be,
        which is known, too.
        """
        return isinstance(self._marks[-1], float) or self._marks[-1].query()

    def seconds(self) -> float | None:
        """Time of forward and backward, without what the caller does between them; ``None`` before backward
        has ended.

        On a GPU this waits for the backward's end: ask when it is `over`.
        """
        if len(self._marks) != 4:
            return None
        begin, forward_end, backward_begin, end = self._marks
        return _between(begin, forward_end) + _between(backward_begin, end)

    def close(self) -> None:
        """Stop measuring memory."""
        if self._peak is not None:
            self._peak.__exit__(None, None, None)
            self._peak = None

    def __del__(self) -> None:
        self.close()


def open_peak(device: torch.device) -> Peak | None:
    """A running peak, where there is one that can be read at any time."""
    if device.type == "cpu" and not available():
        return None
    try:
        return peak(device).__enter__()
    except MeterError:
        return None


def _now(device: torch.device) -> Any:
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def _between(begin: Any, end: Any) -> float:
    if isinstance(begin, float):
        return end - begin
    end.synchronize()
    return begin.elapsed_time(end) * 1e-3
