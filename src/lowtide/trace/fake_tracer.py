"""Record a step that runs on fake tensors, for models and devices that are not here.

Every saved tensor is evicted as it is packed and a stand-in is handed out as it is unpacked, so that the
events show how long the *program* needs each storage. This is a `TorchDispatchMode`, so ATen takes some ways
that it does not take in a plain step (see `lowtide.interception`): what is planned from here is a forecast
for what cannot run, not what `limit_memory` goes by.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from lowtide import private
from lowtide.errors import TraceError
from lowtide.graph import Event, Operation, Saved, StepGraph, Storage, StorageKind, Value
from lowtide.ops import (
    OpInfo,
    covers_storage,
    has_plain_storage,
    hidden_bytes,
    hidden_statistics,
    op_info,
    tensors_of,
    written_tensors,
)
from lowtide.private import FakeTensor, TorchDispatchMode
from lowtide.trace.constants import Unknown, stays_real
from lowtide.trace.contents import GROUPED
from lowtide.trace.costs import OpSpec
from lowtide.trace.describe import Signature, is_wrapper_type, plain_leaves, signature_of
from lowtide.trace.eager import OUTSIDE
from lowtide.trace.fake import grouped, laid_out, refuse_strangers
from lowtide.trace.overwritten import settled_operations

_INNER = "it runs in a backward inside the step, which is not recorded"


class TraceHandle:
    """What autograd holds in place of a saved tensor during a trace; its end is the tensor's release."""

    __slots__ = ("device", "dtype", "kept", "saved", "shape", "strides", "tracer")

    def __init__(self, tracer: Tracer, saved: int, tensor: torch.Tensor, kept: torch.Tensor | None) -> None:
        self.tracer = tracer
        self.saved = saved
        self.shape = tensor.shape
        self.strides = tensor.stride()
        self.dtype = tensor.dtype
        self.device = tensor.device
        self.kept = kept

    def __del__(self) -> None:
        self.tracer.event("release", self.saved)


