"""Watch one step: when its backward begins and ends, its peak memory and its time."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lowtide import accelerator, private
from lowtide.meter import LiveSource, MeterError, Peak, available, peak


class _Mark:
    """A sentinel in the metadata of autograd's nodes: when it dies, the last of these nodes is gone."""


def weakly(method: Callable[..., object], *first: object) -> Callable[..., None]:
    """A function that calls a bound method, with the arguments ``first`` before its own, and does not hold
    the method's object: it does nothing once that is gone.

    For callbacks that autograd's graph holds. A model may keep its own outputs, and with them their graph; a
    circle through that graph is one that Python's collector does not see.
    """
    reference: Any = weakref.WeakMethod(method)

    def call(*rest: object) -> None:
        alive = reference()
        if alive is not None:
            alive(*first, *rest)

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
        self._replay_seconds = 0.0
        self._on_end, self._on_gone = on_end, on_gone
        self._awaited: list[weakref.ref[_Mark]] = []  # by forward
        self._unreached: set[int] = set()  # forwards that no backward has reached
        self._peak = open_peak(device)
        self._marks = [_now(device)]  # begin and end of each forward, and of the first backward behind them
        self._timed: bool | None = None  # whether that backward is over; None before it begins

    @property
    def peak_bytes(self) -> int | None:
        """Most live bytes of the step so far, above those at its start; ``None`` where it cannot be
        measured.
        """
        return self._peak.peak_bytes if self._peak is not None else None

    @property
    def is_measured(self) -> bool:
        """Whether live bytes are known while the step runs."""
        return self._peak is not None

    def live_source(self) -> LiveSource:
        """Where the C++ recorder reads how many bytes are live, above those at the step's start."""
        assert self._peak is not None
        return self._peak.live_source()

    @property
    def replay_seconds(self) -> float:
        """Time that replays and fetches took; meaningless on a GPU."""
        return self._replay_seconds + sum(core.seconds for core in self.cores)

    def ends_backward(self) -> None:
        """A backward through the step has ended, before anybody is told."""

    def forward_begins(self) -> None:
        """Another forward of the step begins."""
        if self._timed is None:
            self._marks.append(_now(self.device))

    def forward_ends(self, outputs: Iterable[torch.Tensor]) -> None:
        """A forward has returned ``outputs``; backward will begin there."""
        if self._timed is None:
            self._marks.append(_now(self.device))
        number, mark = len(self._awaited), _Mark()
        self._awaited.append(weakref.ref(mark, self._check_gone))
        self._unreached.add(number)
        for output in outputs:
            if output.grad_fn is not None:
                output.grad_fn.register_prehook(lambda *_: self._reaches(number))
                output.grad_fn.metadata["lowtide", id(self), number] = mark  # pyright: ignore

    def ends(self) -> None:
        """End the step by hand: its caller ran the backwards without telling the watch, as the schedule of a
        pipeline does.
        """
        self._marks.append(_now(self.device))
        self._timed = True
        self.backwards = 1
        self._on_end(self)
        self.close()

    def follow(self, core: Any, several: bool) -> None:
        """Add the time of a C++ recorder's replays to `replay_seconds`.

        Args:
            core: the C++ recorder.
            several: more than one backward is expected. Then the first replay begins a backward, too: the
                backward of a gradient penalty does not pass by the outputs, where hooks wait for it.
        """
        self.cores.append(core)
        watch = weakref.ref(self)  # which holds the recorder

        def begin() -> None:
            alive = watch()
            if alive is not None:
                alive.backward_begins()

        if several:
            core.on_unpack = begin

    def is_pending(self) -> bool:
        """Whether no backward has begun, and one still can."""
        return self._is_alive() and not (self.backwards or self.began)

    def is_needed(self) -> bool:
        """Whether a backward through one of its forwards has not come, and still can."""
        return any(self._awaited[number]() is not None for number in self._unreached)

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
            self._marks.append(_now(self.device))
        # once more: others (FSDP) have queued theirs by then, and tidy up before this one
        private.at_backward_end(lambda: private.at_backward_end(self._backward_ends))

    def unpacks(self, unpack: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Call ``unpack`` for backward, and time it."""
        self.backward_begins()
        begin = time.perf_counter()
        found = unpack()
        self._replay_seconds += time.perf_counter() - begin
        return found

    def _backward_ends(self) -> None:
        self.began = False
        self.backwards += 1
        if self._timed is False:
            self._timed = True
            self._marks.append(_now(self.device))
        self.ends_backward()
        self._on_end(self)
        self._check_gone()

    def _check_gone(self, *_: object) -> None:
        under_way = self.began and not self.has_failed()
        if not under_way and self._awaited and not self._is_alive():
            (self._on_gone or self.close)()

    def _is_alive(self) -> bool:
        """Whether a backward can reach any of its forwards."""
        return any(mark() is not None for mark in self._awaited)

    def _reaches(self, number: int) -> None:
        """Backward reaches a forward of the step."""
        if private.in_backward():
            self._unreached.discard(number)
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
        marks = iter(self._marks)
        return sum(_between(begin, end) for begin, end in zip(marks, marks, strict=True))

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
    return accelerator.timed_event(device) if accelerator.is_accelerator(device) else time.perf_counter()


def _between(begin: Any, end: Any) -> float:
    if isinstance(begin, float):
        return end - begin
    end.synchronize()
    return begin.elapsed_time(end) * 1e-3


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
