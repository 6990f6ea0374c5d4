"""What a step is made of, written down while it runs: storages, values, saved tensors, events.

In: each operation, and what autograd saves and asks for. Out: the `StepGraph`. Nothing that the step made is
held here: a storage is followed by a weak reference, so the events show how long user code itself needs it.
An in-place write makes a new version of the value. What takes time is done once, when the step is over.

`lowtide.run.profile` writes down a step that runs, `lowtide.trace.fake` one on tensors without memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from types import CodeType
from typing import Any, Literal

import torch

from lowtide import accelerator, private
from lowtide.graph import Event, EventKind, Operation, Saved, StepGraph, Storage, Value
from lowtide.meter.resident import gradient_of
from lowtide.ops import Call, enter, has_plain_storage
from lowtide.trace.modules import calling_line, following_modules, tensor_names
from lowtide.trace.results import loss_in, loss_of, plain_leaves, tensors_returned
from lowtide.trace.transforms import in_place, with_gathered
from lowtide.trace.untouched import Gradients

OUTSIDE = "it runs outside the model's forward"
"""Why an operation is not replayable that the model's forward did not run."""
OPAQUE = "it was made by code that the dispatcher does not see"
"""Why a value has to stay that a compiled submodule, say, returned."""
_BEHIND = "what autograd saved of it is overwritten through .data"
_RESIZED = "the program resizes a storage that it reads or writes"
_INNER = "it runs in a backward inside the step, which is not recorded"

CostFigures = tuple[float, int, tuple[int, ...]]
"""What an operation takes: seconds, scratch bytes, blocks, as `lowtide.graph.Operation` has them."""


class TracedStorage(weakref.ref[torch.UntypedStorage]):
    """A storage of the step, while it lives.

    Attributes:
        key: as of `lowtide.private.storage_key`.
        number: its id in the graph.
        value: the id of its newest value.
        phase: in which phase an operation of the step made it, or empty: it was resident before the step.
        resized: user code resizes it.
        gathered: sharded weights are gathered into it.
    """

    __slots__ = ("gathered", "key", "number", "phase", "resized", "value")
    gathered: bool
    key: int
    number: int
    value: int
    phase: str
    resized: bool


@dataclass(slots=True)
class TracedOperation:
    """As `lowtide.graph.Operation`, of which it has name, reads, writes, phase, module, random, reason,
    source and region; the rest is known at the end.
    """

    name: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    phase: Literal["forward", "backward"]
    module: str
    random: bool
    reason: str
    source: str
    region: int | None


@dataclass(slots=True)
class TracedValue:
    """As `lowtide.graph.Value`, of which it has storage, version, producer, shape and dtype; the rest is
    known at the end.
    """

    storage: int
    version: int
    producer: int | None
    shape: tuple[int, ...]
    dtype: torch.dtype


