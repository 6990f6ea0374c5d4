"""Carry out a plan's moves: copies out while forward goes on, copies in ahead of backward's need.

The rules are those of `lowtide.plan.simulate.transfers`. A moved value comes back like a replayed one, by an
operation without inputs (`lowtide.run.record.tape.Fetch`). That holds what is stored (`StoredTensor`), and is
deleted when autograd has released the last saved tensor that depends on it.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from functools import lru_cache

import torch

from lowtide import private
from lowtide.interception import unseen
from lowtide.plan.data import Compress, Move, Plan, Shard, stages
from lowtide.plan.layout import find
from lowtide.run.digest import digest, words_of
from lowtide.store.codec import Codec, CodecError
from lowtide.store.lanes import Transfer
from lowtide.store.shard import Gather, Replicas
from lowtide.store.slab import Place
from lowtide.store.stores import Stores
from lowtide.store.tier import Slot, Tier


class StoredTensor:
    """One value in a store: whole, encoded or as this rank's part.

    Args:
        move: the plan's move of the value.
        number: its place among the plan's moves.
        tensor: a tensor on the value.
        stores: the stores it goes to.
        verify: check that what is sharded is replicated.

    Attributes:
        move: as given.
        exact: whether every bit comes back.
        replayable_from: whether operations may be replayed from what comes back.
        note: why it is kept unchanged after all, else empty.
    """

    __slots__ = (
        "__weakref__", "_arriving", "_codec", "_device", "_dtype", "_elements", "_gathering", "_group",
        "_kept", "_parts", "_places", "_reads", "_slab", "_slot", "_stores", "_writes",
        "exact", "move", "note", "replayable_from",
    )  # fmt: skip

    def __init__(self, move: Move, number: int, tensor: torch.Tensor, stores: Stores, verify: bool) -> None:
        self.move, self.note = move, ""
        self.exact = self.replayable_from = True
        self._stores, self._device = stores, tensor.device
        # for the first fetch alone; later ones have memory of their own
        self._slab = stores.slab
        nbytes = tensor.untyped_storage().nbytes()
        self._dtype = torch.uint8 if nbytes % tensor.element_size() else tensor.dtype
        self._elements = nbytes // self._dtype.itemsize
        self._kept: torch.Tensor | None = None
        self._codec: Codec | None = None
        self._group: Replicas | None = None
        first, then = stages(move.decision)
        flat = words_of(tensor, self._dtype, nbytes)
        self._parts: tuple[torch.Tensor, ...] = (flat,)
        if isinstance(first, Shard):
            self._group = stores.group(first.group, first.size)
            if verify:
                what = f"a saved value of {nbytes:,} bytes (shape {tuple(tensor.shape)})"
                self._group.check(digest(tensor, nbytes), what)
            self._parts = (self._group.cut(flat),)
        elif isinstance(first, Compress):
            self._encode(stores.codec(first.codec), flat)
        self._slot: Slot | None = None
        self._gathering: _Destination | None = None
        self._arriving: _Destination | None = None
        self._places: list[tuple[int, int, torch.dtype]] = []
        """(where in the slot, elements, dtype) of each part"""
        self._writes: list[Transfer] = []
        self._reads: list[Transfer] = []
        if then is not None and self._kept is None:
            self._write(stores.tier(then.tier, then.path, self._device), number)

    def _encode(self, codec: Codec, flat: torch.Tensor) -> None:
        try:
            self._parts = codec.encode(flat)
        except CodecError as error:
            self.note, self._kept = str(error), flat
        else:
            self._codec, self.exact, self.replayable_from = codec, codec.bitwise, codec.replayable_from

    def _write(self, tier: Tier, number: int) -> None:
        """Start copying out."""
        starts, total = _packed([part.nbytes for part in self._parts], tier.align)
        self._slot = tier.take(total, number)
        for at, part in zip(starts, self._parts, strict=True):
            self._places.append((at, part.numel(), part.dtype))
            self._writes.append(tier.write(part.view(torch.uint8), self._slot, at))

    @property
    def waiting_bytes(self) -> int:
        """Bytes that are held until the copy out has finished."""
        return self.move.encoded_bytes if self._writes else 0

    @property
    def can_begin(self) -> bool:
        """Whether it takes a read or a gather, which can begin ahead of need."""
        return self._slot is not None or self._group is not None

    def settle(self) -> None:
        """Order the device behind the copy out, and release what was copied."""
        writes, self._writes = self._writes, []
        for transfer in writes:
            transfer.join()
        if self._slot is not None:
            self._parts = ()

    def begin(self) -> None:
        """Start fetching, if it is not under way."""
        if self._slot is None:
            if self._group is not None and self._gathering is None:
                self._gathering = self._gather(self._group, self._parts[0])
            return
        if self._reads:
            return
        encoded = self._group is not None or self._codec is not None
        sizes = [elements * dtype.itemsize for _, elements, dtype in self._places]
        self._arriving = destination = self._destination(
            sizes, self.move.arrival if encoded else self.move.place
        )
        for (at, _, _), target in zip(self._places, destination.targets, strict=True):
            self._reads.append(self._slot.tier.read(self._slot, target, at))
        destination.pending(self._reads)

    def _destination(self, sizes: list[int], at: int) -> _Destination:
        """Memory for parts of these sizes: at their place in the slab if that is free, or of their own."""
        starts, total = _packed(sizes, _PART_ALIGN)
        taken = self._slab.take(at, total) if self._slab is not None and at >= 0 else None
        if taken is None:
            self._stores.unplaced += 1
        return _Destination(starts, sizes, self._device, taken)

    def _gather(self, group: Replicas, part: torch.Tensor) -> _Destination:
        destination = self._destination([part.nbytes * group.size], self.move.place)
        destination.pending([group.gather(part, destination.targets[0])])
        return destination

    def fetch(self) -> torch.Tensor:
        """The value as a flat tensor of its own."""
        if self._kept is not None:
            return self._kept
        try:
            return self._fetch()
        finally:
            self._slab = None

    def _fetch(self) -> torch.Tensor:
        arrived: _Destination | None = None
        parts = self._parts
        if self._slot is not None:
            self.begin()
            arrived, self._arriving, self._reads = self._arriving, None, []
            assert arrived is not None  # holds the parts until the value is put together
            arrived.join()
            parts = tuple(
                part.view(dtype) for part, (_, _, dtype) in zip(arrived.targets, self._places, strict=True)
            )
        if self._group is not None:
            destination, self._gathering = self._gathering, None
            destination = destination or self._gather(self._group, parts[0])
            destination.join()
        elif self._codec is not None:
            destination = self._destination([self._elements * self._dtype.itemsize], self.move.place)
            self._codec.decode(parts, destination.tensors[0].view(self._dtype))
        else:
            destination = arrived
        assert destination is not None
        return destination.tensors[0].view(self._dtype)


_PART_ALIGN = 64
"""Parts of an encoded form begin at multiples of this in the slab."""


class _Destination:
    """Memory that transfers write to.

    Attributes:
        tensors: flat bytes for each part.
        targets: the same bytes, for the threads that write them or decode them, which may hold them longer.
    """

    __slots__ = ("_pending", "_place", "targets", "tensors")

    def __init__(
        self,
        starts: list[int],
        sizes: list[int],
        device: torch.device,
        taken: tuple[Place, torch.Tensor] | None,
    ) -> None:
        self._pending: list[Transfer | Gather] = []
        self._place: Place | None = None
        if taken is None:
            self.targets = self.tensors = [
                torch.empty(size, dtype=torch.uint8, device=device) for size in sizes
            ]
            return
        self._place, whole = taken
        spans = [(at, at + size) for at, size in zip(starts, sizes, strict=True)]
        self.tensors = [whole] if len(sizes) == 1 else [whole[start:end] for start, end in spans]
        self.targets = [self._place.target[start:end] for start, end in spans]

    def pending(self, work: Sequence[Transfer | Gather]) -> None:
        """This work writes there; nothing else may until it has finished."""
        self._pending = list(work)
        if self._place is not None:
            self._place.writing(work)

    def join(self) -> None:
        """Order the device behind the pending writes, and forget them."""
        pending, self._pending = self._pending, []
        for work in pending:
            work.join()
        if self._place is not None:
            self._place.writing([])


def _packed(sizes: list[int], align: int) -> tuple[list[int], int]:
    """The offsets of parts, each a multiple of ``align``, and the bytes that all of them take.

    >>> _packed([10, 3], 64)
    ([0, 64], 67)
    """
    starts, end = [], 0
    for size in sizes:
        starts.append(-(-end // align) * align)
        end = starts[-1] + size
    return starts, end


class TransferEngine:
    """The moves of one forward.

    Args:
        plan: has moves.
        stores: the stores to use; what a step under the plan needs there is reserved once.
        verify: check that what is sharded is replicated.

    Raises:
        StoreError: the stores have too little memory.
        PlanError: a tier cannot be opened, a codec or a group is not known.

    Attributes:
        notes: values that did not fit their codec, with the reason.
    """

    def __init__(self, plan: Plan, stores: Stores, verify: bool) -> None:
        _prepare(plan, stores, torch.device(plan.device))
        self.plan = plan
        self.stores = stores
        self.verify = verify
        self.notes: list[str] = []
        self._waiting: deque[StoredTensor] = deque()
        self._waiting_bytes = 0
        self._order: list[weakref.ref[StoredTensor] | None] = [None] * sum(
            1 for move in plan.moves if move.fetched >= 0
        )
        self._next = 0
        self._early: dict[int, int] = {}
        self._began = False

    def out(self, number: int, tensor: torch.Tensor) -> StoredTensor:
        """Store the value of ``tensor``, the ``number``-th of the plan's moves (rules 1 and 2)."""
        move = self.plan.moves[number]
        with unseen():
            stored = StoredTensor(move, number, tensor, self.stores, self.verify)
            if stored.note:
                self.notes.append(stored.note)
            if move.fetched >= 0:
                self._order[move.fetched] = weakref.ref(stored)
            if stored.waiting_bytes:
                self._waiting.append(stored)
                self._waiting_bytes += stored.waiting_bytes
                while self._waiting_bytes > self.plan.window_bytes:
                    self._settle()
        return stored

    def _settle(self) -> None:
        stored = self._waiting.popleft()
        self._waiting_bytes -= stored.waiting_bytes
        stored.settle()

    def begin(self) -> None:
        """Backward has begun: wait for the copies out that are under way."""
        if self._began or not private.in_backward():
            return
        self._began = True
        while self._waiting:
            self._settle()

    def ahead(self) -> None:
        """Rule 4: start fetching what comes next, as far as the window allows."""
        if not self._began:
            return
        free = self.plan.window_bytes - sum(self._early.values())
        while self._next < len(self._order):
            reference = self._order[self._next]
            stored = reference() if reference is not None else None
            if stored is not None and stored.can_begin:
                size = stored.move.ahead_bytes
                if size > free:
                    return
                free -= size
                self._early[id(stored)] = size
                with unseen():
                    stored.begin()
            self._next += 1

    def taken(self, stored: StoredTensor) -> None:
        """A value is in use, and no longer ahead of need; nor is any before it."""
        self._early.pop(id(stored), None)
        if stored.move.fetched >= self._next:
            self._order[stored.move.fetched] = None


