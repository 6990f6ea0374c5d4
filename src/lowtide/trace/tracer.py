"""What a step is made of, taken down while it runs: storages, values, saved tensors, events.

Comes in: each operation, and what autograd saves and asks for. Goes out: the `StepGraph`. Nothing that the
step made is held here. Storages are followed by weak references, so the events show how long the program
itself needs each. An in-place write makes a new version of the value.

`lowtide.trace.eager` records a step that runs, `lowtide.trace.fake` one on tensors without memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Literal

import torch

from lowtide import private
from lowtide.graph import Event, Operation, Saved, StepGraph, Storage, StorageKind, Value
from lowtide.meter.resident import gradient_of, plain_parts
from lowtide.ops import (
    FUNCTIONAL_COLLECTIVES,
    IS_COLLECTIVE,
    Call,
    OpInfo,
    enter,
    has_plain_storage,
    is_sparse,
    tensors_of,
)
from lowtide.trace.results import loss_in, loss_of, plain_leaves
from lowtide.trace.source import calling_line
from lowtide.trace.untouched import Gradients

OUTSIDE = "it runs outside the planned region"
"""Why an operation is not replayable that the model's forward did not run."""
_BEHIND = "what autograd saved of it is overwritten through .data"
_RESIZED = "the program resizes a storage that it reads or writes"
_INNER = "it runs in a backward inside the step, which is not recorded"


