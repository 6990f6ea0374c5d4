"""The tape of a profiled step: what its forward ran, so that backward can bring back what autograd saves.

Every operation that can be replayed is recorded, and nothing that it wrote is held. What replays start from
is held as a copy (copy on write), so that the step's own tensors end where user code lets go of them:
inputs of blocks, and what crosses where few bytes do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from lowtide import private
from lowtide.meter.resident import plain_parts
from lowtide.ops import enter
from lowtide.run.record.handles import Evicted, Kept
from lowtide.run.record.tape import Tape
from lowtide.run.record.values import LiveValue, Ref, Writer
from lowtide.run.tensor_bytes import on_a_copy
from lowtide.trace.traced import TracedStorage
from lowtide.trace.tracer import Tracer
from lowtide.writes import WriteWatch

_ENOUGH, _MUCH = 2, 4
"""A segment may end once it has evicted this many times the bytes that would cross its end (the first), and
ends once it has evicted that many times (the second).
"""

_NEAR = 1.05
"""Between the two it ends where at most this many times the bytes cross that did where fewest have so far."""


class SegmentedTape(Tape):
    """Records the forwards of a profiled step, in segments: what it has recorded in one is forgotten when the
    next begins, and what replays read across is held as copies.

    Args:
        tracer: knows the step's storages. Whoever made it calls `forget_storage` for each that ends.
        verify: as of `Profiler`; and compare what is read with what was written.
    """

    def __init__(self, tracer: Tracer, verify: bool) -> None:
        super().__init__(verify)
        self._tracer = tracer
        self._sparse: dict[int, Any] = {}  # storages of the step's own sparse tensors
        self._evicted: set[LiveValue] = set()  # of this segment
        self._evicted_bytes = self._held_bytes = 0
        self._fewest = 0  # bytes that user code held of this segment, since the segment may end; 0 before

    # ---- storages --------------------------------------------------------------------------------

    def forget_storage(self, storage: TracedStorage) -> None:
        """A storage has ended."""
        self.replayable.pop(storage.key, None)
        self.sources.pop(storage.key, None)

    def register(self, node: Writer, tensor: torch.Tensor, extent: int) -> LiveValue:
        """The value of ``tensor``, replayable by ``node`` as long as its storage lives; the step's tracer
        knows that storage from now on.
        """
        value = LiveValue.written(node, tensor, extent, self.verify)
        storage = self._tracer.register(tensor)
        self.replayable.pop(storage.key, None)  # so that the newest values come last
        self.replayable[storage.key] = value, storage
        return value

    def hold(self, tensor: torch.Tensor) -> LiveValue:
        """A value that the tensor shows, held.

        Tensors that the step made are held as copies (copy on write), so that the originals are freed when
        user code releases them. Not those of a backward inside the forward: every plan keeps them, and
        autograd adds in place to what no saved tensor holds.
        """
        storage = self._tracer.storage_of(tensor)
        if storage is None or storage.phase != "forward":  # unknown: backward was handed the tensor
            return super().hold(tensor)
        value = LiveValue.hold(on_a_copy(tensor, lazy=not storage.resized))
        self._held_bytes += value.nbytes
        return value

    def is_constant(self, sparse: torch.Tensor) -> bool:
        """Whether a sparse tensor was there before the step."""
        return super().is_constant(sparse) and not any(
            private.storage_key(part) in self._sparse or self._is_made(part) for part in plain_parts(sparse)
        )

    def _is_made(self, tensor: torch.Tensor) -> bool:
        """Whether the step made the tensor's storage."""
        storage = self._tracer.storage_of(tensor)
        return storage is not None and bool(storage.phase)

    def note_sparse(self, parts: Sequence[torch.Tensor]) -> None:
        """The step made a sparse tensor of these parts."""
        for part in parts:
            enter(self._sparse, part.untyped_storage(), None)

    def note_gathered(self, storage: TracedStorage) -> None:
        """A sharded weight was gathered into a storage: no replay brings it back."""
        self.gathered.add(storage.key)
        self.replayable.pop(storage.key, None)
        self.blank.pop(storage.key, None)

    # ---- segments ---------------------------------------------------------------------------------

    def boundary(self) -> None:
        """Begin a segment: what was made before is held from here on where replays read it. What is held
        already stays known: it is a copy.
        """
        self.replayable.clear()
        self._evicted.clear()
        self._evicted_bytes = self._fewest = 0

    def crossing_bytes(self) -> int:
        """Bytes of this segment that user code holds now: so many cross if the segment ends."""
        return sum(value.nbytes for value, _ in self.replayable.values())

    def at_scope(self) -> None:
        """A checkpointing scope begins or has ended, where user code itself keeps what crosses: a segment
        begins there if that is small beside what is evicted.
        """
        if self._evicted_bytes > 2 * self.crossing_bytes():
            self.boundary()

    def close(self) -> WriteWatch:
        """A forward is over; see `Tape.close`. The step may have more."""
        watch = super().close()
        self.boundary()
        self._held_bytes = 0
        return watch

    # ---- saved tensors ---------------------------------------------------------------------------

    def held_or_evicted(self, tensor: torch.Tensor, droppable: bool) -> Kept | Evicted:
        """What autograd holds in place of a saved tensor, which a plan may evict if it is ``droppable``."""
        storage = self._tracer.storage_of(tensor)
        value, _ = self.replayable.get(private.storage_key(tensor), (None, None))
        # what is blank is written after it was saved, as rrelu does with its noise: there is nothing to copy
        if (
            storage is None
            or storage.key in self.blank
            or storage.resized
            or (value is None and not (droppable and storage.phase))
        ):
            return Kept(tensor)
        if value is None:
            value = self.value_of(tensor)
        elif not self.is_as_written(value, tensor):
            self.written_unseen(value, tensor)
            return Kept(tensor)
        if value.node is not None and value not in self._evicted:
            self._divide(value)
        value.evicted = True
        return Evicted(Ref(value, tensor), tensor, None, watch=self.watch)

    def _divide(self, evicted: LiveValue) -> None:
        """Begin a segment where few bytes cross: those that user code still holds of this segment.

        The segment may end once more bytes were evicted in it than are held in all, and `_ENOUGH` times those
        that may cross. It ends at a moment when about the fewest bytes since then cross, or when `_MUCH`
        times as many were evicted. In a loop that is between two rounds, and not in the middle of one.
        """
        self._evicted.add(evicted)
        self._evicted_bytes += evicted.nbytes
        crossing = self.crossing_bytes()
        if self._evicted_bytes <= max(self._held_bytes, _ENOUGH * crossing):
            return
        fewest, self._fewest = self._fewest, min(self._fewest or crossing, crossing)
        if crossing <= _NEAR * fewest or self._evicted_bytes > max(self._held_bytes, _MUCH * crossing):
            self.boundary()


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
