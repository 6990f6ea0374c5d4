"""The tape of one forward: records its operations, and finds the values of its storages.

A storage shows one value at a time. It is replayable (a recorded operation wrote it, or it was moved), or a
source (a replay reads it, and it is held until then), or the tape has not met it. The tape's dictionaries end
with the forward; what was recorded is held by autograd's graph alone (`values.py`).

`Recorder` and the C++ recorder write on one `Tape`; a profiled step on a `SegmentedTape`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from lowtide import private, writes
from lowtide.ops import Call, OpInfo, covers_storage, enter, is_sparse
from lowtide.run.record.replay import copy_of, why_not_reproduced
from lowtide.run.record.values import (
    Fetch,
    LiveValue,
    Node,
    Overwrite,
    PythonNode,
    Ref,
    SparseInput,
    Unrecordable,
    Writer,
)
from lowtide.run.tensor_bytes import digest, reach


class Tape:
    """Records the operations of one forward.

    Args:
        verify: whether what an operation reads is compared with what was written, by digests.
        gathered: keys of the storages that sharded weights are gathered into, each time the same bytes.

    Attributes:
        replayable: the replayable value that a storage shows, and a weak reference to that storage; by its
            key (`lowtide.private.storage_key`).
        sources: a weak reference to the held value that a storage shows, by its key.
        blank: storages that nothing has written yet, by their keys.
        order: how many nodes were recorded: the next one's place in the forward.
        findings: names of the operations that did not reproduce, with the reason. What they wrote is held.
        watch: warns the values of this forward before their storages change; evicted tensors keep it.

    The C++ recorder reads and writes the first four, which are never replaced by others.
    """

    __slots__ = ("blank", "findings", "gathered", "order", "replayable", "sources", "verify", "watch")

    def __init__(self, verify: bool = False, gathered: Iterable[int] = ()) -> None:
        self.verify = verify
        self.gathered = set(gathered)
        self.replayable: dict[int, tuple[LiveValue, Any]] = {}
        self.sources: dict[int, weakref.ref[LiveValue]] = {}
        self.blank: dict[int, object] = {}
        self.order = 0
        self.findings: dict[str, str] = {}
        self.watch = writes.WriteWatch()

    # ---- operations ------------------------------------------------------------------------------

    def refills(self, tensor: torch.Tensor) -> bool:
        """Whether a write to the tensor gathers a sharded weight: it writes the bytes of before."""
        return bool(self.gathered) and private.storage_key(tensor) in self.gathered

    def overwritten_by(self, call: Call) -> list[torch.Tensor]:
        """The tensors that a call overwrites with other bytes."""
        return [tensor for tensor in call.overwritten if not self.refills(tensor)]

    def is_constant(self, sparse: torch.Tensor) -> bool:
        """Whether a replay may read a tensor that is not strided by reference: a sparse input or buffer."""
        return is_sparse(sparse)

    def node_of(self, call: Call, reads_blank: bool = False) -> Node | None:
        """The node of a call about to be made, or ``None`` where it cannot be replayed.

        Args:
            call: the call.
            reads_blank: whether the call may read memory that was filled part by part. It may where a plan
                is followed: in the profiled step nothing overwrote what the call read.
        """
        info = call.info
        if (call.reason and not info.collective) or info.uninitialized or call.writes_others:
            return None
        if any(map(self.refills, call.written)) or not all(map(self.is_constant, call.others)):
            return None
        read = (tensor for tensor in call.inputs if id(tensor) not in call.unread)
        if self.blank and not reads_blank and any(private.storage_key(t) in self.blank for t in read):
            return None
        device = next((t.device for t in (*call.inputs, *call.others)), None)
        node = PythonNode(call.func, self.order, device or torch.device(call.kwargs.get("device") or "cpu"))
        node.statistics = tuple(call.statistics)
        try:
            node.args = [self._argument(item, call, node) for item in call.args]
            node.kwargs = {name: self._argument(item, call, node) for name, item in call.kwargs.items()}
        except Unrecordable:
            return None
        self.order += 1
        return node

    def _argument(self, item: Any, call: Call, node: Node) -> Any:
        """An argument of a call with `Ref` in place of tensors. Adds to the node what the call reads and
        overwrites.
        """
        if isinstance(item, (tuple, list)):
            return [self._argument(part, call, node) for part in item]
        if not isinstance(item, torch.Tensor):
            return item
        if call.others and is_sparse(item):
            return SparseInput(item)
        overwrites = id(item) in call.redone
        if overwrites and id(item) in call.unread:
            value = LiveValue(None, item.untyped_storage().nbytes())
        else:
            value = self.value_of(item)
            node.inputs.append(value)
            if overwrites and value.held is not None:
                raise Unrecordable
        ref = Ref(value, item)
        if overwrites:
            node.written.append(Overwrite(ref, id(item) not in call.unread))
        return ref

    def copies_of(self, overwritten: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Each tensor that a call is about to overwrite, with a copy: a second run starts from it. None where
        nothing is verified.
        """
        return [(tensor, copy_of(tensor)) for tensor in overwritten] if self.verify else []

    def before_overwriting(self, overwritten: Sequence[torch.Tensor]) -> None:
        """A call is about to overwrite tensors: give recorded readers of a held one a copy."""
        for tensor in overwritten:
            key = private.storage_key(tensor)
            value = self.source_of(key)
            if value is not None and value.reads(key):  # else it holds a copy already
                value.copy_held()

    def forget(self, overwritten: Sequence[torch.Tensor], info: OpInfo) -> None:
        """A call has overwritten tensors: their storages show other values now."""
        for tensor in overwritten:
            key = private.storage_key(tensor)
            if not info.fills or covers_storage(tensor):
                self.blank.pop(key, None)
            if (entry := self.replayable.pop(key, None)) is not None:
                entry[0].drop_shared(key)
            self.sources.pop(key, None)

    def note_uninitialized(self, tensor: torch.Tensor) -> None:
        """Nothing has written the tensor's memory yet."""
        enter(self.blank, tensor.untyped_storage(), None)

    def reproduces(
        self,
        node: Node,
        call: Call,
        flat: list[Any],
        before: list[tuple[torch.Tensor, torch.Tensor]],
        around: Callable[[Callable[[], Any]], Any] = lambda run: run(),
    ) -> bool:
        """Whether a second run of an operation gives the bytes of the first.

        Args:
            node, call, flat, before, around: as of `lowtide.run.record.replay.why_not_reproduced`.
        """
        reason = why_not_reproduced(node, call, flat, before, around)
        if reason:
            self.note_finding(call.info.name, reason)
        return not reason

    def note_finding(self, name: str, reason: str) -> None:
        """The operation with that name does not reproduce."""
        self.findings.setdefault(name, reason)

    def link(
        self,
        node: Node,
        call: Call,
        fresh: Sequence[tuple[int, torch.Tensor]],
        stays: Sequence[bool] = (),
    ) -> None:
        """Note what a call that has run wrote as replayable by its node, which is complete then.

        Args:
            node, call: the recorded call.
            fresh: tensors on storages that it made, one for each, with their positions among the results.
            stays: whether each fresh tensor stays, then each overwritten one; by default none does.
        """
        stays, loose = stays or (False,) * (len(fresh) + len(node.written)), call.loose
        for (position, tensor), stay in zip(fresh, stays, strict=False):
            if not stay:
                value = self.register(node, tensor, 0 if position in loose else reach(tensor))
                node.outputs.append((position, weakref.ref(value)))
        for old, tensor, stay in zip(node.written, call.written, stays[len(fresh) :], strict=False):
            if not stay:
                value = self.register(node, tensor, max(old.ref.value.extent, reach(tensor)))
                old.new = weakref.ref(value)
        node.complete()

    # ---- values ----------------------------------------------------------------------------------

    def register(self, node: Writer, tensor: torch.Tensor, extent: int) -> LiveValue:
        """The value of ``tensor``, replayable by ``node`` as long as its storage lives; its first ``extent``
        bytes were written.
        """
        value = LiveValue.written(node, tensor, extent, self.verify)
        enter(self.replayable, tensor.untyped_storage(), value)
        return value

    def value_of(self, tensor: torch.Tensor) -> LiveValue:
        """The value that a tensor shows. One that is not replayable is held from now on.

        Raises:
            Unrecordable: it was moved by a codec that loses too much to replay from.
        """
        key = private.storage_key(tensor)
        if (entry := self.replayable.get(key)) is not None:
            value = entry[0]
            if not self.is_as_written(value, tensor):
                return self.written_unseen(value, tensor)
            if isinstance(value.node, Fetch) and not value.node.stored.replayable_from:
                raise Unrecordable
            return value
        value = self.source_of(key)
        if value is None:
            value = self.hold(tensor)
            self.sources[key] = weakref.ref(value)
        return value

    def hold(self, tensor: torch.Tensor) -> LiveValue:
        """A value that the tensor shows, held."""
        return LiveValue.hold(tensor)

    def source_of(self, key: int) -> LiveValue | None:
        """The held value of a storage, if that was neither written nor emptied since."""
        reference = self.sources.get(key)
        value = reference() if reference is not None else None
        return value if value is not None and value.is_unchanged and value.emptied is None else None

    def is_as_written(self, value: LiveValue, tensor: torch.Tensor) -> bool:
        """Whether a tensor shows the bytes of its replayable value. It is not looked into where nothing is
        verified.
        """
        return not self.verify or value.digest is None or digest(tensor, value.extent) == value.digest

    def written_unseen(self, value: LiveValue, tensor: torch.Tensor) -> LiveValue:
        """The value of a tensor that code which the dispatcher does not see has overwritten: it is held.
        Operations that read the old value cannot be replayed, since no copy of it exists.

        Args:
            value: the old value; ``tensor`` shows the new one.
        """
        name = str(value.node.func) if value.node is not None else "an operation"
        self.note_finding(name, "its result was written by code that the dispatcher does not see")
        for other, _ in self.replayable.values():
            if isinstance(other.node, Node) and any(read is value for read in other.node.inputs):
                self.note_finding(
                    str(other.node.func),
                    "what it had read was overwritten by code that the dispatcher does not see",
                )
        new = LiveValue.hold(tensor)
        value.node, value.digest = None, None
        value.held, value.version = new.held, (-1 if value.readers else new.version)
        key = private.storage_key(tensor)
        self.replayable.pop(key, None)
        self.sources[key] = weakref.ref(new)
        return new

    def before_resize(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """A storage is about to be resized within the forward."""
        key = private.storage_address(storage)
        if key in self.gathered:
            return
        if (entry := self.replayable.get(key)) is not None:
            entry[0].drop_shared(key)
        reference = self.sources.get(key)
        value = reference() if reference is not None else None
        if value is not None and nbytes < storage.nbytes():
            value.before_emptying()

    # ---- segments --------------------------------------------------------------------------------

    def boundary(self) -> None:
        """Begin a segment: values of earlier ones are sources, and are held where replays read them."""
        self._forget()

    def _forget(self) -> None:
        """Forget all values, the same for every tape."""
        self._watch()
        self.replayable.clear()
        self.sources.clear()

    def _watch(self) -> None:
        """Have `lowtide.writes` watch the storages of values that are about to be forgotten.

        A held value that replays start from is copied before its storage is overwritten. An evicted value
        whose storage lives on is read from that storage once that was overwritten.
        """
        self.watch.add({key: one for key, one in self.sources.items() if key not in self.gathered})
        alive: dict[int, weakref.ref[LiveValue]] = {}
        for key, (value, storage) in self.replayable.items():
            if value.evicted and value.readers:
                value.shown, alive[key] = storage, weakref.ref(value)
        self.watch.add(alive)

    def close(self) -> writes.WriteWatch:
        """The forward is over: forget all values; autograd's graph holds those that saved tensors need.

        Returns:
            The watch, which evicted tensors keep.
        """
        self._forget()
        self.blank.clear()
        watch, self.watch = self.watch, writes.WriteWatch()
        return watch
