"""One step, taken down: which compiled graphs ran forward and backward in which order, and what was live
beside them.

Each graph runs under a cut that is known, so what it keeps for its backward is taken off what the meter
reads; what is left is live whatever the plan decides.
"""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
import torch.distributed as dist

from lowtide import accelerator
from lowtide.compiled.joint import Key
from lowtide.errors import shorten
from lowtide.meter import Peak, peak, storages
from lowtide.meter.resident import gradient_of
from lowtide.private import at_backward_end, storage_key
from lowtide.trace.results import tensors_inside

_TIDY_SECONDS = 0.001
"""How long Gloo's threads get to let go of what a collective moved through."""


@dataclass
class GraphCall:
    """One call of a compiled graph in a step.

    Attributes:
        number: position among the step's forwards.
        graph: what was called.
        saved_bytes: what the recorded cut saves for backward -> bytes.
        lies: the graph's inputs and outputs -> numbers of the storages that they lie in.
        saved: addresses of what backward is handed, by which it is known again.
    """

    number: int
    graph: Any
    saved_bytes: Mapping[Key, int] = field(default_factory=dict)
    lies: dict[Key, int] = field(default_factory=dict)
    saved: tuple[int, ...] = ()


@dataclass(frozen=True)
class Moment:
    """A part of a step.

    Attributes:
        kind: a ``forward`` or ``backward`` of a compiled graph, or what runs in a ``gap`` between them.
        call: whose it is.
        bytes: live when it begins, of a gap the most at any time; without what compiled graphs save
            for backward.
        waiting: calls, other than its own, whose backward is to come.
        alive: numbers of the live storages among those that are inputs or outputs of compiled graphs.
        lent: of a backward, those inputs and outputs of its graph that others still hold when it has ended;
            where it is ``None``, the inputs are taken for these.
        own: of a backward, what it alone holds of its graph's inputs and outputs: it was handed them, and
            when it has ended they are gone. By key, the numbers of their storages; not counted in ``bytes``.
        gradients: how many of ``bytes`` are parameters' gradients when it begins.
    """

    kind: Literal["forward", "backward", "gap"]
    call: int | None
    bytes: int
    waiting: tuple[int, ...] = ()
    alive: frozenset[int] = frozenset()
    lent: frozenset[Key] | None = None
    own: Mapping[Key, int] = field(default_factory=dict)
    gradients: int = 0

    @property
    def calls(self) -> tuple[int, ...]:
        """The calls that take memory: those whose backward is to come, and the call that runs."""
        return self.waiting if self.call is None else (*self.waiting, self.call)

    def held_bytes(self, call: GraphCall, saved_bytes: Mapping[Key, int]) -> int:
        """Bytes that a call whose backward is to come holds at this moment, and that nobody else holds."""
        live = self.alive.difference(self.own.values())
        return sum(count for key, count in saved_bytes.items() if call.lies.get(key) not in live)

    def lent_beside(self, others: Iterable[tuple[GraphCall, Mapping[Key, int]]]) -> frozenset[Key] | None:
        """The storages of a backward's inputs that others hold until the backward has ended.

        Args:
            others: calls whose backward is to come, and what each keeps for it.
        """
        held = {call.lies[key] for call, saved_bytes in others for key in saved_bytes if key in call.lies}
        more = {key for key, number in self.own.items() if number in held}
        return self.lent | more if more and self.lent is not None else self.lent


@dataclass(frozen=True)
class Timeline:
    """A step, as far as a plan follows from it.

    Attributes:
        device: whose memory counts.
        resident_bytes: what is resident when it begins.
        calls: of compiled graphs, in the order of their forwards.
        moments: its parts, in their order.
        zeros: storages of gradients that autograd makes up for outputs beside the loss, of one graph that is
            the whole step.
    """

    device: str
    resident_bytes: int
    calls: list[GraphCall] = field(default_factory=list)
    moments: list[Moment] = field(default_factory=list)
    zeros: frozenset[Key] = frozenset()

    @property
    def facts(self) -> list[Any]:
        """All of it but the bytes of its moments, in JSON's words; graphs by their first call."""
        first = {id(call.graph): call.number for call in reversed(self.calls)}
        calls = [(first[id(call.graph)], sorted(call.lies.items())) for call in self.calls]
        moments = [
            (
                *(one.kind, one.call, one.waiting, one.gradients, sorted(one.alive)),
                *(one.lent if one.lent is None else sorted(one.lent), sorted(one.own.items())),
            )
            for one in self.moments
        ]
        return [self.device, self.resident_bytes, calls, moments]

    @property
    def levels(self) -> list[int]:
        """The bytes of its moments. They differ from process to process, by a number of Python's or two."""
        return [one.bytes for one in self.moments]

    def ending_with(self, after_bytes: int) -> Timeline:
        """The same step with so many live bytes when its backward has ended; with 0 the step itself."""
        if not after_bytes:
            return self
        return replace(self, moments=[*self.moments, Moment("gap", None, after_bytes)])

    def adding_to(self, gradients_bytes: int, made_bytes: int) -> Timeline:
        """The same step with more gradients when it begins: its own are added to these, and freed at once.

        Args:
            gradients_bytes: those that there are.
            made_bytes: those that there were when the recorded step had ended.
        """
        before = self.moments[0].gradients
        if gradients_bytes <= before:
            return self
        known = gradients_bytes >= made_bytes  # else nobody knows which of them the step makes
        moments = [
            replace(one, bytes=one.bytes + gradients_bytes - (one.gradients if known else before))
            for one in self.moments
        ]
        return replace(self, resident_bytes=self.resident_bytes + gradients_bytes - before, moments=moments)


