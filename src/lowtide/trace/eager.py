"""Write down one real training step as a `StepGraph`, operation by operation, while it runs.

Comes in: every operation of the step (it is an `Interceptor`), and what autograd saves and asks for, from who
stands between (`lowtide.run.look`). Goes
out: the graph. Nothing that the step made is held here: storages are followed by weak references, so that the
events show how long the program itself needs each of them, and an in-place write makes a new version.
"""

from __future__ import annotations

import statistics
import weakref
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import torch

from lowtide import private
from lowtide.graph import Event, Operation, Saved, StepGraph, Storage, StorageKind, Value
from lowtide.interception import Interceptor, proceed, unseen
from lowtide.meter import available, peak
from lowtide.meter.resident import plain_parts
from lowtide.ops import (
    OpInfo,
    covers_storage,
    has_plain_storage,
    hidden_statistics,
    is_sparse,
    op_info,
    tensors_of,
    written_tensors,
)
from lowtide.trace.clock import Clock
from lowtide.trace.describe import plain_leaves, tensors_inside
from lowtide.trace.overwritten import settled_operations
from lowtide.trace.sums import SUM, in_place

OUTSIDE = "it runs outside the planned region"
"""Why an operation is not replayable that the model's forward did not run."""
_ELSEWHERE = "it reads a tensor that is neither strided nor stood before the step"
HIDDEN = "it was made by code that the dispatcher does not see"
"""Why a value has to stay that a compiled submodule, say, returned."""
_REENTRANT = "CheckpointFunctionBackward"
"""Name of the autograd node of a reentrant ``torch.utils.checkpoint``."""
_INNER = "it runs in a backward inside the step, which is not recorded"