class Tracer(TorchDispatchMode):
    """Records what runs on fake tensors while it is active.

    Args:
        model: names parameters, buffers and modules.
    """

    def __init__(self, model: torch.nn.Module | None = None) -> None:
        super().__init__()
        private.keep_dynamo_out()
        self.model = model
        self.operations: list[dict[str, Any]] = []
        self.signatures: list[Signature] = []
        self.specs: dict[Signature, OpSpec] = {}
        self.storages: list[dict[str, Any]] = []
        self.values: list[dict[str, Any]] = []
        self.saved: list[dict[str, Any]] = []
        self.events: list[Event] = []
        self.in_region = True
        self.closed = False
        self.paused = 0
        self.module_stack: list[str] = []
        self.backward_module = ""
        self._known: dict[int, int] = {}  # storage address -> storage id
        self._current: dict[int, int] = {}  # storage id -> id of its newest value
        self._restored: dict[int, int] = {}  # address of a handed-out stand-in -> value id
        self._watches: list[weakref.ref[torch.UntypedStorage]] = []
        self._names: dict[int, tuple[StorageKind, str]] = {}
        self._module_names: dict[int, str] = {}
        self._uninitialized: set[int] = set()
        # made in the step, and later written by a kernel whose schema does not say so
        self._updated: set[int] = set()
        self._unknown = Unknown()
        self._scopes: list[tuple[int, Any]] = []
        # by operation: what the scope around it says, None outside of all
        self._evicts: list[bool | None] = []
        if model is not None:
            self.name_model(model)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """A compiled call within stays compiled."""
        return True

    # ---- names -----------------------------------------------------------------------------------

    def name_model(self, model: torch.nn.Module) -> None:
        """Learn whose storage is whose and what the modules are called."""
        for name, parameter in model.named_parameters():
            self._name(parameter, "parameter", name)
            if parameter.grad is not None:
                self._name(parameter.grad, "gradient", name)
        for name, buffer in model.named_buffers():
            self._name(buffer, "buffer", name)
        self._module_names = {id(module): name for name, module in model.named_modules()}

    def _name(self, tensor: torch.Tensor, kind: StorageKind, name: str) -> None:
        for leaf in plain_leaves(tensor):
            self._names.setdefault(private.storage_key(leaf), (kind, name))

    def enter_module(self, module: torch.nn.Module) -> None:
        """A module's forward begins."""
        if not self._module_names:
            self._module_names = {id(m): name for name, m in module.named_modules()}
        here = self.module_stack[-1] if self.module_stack else ""
        self.module_stack.append(self._module_names.get(id(module), here))

    def exit_module(self) -> None:
        """A module's forward ends."""
        if self.module_stack:
            self.module_stack.pop()

    @property
    def module(self) -> str:
        """Qualified name of the module that runs now; in backward, of the one whose saved tensor was asked
        for last.
        """
        if private.in_backward():
            return self.backward_module
        return self.module_stack[-1] if self.module_stack else ""

    # ---- events ----------------------------------------------------------------------------------

    def event(self, kind: Any, index: int) -> None:
        """Append one event, unless the trace is over."""
        if not self.closed:
            self.events.append(Event(kind, index))

    def watch(self, storage: torch.UntypedStorage, on_end: Callable[[], None]) -> None:
        """Call ``on_end`` when the storage ends, if that is before the trace does."""
        key = private.storage_address(storage)

        def ended(_: object) -> None:
            if not self.closed:
                self._known.pop(key, None)
                self._restored.pop(key, None)
                on_end()

        self._watches.append(weakref.ref(storage, ended))

    def _storage_of(self, tensor: torch.Tensor, producer: int | None = None) -> int:
        """The id of the tensor's storage, registered now if it is new."""
        storage = tensor.untyped_storage()
        key = private.storage_address(storage)
        found = self._known.get(key)
        if found is not None:
            return found
        kind, name = self._names.get(key, (None, ""))
        if kind is None or producer is not None:
            kind, name = (
                ("input" if producer is None else "backward" if private.in_backward() else "forward"),
                "",
            )
        number = len(self.storages)
        self.storages.append(
            {"id": number, "bytes": storage.nbytes(), "kind": kind, "producer": producer, "name": name}
        )
        self._known[key] = number
        self.watch(storage, lambda: self.event("free", number))
        self._new_value(number, producer)
        return number

    def _new_value(self, storage: int, producer: int | None) -> int:
        version = self.values[self._current[storage]]["version"] + 1 if storage in self._current else 0
        number = len(self.values)
        self.values.append({"id": number, "storage": storage, "version": version, "producer": producer})
        self._current[storage] = number
        return number

    def value_of(self, tensor: torch.Tensor) -> int:
        """The id of the value that the tensor shows now."""
        restored = self._restored.get(private.storage_key(tensor))
        if restored is not None:
            return restored
        return self._current[self._storage_of(tensor)]

    # ---- operations ------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.paused or self.closed:
            return private.call(func, args, kwargs)
        if any(is_wrapper_type(kind) for kind in types):
            return NotImplemented
        info = op_info(func)
        if info.is_view:
            constant = not any(isinstance(t, FakeTensor) for t in tensors_of([args, kwargs]))
            with private.without_fake_mode() if constant else nullcontext():
                return private.call(func, args, kwargs)
        inputs = [t for t in tensors_of([args, kwargs]) if has_plain_storage(t)]
        refuse_strangers(inputs)
        if info.real_only:
            raise TraceError(
                f"{info.name} allocates memory that fake tensors do not show: run the step for real"
            )
        written = written_tensors(info, args, kwargs)
        keys = {private.storage_key(t) for t in inputs}
        statistics = [args[position] for position in hidden_statistics(info, args)]
        ignored = {id(t) for t in statistics}
        if info.fills:
            ignored |= {id(t) for t in written if has_plain_storage(t) and covers_storage(t)}
        reads = list(dict.fromkeys(self.value_of(t) for t in inputs if id(t) not in ignored))
        behind = [
            self.value_of(t) for t in statistics if isinstance(t, torch.Tensor) and has_plain_storage(t)
        ]
        self._updated.update(value for value in behind if self.values[value]["producer"] is not None)
        wanted = self._scopes[-1][1].evicts(func, args, kwargs) if self._scopes else None
        signature, spec = signature_of(func, args, kwargs)
        result = self._on_fakes(func, info, inputs, args, kwargs)
        self._unknown.seen(inputs, written)
        outputs = [t for t in tensors_of(result) if has_plain_storage(t)]
        fresh = [t for t in outputs if private.storage_key(t) not in keys] if not info.returns_written else []
        if not fresh and not written:
            return result
        index = len(self.operations)
        hidden = hidden_bytes(info, args)
        if signature not in self.specs:
            output_bytes = max(
                hidden, sum({private.storage_key(t): t.untyped_storage().nbytes() for t in fresh}.values())
            )
            self.specs[signature] = replace(spec, output_bytes=output_bytes)
        writes: list[int] = []
        for tensor in fresh:
            known = len(self.storages)
            storage = self._storage_of(tensor, producer=index)
            if storage >= known:
                self.storages[storage]["bytes"] = max(hidden, self.storages[storage]["bytes"])
                writes.append(self._current[storage])
                if info.uninitialized:
                    self._uninitialized.add(self._current[storage])
        for tensor in written:
            if has_plain_storage(tensor):
                new = self._new_value(self._storage_of(tensor), index)
                writes.append(new)
                if info.fills and not covers_storage(tensor) and self._uninitialized.intersection(reads):
                    self._uninitialized.add(new)
        reason = info.reason or self._unsafe(info, reads, inputs, outputs)
        self.signatures.append(signature)
        self._evicts.append(wanted)
        self.operations.append(
            {
                "index": index,
                "name": info.name,
                "reads": tuple(reads),
                "writes": tuple(dict.fromkeys(writes)),
                "phase": "backward" if private.in_backward() else "forward",
                "module": self.module,
                "random": info.random,
                "replayable": not reason,
                "reason": reason,
            }
        )
        self.event("op", index)
        return result

    def _on_fakes(
        self,
        func: Any,
        info: OpInfo,
        inputs: list[torch.Tensor],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """What a call returns: for real where all that it reads is small and real."""
        if stays_real(info, inputs, args, kwargs) and not any(map(self._unknown.has, inputs)):
            with private.without_fake_mode():
                return private.call(func, args, kwargs)
        if info.name == GROUPED:
            return grouped(*args, **kwargs)
        return laid_out(info, args, private.call(func, args, kwargs))

    def _unsafe(
        self, info: OpInfo, reads: list[int], inputs: list[torch.Tensor], outputs: list[torch.Tensor]
    ) -> str:
        if not self.in_region:
            return OUTSIDE
        if private.in_backward():
            return _INNER
        if info.uninitialized:
            return "it returns memory that nothing has written yet"
        for value in reads:
            if value in self._uninitialized:
                return "it reads memory that nothing the dispatcher sees has written"
        if not outputs:
            return "it returns no tensor"
        return ""

    # ---- saved tensors ---------------------------------------------------------------------------

    def pack(self, tensor: torch.Tensor) -> Any:
        """Autograd saves ``tensor``."""
        if self.closed or not has_plain_storage(tensor):
            return tensor
        with self._pause():
            value = self.value_of(tensor)
            storage = self.storages[self.values[value]["storage"]]
            droppable = (
                self.in_region and storage["producer"] is not None and self._wanted(value) is not False
            )
            number = len(self.saved)
            self.saved.append(
                {
                    "id": number,
                    "value": value,
                    "droppable": droppable,
                    "module": self.module,
                    "shape": tuple(tensor.shape),
                    "dtype": str(tensor.dtype).removeprefix("torch."),
                    "forced": self._wanted(value) is True,
                }
            )
            self.event("pack", number)
            return TraceHandle(self, number, tensor, None if droppable else tensor.detach())

    def unpack(self, handle: Any) -> torch.Tensor:
        """Autograd asks for a saved tensor."""
        if not isinstance(handle, TraceHandle):
            return handle
        with self._pause():
            self.backward_module = self.saved[handle.saved]["module"]
            self.event("unpack", handle.saved)
            value = self.saved[handle.saved]["value"]
            if handle.kept is not None:
                tensor = handle.kept
            else:
                tensor = torch.empty_strided(
                    handle.shape, handle.strides, dtype=handle.dtype, device=handle.device
                )
            key = private.storage_key(tensor)
            number = handle.saved
            if key in self._known or key in self._restored:
                self.event("done", number)
            else:
                self._restored[key] = value
                self.watch(tensor.untyped_storage(), lambda: self.event("done", number))
            return tensor

    @contextmanager
    def region(self, director: Any) -> Iterator[None]:
        """A checkpointing scope: what its director gives up is forced, what it keeps is not droppable."""
        self._scopes.append((len(self.operations), director))
        try:
            yield
        finally:
            self._scopes.pop()

    def _wanted(self, value: int) -> bool | None:
        """Whether the innermost scope that is open gives up what the value's operation writes; ``None`` where
        it was not written in one.
        """
        producer = self.values[value]["producer"]
        if producer is None or not self._scopes:
            return None
        return self._evicts[producer] if producer >= self._scopes[-1][0] else None

    def gives_up(self, tensor: torch.Tensor) -> bool:
        """Whether the scope around this code brings the tensor back."""
        storage = self._known.get(private.storage_key(tensor))
        return storage is not None and self._wanted(self._current[storage]) is True

    @contextmanager
    def _pause(self) -> Iterator[None]:
        self.paused += 1
        try:
            yield
        finally:
            self.paused -= 1

    # ---- the whole -------------------------------------------------------------------------------

    @contextmanager
    def recording(self) -> Iterator[Tracer]:
        """Activate the dispatch mode, the hooks and the module names together."""
        with ExitStack() as stack:
            hook = torch.nn.modules.module
            pre = hook.register_module_forward_pre_hook(lambda module, _: self.enter_module(module))
            stack.callback(pre.remove)
            post = hook.register_module_forward_hook(lambda *_: self.exit_module(), always_call=True)
            stack.callback(post.remove)
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack))
            stack.enter_context(self)
            yield self

    def known(self, tensor: torch.Tensor) -> int | None:
        """The id of the tensor's storage, if it has been seen."""
        return self._known.get(private.storage_key(tensor))

    def graph(self, *, device: str, extra_resident_bytes: int = 0, notes: tuple[str, ...] = ()) -> StepGraph:
        """What was recorded, as data, without times; ends the trace."""
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
                must_store=value["id"] in self._updated,
            )
            for value in self.values
        )
        resident = sum(s["bytes"] for s in self.storages if s["producer"] is None)
        return StepGraph(
            operations=tuple(
                Operation(**op)
                for op in settled_operations(self.operations, self.values, self.saved, self.storages)
            ),
            storages=tuple(Storage(**storage) for storage in self.storages),
            values=values,
            saved=tuple(Saved(**saved) for saved in self.saved),
            events=tuple(self.events),
            resident_bytes=resident + extra_resident_bytes,
            device=device,
            source="fake",
            notes=notes,
        )
