"""What the tape consists of: recorded operations (nodes), and the values that they wrote.

References alone hold it: autograd's graph holds handles, a handle holds a value, a value holds the node that
wrote it, a node holds the values that it read. When autograd releases its graph, all of it is freed.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from lowtide import private
from lowtide.errors import ReplayError
from lowtide.interception import cpp_module, without_modes
from lowtide.run.tensor_bytes import Geometry, digest, fingerprint, on_a_copy
from lowtide.run.transfers import StoredTensor, TransferEngine
from lowtide.store.slab import is_leased

FILLED_OTHERWISE = (
    "a tensor of {nbytes} bytes that a recomputation starts from was freed after its forward "
    "(storage.resize_) and filled again with other bytes, so this step's gradients would be wrong: fill it "
    "with what it held, or keep that region with lowtide.policies.keep_all"
)


def current_stream(device: torch.device) -> Any:
    """The stream on which this thread computes on an accelerator; ``None`` where there are none."""
    return None if device.type in ("cpu", "meta") else torch.accelerator.current_stream(device)


class LiveValue:
    """One version of one storage in a running step.

    Attributes:
        node: the operation that writes it again, or ``None`` when the value is held instead.
        held: a tensor on the stored storage; later in-place writes show in its version counter.
        version: that counter when the value was recorded.
        cached: a replayed copy, while it has readers left.
        readers: how many nodes and saved tensors have yet to read it.
        nbytes: size of its storage.
        digest: of its bytes, where verification asks for it.
        evicted: whether a saved tensor of it was evicted.
        extent: how many of its storage's bytes were written.
        emptied: where the storage of a held value was emptied (`storage.resize_`, as FSDP does), a
            fingerprint (`lowtide.run.tensor_bytes.fingerprint`) of its bytes: they have to be the same when
            it is read.
        stream: on an accelerator, of a cached copy the stream that made it or read it last, of a held tensor
            the stream that was current when it was first seen; else ``None``.
        shown: a weak reference to the storage that the value was evicted from, where that outlives the
            forward. Once code has written to that storage, a tensor over it instead: saved tensors are then
            unpacked from there, since those of a plain step would show what was written.
    """

    __slots__ = (
        "__weakref__", "cached", "digest", "emptied", "evicted", "extent", "held", "nbytes", "node",
        "readers", "shown", "stream", "version",
    )  # fmt: skip

    def __init__(self, node: Writer | None, nbytes: int) -> None:
        self.node = node
        self.nbytes = nbytes
        self.extent = nbytes
        self.held: torch.Tensor | None = None
        self.version = 0
        self.cached: torch.Tensor | None = None
        self.readers = 0
        self.evicted = False
        self.digest: int | None = None
        self.emptied: torch.Tensor | None = None
        self.stream: Any = None
        self.shown: weakref.ref[torch.UntypedStorage] | torch.Tensor | None = None

    @classmethod
    def hold(cls, tensor: torch.Tensor) -> LiveValue:
        """A value that stays, held by reference."""
        value = cls(None, tensor.untyped_storage().nbytes())
        value.held = private.versioned_alias(tensor)
        value.version = private.version(value.held)
        value.stream = current_stream(tensor.device)
        return value

    @classmethod
    def written(cls, node: Writer, tensor: torch.Tensor, extent: int, verify: bool) -> LiveValue:
        """The value that ``node`` has written to the first ``extent`` bytes of a tensor's storage."""
        value = cls(node, tensor.untyped_storage().nbytes())
        value.extent = extent
        if verify:
            value.digest = digest(tensor, extent)
        return value

    def count_off(self) -> None:
        """Count off one reader; drop the cached copy after the last."""
        if self.readers > 0:
            self.readers -= 1
            if self.readers == 0:
                self.cached = None

    @property
    def is_unchanged(self) -> bool:
        """Whether it is held, and was not written since."""
        return self.held is not None and private.version(self.held) == self.version

    def keep_cached(self, copy: torch.Tensor) -> None:
        """Cache a copy that has just been made, on the current stream."""
        self.cached, self.stream = copy, current_stream(copy.device)

    def _follow(self, copy: torch.Tensor) -> None:
        """Let the current stream read the cached copy: after the stream that had it last, and before its
        memory is used again.
        """
        now, before = current_stream(copy.device), self.stream
        if now == before:
            return
        now.wait_stream(before)
        if is_leased(copy):  # the allocator does not know a place in a slab
            self.cached = on_a_copy(copy)
            before.wait_stream(now)
        else:
            copy.record_stream(now)
        self.stream = now

    def _share(self, held: torch.Tensor) -> None:
        """Tell the allocator that the current stream reads the held tensor, before whose end its memory is
        not to be used again. User code does so for the streams that read it in forward; a replay may run on
        another.
        """
        now = current_stream(held.device)
        if now != self.stream:
            held.record_stream(now)

    def reads(self, key: int) -> bool:
        """Whether replays or saved tensors have yet to read this value from the storage with that key."""
        if self.held is None:
            return self.readers > 0 and self.shown is not None
        return self.readers > 0 and private.storage_key(self.held) == key

    def drop_shared(self, key: int) -> None:
        """The storage with that key is about to change. If the cached copy lies in it (then it is no copy,
        but the very storage that autograd had saved) the value is replayed from now on.
        """
        if self.cached is not None and private.storage_key(self.cached) == key:
            self.cached = None

    def copy_held(self) -> None:
        """The held tensor is about to be overwritten: hold a copy from now on."""
        assert self.held is not None
        self.held = on_a_copy(self.held)
        self.version = private.version(self.held)
        self.stream = current_stream(self.held.device)

    def before_change(self, key: int, how: str) -> bool:
        """Its storage is about to change (`lowtide.writes`): the value keeps its bytes while it has readers.
        Returns whether further changes matter, too. An emptied storage is no change of bytes: it has the
        same ones again before it is read (sharded weights), or `here` raises.
        """
        self.drop_shared(key)
        if how == "emptied":
            self.before_emptying()
        if self.emptied is not None:
            return True  # it is filled again by writes
        if not self.reads(key):
            return False
        with without_modes(), private.replaying():
            held = self.held
            if held is None:
                storage = self.shown() if isinstance(self.shown, weakref.ref) else None
                if storage is not None and how == "written":
                    empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
                    self.shown = empty.set_(storage)  # pyright: ignore
            elif self.is_unchanged and held.untyped_storage().nbytes() >= self.nbytes:
                self.held = held.data if how == "swapped" else on_a_copy(held)
                self.version = private.version(self.held)
        return False

    def before_emptying(self) -> None:
        """Its storage is about to be emptied: note what its bytes are, if the value has readers."""
        held = self.held
        if held is None or self.readers <= 0 or self.emptied is not None or not self.is_unchanged:
            return
        if held.untyped_storage().nbytes() >= self.nbytes:
            with without_modes(), private.replaying():
                self.emptied = fingerprint(held, self.nbytes)

    def _is_filled_again(self) -> bool:
        """Whether a held value has the bytes that it had when it was emptied, if it was. User code does not
        wait for a GPU: other bytes fail there, as an assertion of the device.
        """
        assert self.held is not None
        if self.emptied is None:
            return True
        with without_modes(), private.replaying():
            same = (fingerprint(self.held, self.nbytes) == self.emptied).all()
            if same.is_cpu:
                if not bool(same):
                    return False
            else:
                private.assert_on_device(same, FILLED_OTHERWISE.format(nbytes=self.nbytes))
        self.emptied = None
        return True

    def here(self) -> torch.Tensor | None:
        """A tensor on the value's bytes if they are in memory.

        Raises:
            ReplayError: they have been overwritten or freed since.
        """
        if self.held is None:
            if self.cached is not None and self.stream is not None:
                self._follow(self.cached)
            return self.cached
        if not self.is_unchanged:
            raise ReplayError(
                "a tensor that a recomputation starts from was modified by an in-place operation after the "
                f"forward pass (version {private.version(self.held)}, expected {self.version}, shape "
                f"{tuple(self.held.shape)}): write to a copy, or keep that region with "
                "lowtide.policies.keep_all"
            )
        if self.held.untyped_storage().nbytes() < self.nbytes:
            if weight := private.weight_in(self.held.untyped_storage()):
                raise ReplayError(
                    f"a recomputation reads the sharded weight {weight!r}, which is not gathered now: FSDP "
                    "had it whole here in the step that was profiled. Do not reshard its unit, or change "
                    "what FSDP gathers ahead, within a step; or keep that region with "
                    "lowtide.policies.keep_all"
                )
            raise ReplayError(
                f"a tensor of {self.nbytes} bytes that a recomputation starts from was resized to "
                f"{self.held.untyped_storage().nbytes()} bytes after the forward pass, and backward needs it "
                "before it is filled again: fill it earlier, or keep that region with "
                "lowtide.policies.keep_all"
            )
        if not self._is_filled_again():
            raise ReplayError(FILLED_OTHERWISE.format(nbytes=self.nbytes))
        if self.stream is not None:
            self._share(self.held)
        return self.held