class StepTracer(Interceptor):
    """Records what runs while it is active.

    Args:
        model: names parameters, buffers and modules.
        device: whose memory and time are measured.
        claims: indices of operations that are to run again: layers that ask (`gives_up`) save the results.

    Attributes:
        in_region: whether what runs is the model's forward, which can be planned.
        operations, storages, values, saved, events: as they will stand in the graph.
        unreleased: how many saved tensors autograd still holds.
        asks: whether the forward asked for values, which may change what it does from step to step.
        checkpoints: whether a part of the forward is under ``torch.utils.checkpoint``.
        before_write: called with the tensors that an operation outside the planned region is about to
            overwrite.
    """

    def __init__(
        self, model: torch.nn.Module | None, device: torch.device, claims: frozenset[int] = frozenset()
    ) -> None:
        self.claims = claims
        self.operations: list[dict[str, Any]] = []
        self.storages: list[dict[str, Any]] = []
        self.values: list[dict[str, Any]] = []
        self.saved: list[dict[str, Any]] = []
        self.events: list[Event] = []
        self.in_region = True
        self.closed = False
        self.unreleased = 0
        self.asks = False
        self.checkpoints = False
        self.before_write: Callable[[list[torch.Tensor]], None] = lambda written: None
        self.opaque = 0  # compiled submodules that are being run
        self.clock = Clock(device)
        self._device = device
        self._measures = device.type == "cpu" and available()
        self._seconds: dict[Any, list[Callable[[], float]]] = {}
        self._scratch: dict[Any, list[int]] = {}
        self._cost: Any = None  # of the operation at hand
        self._sparse: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._costs: list[Any] = []  # for each operation, what equal calls share
        self._infos: list[OpInfo] = []
        self._modules: list[str] = []
        self._backward_module = ""
        self._known: dict[int, int] = {}  # address of a storage -> its id
        self._current: dict[int, int] = {}  # id of a storage -> id of its newest value
        # address of the storage of an unpacked tensor -> id of the value that it shows
        self._handed_out: dict[int, int] = {}
        self._watches: list[weakref.ref[torch.UntypedStorage]] = []
        self._names: dict[int, tuple[StorageKind, str]] = {}
        self._given: set[int] = set()
        self._module_names: dict[int, str] = {}
        self._uninitialized: set[int] = set()
        # made in the step, later written by a kernel whose schema does not say so
        self._updated: set[int] = set()
        self._claimed: set[int] = set()
        self._scopes: list[Any] = []  # directors of the checkpointing scopes that are open
        # for each operation, whether the scope around it evicts what it writes
        self._evicts: list[bool | None] = []
        self._nodes: list[Any] = []  # for each operation, the autograd node whose turn it was
        self._sums: set[int] = set()  # additions that autograd's engine made between nodes
        if model is not None:
            self._name_model(model)

    # ---- names -----------------------------------------------------------------------------------

    def _name_model(self, model: torch.nn.Module) -> None:
        for name, parameter in model.named_parameters():
            self._name(parameter, "parameter", name)
            if parameter.grad is not None:
                self._name(parameter.grad, "gradient", name)
            slab = getattr(parameter, "gradient_slab", None)  # it stands without gradients, too
            if isinstance(slab, torch.Tensor):
                self._name(slab, "gradient", name)
        for name, buffer in model.named_buffers():
            self._name(buffer, "buffer", name)
        self._module_names = {id(module): name for name, module in model.named_modules()}

    def _name(self, tensor: torch.Tensor, kind: StorageKind, name: str) -> None:
        for leaf in plain_leaves(tensor):
            self._names.setdefault(private.storage_key(leaf), (kind, name))

    def name_gradients(self, model: torch.nn.Module) -> None:
        """Gradients that the step made have the names of their parameters from here on."""
        for name, parameter in model.named_parameters():
            for leaf in plain_leaves(parameter.grad) if parameter.grad is not None else ():
                number = self.known(leaf)
                if number is not None and self.storages[number]["producer"] is not None:
                    self.storages[number]["name"] = name

    def enter_module(self, module: torch.nn.Module) -> None:
        """A module's forward begins."""
        here = self._modules[-1] if self._modules else ""
        self._modules.append(self._module_names.get(id(module), here))

    def exit_module(self) -> None:
        """A module's forward ends."""
        if self._modules:
            self._modules.pop()

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
        if kind is None and producer is None and self.opaque:
            producer = self._hidden_operation()
        if kind is None or producer is not None:
            kind, name = (
                ("input" if producer is None else "backward" if private.in_backward() else "forward"),
                "",
            )
        number = len(self.storages)
        bytes_ = storage.nbytes() if tensor.device.type == self._device.type else 0
        self.storages.append(
            {"id": number, "bytes": bytes_, "kind": kind, "producer": producer, "name": name}
        )
        self._known[key] = number
        self._watch(storage, lambda: None if number in self._given else self.event("free", number))
        self._new_value(number, producer)
        if producer is not None and self._infos[producer] is _HIDDEN_INFO:
            self.operations[producer]["writes"] = (self._current[number],)
        return number

    def _hidden_operation(self) -> int:
        """What stands for code that wrote a tensor unseen; the tensor has just shown up."""
        index = len(self.operations)
        self._infos.append(_HIDDEN_INFO)
        self._evicts.append(None)
        self._nodes.append(None)
        self._add_operation(index, HIDDEN, (), False, HIDDEN, (HIDDEN, index))
        self.event("op", index)
        return index

    def opaque_call(self, call: Callable[[], Any]) -> Any:
        """Run code whose operations nobody sees: what it returns and what autograd saves in it shows up as
        written by one hidden operation each.
        """
        first = len(self.operations)
        self.opaque += 1
        try:
            result = self.measured((HIDDEN, first), call)
            for tensor in tensors_inside(result):
                self.value_of(tensor)
        finally:
            self.opaque -= 1
        return result

    def _new_value(self, storage: int, producer: int | None) -> int:
        version = self.values[self._current[storage]]["version"] + 1 if storage in self._current else 0
        number = len(self.values)
        self.values.append({"id": number, "storage": storage, "version": version, "producer": producer})
        self._current[storage] = number
        return number

    def value_of(self, tensor: torch.Tensor) -> int:
        """The id of the value that the tensor shows now."""
        found = self._handed_out.get(private.storage_key(tensor))
        return found if found is not None else self._current[self._storage_of(tensor)]

    def made(self, tensor: torch.Tensor) -> bool:
        """Whether the step made the tensor's storage: parameters, buffers and inputs stood before."""
        number = self._known.get(private.storage_key(tensor))
        return number is not None and self.storages[number]["producer"] is not None

    def stands(self, tensor: torch.Tensor) -> bool:
        """Whether a sparse tensor stood before the step: what reads it can run again."""
        return is_sparse(tensor) and not any(
            private.storage_key(part) in self._sparse or self.made(part) for part in plain_parts(tensor)
        )

    def _sparse_parts(self, things: Any, made: bool = True) -> list[torch.Tensor]:
        """What the sparse tensors among ``things`` are made of; ``made``: by the step, as will be known
        again.
        """
        parts = [part for t in tensors_of(things) if is_sparse(t) for part in plain_parts(t)]
        if made:
            known = self._sparse
            for part in parts:
                key = private.storage_key(part)
                known[key] = weakref.ref(part.untyped_storage(), lambda _, key=key: known.pop(key, None))
        return parts

    def known(self, tensor: torch.Tensor) -> int | None:
        """The id of the tensor's storage, if it has been seen."""
        return self._known.get(private.storage_key(tensor))

    # ---- operations ------------------------------------------------------------------------------

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operation and write it down."""
        if self.closed:
            return proceed(func, args, kwargs)
        info = op_info(func)
        read = list(tensors_of([args, kwargs]))
        inputs = [t for t in read if has_plain_storage(t)]
        elsewhere = len(inputs) < len(read) and not all(has_plain_storage(t) or self.stands(t) for t in read)
        written = [t for t in written_tensors(info, args, kwargs) if has_plain_storage(t)]
        keys = {private.storage_key(t) for t in inputs}
        statistics_ = [args[p] for p in hidden_statistics(info, args) if isinstance(args[p], torch.Tensor)]
        ignored = {id(t) for t in statistics_}
        if info.fills:
            ignored |= {id(t) for t in written if covers_storage(t)}
        reads = list(dict.fromkeys(self.value_of(t) for t in inputs if id(t) not in ignored))
        for tensor in statistics_:
            if (
                has_plain_storage(tensor)
                and self.values[(value := self.value_of(tensor))]["producer"] is not None
            ):
                self._updated.add(value)
        wanted = self._scopes[-1].evicts(func, args, kwargs) if self._scopes else None
        if not self.in_region and (written or statistics_):
            self.before_write([*written, *statistics_])
        self._cost = cost = _cost_key(func, args, kwargs)
        self.checkpoints = self.checkpoints or (self.in_region and private.in_torch_checkpoint())
        if private.in_backward() or not self.in_region:
            result = apart(func, args, kwargs, lambda call: self.measured(cost, call))
        else:
            result = proceed(func, args, kwargs)  # to the recorder, which measures its runs
        self._cost = cost
        outputs = [t for t in tensors_of(result) if has_plain_storage(t)]
        parts = self._sparse_parts(result)
        if parts and (private.in_backward() or not self.in_region):
            outputs += parts  # within the region the recorder counts operations, and these are none to it
            keys |= {private.storage_key(part) for part in self._sparse_parts([args, kwargs], made=False)}
        fresh = [] if info.returns_written else [t for t in outputs if private.storage_key(t) not in keys]
        if not fresh and not written:
            self.asks |= self.in_region and info.name in _ASKS
            return result
        index = len(self.operations)
        node = private.node_key() if private.in_backward() else None
        self.checkpoints = self.checkpoints or (node is not None and node[0] == _REENTRANT)
        self._nodes.append(node)
        if (
            info.name == SUM
            and node is not None
            and len(args) == 2
            and not kwargs
            and self._meets(args[0], reads, node)
        ):
            self._sums.add(index)
        writes: list[int] = []
        reason = info.reason or (_ELSEWHERE if elsewhere else self._unsafe(info, reads, outputs))
        self._infos.append(info)
        self._evicts.append(wanted)
        self._add_operation(index, info.name, tuple(reads), info.random, reason, self._cost)
        for tensor in fresh:
            known = len(self.storages)
            storage = self._storage_of(tensor, producer=index)
            if storage >= known:
                writes.append(self._current[storage])
                if info.uninitialized:
                    self._uninitialized.add(self._current[storage])
        for tensor in written:
            new = self._new_value(self._storage_of(tensor), index)
            writes.append(new)
            if info.fills and not covers_storage(tensor) and self._uninitialized.intersection(reads):
                self._uninitialized.add(new)
        self.operations[index]["writes"] = tuple(dict.fromkeys(writes))
        self.event("op", index)
        return result

    def _meets(self, first: Any, reads: list[int], node: Any) -> bool:
        """Whether a gradient that another node made is the first that is read, and nobody else holds it: the
        engine adds the second to it.

        A view holds its base, and the engine adds out of place where anybody holds the bytes.
        """
        producer = self.values[reads[0]]["producer"] if reads else None
        return (
            producer is not None and self._nodes[producer] not in (None, node) and not private.is_view(first)
        )

    def _add_operation(
        self, index: int, name: str, reads: tuple[int, ...], random: bool, reason: str, cost: Any
    ) -> None:
        self._costs.append(cost)
        self.operations.append(
            {
                "index": index,
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

    def measured(self, cost: Any, call: Callable[[], Any]) -> Any:
        """What ``call`` returns; its seconds and scratch count for the operations of the kind ``cost``."""
        if not self._measures:
            result, seconds = self.clock.time(call)
        else:
            with peak("cpu", "allocator") as seen:
                result, seconds = self.clock.time(call)
                live = max(0, seen.live_bytes)
            self._scratch.setdefault(cost, []).append(seen.peak_bytes - live)
        self._seconds.setdefault(cost, []).append(seconds)
        return result

    def first_run(self, call: Callable[[], Any]) -> Any:
        """Measure the first run of the forward operation at hand, for those that have no second one."""
        return self.measured((self._cost, "cold"), call)

    def second_run(self, call: Callable[[], Any]) -> Any:
        """Measure the second, warm run of the forward operation at hand, which verifies that it
        reproduces.
        """
        return self.measured(self._cost, call)

    def _seconds_of(self, cost: Any) -> float:
        reads = self._seconds.get(cost) or self._seconds.get((cost, "cold")) or ()
        return statistics.median(read() for read in reads) if reads else 0.0

    def _scratch_of(self, cost: Any) -> int:
        """What one of equal calls takes at most. The threads of a collective may let go of an earlier one's
        buffers while it runs, which looks like scratch: there the middle one counts.
        """
        found = [*self._scratch.get(cost, ()), *self._scratch.get((cost, "cold"), ())]
        if found and getattr(cost[0], "namespace", "") == "_c10d_functional":
            return statistics.median_low(found)
        return max(found, default=0)

    def _unsafe(self, info: OpInfo, reads: list[int], outputs: list[torch.Tensor]) -> str:
        if not self.in_region:
            return OUTSIDE
        if private.in_backward():
            return _INNER
        if info.uninitialized:
            return "it returns memory that nothing has written yet"
        if any(value in self._uninitialized for value in reads):
            return "it reads memory that nothing the dispatcher sees has written"
        return "" if outputs else "it returns no tensor"

    # ---- saved tensors ---------------------------------------------------------------------------

    def packs(self, tensor: torch.Tensor) -> tuple[int, bool]:
        """Autograd saves ``tensor``: the id of the saved tensor, and whether a plan may evict it."""
        value = self.value_of(tensor)
        storage = self.storages[self.values[value]["storage"]]
        wanted = self._wanted(value)
        droppable = self.in_region and storage["producer"] is not None and wanted is not False
        number = len(self.saved)
        self.saved.append(
            {
                "id": number,
                "value": value,
                "droppable": droppable,
                "module": self.module,
                "shape": tuple(tensor.shape),
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "forced": wanted is True or self.values[value]["producer"] in self._claimed,
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
        self, number: int, storage: torch.UntypedStorage | None, on_end: Callable[[], None]
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

    @contextmanager
    def region(self, director: Any):
        """A checkpointing scope: what its director evicts is forced, what it keeps is not droppable."""
        self._scopes.append(director)
        try:
            yield
        finally:
            self._scopes.pop()

    def gives_up(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is taken to come back for whoever saves it."""
        if not self.claims or self.closed or not self.in_region or not has_plain_storage(tensor):
            return False
        value = self.value_of(tensor)
        producer = self.values[value]["producer"]
        if producer not in self.claims or self._wanted(value) is False:
            return False
        self._claimed.add(producer)
        return True

    def _wanted(self, value: int) -> bool | None:
        """Whether the scope in which the value was written evicts it; ``None`` where it was not written in
        one, or is saved outside it.
        """
        producer = self.values[value]["producer"]
        return self._evicts[producer] if producer is not None and self._scopes else None

    # ---- the whole -------------------------------------------------------------------------------

    def graph(self, notes: tuple[str, ...] = ()) -> StepGraph:
        """What was recorded, as data; ends the trace."""
        self.closed = True
        events = in_place(self.events, self.operations, self.storages, self.values, self._sums)
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
                must_store=value["id"] in self._updated,
            )
            for value in self.values
        )
        costs = {cost: (self._seconds_of(cost), self._scratch_of(cost)) for cost in set(self._costs)}
        operations = tuple(
            Operation(**operation, seconds=costs[cost][0], scratch_bytes=costs[cost][1])
            for operation, cost in zip(
                settled_operations(self.operations, self.values, self.saved, self.storages),
                self._costs,
                strict=True,
            )
        )
        return StepGraph(
            operations=operations,
            storages=tuple(Storage(**storage) for storage in self.storages),
            values=values,
            saved=tuple(Saved(**saved) for saved in self.saved),
            events=tuple(events),
            resident_bytes=sum(s["bytes"] for s in self.storages if s["producer"] is None),
            plain_seconds=sum(operation.seconds for operation in operations),
            device=self._device.type,
            source="real",
            notes=notes,
            claims=tuple(sorted(self._claimed)),
        )


