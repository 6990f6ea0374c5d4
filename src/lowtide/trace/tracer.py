"""What a step is made of, taken down while it runs: storages, values, saved tensors, events.

Comes in: each operation, and what autograd saves and asks for. Goes out: the `StepGraph`. Nothing that the
step made is held here. Storages are followed by weak references, so the events show how long the program
itself needs each. An in-place write makes a new version of the value.

`lowtide.trace.eager` records a step that runs, `lowtide.trace.fake` one on tensors without memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from lowtide import private
from lowtide.graph import Event, Operation, Saved, StepGraph, Storage, StorageKind, Value
from lowtide.meter.resident import gradient_of, plain_parts
from lowtide.ops import (
    FUNCTIONAL_COLLECTIVES,
    IS_COLLECTIVE,
    OpInfo,
    covers_storage,
    has_plain_storage,
    hidden_statistics,
    is_sparse,
    op_info,
    tensors_of,
    written_tensors,
)
from lowtide.trace.results import loss_of, plain_leaves
from lowtide.trace.untouched import Gradients

OUTSIDE = "it runs outside the planned region"
"""Why an operation is not replayable that the model's forward did not run."""
_INNER = "it runs in a backward inside the step, which is not recorded"


@dataclass(frozen=True, slots=True)
class Call:
    """One operation of the step, as it is called.

    Attributes:
        func, args, kwargs: the call.
        info: what is known of it.
        inputs: the tensors that it is given, where each lies in one storage.
        written: those of them that it writes by its schema.
        statistics: running statistics that it updates, whatever its schema says.
        reads: ids of the values that it reads.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    info: OpInfo
    inputs: list[torch.Tensor]
    written: list[torch.Tensor]
    statistics: list[torch.Tensor]
    reads: tuple[int, ...]


class Tracer:
    """The base of who records a step.

    Args:
        model: names parameters, buffers and modules.
        device: whose memory the graph is about: storages elsewhere count no bytes.

    Attributes:
        in_region: whether what runs is the model's forward, which can be planned.
        closed: whether the trace is over.
        operations, storages, values, saved, events: as they will stand in the graph.
        unreleased: how many saved tensors autograd still holds.
    """

    def __init__(self, model: torch.nn.Module | None, device: torch.device) -> None:
        private.keep_dynamo_out()
        self.model = model
        self.device = device
        self.operations: list[dict[str, Any]] = []
        self.storages: list[dict[str, Any]] = []
        self.values: list[dict[str, Any]] = []
        self.saved: list[dict[str, Any]] = []
        self.events: list[Event] = []
        self.in_region = True
        self.closed = False
        self.unreleased = 0
        self._modules: list[str] = []
        self._backward_module = ""
        self._known: dict[int, int] = {}  # address of a storage -> its id
        self._current: dict[int, int] = {}  # id of a storage -> id of its newest value
        # address of the storage of an unpacked tensor -> id of the value that it shows
        self._handed_out: dict[int, int] = {}
        self._watches: list[weakref.ref[torch.UntypedStorage]] = []
        self._names: dict[int, tuple[StorageKind, str]] = {}
        self._given: set[int] = set()
        self._elsewhere: set[int] = set()  # storages of other devices
        self._module_names: dict[int, str] = {}
        self._scopes: list[Any] = []  # directors of the checkpointing scopes that are open
        # for each operation, whether the scope around it evicts what it writes; None outside of all
        self._evicts: list[bool | None] = []
        if model is not None:
            self._name_model(model)

    # ---- names -----------------------------------------------------------------------------------

    def _name_model(self, model: torch.nn.Module) -> None:
        for name, parameter in model.named_parameters():
            self._name(parameter, "parameter", name)
            gradient = gradient_of(parameter)
            if gradient is not None:
                self._name(gradient, "gradient", name)
            slab = getattr(parameter, "gradient_slab", None)  # it stands without gradients, too
            if isinstance(slab, torch.Tensor):
                self._name(slab, "gradient", name)
        for name, buffer in model.named_buffers():
            self._name(buffer, "buffer", name)
        self._module_names = {id(module): name for name, module in model.named_modules()}

    def _name(self, tensor: torch.Tensor, kind: StorageKind, name: str) -> None:
        for leaf in plain_leaves(tensor):
            self._names.setdefault(private.storage_key(leaf), (kind, name))

    def name_gradients(self) -> None:
        """Gradients that the step made have the names of their parameters from here on."""
        for name, parameter in self.model.named_parameters() if self.model is not None else ():
            gradient = gradient_of(parameter)
            for leaf in plain_leaves(gradient) if gradient is not None else ():
                number = self.known(leaf)
                if number is not None and self.storages[number]["producer"] is not None:
                    self.storages[number]["name"] = name

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
            for module in _open_modules(self.model) if self.model is not None else ():
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

    def _watch(self, storage: torch.UntypedStorage, on_end: Callable[[], None]) -> None:
        key = private.storage_address(storage)

        def ended(_: object) -> None:
            self._known.pop(key, None)
            self._handed_out.pop(key, None)
            on_end()

        self._watches.append(weakref.ref(storage, ended))

    def given(self, tensor: torch.Tensor) -> None:
        """The caller gave it to the step: it stands to the end, used or not, since the caller of a later step
        may hold on to it.
        """
        self._given.add(self._storage_of(tensor))

    def _storage_of(self, tensor: torch.Tensor, producer: int | None = None) -> int:
        """The id of the tensor's storage, registered now if it is new."""
        storage = tensor.untyped_storage()
        key = private.storage_address(storage)
        found = self._known.get(key)
        if found is not None:
            return found
        kind, name = self._names.get(key, (None, ""))
        if producer is not None:
            kind, name = ("backward" if private.in_backward() else "forward"), ""
        elif kind is None:
            kind = "input"
        number = len(self.storages)
        here = tensor.device.type == self.device.type
        if not here:
            self._elsewhere.add(number)
        self.storages.append(
            {
                "id": number,
                "bytes": storage.nbytes() if here else 0,
                "kind": kind,
                "producer": producer,
                "name": name,
            }
        )
        self._known[key] = number
        self._watch(storage, lambda: None if number in self._given else self.event("free", number))
        self._new_value(number, producer, tensor)
        return number

    def _new_value(self, storage: int, producer: int | None, tensor: torch.Tensor) -> int:
        version = self.values[self._current[storage]]["version"] + 1 if storage in self._current else 0
        number = len(self.values)
        self.values.append(
            {
                "id": number,
                "storage": storage,
                "version": version,
                "producer": producer,
                "shape": tuple(tensor.shape),
                "dtype": str(tensor.dtype).removeprefix("torch."),
            }
        )
        self._current[storage] = number
        return number

    def value_of(self, tensor: torch.Tensor) -> int:
        """The id of the value that the tensor shows now."""
        found = self._handed_out.get(private.storage_key(tensor))
        return found if found is not None else self._current[self._storage_of(tensor)]

    def known(self, tensor: torch.Tensor) -> int | None:
        """The id of the tensor's storage, if it has been seen."""
        return self._known.get(private.storage_key(tensor))

    def made(self, tensor: torch.Tensor) -> bool:
        """Whether the step made the tensor's storage: parameters, buffers and inputs stood before."""
        number = self.known(tensor)
        return number is not None and self.storages[number]["producer"] is not None

    # ---- operations ------------------------------------------------------------------------------

    def ran_own_backward(self, result: Any, gradients: Gradients) -> bool:
        """Whether a step that returned ``result`` has run its own backward, and not one inside its forward
        alone (forces, a penalty): nothing waits for one, or a gradient has arrived.
        """
        if not any(operation["phase"] == "backward" for operation in self.operations):
            return False
        return not self.unreleased or gradients.have_arrived() or loss_of(result) is None

    def run(self, call: Call) -> Any:
        """What the operation returns."""
        raise NotImplementedError

    def unfollowed(self, read: list[torch.Tensor]) -> str:
        """Why an operation is not replayable that reads tensors of which some lie in no single storage."""
        return ""

    def parts_of(self, result: Any) -> list[torch.Tensor]:
        """What the sparse tensors that an operation returned are made of, where those count as its own."""
        return []

    def noted(self, call: Call, index: int, fresh: list[torch.Tensor]) -> None:
        """The operation made ``fresh`` storages or wrote to others, and is about to get its place."""

    def _record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operation and write it down, where it writes anything."""
        info = op_info(func)
        read = list(tensors_of([args, kwargs]))
        inputs = [t for t in read if has_plain_storage(t)]
        unfollowed = "" if len(inputs) == len(read) else self.unfollowed(read)
        written = [t for t in written_tensors(info, args, kwargs) if has_plain_storage(t)]
        at = [args[p] for p in hidden_statistics(info, args) if isinstance(args[p], torch.Tensor)]
        statistics = [t for t in at if has_plain_storage(t)]
        ignored = {id(t) for t in at}
        if info.fills:
            ignored |= {id(t) for t in written if covers_storage(t)}
        keys = {private.storage_key(t) for t in inputs}
        reads = tuple(dict.fromkeys(self.value_of(t) for t in inputs if id(t) not in ignored))
        wanted = self._scopes[-1].evicts(func, args, kwargs) if self._scopes else None
        call = Call(func, args, kwargs, info, inputs, written, statistics, reads)
        result = self.run(call)
        outputs = [t for t in tensors_of(result) if has_plain_storage(t)]
        parts = self.parts_of(result)
        if parts:
            outputs += parts
            keys |= {private.storage_key(part) for t in read if is_sparse(t) for part in plain_parts(t)}
        fresh = [] if info.returns_written else [t for t in outputs if private.storage_key(t) not in keys]
        if not fresh and not written:
            return result
        index = len(self.operations)
        self.noted(call, index, fresh)
        reason = info.reason or unfollowed or self._unsafe(info, bool(outputs))
        self._add_operation(info.name, reads, info.random, reason, wanted)
        writes: list[int] = []
        for tensor in fresh:
            known = len(self.storages)
            storage = self._storage_of(tensor, producer=index)
            if storage >= known:
                writes.append(self._current[storage])
        writes += [self._new_value(self._storage_of(tensor), index, tensor) for tensor in written]
        self.operations[index]["writes"] = tuple(dict.fromkeys(writes))
        self.event("op", index)
        return result

    def _add_operation(
        self, name: str, reads: tuple[int, ...], random: bool, reason: str, evicts: bool | None
    ) -> None:
        self._evicts.append(evicts)
        self.operations.append(
            {
                "index": len(self.operations),
                "name": name,
                "reads": reads,
                "writes": (),
                "phase": "backward" if private.in_backward() else "forward",
                "module": self.module,
                "random": random,
                "replayable": not reason,
                "reason": reason,
            }
        )

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
        storage = self.storages[self.values[value]["storage"]]
        wanted = self._wanted(value)
        made_here = storage["producer"] is not None and storage["id"] not in self._elsewhere
        droppable = self.in_region and made_here and wanted is not False
        number = len(self.saved)
        self.saved.append(
            {
                "id": number,
                "value": value,
                "droppable": droppable,
                "module": self.module,
                "shape": tuple(tensor.shape),
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "forced": wanted is True,
            }
        )
        self.unreleased += 1
        self.event("pack", number)
        return number, droppable

    def unpacks(self, number: int) -> None:
        """Backward asks for a saved tensor."""
        self._backward_module = self.saved[number]["module"]
        self.event("unpack", number)

    def hands_out(
        self, number: int, storage: torch.UntypedStorage | None, on_end: Callable[[], None] = lambda: None
    ) -> None:
        """It gets one on ``storage``, made for it alone; without one, nobody can tell how long it is used,
        and it stays anyway.
        """
        if storage is None:
            self.event("done", number)
            return

        def ended() -> None:
            self.event("done", number)
            on_end()

        self._handed_out[private.storage_address(storage)] = self.saved[number]["value"]
        self._watch(storage, ended)

    def releases(self, number: int) -> None:
        """Autograd has let go of a saved tensor for good."""
        self.unreleased -= 1
        self.event("release", number)

    # ---- scopes ----------------------------------------------------------------------------------

    @contextmanager
    def region(self, director: Any) -> Iterator[None]:
        """A checkpointing scope: what its director evicts is forced, what it keeps is not droppable."""
        self._scopes.append(director)
        try:
            yield
        finally:
            self._scopes.pop()

    def _wanted(self, value: int) -> bool | None:
        """Whether the scope in which the value was written evicts it; ``None`` where it was not written in
        one, or is saved outside it.
        """
        producer = self.values[value]["producer"]
        return self._evicts[producer] if producer is not None and self._scopes else None

    # ---- the whole -------------------------------------------------------------------------------

    def costs(self) -> list[tuple[float, int]]:
        """Seconds and scratch bytes of each operation."""
        raise NotImplementedError

    def graph(self) -> StepGraph:
        """What was recorded, as data; ends the trace."""
        self.closed = True
        newest: dict[int, int] = {}
        for value in self.values:
            producer = value["producer"]
            if producer is None or self.operations[producer]["phase"] == "forward":
                newest[value["storage"]] = value["id"]
        values = tuple(
            Value(
                **value,
                storable=newest.get(value["storage"]) == value["id"]
                or self.storages[value["storage"]]["kind"] == "backward",
            )
            for value in self.values
        )
        operations = tuple(
            Operation(**operation, seconds=seconds, scratch_bytes=scratch)
            for operation, (seconds, scratch) in zip(self.operations, self.costs(), strict=True)
        )
        return StepGraph(
            operations=operations,
            storages=tuple(Storage(**storage) for storage in self.storages),
            values=values,
            saved=tuple(Saved(**saved) for saved in self.saved),
            events=tuple(self.events),
            resident_bytes=sum(s["bytes"] for s in self.storages if s["producer"] is None),
            plain_seconds=sum(operation.seconds for operation in operations),
            device=self.device.type,
        )


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
