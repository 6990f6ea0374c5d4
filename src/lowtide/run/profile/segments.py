"""The tape of a profiled step: what its forward ran, so that backward can bring back what autograd saves.

Every operation that can be replayed is recorded, and nothing that it wrote is held. What replays start from
is held as a copy (copy on write), so that the step's own tensors end where the program lets go of them:
inputs of blocks, and what crosses where few bytes do.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from lowtide import private, writes
from lowtide.meter.resident import plain_parts
from lowtide.ops import Call, covers_storage, enter, is_sparse
from lowtide.run.digest import digest, on_a_copy
from lowtide.run.record.handles import Evicted, Kept
from lowtide.run.record.tape import LiveValue, Node, Ref, Writer, link, node_of, written_unseen
from lowtide.run.record.verify import copy_of, why_not_reproduced
from lowtide.trace.traced import TracedStorage
from lowtide.trace.tracer import Tracer

_ENOUGH, _MUCH = 2, 4
"""Evicted bytes of a segment, as a multiple of those that may cross its end, from which it may end; and from
which it ends.
"""

_NEAR = 1.05
"""Bytes that may cross count as few up to this multiple of the fewest that were seen since the segment may
end.
"""


class Segment:
    """Values that can be recomputed from where few bytes crossed, while the program holds their storages.

    Attributes:
        storages: their storages; those that have no value any more included.
        nbytes: of the values.
    """

    def __init__(self) -> None:
        self.storages: list[TracedStorage] = []
        self.nbytes = 0

    def add(self, storage: TracedStorage, value: LiveValue) -> None:
        """The storage has this value now."""
        self.forget(storage)
        storage.live = value
        self.nbytes += value.nbytes
        self.storages.append(storage)

    def forget(self, storage: TracedStorage) -> None:
        """The storage has ended, or nothing recomputes what it shows now."""
        if storage.live is not None:
            self.nbytes -= storage.live.nbytes
            storage.live = None

    def end(self) -> None:
        """Forget all."""
        for storage in self.storages:
            self.forget(storage)
        self.storages.clear()


class SegmentedTape:
    """Records the forward of a profiled step.

    Args:
        tracer: knows the step's storages.
        segment: forgets those that end.
        verify: run each operation twice and compare, and compare what is read with what was written.

    Attributes:
        findings: names of the operations that did not reproduce, with the reason. What they wrote is held.
    """

    def __init__(self, tracer: Tracer, segment: Segment, verify: bool) -> None:
        self.verify = verify
        self.findings: dict[str, str] = {}
        self._tracer = tracer
        self._order = 0
        self._sparse: dict[int, Any] = {}  # storages of the step's own sparse tensors
        self._blank: dict[int, object] = {}  # memory that nothing has written yet
        self._segment = segment
        self._evicted: set[LiveValue] = set()  # of this segment
        self._evicted_bytes = self._held_bytes = 0
        self._fewest = 0  # bytes that the program held of this segment, since the segment may end; 0 before
        self._starts = writes.Watch()

    # ---- operations ------------------------------------------------------------------------------

    def node_of(self, call: Call) -> Node | None:
        """The node of a call about to be made, or ``None`` where it cannot be replayed."""
        if any(map(self._gathers, call.written)) or not all(map(self.stood_before, call.others)):
            return None
        node = node_of(call, self._order, self._blank, self._value_of)
        self._order += node is not None
        return node

    def copies_of(self, call: Call) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Each tensor that a call overwrites, with a copy: a second run starts from it."""
        return [(tensor, copy_of(tensor)) for tensor in call.overwritten] if self.verify else []

    def before_overwriting(self, call: Call) -> None:
        """A call is about to overwrite tensors: copy those that replays start from. Those that the step made
        are held as copies already.
        """
        for tensor in call.overwritten:
            storage = self._tracer.storage_of(tensor)
            if storage is None or storage.phase or storage.gathered:
                continue
            value = _held(storage)
            if value is not None and value.held is not None and value.readers > 0:
                value.held = on_a_copy(value.held)
                value.version = private.version(value.held)

    def forget_overwritten(self, call: Call) -> None:
        """A call has overwritten tensors: forget their values."""
        for tensor in call.overwritten:
            if self._blank and (not call.info.fills or covers_storage(tensor)):
                self._blank.pop(private.storage_key(tensor), None)
            storage = self._tracer.storage_of(tensor)
            if storage is not None and not storage.gathered:
                self._segment.forget(storage)
                storage.held = None

    def note_uninitialized(self, tensor: torch.Tensor) -> None:
        """Nothing has written the tensor's memory yet."""
        enter(self._blank, tensor.untyped_storage(), None)

    def reproduces(
        self,
        node: Node,
        call: Call,
        flat: list[Any],
        before: list[tuple[torch.Tensor, torch.Tensor]],
        around: Callable[[Callable[[], Any]], Any],
    ) -> bool:
        """Whether a second run of an operation gives the bytes of the first.

        Args:
            node, call, flat, before, around: as of `lowtide.run.record.verify.why_not_reproduced`.
        """
        reason = why_not_reproduced(node, call, flat, before, around)
        if reason:
            self.findings.setdefault(call.info.name, reason)
        return not reason

    def link(self, node: Node, call: Call, fresh: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Note what a recorded call wrote as recomputable by its node (`lowtide.run.record.tape.link`); the
        call's storages are registered.
        """
        link(node, call, fresh, self._register)

    def _register(self, node: Writer, tensor: torch.Tensor, extent: int) -> LiveValue:
        value = LiveValue.written(node, tensor, extent, self.verify)
        self._segment.add(self._tracer.register(tensor), value)
        return value

    def stood_before(self, tensor: torch.Tensor) -> bool:
        """Whether a sparse tensor stood before the step: what reads it can run again."""
        return is_sparse(tensor) and not any(
            private.storage_key(part) in self._sparse or self._made(part) for part in plain_parts(tensor)
        )

    def note_sparse(self, parts: Sequence[torch.Tensor]) -> None:
        """The step made a sparse tensor of these parts."""
        for part in parts:
            enter(self._sparse, part.untyped_storage(), None)

    def note_gathered(self, storage: TracedStorage) -> None:
        """A sharded weight was gathered into a storage: no replay brings it back."""
        self._segment.forget(storage)
        self._blank.pop(storage.key, None)

    def _gathers(self, tensor: torch.Tensor) -> bool:
        """Whether a write to the tensor gathers a sharded weight: it writes the same bytes each time."""
        storage = self._tracer.storage_of(tensor)
        return storage is not None and storage.gathered

    def _made(self, tensor: torch.Tensor) -> bool:
        storage = self._tracer.storage_of(tensor)
        return storage is not None and bool(storage.phase)

    # ---- values ----------------------------------------------------------------------------------

    def _value_of(self, tensor: torch.Tensor) -> LiveValue:
        """The present value of a tensor; one that is not recomputable is held from here on.

        Tensors that the step made are held as copies, so that the originals are freed when the program
        releases them. Not those of a backward inside the forward: every plan keeps them, and autograd adds in
        place to what no saved tensor holds.
        """
        storage = self._tracer.storage_of(tensor)
        if storage is None:  # backward was handed it
            return LiveValue.hold(tensor)
        value = storage.live
        if value is not None:
            if self.verify and value.digest is not None and digest(tensor, value.extent) != value.digest:
                value = self._written_unseen(storage, tensor)
            return value
        copies = storage.phase == "forward"
        value = _held(storage) if not copies else storage.held() if storage.held is not None else None
        if value is None:
            if copies:
                value = LiveValue.hold(on_a_copy(tensor, lazy=not storage.resized))
                self._held_bytes += value.nbytes
            else:
                value = LiveValue.hold(tensor)
            storage.held = weakref.ref(value)
        return value

    def _written_unseen(self, storage: TracedStorage, tensor: torch.Tensor) -> LiveValue:
        """Code that the dispatcher does not see has overwritten ``tensor``: hold its present value."""
        replayable = [other.live for other in self._segment.storages if other.live is not None]
        new = written_unseen(storage.live, tensor, replayable, self.findings.setdefault)
        self._segment.forget(storage)
        storage.held = weakref.ref(new)
        return new

    # ---- segments ---------------------------------------------------------------------------------

    def boundary(self) -> None:
        """Begin a segment: what was made before is held from here on where replays need it. What is held
        already stays known: it is a copy.
        """
        self._segment.end()
        self._evicted.clear()
        self._evicted_bytes = self._fewest = 0

    def at_scope(self) -> None:
        """A checkpointing scope begins or has ended, where the program itself keeps what crosses: a segment
        begins there if that is small beside what is evicted.
        """
        if self._evicted_bytes > 2 * self._segment.nbytes:
            self.boundary()

    def close(self) -> None:
        """The forward is over: autograd's graph holds what saved tensors need, and nobody else anything.

        From here on `lowtide.writes` watches: tensors that replays start from are copied before they are
        overwritten, and an evicted value whose storage lives on is read from the storage once that was.
        """
        living = [s for s in self._tracer.living() if s.held is not None and not s.gathered]
        self._starts.add({s.key: s.held for s in living if s.held is not None})
        alive: dict[int, weakref.ref[LiveValue]] = {}
        for storage in self._segment.storages:
            value = storage.live
            if value is not None and value.evicted and value.readers:
                value.shown, alive[storage.key] = storage, weakref.ref(value)
        self._starts.add(alive)
        self.boundary()
        self._blank.clear()
        del self._starts  # evicted tensors keep it

    # ---- saved tensors ---------------------------------------------------------------------------

    def held_or_evicted(self, tensor: torch.Tensor, droppable: bool) -> Kept | Evicted:
        """What autograd holds in place of a saved tensor, which a plan may evict if it is ``droppable``."""
        storage = self._tracer.storage_of(tensor)
        value = None if storage is None else storage.live
        # what is blank is written after it was saved, as rrelu does with its noise: there is nothing to copy
        if (
            storage is None
            or (self._blank and storage.key in self._blank)
            or storage.resized
            or (value is None and not (droppable and storage.phase))
        ):
            return Kept(tensor)
        if value is None:
            value = self._value_of(tensor)
        elif self.verify and value.digest is not None and digest(tensor, value.extent) != value.digest:
            self._written_unseen(storage, tensor)
            return Kept(tensor)
        if value.node is not None and value not in self._evicted:
            self._divide(value)
        value.evicted = True
        return Evicted(Ref(value, tensor), tensor, None, starts=self._starts)

    def _divide(self, evicted: LiveValue) -> None:
        """Begin a segment where few bytes cross: those that the program still holds of this segment.

        The segment may end once more bytes were evicted in it than are held in all, and `_ENOUGH` times those
        that may cross. It ends at a moment when about the fewest bytes since then cross, or when `_MUCH`
        times as many were evicted. In a loop that is between two rounds, and not in the middle of one.
        """
        self._evicted.add(evicted)
        self._evicted_bytes += evicted.nbytes
        crossing = self._segment.nbytes
        if self._evicted_bytes <= max(self._held_bytes, _ENOUGH * crossing):
            return
        fewest, self._fewest = self._fewest, min(self._fewest or crossing, crossing)
        if crossing <= _NEAR * fewest or self._evicted_bytes > max(self._held_bytes, _MUCH * crossing):
            self.boundary()


def _held(storage: TracedStorage) -> LiveValue | None:
    """The value that is held in the storage's place, if the storage was not written since."""
    value = storage.held() if storage.held is not None else None
    return value if value is not None and value.unchanged else None


def blocks_in(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The outermost members of the model's lists of modules, or its children, without single layers."""
    return _no_layers(_members(model)) or _no_layers(model.children())


def _no_layers(modules: Iterable[torch.nn.Module]) -> list[torch.nn.Module]:
    """The modules that have children and take hooks: TorchScript's take none."""
    return [
        module
        for module in modules
        if next(module.children(), None) is not None and not isinstance(module, torch.jit.ScriptModule)
    ]


def _members(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    children = list(module.children())
    if len(children) > 1 and isinstance(module, (torch.nn.ModuleList, torch.nn.Sequential)):
        yield from children
    else:
        for child in children:
            yield from _members(child)