_ASKS = ("aten._local_scalar_dense.default", "aten.is_nonzero.default", "aten.equal.default")
_HIDDEN_INFO = OpInfo(HIDDEN, False, (), False, False, False, (), None, HIDDEN)


def apart(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[[Callable[[], Any]], Any]
) -> Any:
    """What ``run`` returns for the operation; a functional collective is waited for, and moves copies.

    The threads that carry out a collective hold its buffers until they have tidied up, so only copies let the
    step's own tensors end where the program lets go of them.
    """
    if getattr(func, "namespace", "") != "_c10d_functional" or op_info(func).waits:
        return run(lambda: proceed(func, args, kwargs))
    copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        copies.append((tensor, tensor.clone()))
        return copies[-1][1]

    with unseen():
        given, named = private.tree_map_only(torch.Tensor, copied, (args, kwargs))
    result = run(lambda: _waited_for(proceed(func, given, named)))
    written = {id(tensor) for tensor in written_tensors(op_info(func), given, named)}
    with unseen():
        if not written:
            return private.tree_map_only(torch.Tensor, torch.clone, result)
        for tensor, copy in copies:
            if id(copy) in written:
                tensor.copy_(copy)
    originals = {private.storage_key(copy): tensor for tensor, copy in copies}
    return private.tree_map_only(torch.Tensor, lambda tensor: originals[private.storage_key(tensor)], result)


def _waited_for(result: Any) -> Any:
    return private.tree_map_only(torch.Tensor, private.wait_for_collective, result)


def _cost_key(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What calls share that take equally long: the overload, and the shapes, strides and types of its
    arguments.
    """
    return (func, tuple(map(_form, args)), tuple((name, _form(item)) for name, item in kwargs.items()))


def _form(item: Any) -> Any:
    if isinstance(item, torch.Tensor):
        if item.is_nested and item.layout is torch.strided:  # it has no shape, and PyTorch aborts where asked
            return (item.numel(), item.dtype)
        if item.layout is torch.sparse_coo:  # one that is not coalesced is sorted first, in a copy
            return (item.shape, item.dtype, item._nnz(), item.is_coalesced())
        return (item.shape, item.dtype, item.stride() if item.layout is torch.strided else None)
    if isinstance(item, (tuple, list)):
        return tuple(map(_form, item))
    return item if isinstance(item, (int, float, bool, str, torch.dtype)) else type(item)
