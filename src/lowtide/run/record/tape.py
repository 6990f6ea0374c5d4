"""The tape: recorded operations, and the values that they wrote.

It is held by references alone: autograd's graph holds handles, a handle holds a value, a value holds the node
that wrote it, a node holds the values that it read. When autograd releases its graph, all of it is freed.
During the forward the recorder has tables to find values by their storages.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

import torch

from lowtide import private
from lowtide.errors import ReplayError
from lowtide.interception import cpp_module, without_modes
from lowtide.ops import Call, is_sparse
from lowtide.run.digest import Geometry, digest, fingerprint, on_a_copy, reach
from lowtide.run.move import StoredTensor, TransferEngine
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
        emptied: of a held one whose storage was emptied (`storage.resize_`, as FSDP does) what its bytes were
            then (`lowtide.run.digest.fingerprint`): they have to come back the same before it is read.
        stream: of an accelerator's cached copy the stream that made it or read it last, else ``None``.
        shown: of an evicted one, a weak reference to the storage that it was evicted from, where that
            outlives the forward. Once code has written to that storage, a tensor over it instead: in a plain
            step autograd's saved tensors would read what was written, so they are unpacked from there.
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
    def unchanged(self) -> bool:
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

    def reads(self, key: int) -> bool:
        """Whether replays or saved tensors have yet to read this value from the storage with that key."""
        if self.held is None:
            return self.readers > 0 and self.shown is not None
        return self.readers > 0 and private.storage_key(self.held) == key

    def before_change(self, key: int, how: str) -> bool:
        """Its storage is about to change (`lowtide.writes`): the value keeps its bytes while it has readers.
        Returns whether further changes matter, too. An emptied storage is no change of bytes: it has the
        same ones again before it is read (sharded weights), or `here` raises.
        """
        if self.cached is not None and private.storage_key(self.cached) == key:
            self.cached = None  # it was no copy, but the very storage that autograd had saved
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
            elif self.unchanged and held.untyped_storage().nbytes() >= self.nbytes:
                self.held = held.data if how == "swapped" else on_a_copy(held)
                self.version = private.version(self.held)
        return False

    def before_emptying(self) -> None:
        """Its storage is about to be emptied: note what its bytes are, if the value has readers."""
        held = self.held
        if held is None or self.readers <= 0 or self.emptied is not None or not self.unchanged:
            return
        if held.untyped_storage().nbytes() >= self.nbytes:
            with without_modes(), private.replaying():
                self.emptied = fingerprint(held, self.nbytes)

    def _is_filled_again(self) -> bool:
        """Whether a held value has the bytes that it had when it was emptied, if it was. The program does not
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
        if not self.unchanged:
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
        return self.held