class Ref(Geometry):
    """A tensor argument: a value and a geometry over it."""

    __slots__ = ("value",)

    def __init__(self, value: LiveValue, tensor: torch.Tensor) -> None:
        super().__init__(tensor)
        self.value = value


class SparseInput:
    """A sparse argument, kept by reference."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.version = tensor, private.version(tensor)

    def here(self) -> torch.Tensor:
        """The tensor.

        Raises:
            ReplayError: it was overwritten since.
        """
        if private.version(self.tensor) != self.version:
            raise ReplayError(
                "a sparse tensor that a recomputation reads was modified by an in-place operation after the "
                "forward pass: write to a copy, or keep that region with lowtide.policies.keep_all"
            )
        return self.tensor


class Overwrite:
    """A tensor argument that an operation overwrites.

    Attributes:
        ref: the old value.
        reads: whether that is read.
        new: a weak reference to the new value, if that can be recomputed.
    """

    __slots__ = ("new", "reads", "ref")

    def __init__(self, ref: Ref, reads: bool) -> None:
        self.ref, self.reads = ref, reads
        self.new: weakref.ref[LiveValue] | None = None


class Node:
    """One recorded operation.

    Attributes:
        func, args, kwargs: the call, with `Ref` in place of tensors.
        order: position in the forward.
        inputs: the values that it reads, each once when the node is complete.
        written: the arguments that it overwrites.
        outputs: for each new storage: position in the flat list of result tensors, and a weak reference to
            its value.
        statistics: positions of running statistics; a replay gets clones of them.
        random_state: of an operation that draws random numbers, its generator's state before it ran, from
            which its replay draws; ``None`` of others.
        generator: the generator argument, if one was given.
        device: where it ran.
        exact: whether its replay starts from the same bits as the forward.
        grad: whether gradients were enabled, which some kernels depend on.
        call: the C++ recorder's form of the call, in place of ``args`` and ``kwargs``, or ``None``.
        updated: what a ``call`` overwrites: for each value its place among ``inputs``, and a weak reference
            to the new value.
        waits: whether the node is counted in the ``readers`` of its inputs: from `complete` on, until it has
            run again or is deleted. One with a ``call`` is not: C++ counts the call.
    """

    __slots__ = (
        "__weakref__", "args", "call", "device", "exact", "func", "generator", "grad", "inputs",
        "kwargs", "order", "outputs", "random_state", "statistics", "updated", "waits", "written",
    )  # fmt: skip

    def __init__(self, func: Any, order: float, device: torch.device) -> None:
        self.func = func
        self.order = order
        self.device = device
        self.exact = True
        self.args: list[Any] = []
        self.call: Any = None
        self.kwargs: dict[str, Any] = {}
        self.inputs: list[LiveValue] = []
        self.written: list[Overwrite] = []
        self.outputs: list[tuple[int, weakref.ref[LiveValue]]] = []
        self.statistics: tuple[int, ...] = ()
        self.random_state: Any = None
        self.generator: torch.Generator | None = None
        self.grad = torch.is_grad_enabled()
        self.updated: tuple[tuple[int, weakref.ref[LiveValue]], ...] = ()
        self.waits = False

    def complete(self) -> None:
        """All inputs are noted: count the node among their readers."""
        self.inputs = list(dict.fromkeys(self.inputs))
        self.waits = True
        for value in self.inputs:
            value.readers += 1
            if value.node is not None and not value.node.exact:
                self.exact = False

    def drop_inputs(self) -> None:
        """Count the node off its inputs: it has run again, or never will."""
        if self.call is not None:
            cpp_module().drop_inputs(self.call)
        elif self.waits:
            self.waits = False
            for value in self.inputs:
                value.count_off()


class PythonNode(Node):
    """One that Python recorded, and has to count off when it is deleted."""

    __slots__ = ()

    def __del__(self) -> None:
        self.drop_inputs()


class Unrecordable(Exception):
    """An argument cannot be described by value and geometry."""


class Fetch:
    """The node that writes a moved value: an operation without inputs.

    Attributes:
        func: for messages.
        order: position in the forward.
        exact: whether every bit comes back.
        output: the value.
    """

    __slots__ = ("__weakref__", "engine", "exact", "func", "grad", "order", "output", "stored")
    inputs: Sequence[LiveValue] = ()

    def __init__(self, stored: StoredTensor, engine: TransferEngine, order: float) -> None:
        self.func = "a moved value"
        self.stored = stored
        self.engine = engine
        self.order = order
        self.exact = stored.exact
        self.grad = False
        self.output: weakref.ref[LiveValue] | None = None

    def fetch(self) -> torch.Tensor:
        """The bytes, now."""
        self.engine.note_use(self.stored)
        return self.stored.fetch()


Writer = Node | Fetch
"""What writes a value again."""
