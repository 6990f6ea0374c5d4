"""Watch one step: when its backward begins and ends, its peak memory and its time."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from operator import attrgetter
from typing import Any

import torch

from lowtide import accelerator, private
from lowtide.errors import shorten
from lowtide.meter import LiveSource, MeterError, Peak, measurable, peaks


class _Mark:
    """A sentinel in the metadata of autograd's nodes: when it dies, the last of these nodes is gone."""


def weakly(method: Callable[..., Any], *first: object) -> Callable[..., Any]:
    """A function that calls a bound method, with the arguments ``first`` before its own, and does not hold
    the method's object: it does nothing once that is gone, and returns ``None``.

    For callbacks that autograd's graph holds. A model may keep its own outputs, and with them their graph; a
    circle through that graph is one that Python's collector does not see.
    """
    reference: Any = weakref.WeakMethod(method)

    def call(*rest: object) -> Any:
        alive = reference()
        return None if alive is None else alive(*first, *rest)

    return call


class StepWatch:
    """Follows one step of a limited model, from its first forward to the end of each of its backwards.

    Args:
        on_end: called with the watch each time that a backward through the step has ended. Autograd's graph
            holds the watch, so ``on_end`` must not hold the model (`weakly`).
        device: whose memory and time are watched.
        on_gone: called when backward through the step has become impossible; it must not hold the model,
            either. ``None`` closes the watch then, so that no meter stays open after the last step.

    Attributes:
        began: whether a backward through the step is under way, or has failed.
        backwards: how many backwards through the step have ended.
        makes_graph: whether one of these backwards was run with ``create_graph=True``.
        recording_seconds: time that recording added to the forward; meaningless on a GPU, where the host runs
            ahead.
        cores: the C++ recorders, which know the time of their replays.
        is_measured: whether live bytes are known while the step runs.
    """

    _peak: Peak | None = None  # of a step whose making fails, too, which is closed when it goes

    def __init__(
        self,
        on_end: Callable[[StepWatch], None],
        device: torch.device,
        on_gone: Callable[[], None] | None = None,
    ) -> None:
        self.device = device
        self.began = False
        self.backwards = 0
        self.makes_graph = False
        self.recording_seconds = 0.0
        self.cores: list[Any] = []
        self._on_end, self._on_gone = on_end, on_gone
        self._forwards = 0  # that have ended
        self._awaited: set[weakref.ref[_Mark]] = set()  # of the forwards that a backward can reach
        self._unreached: set[weakref.ref[_Mark]] = set()  # of these, what no backward has reached
        self._peak = open_peak(device)
        self.is_measured = self._peak is not None
        on_card = accelerator.is_accelerator(device)
        self._now: Callable[[], Any] = (
            partial(accelerator.timed_event, device) if on_card else time.perf_counter
        )
        self._marks = [self._now()]  # begin and end of each forward, and of the first backward behind them
        self._timed: bool | None = None  # whether that backward is over; None before it begins

    @property
    def peak_bytes(self) -> int | None:
        """Most live bytes of the step so far, above those at its start; ``None`` where it cannot be
        measured.
        """
        return self._peak.peak_bytes if self._peak is not None else None

    def live_source(self) -> LiveSource:
        """Where the governor reads how many bytes are live, above those at the step's start."""
        assert self._peak is not None
        return self._peak.live_source()

    @property
    def replay_seconds(self) -> float:
        """Time that replays and fetches took; meaningless on a GPU."""
        return sum(map(attrgetter("seconds"), self.cores))

    def ends_backward(self) -> None:
        """A backward through the step has ended, before anybody is told."""

    def forward_begins(self) -> None:
        """Another forward of the step begins."""
        if self._timed is None:
            self._marks.append(self._now())

    def forward_ends(self, outputs: Iterable[torch.Tensor]) -> None:
        """A forward has returned ``outputs``; backward will begin there."""
        if self._timed is None:
            self._marks.append(self._now())
        mark = _Mark()
        forward = weakref.ref(mark, self._check_gone)
        self._forwards += 1
        self._awaited.add(forward)
        self._unreached.add(forward)
        for output in outputs:
            if output.grad_fn is not None:
                output.grad_fn.register_prehook(partial(self._reaches, forward))
                output.grad_fn.metadata["lowtide", id(self), self._forwards] = mark  # pyright: ignore

    def ends(self) -> None:
        """End the step by hand: its caller ran the backwards without telling the watch, as the schedule of a
        pipeline does.
        """
        self._marks.append(self._now())
        self._timed = True
        self.backwards = 1
        self._on_end(self)
        self.close()

    def follow(self, core: Any) -> None:
        """Add the time of a C++ recorder's replays to `replay_seconds`. What backward asks the recorder for
        begins a backward, too: that of a gradient penalty does not pass by the outputs, where hooks wait.

        Args:
            core: the C++ recorder.
        """
        self.cores.append(core)
        watch = weakref.ref(self)  # which holds the recorder

        def begin() -> None:
            alive = watch()
            if alive is not None and not any(map(attrgetter("in_forward"), alive.cores)):
                alive.backward_begins()

        core.on_unpack = begin

    def is_pending(self) -> bool:
        """Whether no backward has begun, and one still can."""
        return bool(self._awaited) and not (self.backwards or self.began)

    def is_needed(self) -> bool:
        """Whether a backward through one of its forwards has not come, and still can."""
        return bool(self._unreached)

    def reaches_backward(self) -> bool:
        """Whether a backward has begun, or can."""
        return self.is_pending() or self.began or self.backwards > 0

    def has_failed(self) -> bool:
        """Whether a backward has begun and ended with an error; to be asked outside of backward, since
        autograd calls no hook then.
        """
        return self.began and not private.in_backward()

    def backward_begins(self, *_: object) -> None:
        """Backward reaches the step."""
        if self.began or not private.in_backward():  # a debugger may unpack a saved tensor, too
            return
        self.began = True
        self.makes_graph |= torch.is_grad_enabled()  # autograd's engine sets it so
        if self._timed is None and len(self._marks) % 2 == 0:
            self._timed = False
            self._marks.append(self._now())
        # once more: others (FSDP) have queued theirs by then, and tidy up before this one
        private.at_backward_end(partial(private.at_backward_end, self._backward_ends))

    def _backward_ends(self) -> None:
        self.began = False
        self.backwards += 1
        if self._timed is False:
            self._timed = True
            self._marks.append(self._now())
        self.ends_backward()
        try:
            self._on_end(self)
        except Exception as error:
            shorten(error)
            raise
        self._check_gone()

    def _check_gone(self, forward: weakref.ref[_Mark] | None = None) -> None:
        """No backward can reach a forward any more; without one, a backward has ended."""
        if forward is not None:
            self._awaited.discard(forward)
            self._unreached.discard(forward)
        under_way = self.began and not self.has_failed()
        if self._forwards and not (self._awaited or under_way):
            (self._on_gone or self.close)()

    def _reaches(self, forward: weakref.ref[_Mark], *_: object) -> None:
        """Backward reaches a forward of the step."""
        if private.in_backward():
            self._unreached.discard(forward)
        self.backward_begins()

    def over(self) -> bool:
        """Whether the device has done the backward, so that `seconds` does not wait."""
        return isinstance(self._marks[-1], float) or self._marks[-1].query()

    def seconds(self) -> float | None:
        """Time of the forwards and the first backward, without what the caller does between them; ``None``
        before backward has ended.

        On a GPU this waits for the backward's end: ask when it is `over`.
        """
        if not self._timed:
            return None
        begins, ends = self._marks[::2], self._marks[1::2]
        if isinstance(ends[-1], float):
            return sum(ends) - sum(begins)
        ends[-1].synchronize()
        return sum(begin.elapsed_time(end) for begin, end in zip(begins, ends, strict=True)) * 1e-3

    def close(self) -> None:
        """Stop measuring memory."""
        if self._peak is not None:
            self._peak.__exit__(None, None, None)
            self._peak = None

    def __del__(self) -> None:
        self.close()


@cache
def _peaks_of(device: torch.device) -> Callable[[bool], Peak] | None:
    """What measures the steps on a device: asked in every step."""
    return peaks(device) if measurable(device) else None


def open_peak(device: torch.device) -> Peak | None:
    """A running peak, where there is one that can be read at any time."""
    try:
        make = _peaks_of(device)
        return make and make(False).__enter__()
    except MeterError:
        return None


@contextmanager
def meter_gathered(model: torch.nn.Module) -> Iterator[None]:
    """Have main memory's meter count the storages that FSDP gathers a model's weights into. The meter is
    their allocator, and a storage keeps the allocator of its first step, a step without a limit included.
    """
    seen = open_peak(torch.device("cpu")) if private.units(model) else None
    try:
        yield
    finally:
        if seen is not None:
            seen.__exit__(None, None, None)
