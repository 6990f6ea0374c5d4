"""Watch one planned step from outside: what is known only once backward begins, and what the step really took."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lowtide import private
from lowtide.meter import MeterError, Peak, available, peak
from lowtide.run.aside import Histories


class _Here(threading.local):
    """The watches that this thread has open: a step of one limited model may run within that of another."""

    def __init__(self) -> None:
        self.watches: weakref.WeakSet[StepWatch] = weakref.WeakSet()


_HERE = _Here()


@contextmanager
def unwatched() -> Iterator[None]:
    """Leave the block out of what this thread's open watches measure: planning another model's first step is no part of theirs."""
    stretches = [stretch for watch in list(_HERE.watches) for stretch in watch.stretches()]
    for stretch in stretches:
        stretch.pause()
    try:
        yield
    finally:
        for stretch in stretches:
            stretch.resume()


class _Stretch:
    """Most and last live bytes since it was made, without those of its pauses."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._peak = _open(device)
        self._before = self._most = 0
        self._over = False
        self.known = self._peak is not None

    def pause(self) -> None:
        """Stop measuring for a while."""
        self._most, self._before = self.peak_bytes, self.live_bytes
        self._stop()

    def resume(self) -> None:
        """Go on, as if nothing had changed meanwhile, unless it has been closed."""
        if self.known and not self._over:
            self._peak = _open(self._device)

    @property
    def peak_bytes(self) -> int:
        """Most live bytes, above those at the start."""
        return max(self._most, self._before + self._peak.peak_bytes) if self._peak is not None else self._most

    @property
    def live_bytes(self) -> int:
        """Live bytes now, above those at the start."""
        return self._before + (self._peak.live_bytes if self._peak is not None else 0)

    def close(self) -> None:
        """Stop measuring for good."""
        self._over = True
        self._stop()

    def _stop(self) -> None:
        if self._peak is not None:
            self._peak.__exit__(None, None, None)
            self._peak = None

    def __del__(self) -> None:
        self._stop()


class Repeats:
    """Whether backward has run again through what one forward saved."""

    def __init__(self) -> None:
        self.seen = False