def _prepare(plan: Plan, stores: Stores, device: torch.device) -> None:
    """Lay out and reserve what every step under ``plan`` stores, once."""
    if stores.prepared is plan:
        return
    lives: dict[Tier, list[tuple[int, int, int]]] = {}
    for number, move in enumerate(plan.moves):
        first, then = stages(move.decision)
        if isinstance(first, Compress):
            stores.codec(first.codec)
        if isinstance(first, Shard):
            stores.group(first.group, first.size)
        if then is None:
            continue
        tier = stores.tier(then.tier, then.path, device)
        own = lives.setdefault(tier, [])
        own += [(0, 0, 0)] * (number - len(own))  # places of moves that go elsewhere
        parts = 2 if isinstance(first, Compress) else 1  # a codec's parts begin at whole pages, too
        own.append((move.born, max(move.gone, move.born + 1), move.encoded_bytes + (parts - 1) * tier.align))
    for tier, own in lives.items():
        tier.expect(_offsets(tuple(own), tier.align), [size for _, _, size in own])
    stores.reserve(plan.slab_bytes, device)
    stores.prepared = plan


@lru_cache(maxsize=64)
def _offsets(lives: tuple[tuple[int, int, int], ...], align: int) -> list[int]:
    """The offset of each (from, until, bytes); cached, since kinds of steps take turns."""
    lower, upper, size = zip(*lives, strict=True)
    return find(lower, upper, size, align=align, seconds=2.0).offsets.tolist()