class Tables:
    """What a recorder knows of one forward's storages, by their keys (`lowtide.private.storage_key`).

    The C++ recorder and the one in Python work on the same dictionaries, which are never replaced.

    Attributes:
        given: the value of a storage that can be replayed or fetched, and what removes the entry when the
            storage ends.
        held: a weak reference to the value of a storage that a replay reads and that is held until then.
        blank: storages that nothing has written yet.
        order: how many nodes were recorded: the next one's place in the forward.
    """

    __slots__ = ("blank", "given", "held", "order")

    def __init__(self) -> None:
        self.given: dict[int, tuple[LiveValue, Any]] = {}
        self.held: dict[int, weakref.ref[LiveValue]] = {}
        self.blank: dict[int, object] = {}
        self.order = 0


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
        noted: what forward noted for the replay: of a random operation, the generator's state before it.
        generator: the generator argument, if one was given.
        device: where it ran.
        exact: whether its replay starts from the same bits as the forward.
        grad: whether gradients were enabled, which some kernels depend on.
        call: the C++ recorder's form of the call, in place of ``args`` and ``kwargs``, or ``None``.
        updated: what a ``call`` overwrites: for each value its place among ``inputs``, and a weak reference
            to the new value.
        waits: whether it counts among the readers of its inputs: until it has run again, or is deleted. The
            C++ recorder's form of a call counts for itself.
    """

    __slots__ = (
        "__weakref__", "args", "call", "device", "exact", "func", "generator", "grad", "inputs",
        "kwargs", "noted", "order", "outputs", "statistics", "updated", "waits", "written",
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
        self.noted: Any = None
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


def node_of(
    call: Call, order: int, blank: Container[int], value_of: Callable[[torch.Tensor], LiveValue]
) -> Node | None:
    """The node of a call about to be made, or ``None`` where it cannot be replayed.

    Args:
        call: the call.
        order: the node's position in the forward.
        blank: keys of the storages that nothing has written yet.
        value_of: the present value of a tensor that the call reads. It may raise `Unrecordable`.
    """
    info = call.info
    if (call.reason and not info.collective) or info.uninitialized or call.writes_others:
        return None
    if blank and any(private.storage_key(t) in blank for t in call.inputs if id(t) not in call.unread):
        return None
    device = next((t.device for t in (*call.inputs, *call.others)), None)
    node = PythonNode(call.func, order, device or torch.device(call.kwargs.get("device") or "cpu"))
    node.statistics = tuple(call.statistics)
    try:
        node.args = [_argument(item, call, node, value_of) for item in call.args]
        node.kwargs = {name: _argument(item, call, node, value_of) for name, item in call.kwargs.items()}
    except Unrecordable:
        return None
    return node


def _argument(item: Any, call: Call, node: Node, value_of: Callable[[torch.Tensor], LiveValue]) -> Any:
    """An argument of a call with `Ref` in place of tensors. Adds to the node what the call reads and
    overwrites.
    """
    if isinstance(item, (tuple, list)):
        return [_argument(part, call, node, value_of) for part in item]
    if not isinstance(item, torch.Tensor):
        return item
    if call.others and is_sparse(item):
        return SparseInput(item)
    overwrites = id(item) in call.redone
    if overwrites and id(item) in call.unread:
        value = LiveValue(None, item.untyped_storage().nbytes())
    else:
        value = value_of(item)
        node.inputs.append(value)
        if overwrites and value.held is not None:
            raise Unrecordable
    ref = Ref(value, item)
    if overwrites:
        node.written.append(Overwrite(ref, id(item) not in call.unread))
    return ref


def link(
    node: Node,
    call: Call,
    fresh: Sequence[tuple[int, torch.Tensor]],
    register: Callable[[Node, torch.Tensor, int], LiveValue],
    stays: Sequence[bool] = (),
) -> None:
    """Note what a call that has run wrote as recomputable by its node, which is complete then.

    Args:
        node, call: the recorded call.
        fresh: tensors on storages that it made, one for each, with their positions among the results.
        register: makes the value of a tensor of whose storage so many bytes were written, and keeps it.
        stays: whether each fresh tensor stays, then each overwritten one; by default none does.
    """
    stays, loose = stays or (False,) * (len(fresh) + len(node.written)), call.loose
    for (position, tensor), stay in zip(fresh, stays, strict=False):
        if not stay:
            value = register(node, tensor, 0 if position in loose else reach(tensor))
            node.outputs.append((position, weakref.ref(value)))
    for old, tensor, stay in zip(node.written, call.written, stays[len(fresh) :], strict=False):
        if not stay:
            value = register(node, tensor, max(old.ref.value.extent, reach(tensor)))
            old.new = weakref.ref(value)
    node.complete()


def written_unseen(
    value: LiveValue,
    tensor: torch.Tensor,
    others: Iterable[LiveValue],
    note: Callable[[str, str], object],
) -> LiveValue:
    """The value of a tensor that code which the dispatcher does not see has overwritten: it is held.
    Operations that read the old value cannot be replayed, since no copy of it exists.

    Args:
        value: the old value; ``tensor`` shows the new one.
        others: all values that can be replayed.
        note: called with the name of each operation that cannot be replayed, and the reason.
    """
    name = str(value.node.func) if value.node is not None else "an operation"
    note(name, "its result was written by code that the dispatcher does not see")
    for other in others:
        if isinstance(other.node, Node) and any(read is value for read in other.node.inputs):
            note(
                str(other.node.func),
                "what it had read was overwritten by code that the dispatcher does not see",
            )
    new = LiveValue.hold(tensor)
    value.node, value.digest = None, None
    value.held, value.version = new.held, (-1 if value.readers else new.version)
    return new


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