class StepWatch:
    """Follows one step of a limited model, from before its forward to the end of its backward.

    Args:
        on_backward: called once, when backward asks for the first saved tensor of the forward.
        on_end: called once, when that backward has ended.
        device: whose memory and time are watched.
        memory: whether to watch memory, too.
        small_bytes: outputs that take no more than this together do not count as held: a model may keep a few numbers itself.
        withheld_bytes: what those outputs hold beside themselves that have a history aside from the loss.
        repeats: is told of saved tensors that a later backward asks for again, or ``None``.

    Attributes:
        outputs_dropped: whether the caller had let go of what the forward returned (other than the loss) when backward began, and of
            what autograd saved for it alone.
        loss_peak_bytes, loss_live_bytes: most and last live bytes between forward and backward, above those at the forward's end; ``None``
            where they cannot be measured.
        peak_bytes: most live bytes of the step, above those at its start; ``None`` where it cannot be measured.
        replay_seconds, recording_seconds: time that bringing values back and recording took, the latter with what is done around the forward;
            they say nothing on a GPU, where the host runs ahead.
        entries: how often a dispatch or a saved tensor's hook went into Python.
    """

    def __init__(
        self,
        on_backward: Callable[[], None],
        on_end: Callable[[], None],
        device: torch.device,
        *,
        memory: bool = True,
        small_bytes: int = 0,
        withheld_bytes: int = 0,
        repeats: Repeats | None = None,
    ) -> None:
        self._on_backward = on_backward
        self._on_end = on_end
        self._began = False
        self._outputs: list[weakref.ref[torch.Tensor]] = []
        self._whole = _stretch(device) if memory else None
        self._loss: _Stretch | None = None
        self._memory = memory
        self._small_bytes = small_bytes
        self._withheld_bytes = withheld_bytes
        self._histories = Histories()
        self._awaited = Histories()
        self._repeats = repeats
        self._asked: set[int] = set()
        self._ended = False
        self.device = device
        self._marks = [_now(device)]
        self.outputs_dropped = False
        self.loss_peak_bytes: int | None = None
        self.loss_live_bytes: int | None = None
        self.peak_bytes: int | None = None
        self.replay_seconds = 0.0
        self.recording_seconds = 0.0
        self.entries = 0
        _HERE.watches.add(self)

    def stretches(self) -> list[_Stretch]:
        """What is being measured."""
        return [stretch for stretch in (self._whole, self._loss) if stretch is not None]

    def forward_ends(self, outputs: Iterable[torch.Tensor], aside: Iterable[torch.Tensor] = ()) -> None:
        """The forward returned ``outputs``; those ``aside`` have a history that the loss does not share."""
        self._outputs = [weakref.ref(t) for t in outputs if t.numel() > 1]
        self._histories.follow(aside)
        self._loss = _stretch(self.device) if self._memory else None
        self._marks.append(_now(self.device))

    def awaits(self, outputs: Iterable[torch.Tensor]) -> None:
        """The forward returned these outputs, the loss among them."""
        self._awaited.follow(outputs)

    @property
    def pending(self) -> bool:
        """Whether the step's backward is still to come: it has not begun, and someone can still begin it."""
        return not self._began and self._awaited.any_held()

    def backward_begins(self) -> None:
        """Backward asks for a saved tensor; only the first time counts."""
        if self._began or not private.in_backward():  # a debugger may look at a saved tensor, too
            return
        self._began = True
        self._marks.append(_now(self.device))
        held = [output for reference in self._outputs if (output := reference()) is not None]
        history_bytes = self._withheld_bytes if self._histories.any_held() else 0
        self.outputs_dropped = sum(output.nbytes for output in held) + history_bytes <= self._small_bytes
        del held
        if self._loss is not None:
            self.loss_peak_bytes, self.loss_live_bytes = self._loss.peak_bytes, self._loss.live_bytes
            self._loss.close()
            self._loss = None
        private.at_backward_end(self._backward_ends)
        self._on_backward()

    def unpacks(self, unpack: Callable[[], torch.Tensor], *, replays: bool) -> torch.Tensor:
        """What ``unpack`` hands to backward, counted and timed: as replaying, or as what recording costs."""
        self.backward_begins()
        if self._repeats is not None:
            handle = id(getattr(unpack, "__self__", unpack))
            self._repeats.seen |= self._ended and handle in self._asked
            self._asked.add(handle)
        begin = time.perf_counter()
        found = unpack()
        self.entries += 1
        seconds = time.perf_counter() - begin
        if replays:
            self.replay_seconds += seconds
        else:
            self.recording_seconds += seconds
        return found

    def _backward_ends(self) -> None:
        self._marks.append(_now(self.device))
        self._ended = True
        self.close()
        self._on_end()

    def over(self) -> bool:
        """Whether the time is known without waiting; of a step whose backward never ended it never will be, which is known, too."""
        return isinstance(self._marks[-1], float) or self._marks[-1].query()

    def seconds(self) -> float | None:
        """Time of forward and backward, without what the caller does between them; ``None`` before backward has ended.

        On a GPU this waits for the backward's end: ask when it is `over`.
        """
        if len(self._marks) != 4:
            return None
        begin, forward_end, backward_begin, end = self._marks
        return _between(begin, forward_end) + _between(backward_begin, end)

    def close(self) -> None:
        """Stop measuring."""
        if self._whole is not None:
            self.peak_bytes = self._whole.peak_bytes
            self._whole.close()
            self._whole = None
        if self._loss is not None:
            self._loss.close()
            self._loss = None

    def __del__(self) -> None:
        self.close()


def _stretch(device: torch.device) -> _Stretch | None:
    """A stretch that is being measured, where memory can be read at any time."""
    found = _Stretch(device)
    return found if found.known else None


def _open(device: torch.device) -> Peak | None:
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