class Tracer:
    """Writes a step down.

    Args:
        model: names parameters, buffers and modules.
        device: whose memory the graph is about: storages elsewhere count no bytes.
        gradients: notes those of trainable tensors that the step is given, if the step is not to leave any.
        on_end: called with each storage that has ended.

    Attributes:
        in_forward: whether what runs is the model's forward, which can be planned (`forward`).
        closed: whether the trace is over.
        operations, storages, values, saved, events: as they will stand in the graph.
        signatures: for each operation, what calls share that cost the same.
        behind: saved tensors that were overwritten where their version counter does not tell (``.data``): a
            plain step reads what was written, so they are kept.
        unreleased: how many saved tensors autograd still holds.
        gradients: as given.
        governor: of the step, is told of what it finds to have been there before; or ``None``.
        outside_bytes: of such storages that are neither the model's nor were given to the step.
        opaque: how many calls are under way whose operations nobody sees.
        meetings: operations in which autograd's engine added gradients of two nodes.
        left_bytes: of buffers that the newest operation, a collective, holds until it is waited for.
        known: the step's storages that live, by their keys (`lowtide.private.storage_key`).
        handed_out: by the key of an unpacked tensor's storage the id of its value, and what removes it.
        modules: names of the modules whose forwards are under way, outermost first.
        backward_module: name of the module whose saved tensor backward asked for last.
        files: of code that was met, its file (`calling_line`).
        scopes: directors of the checkpointing scopes that are open.

    The C++ recorder (`run/record/cpp/listen.h`) reads the slots.
    """

    __slots__ = (
        "__dict__", "__weakref__", "backward_module", "closed", "events", "files", "handed_out",
        "in_forward", "known", "left_bytes", "modules", "opaque", "operations", "scopes", "signatures",
        "storages", "values",
    )  # fmt: skip

    def __init__(
        self,
        model: torch.nn.Module | None,
        device: torch.device,
        gradients: Gradients | None = None,
        on_end: Callable[[TracedStorage], object] | None = None,
    ) -> None:
        private.keep_dynamo_out()
        # autograd's graph holds the tracer, and the model may hold that
        self._model = (lambda: None) if model is None else weakref.ref(model)
        self.device = device
        self.operations: list[TracedOperation] = []
        self.storages: list[Storage] = []
        self.values: list[TracedValue] = []
        self.saved: list[Saved] = []
        self.events: list[tuple[EventKind, int]] = []
        self.signatures: list[Any] = []
        self.in_forward = self.closed = False
        self.behind: set[int] = set()
        self.unreleased = self.opaque = self.left_bytes = 0
        self.gradients, self._on_end = gradients, on_end
        self.governor: Any = None
        self.outside_bytes = 0
        self.meetings: set[int] = set()
        self._gathered: set[int] = set()
        self._unfilled: set[int] = set()  # of these, of units that have not run
        self._resized: set[int] = set()
        self.modules: list[str] = []
        self.backward_module = ""
        self.known: dict[int, TracedStorage] = {}
        self.handed_out: dict[int, tuple[int, object]] = {}
        self._names = tensor_names(model) if model is not None else {}
        self._given: set[int] = set()
        self._elsewhere: set[int] = set()  # storages of other devices
        self.files: dict[CodeType, str] = {}
        self.scopes: list[Any] = []
        self._scope_number = 0  # how many regions have begun: a scope begins one, in another scope, too
        self._stored_by_scopes: set[int] = set()  # operations in a scope that keeps what they write

    # ---- names -----------------------------------------------------------------------------------

    @property
    def model(self) -> torch.nn.Module | None:
        """The model, or ``None`` once nobody else holds it."""
        return self._model()

    def name_gradients(self) -> None:
        """Gradients that the step made have the names of their parameters from here on."""
        model = self.model
        for name, parameter in model.named_parameters() if model is not None else ():
            gradient = gradient_of(parameter)
            for leaf in plain_leaves(gradient) if gradient is not None else ():
                storage = self.storage_of(leaf)
                if storage is not None and storage.phase:
                    number = storage.number
                    self.storages[number] = replace(self.storages[number], name=name)

    def following_modules(self) -> AbstractContextManager[None]:
        """What runs in the block belongs to the module of the model whose forward it runs in."""
        model = self.model
        return nullcontext() if model is None else following_modules(model, self.modules)

    @property
    def module(self) -> str:
        """Qualified name of the module that runs now; in backward, of the one whose saved tensor was asked
        for last.
        """
        here = self.modules[-1] if self.modules else ""
        return self.backward_module if private.in_backward() else here

    @contextmanager
    def forward(self) -> Iterator[None]:
        """What runs in the block is the model's forward, which can be planned."""
        self.in_forward = True
        try:
            yield
        finally:
            self.in_forward = False

    # ---- storages and values ---------------------------------------------------------------------

    def event(self, kind: EventKind, index: int) -> None:
        """Append one event, unless the trace is over."""
        if not self.closed:
            self.events.append((kind, index))

    def note_given(self, tensors: Iterable[torch.Tensor]) -> None:
        """The caller gave the tensors to the step, and may hold them: their storages are live to the end."""
        for tensor in tensors:
            self._given.add(self.register(tensor, counted=True).number)

    def integers_in(self, arguments: Any) -> set[int]:
        """The ids of the values that Python may read by itself: integers in main memory, but those in sparse
        tensors.
        """
        found = set[int]()
        for tensor in tensors_returned(arguments):
            integer = not (tensor.is_floating_point() or tensor.is_complex())
            if integer and tensor.is_cpu and has_plain_storage(tensor):
                found.add(self.value_of(tensor))
        return found

    def storage_of(self, tensor: torch.Tensor) -> TracedStorage | None:
        """The tensor's storage, if it has been seen."""
        return self.known.get(private.storage_key(tensor))

    def register(
        self, tensor: torch.Tensor, producer: int | None = None, counted: bool = False
    ) -> TracedStorage:
        """The tensor's storage; a new one is of the operation ``producer``, or of before the step: it is
        ``counted`` already, or one of `outside_bytes`.
        """
        key = private.storage_key(tensor)
        found = self.known.get(key)
        if found is not None:
            return found
        opaque, storage = (
            producer is None and self.opaque > 0 and key not in self._names,
            tensor.untyped_storage(),
        )
        if opaque:  # an operation that nobody saw has written it
            producer = len(self.operations)
        elif producer is None and 0 < storage.nbytes() <= self.left_bytes and key not in self._names:
            self.left_bytes -= storage.nbytes()  # it shows up where the collective is waited for
            producer = len(self.operations) - 1
        if producer is not None:
            phase: Any = "backward" if private.in_backward() else "forward"
            kind, name = phase, ""
        else:
            phase = ""
            kind, name = self._names.get(key, ("input", ""))
            if kind == "input" and not counted and accelerator.is_on(tensor, self.device):
                self.outside_bytes += storage.nbytes()
                if self.governor is not None:
                    self.governor.count(storage.nbytes())
            if self.gradients is not None:
                self.gradients.note(tensor)
        number = len(self.storages)
        if not (here := accelerator.is_on(tensor, self.device)):
            self._elsewhere.add(number)
        self.storages.append(Storage(number, storage.nbytes() if here else 0, kind, producer, name))
        found = self.known[key] = TracedStorage(storage, self.end_storage)
        found.key, found.number, found.phase, found.resized = key, number, phase, False
        found.gathered = False
        found.value = len(self.values)
        self.values.append(TracedValue(number, 0, producer, tuple(tensor.shape), tensor.dtype))
        if opaque:
            self._add_operation(OPAQUE, (), (found.value,), OPAQUE)
            self.signatures.append((OPAQUE, producer))
            self.event("op", producer or 0)
        return found

    def end_storage(self, storage: TracedStorage) -> None:
        """The storage has ended."""
        self.known.pop(storage.key, None)
        if self._on_end is not None:
            self._on_end(storage)
        if storage.number not in self._given:
            self.event("free", storage.number)

    def value_of(self, tensor: torch.Tensor) -> int:
        """The id of the value that the tensor shows now."""
        found = self.handed_out.get(private.storage_key(tensor)) if self.handed_out else None
        return self.register(tensor).value if found is None else found[0]

    def number_of(self, tensor: torch.Tensor) -> int | None:
        """The id of the tensor's storage, if it has been seen."""
        return None if (found := self.storage_of(tensor)) is None else found.number

    def leaves_unread(self, values: set[int]) -> bool:
        """Whether there are values among these that no operation has read so far."""
        return not values.issubset(value for operation in self.operations for value in operation.reads)

    def resizes(self, storage: torch.UntypedStorage, nbytes: int) -> int | None:
        """User code is about to resize a storage to ``nbytes``: its id, if the step made it.

        No replay touches such a storage, and what is saved in it is kept as user code holds it.
        """
        found = self.known.get(private.storage_address(storage))
        if found is not None and found.gathered:
            self._unfilled.discard(found.number)
            self.event("fill" if nbytes else "empty", found.number)
            return None
        if self.closed or found is None or not found.phase:
            return None
        number, found.resized = found.number, True
        self._resized.add(number)
        whole = self.storages[number]
        if number not in self._elsewhere and nbytes > whole.bytes:
            self.storages[number] = replace(whole, bytes=nbytes)
        if bool(nbytes) is not bool(storage.nbytes()):
            self.event("fill" if nbytes else "empty", number)
        return number

    def gathers(self, tensor: torch.Tensor, name: str) -> TracedStorage:
        """A sharded weight is gathered into the tensor's storage, which is filled and emptied again; it
        counts as one that was resident before the step.
        """
        found = self.register(tensor, counted=True)
        if not found.gathered:
            found.gathered, found.phase, number = True, "", found.number
            self._gathered.add(number)
            if not tensor.untyped_storage().nbytes():
                self._unfilled.add(number)
            nbytes = self.storages[number].bytes or tensor.numel() * tensor.element_size()
            here = number not in self._elsewhere
            self.storages[number] = replace(self.storages[number], bytes=nbytes * here, name=name)
        return found

    # ---- operations ------------------------------------------------------------------------------

    def loss_of(self, result: Any) -> torch.Tensor | None:
        """The loss in what a step returned; ``None`` where it has run its own backward, and not one inside
        its forward alone (forces, a penalty): nothing waits for one, or a gradient has arrived.

        Raises:
            TraceError: there is none.
        """
        arrived = self.gradients is not None and self.gradients.have_arrived()
        if any(operation.phase == "backward" for operation in self.operations) and (
            arrived or not self.unreleased or loss_of(result) is None
        ):
            return None
        return loss_in(result)

    def read_by(self, call: Call) -> tuple[int, ...]:
        """The values that an operation is about to read, each once."""
        unread = call.unread
        return tuple(dict.fromkeys([self.value_of(t) for t in call.inputs if id(t) not in unread]))

    def evicted_by_scope(self, call: Call) -> bool | None:
        """Whether the checkpointing scope around an operation evicts what it writes; ``None`` outside of
        all.
        """
        return self.scopes[-1].evicts(call.func, call.args, call.kwargs) if self.scopes else None

    def add_writer(
        self,
        call: Call,
        reads: tuple[int, ...],
        fresh: Sequence[torch.Tensor],
        signature: Any,
        reason: str = "",
        returned: bool = True,
        evicted: bool | None = None,
        left_bytes: int = 0,
    ) -> int:
        """Append an operation that has run and wrote something; returns its index.

        Args:
            call: the operation.
            reads: as `read_by` said before it ran.
            fresh: tensors on storages that it made, one for each.
            signature: what calls share that cost the same.
            reason: why it is not replayable, beside what its schema says.
            returned: whether it returned tensors.
            evicted: as `evicted_by_scope` said.
            left_bytes: of buffers that a collective holds until it is waited for.
        """
        index, info, backward = len(self.operations), call.info, private.in_backward()
        new = [tensor for tensor in fresh if self.storage_of(tensor) is None]
        writes = [self.register(tensor, index).value for tensor in new]
        for tensor in call.written:
            storage = self.register(tensor)
            version = self.values[storage.value].version + 1
            storage.value = len(self.values)
            shape = tuple(tensor.shape)
            self.values.append(TracedValue(storage.number, version, index, shape, tensor.dtype))
            writes.append(storage.value)
        reason = call.reason or reason
        if not reason:
            if not self.in_forward:
                reason = OUTSIDE
            elif backward:
                reason = _INNER
            elif info.uninitialized:
                reason = "it returns memory that nothing has written yet"
            elif not returned:
                reason = "it returns no tensor"
        random = info.random and call.draws()
        self._add_operation(info.name, reads, writes, reason, random, evicted)
        self.signatures.append(signature)
        self.event("op", index)
        self.left_bytes = left_bytes
        return index

    @contextmanager
    def opaque_call(self) -> Iterator[None]:
        """What runs in the block are operations that nobody sees."""
        self.opaque += 1
        try:
            yield
        finally:
            self.opaque -= 1

    def _add_operation(
        self,
        name: str,
        reads: tuple[int, ...],
        writes: Iterable[int],
        reason: str,
        random: bool = False,
        evicted: bool | None = None,
    ) -> None:
        if evicted is False:
            self._stored_by_scopes.add(len(self.operations))
        backward = private.in_backward()
        source = "" if backward else calling_line(self.files)
        written = tuple(dict.fromkeys(writes))
        phase, region = "backward" if backward else "forward", self._scope_number if evicted else None
        self.operations.append(
            TracedOperation(name, reads, written, phase, self.module, random, reason, source, region)
        )

    # ---- saved tensors ---------------------------------------------------------------------------

    def packs(self, tensor: torch.Tensor) -> tuple[int, bool]:
        """Autograd saves ``tensor``: the id of the saved tensor, and whether a plan may evict it."""
        value = self.value_of(tensor)
        storage = self.storages[self.values[value].storage]
        producer = self.values[value].producer
        made_here = storage.producer is not None and storage.id not in self._elsewhere
        droppable, forced = self.in_forward and made_here, False
        if producer is not None and self.scopes:
            droppable &= producer not in self._stored_by_scopes
            forced = self.operations[producer].region == self._scope_number  # what enters a region stays
        number, shape, dtype = len(self.saved), tuple(tensor.shape), _name_of(tensor.dtype)
        self.saved.append(Saved(number, value, droppable, self.module, shape, dtype, forced))
        self.unreleased += 1
        self.event("pack", number)
        return number, droppable

    def unpacks(self, number: int) -> None:
        """Backward asks for a saved tensor."""
        self.backward_module = self.saved[number].module
        self.event("unpack", number)

    def hands_out(
        self, number: int, storage: torch.UntypedStorage | None, on_end: Callable[[], None] = lambda: None
    ) -> None:
        """Backward gets a saved tensor; the event "done" follows when backward no longer uses it.

        Args:
            number: of the saved tensor.
            storage: the copy that backward gets, made for this call; "done" follows when that storage ends.
                ``None`` where backward gets the tensor that was kept: its storage lives on, so its end shows
                nothing, and "done" follows at once.
            on_end: called after "done".
        """

        def end() -> None:
            self.event("done", number)
            on_end()

        if storage is None:
            end()
        else:
            enter(self.handed_out, storage, self.saved[number].value, end)

    def releases(self, number: int) -> None:
        """Autograd has let go of a saved tensor for good."""
        self.unreleased -= 1
        self.event("release", number)

    def note_behind(self, number: int) -> None:
        """A saved tensor was overwritten where its version counter does not tell."""
        self.behind.add(number)

    # ---- scopes ----------------------------------------------------------------------------------

    @contextmanager
    def scope(self, director: Any) -> Iterator[None]:
        """Within the block a checkpointing scope rules: what its director evicts is forced, and values that
        it keeps are not droppable.

        A scope goes on behind a scope that lies in it. Values that were made before the inner scope have
        entered the rest of the outer one, as in `Recorder.scope`, and stay.
        """
        self.scopes.append(director)
        self._scope_number += 1
        try:
            yield
        finally:
            self.scopes.pop()

    # ---- the whole -------------------------------------------------------------------------------

    def close(self) -> None:
        """The trace is over."""
        self.closed = True

    def graph(self, cost_of: Callable[[Any], CostFigures] = lambda signature: (0.0, 0, ())) -> StepGraph:
        """What was written down, as data; ends the trace.

        Args:
            cost_of: from a signature to seconds, scratch bytes and blocks.
        """
        self.close()
        newest: dict[int, int] = {}
        for number, value in enumerate(self.values):
            if value.producer is None or self.operations[value.producer].phase == "forward":
                newest[value.storage] = number
        stays = {s.id for s in self.storages if s.kind == "backward"} - self._resized
        storable = {number for storage, number in newest.items() if storage not in self._resized}
        resized = {number for number, value in enumerate(self.values) if value.storage in self._resized}
        behind = {self.saved[number].value for number in self.behind}
        costs = {signature: cost_of(signature) for signature in set(self.signatures)}
        operations: list[Operation] = []
        for index, (op, signature) in enumerate(zip(self.operations, self.signatures, strict=True)):
            why, touched = op.reason, (*op.reads, *op.writes) if behind or resized else ()
            if touched and not why:
                why = "" if behind.isdisjoint(touched) else _BEHIND
                why = why if resized.isdisjoint(touched) else _RESIZED
            head = (index, op.name, op.reads, op.writes, op.phase, op.module, op.random)
            seconds, scratch, blocks = costs[signature]
            operations.append(Operation(*head, not why, why, seconds, scratch, op.source, op.region, blocks))
        values: list[Value] = []
        for number, v in enumerate(self.values):
            is_storable = number in storable or v.storage in stays
            dtype = _name_of(v.dtype)
            values.append(Value(number, v.storage, v.version, v.producer, is_storable, v.shape, dtype))
        fixed = behind | resized
        storages = [replace(s, bytes=0) if s.id in self._unfilled else s for s in self.storages]
        graph = StepGraph(
            tuple(operations),
            tuple(storages),
            tuple(values),
            tuple(replace(s, droppable=False, forced=False) if s.value in fixed else s for s in self.saved),
            tuple(map(Event._make, self.events)),
            resident_bytes=sum(s.bytes for s in storages if s.producer is None),
            plain_seconds=sum(operation.seconds for operation in operations),
            device=self.device.type,
        )
        graph = in_place(graph, self.meetings) if self.meetings else graph
        return with_gathered(graph, self._gathered) if self._gathered else graph


@cache
def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