class Recording:
    """Takes down a step that runs now.

    Args:
        device: whose memory counts.
        resident_bytes: what is resident when the step begins.
        gradients: says how many bytes of parameters' gradients there are.
        ended: called when a backward has ended and every call of the step has had its own.
        inputs: what the step is given. It is live to the end, as no meter sees what was there before it go.

    Attributes:
        timeline: what was taken down.
        backwards: how many calls' backward has run.
    """

    def __init__(
        self,
        device: str,
        resident_bytes: int,
        gradients: Callable[[], int],
        ended: Callable[[], None],
        inputs: Any = None,
    ) -> None:
        self.device = device
        self._inputs = inputs
        self._gradients, self._ended = gradients, ended
        self._queued = self._untidy = False
        self._thaw = _spare_old_garbage(self)
        self.timeline = Timeline(device, resident_bytes)
        self.backwards = 0
        self._waiting: dict[int, GraphCall] = {}
        self._numbers: dict[int, int] = {}  # address of a storage that is there -> its number
        self._watched: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._next = 0
        self._handed: dict[Key, int] = {}  # to the backward that runs: storage -> bytes
        self._live = resident_bytes
        self._segment: Peak | None = None
        self._open()

    def close(self) -> None:
        """The step has ended."""
        if self._segment is not None:
            self._gap()
            self._shut()
        self._inputs = None
        self._thaw()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What is done in the block, compiling for one, is no part of the step."""
        if self._segment is None:
            yield
            return
        gc.collect()  # what is garbage by now is freed while that is counted
        self._gap()
        self._shut()
        try:
            yield
        finally:
            gc.collect()
            self._untidy = True
            self._open()

    def forward(self, graph: Any, given: Mapping[Key, torch.Tensor]) -> GraphCall:
        """A forward of ``graph`` begins with these inputs."""
        if self._untidy:  # what Dynamo leaves behind holds tensors: the generator's state, for one
            gc.collect()
            self._untidy = False
        self._gap()
        call = GraphCall(len(self.timeline.calls), graph)
        self._watch(call, given)
        self._add("forward", call, self._live)
        self.timeline.calls.append(call)
        return call

    def end_forward(
        self, call: GraphCall, returned: Mapping[Key, torch.Tensor], saved: Mapping[Key, torch.Tensor]
    ) -> None:
        """A forward has ended, with these outputs and these tensors for its backward."""
        self._watch(call, returned)
        call.saved_bytes = {key: self._bytes(tensor) for key, tensor in saved.items()}
        call.saved = tuple(storage_key(tensor) for tensor in saved.values())
        self._waiting[call.number] = call
        self._go_on()

    def backward(self, graph: Any, given: Mapping[Key, torch.Tensor]) -> GraphCall | None:
        """A backward begins with these inputs; says whose, or nothing where the step has no such forward."""
        there = {storage_key(tensor) for tensor in given.values()}
        waiting = [call for call in self._waiting.values() if call.graph is graph]
        call = next((one for one in reversed(waiting) if there.issuperset(one.saved)), None)
        if call is None:
            return None
        if not self._queued:
            self._queued = True
            at_backward_end(self._end_of_backward)
        self._gap()
        tangents = {
            key: one for key, one in given.items() if key not in call.lies and key not in call.saved_bytes
        }
        self._watch(call, tangents)
        self._handed = {key: self._bytes(one) for key, one in given.items() if key in call.lies}
        self._add("backward", call, self._live)
        return call

    def _end_of_backward(self) -> None:
        self._queued = False
        if not self._waiting:
            try:
                self._ended()
            except Exception as error:
                shorten(error)
                raise

    def end_backward(self, call: GraphCall) -> None:
        """A backward has ended."""
        if self._waiting.pop(call.number, None) is not None:
            self.backwards += 1
        self._go_on()
        # what it was given and let go of is its own, no part of what is live beside it
        there, moments = set(self._numbers.values()), self.timeline.moments
        own = {key: call.lies[key] for key in self._handed if call.lies[key] not in there}
        lent = frozenset(key for key, number in call.lies.items() if number in there)
        level = moments[-1].bytes - sum({number: self._handed[key] for key, number in own.items()}.values())
        moments[-1] = replace(moments[-1], bytes=level, lent=lent, own=own)

    # ---- the meter -------------------------------------------------------------------------------

    def _open(self) -> None:
        self._begun_with = self._gradients()
        self._segment = peak(self.device)
        self._segment.__enter__()

    def _shut(self) -> None:
        assert self._segment is not None
        if self.device == "cpu" and dist.is_available() and dist.is_initialized():
            time.sleep(_TIDY_SECONDS)
        self._live += self._segment.live_bytes
        self._segment.__exit__(None, None, None)
        self._segment = None

    def _go_on(self) -> None:
        self._shut()
        self._open()

    def _gap(self) -> None:
        """What ran up to here ran outside the graphs."""
        assert self._segment is not None
        self._add("gap", None, self._live + self._segment.peak_bytes)
        self._go_on()

    def _add(self, kind: Literal["forward", "backward", "gap"], call: GraphCall | None, bytes_: int) -> None:
        alive = frozenset(self._numbers.values())
        waiting = tuple(number for number in self._waiting if call is None or number != call.number)
        number = None if call is None else call.number
        moment = Moment(kind, number, bytes_, waiting, alive, gradients=self._begun_with)
        saved = sum(moment.held_bytes(one, one.saved_bytes) for one in self._waiting.values())
        self.timeline.moments.append(replace(moment, bytes=bytes_ - saved))

    def _bytes(self, tensor: torch.Tensor) -> int:
        """What a tensor holds of the device whose memory counts."""
        here = accelerator.is_on(tensor, torch.device(self.device))
        return tensor.untyped_storage().nbytes() if here else 0

    def _watch(self, call: GraphCall, tensors: Mapping[Key, torch.Tensor]) -> None:
        for key, tensor in tensors.items():
            address = storage_key(tensor)
            if address not in self._numbers:
                self._numbers[address] = self._next
                self._next += 1
                storage = tensor.untyped_storage()
                self._watched[address] = weakref.ref(storage, lambda _, address=address: self._gone(address))
            call.lies[key] = self._numbers[address]

    def _gone(self, address: int) -> None:
        self._numbers.pop(address, None)
        self._watched.pop(address, None)


def _spare_old_garbage(recording: Recording) -> Callable[[], Any]:
    """What is there now is no garbage while a step is recorded: each of the ten times that garbage is looked
    for would take 0.2 s where a library as large as transformers is loaded. What is returned ends that, and
    so does the recording's own end.
    """
    if gc.get_freeze_count():  # by somebody else, who goes on
        return lambda: None
    gc.freeze()
    return weakref.finalize(recording, gc.unfreeze)


# ---- what is resident before a step -----------------------------------------------------------------


class Resident:
    """Counts the bytes that are resident when a step begins: what is there in every step is counted once.

    Args:
        model: whose gradients come and go.
        optimizer: whose state comes with its first step, or ``None``.
        device: whose memory counts.
        count: counts parameters, buffers, gradients and the optimizer's state.

    Attributes:
        gradient_bytes: of the gradients that there were before the latest step.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None,
        device: torch.device,
        count: Callable[[], int],
    ) -> None:
        self._parameters = list(model.parameters())
        self._optimizer, self._device, self._count = optimizer, device, count
        self.gradient_bytes = 0
        self._always: tuple[int, int] | None = None  # parameters with state, and the bytes that do not change

    def __call__(self, *given: Any) -> int:
        """The bytes that are resident when a step with these arguments begins."""
        gradients = self.gradients_now()
        states = len(self._optimizer.state) if self._optimizer is not None else 0
        if self._always is None or self._always[0] != states:
            self._always = states, self._count() - gradients
        here = [one for one in tensors_inside(given) if one.device.type == self._device.type]
        self.gradient_bytes = gradients
        return self._always[1] + gradients + _bytes(here)

    def gradients_now(self) -> int:
        """Bytes of the gradients that there are now."""
        return _bytes([one for p in self._parameters if (one := gradient_of(p)) is not None])


def _bytes(tensors: list[torch.Tensor]) -> int:
    return sum(storage.nbytes() for storage in storages(tensors))