class Tracer:
    """The base of who records a step.

    Args:
        model: names parameters, buffers and modules.
        device: whose memory the graph is about: storages elsewhere count no bytes.

    Attributes:
        in_region: whether what runs is the model's forward, which can be planned.
        closed: whether the trace is over.
        operations, storages, values, saved, events: as they will stand in the graph.
        signatures: for each operation, what calls share that cost the same.
        resized: ids of the step's own storages that the program resizes.
        behind: saved tensors that were overwritten where their version counter does not tell (``.data``): a
            plain step reads what was written, so they are kept.
        unreleased: how many saved tensors autograd still holds.
        gradients: notes those of trainable tensors that the step is given, if the step is not to leave any.
    """

    def __init__(self, model: torch.nn.Module | None, device: torch.device) -> None:
        private.keep_dynamo_out()
        # autograd's graph holds the tracer, and the model may hold that
        self._model = (lambda: None) if model is None else weakref.ref(model)
        self.device = device
        self.operations: list[Operation] = []
        self.storages: list[Storage] = []
        self.values: list[Value] = []
        self.saved: list[Saved] = []
        self.events: list[Event] = []
        self.signatures: list[Any] = []
        self.in_region = True
        self.closed = False
        self.resized: set[int] = set()
        self.behind: set[int] = set()
        self.unreleased = 0
        self.gradients: Gradients | None = None
        self._modules: list[str] = []
        self._backward_module = ""
        self._known: dict[int, tuple[int, object]] = {}  # by storage: its id
        self._current: dict[int, int] = {}  # id of a storage -> id of its newest value
        self._handed_out: dict[int, tuple[int, object]] = {}  # by storage of an unpacked tensor: its value
        self._names: dict[int, tuple[StorageKind, str]] = {}
        self._given: set[int] = set()
        self._elsewhere: set[int] = set()  # storages of other devices
        self._module_names: dict[int, str] = {}
        self._scopes: list[Any] = []  # directors of the checkpointing scopes that are open
        self._regions = 0  # how many regions have begun: a scope begins one, in another scope, too
        self._kept_by_scopes: set[int] = set()  # operations in a scope that keeps what they write
        if model is not None:
            self._name_model(model)

    # ---- names -----------------------------------------------------------------------------------

    def _name_model(self, model: torch.nn.Module) -> None:
        for name, parameter in model.named_parameters():
            self._name(parameter, "parameter", name)
            # the slab stands without gradients, too
            for tensor in (gradient_of(parameter), getattr(parameter, "gradient_slab", None)):
                if isinstance(tensor, torch.Tensor):
                    self._name(tensor, "gradient", name)
        for name, buffer in model.named_buffers():
            self._name(buffer, "buffer", name)
        self._module_names = {id(module): name for name, module in model.named_modules()}

    def _name(self, tensor: torch.Tensor, kind: StorageKind, name: str) -> None:
        for leaf in plain_leaves(tensor):
            self._names.setdefault(private.storage_key(leaf), (kind, name))

    @property
    def model(self) -> torch.nn.Module | None:
        """The model, as long as others hold it."""
        return self._model()

    def name_gradients(self) -> None:
        """Gradients that the step made have the names of their parameters from here on."""
        model = self.model
        for name, parameter in model.named_parameters() if model is not None else ():
            gradient = gradient_of(parameter)
            for leaf in plain_leaves(gradient) if gradient is not None else ():
                number = self.known(leaf)
                if number is not None and self.made(leaf):
                    self.storages[number] = replace(self.storages[number], name=name)

    @contextmanager
    def following_modules(self) -> Iterator[None]:
        """What runs in the block belongs to the module of the model whose forward it runs in."""

        def begins(module: torch.nn.Module, _: Any) -> None:
            here = self._modules[-1] if self._modules else ""
            self._modules.append(self._module_names.get(id(module), here))

        def ends(*_: object) -> None:
            if self._modules:
                self._modules.pop()

        with ExitStack() as stack:
            model = self.model
            for module in _open_modules(model) if model is not None else ():
                stack.callback(module.register_forward_pre_hook(begins, prepend=True).remove)
                stack.callback(module.register_forward_hook(ends, prepend=True, always_call=True).remove)
            yield

    @property
    def module(self) -> str:
        """Qualified name of the module that runs now; in backward, of the one whose saved tensor was asked
        for last.
        """
        if private.in_backward():
            return self._backward_module
        return self._modules[-1] if self._modules else ""

    # ---- storages and values ---------------------------------------------------------------------

    def event(self, kind: Any, index: int) -> None:
        """Append one event, unless the trace is over."""
        if not self.closed:
            self.events.append(Event(kind, index))

    def given(self, tensor: torch.Tensor) -> None:
        """The caller gave it to the step: it stands to the end, used or not, since the caller of a later step
        may hold on to it.
        """
        self._given.add(self._storage_of(tensor))

    def _storage_of(self, tensor: torch.Tensor, producer: int | None = None) -> int:
        """The id of the tensor's storage, registered now if it is new."""
        found = self.known(tensor)
        if found is not None:
            return found
        if producer is not None:
            kind, name = self._phase, ""
        else:
            kind, name = self._names.get(private.storage_key(tensor), ("input", ""))
            if self.gradients is not None:
                self.gradients.note(tensor)
        number, storage = len(self.storages), tensor.untyped_storage()
        here = tensor.device.type == self.device.type
        if not here:
            self._elsewhere.add(number)
        self.storages.append(Storage(number, storage.nbytes() if here else 0, kind, producer, name))
        enter(
            self._known,
            storage,
            number,
            lambda: None if number in self._given else self.event("free", number),
        )
        self._new_value(number, producer, tensor)
        return number

    def _new_value(self, storage: int, producer: int | None, tensor: torch.Tensor) -> int:
        version = self.values[self._current[storage]].version + 1 if storage in self._current else 0
        number = self._current[storage] = len(self.values)
        shape, dtype = tuple(tensor.shape), _name_of(tensor.dtype)
        self.values.append(Value(number, storage, version, producer, shape=shape, dtype=dtype))
        return number

    def value_of(self, tensor: torch.Tensor) -> int:
        """The id of the value that the tensor shows now."""
        key = private.storage_key(tensor)
        found = self._handed_out.get(key)
        if found is not None:
            return found[0]
        known = self._known.get(key)
        return self._current[self._storage_of(tensor) if known is None else known[0]]

    def known(self, tensor: torch.Tensor) -> int | None:
        """The id of the tensor's storage, if it has been seen."""
        found = self._known.get(private.storage_key(tensor))
        return None if found is None else found[0]

    def made(self, tensor: torch.Tensor) -> bool:
        """Whether the step made the tensor's storage: parameters, buffers and inputs stood before."""
        number = self.known(tensor)
        return number is not None and self.storages[number].producer is not None

    def made_in_backward(self, tensor: torch.Tensor) -> bool:
        """Whether a backward of the step made the tensor's storage."""
        number = self.known(tensor)
        return number is not None and self.storages[number].kind == "backward"

    def resizes(self, storage: torch.UntypedStorage, nbytes: int) -> int | None:
        """The program is about to resize a storage: its id, if the step made it.

        No replay touches such a storage, and what is saved in it is kept as the program holds it.
        """
        number, _ = self._known.get(private.storage_address(storage), (None, None))
        if self.closed or number is None or self.storages[number].producer is None:
            return None
        self.resized.add(number)
        whole = self.storages[number]
        if number not in self._elsewhere and nbytes > whole.bytes:
            self.storages[number] = replace(whole, bytes=nbytes)
        if bool(nbytes) is not bool(storage.nbytes()):
            self.event("fill" if nbytes else "empty", number)
        return number

    def is_resized(self, tensor: torch.Tensor) -> bool:
        """Whether the program has resized the tensor's storage."""
        return bool(self.resized) and self.known(tensor) in self.resized

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

    def run(self, call: Call) -> Any:
        """What the operation returns."""
        raise NotImplementedError

    def unfollowed(self, call: Call) -> str:
        """Why an operation is not replayable that reads tensors which lie in no single storage."""
        return ""

    def parts_of(self, result: Any) -> list[torch.Tensor]:
        """What the sparse tensors that an operation returned are made of, where those count as its own."""
        return []

    def noted(self, call: Call, index: int, fresh: list[torch.Tensor]) -> None:
        """The operation, which made ``fresh`` storages or wrote to others, has got its place."""

    def _record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operation and write it down, where it writes anything."""
        call = Call(func, args, kwargs)
        unfollowed = self.unfollowed(call) if call.others else ""
        reads = tuple(dict.fromkeys(self.value_of(t) for t in call.inputs if id(t) not in call.unread))
        wanted = self._scopes[-1].evicts(func, args, kwargs) if self._scopes else None
        result = self.run(call)
        outputs = list(filter(has_plain_storage, tensors_of(result)))
        parts = self.parts_of(result)
        if parts:
            outputs += parts
            call.keys |= {private.storage_key(p) for t in call.others if is_sparse(t) for p in plain_parts(t)}
        fresh = [outputs[position] for position in call.fresh(outputs)]
        if not fresh and not call.written:
            return result
        reason = call.info.reason or unfollowed or self._unsafe(call.info, bool(outputs))
        index = len(self.operations)
        new = [tensor for tensor in fresh if self.known(tensor) is None]
        writes = [self._current[self._storage_of(tensor, producer=index)] for tensor in new]
        writes += [self._new_value(self._storage_of(tensor), index, tensor) for tensor in call.written]
        self._add_operation(call.info.name, reads, writes, reason, call.draws(), wanted)
        self.noted(call, index, fresh)
        self.event("op", index)
        return result

    def _add_operation(
        self,
        name: str,
        reads: tuple[int, ...],
        writes: Iterable[int],
        reason: str,
        random: bool = False,
        wanted: bool | None = None,
    ) -> None:
        """Append an operation; ``wanted`` is what the scope around it says, as of its director's `evicts`."""
        index, phase = len(self.operations), self._phase
        if wanted is False:
            self._kept_by_scopes.add(index)
        self.operations.append(
            Operation(
                index,
                name,
                reads,
                tuple(dict.fromkeys(writes)),
                phase,
                self.module,
                random,
                not reason,
                reason,
                source=calling_line() if phase == "forward" else "",
                region=self._regions if wanted else None,
            )
        )

    @property
    def _phase(self) -> Literal["forward", "backward"]:
        return "backward" if private.in_backward() else "forward"

    def _unsafe(self, info: OpInfo, returns_tensors: bool) -> str:
        if not self.in_region:
            return OUTSIDE
        if private.in_backward():
            return _INNER
        if info.uninitialized:
            return "it returns memory that nothing has written yet"
        return "" if returns_tensors else "it returns no tensor"

    # ---- saved tensors ---------------------------------------------------------------------------

    def packs(self, tensor: torch.Tensor) -> tuple[int, bool]:
        """Autograd saves ``tensor``: the id of the saved tensor, and whether a plan may evict it."""
        value = self.value_of(tensor)
        storage = self.storages[self.values[value].storage]
        producer = self.values[value].producer
        made_here = storage.producer is not None and storage.id not in self._elsewhere
        droppable, forced = self.in_region and made_here, False
        if producer is not None and self._scopes:
            droppable &= producer not in self._kept_by_scopes
            forced = self.operations[producer].region == self._regions  # what enters a region stays
        number, shape, dtype = len(self.saved), tuple(tensor.shape), _name_of(tensor.dtype)
        self.saved.append(Saved(number, value, droppable, self.module, shape, dtype, forced))
        self.unreleased += 1
        self.event("pack", number)
        return number, droppable

    def unpacks(self, number: int) -> None:
        """Backward asks for a saved tensor."""
        self._backward_module = self.saved[number].module
        self.event("unpack", number)

    def hands_out(
        self, number: int, storage: torch.UntypedStorage | None, on_end: Callable[[], None] = lambda: None
    ) -> None:
        """It gets one on ``storage``, made for it alone; without one, nobody can tell how long it is used,
        and it stays anyway.
        """

        def ended() -> None:
            self.event("done", number)
            on_end()

        if storage is None:
            ended()
        else:
            enter(self._handed_out, storage, self.saved[number].value, ended)

    def releases(self, number: int) -> None:
        """Autograd has let go of a saved tensor for good."""
        self.unreleased -= 1
        self.event("release", number)

    # ---- scopes ----------------------------------------------------------------------------------

    @contextmanager
    def region(self, director: Any) -> Iterator[None]:
        """A checkpointing scope: what its director evicts is forced, what it keeps is not droppable.

        As the recorder has it, a region goes on behind a scope that lies in it, and what was made before that
        one has entered it.
        """
        self._scopes.append(director)
        self._regions += 1
        self.at_scope()
        try:
            yield
        finally:
            self._scopes.pop()
            self.at_scope()

    def at_scope(self) -> None:
        """A checkpointing scope begins or has ended."""

    # ---- the whole -------------------------------------------------------------------------------

    def cost_of(self, signature: Any) -> tuple[float, int]:
        """Seconds and scratch bytes of operations with this signature."""
        raise NotImplementedError

    def graph(self) -> StepGraph:
        """What was recorded, as data; ends the trace."""
        self.closed = True
        newest: dict[int, int] = {}
        for value in self.values:
            if value.producer is None or self.operations[value.producer].phase == "forward":
                newest[value.storage] = value.id
        costs = {signature: self.cost_of(signature) for signature in set(self.signatures)}
        stays = {s.id for s in self.storages if s.kind == "backward"} - self.resized
        resized = {value.id for value in self.values if value.storage in self.resized}
        for storage in self.resized:
            newest.pop(storage, None)
        operations = tuple(
            replace(operation, seconds=costs[signature][0], scratch_bytes=costs[signature][1])
            for operation, signature in zip(self.operations, self.signatures, strict=True)
        )
        behind = {self.saved[number].value for number in self.behind}
        for values, reason in ((resized, _RESIZED), (behind, _BEHIND)):
            if values:
                operations = tuple(
                    op
                    if not op.replayable or values.isdisjoint((*op.reads, *op.writes))
                    else replace(op, replayable=False, reason=reason)
                    for op in operations
                )
        return StepGraph(
            operations=operations,
            storages=tuple(self.storages),
            values=tuple(
                replace(v, storable=newest.get(v.storage) == v.id or v.storage in stays) for v in self.values
            ),
            saved=tuple(
                replace(s, droppable=False, forced=False) if s.value in resized or s.value in behind else s
                for s in self.saved
            ),
            events=tuple(self.events),
            resident_bytes=sum(s.bytes for s in self.storages if s.producer is None),
            plain_seconds=sum(operation.seconds for operation in operations),
            device=self.device.type,
        )


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _open_modules(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The modules whose own code runs: none that are compiled, and nothing inside these."""
    if isinstance(model, torch.jit.ScriptModule) or private.is_compiled(model):
        return
    yield model
    for child in model.children():
        yield from _open_modules(child)


def with_collectives(graph: StepGraph) -> StepGraph:
    """The graph with its functional collectives replayable, as they are where all ranks run them again."""
    if any(operation.name.startswith("_c10d_functional.wait_tensor") for operation in graph.operations):
        return graph  # someone else's, which a trace shows as an operation and a run does not

    def together(op: Operation) -> Operation:
        known = op.name in FUNCTIONAL_COLLECTIVES and op.reason == IS_COLLECTIVE
        return replace(op, replayable=True, reason="") if known and op.phase == "forward" else op

    return graph.with_operations(together)
