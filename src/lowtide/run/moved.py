"""Carry out a plan's moves: copies out while forward goes on, copies in ahead of backward's need. The rules
are those of `lowtide.plan.simulate.transfers`.

A moved value comes back like a replayed one: its node (`Fetch`) is an operation without inputs. The node
holds what is stored, and goes when autograd lets go of the last saved tensor that rests on it.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

import torch

from lowtide import private
from lowtide.interception import unseen
from lowtide.plan.data import Compress, Move, Plan, Shard, ahead_bytes, stages
from lowtide.run.digest import digest
from lowtide.run.tape import LiveValue
from lowtide.store.codec import CodecError
from lowtide.store.slab import Place
from lowtide.store.stores import Stores
from lowtide.store.tier import Slot, Transfer


class Parcel:
    """What is stored of one value.

    Attributes:
        move: what the plan says of it.
        exact: whether every bit comes back.
        replayable_from: whether operations may be replayed from what comes back.
        note: why it is kept as it is after all, else empty.
    """

    __slots__ = (
        "__weakref__", "_arriving", "_codec", "_device", "_dtype", "_elements", "_gathering", "_group",
        "_kept", "_parts", "_places", "_reads", "_slab",
        "_slot", "_stores", "_writes", "exact", "move", "note", "replayable_from",
    )  # fmt: skip

    def __init__(self, move: Move, number: int, tensor: torch.Tensor, stores: Stores, verify: bool) -> None:
        self.move = move
        self.note = ""
        self.exact = self.replayable_from = True
        self._device, self._dtype = tensor.device, tensor.dtype
        self._stores = stores
        # for the first time that the value comes back; what asks again has memory of its own
        self._slab = stores.slab
        nbytes = tensor.untyped_storage().nbytes()
        if nbytes % tensor.element_size():
            self._dtype = torch.uint8
        self._elements = nbytes // self._dtype.itemsize
        first, then = stages(move.decision)
        flat = _flat(tensor, self._dtype)
        self._kept: torch.Tensor | None = None
        self._codec = self._group = None
        parts: tuple[torch.Tensor, ...] = (flat,)
        if isinstance(first, Shard):
            self._group = stores.group(first.group, first.size)
            if verify:
                self._group.check(
                    digest(tensor, nbytes), f"a saved value of {nbytes:,} bytes (shape {tuple(tensor.shape)})"
                )
            parts = (self._group.cut(flat),)
        elif isinstance(first, Compress):
            self._codec = stores.codec(first.codec)
            self.replayable_from = self._codec.replayable_from
            try:
                parts = self._codec.encode(flat)
                self.exact = self._codec.bitwise
            except CodecError as error:
                self.note, self._codec, self._kept = str(error), None, flat
                self.replayable_from = True
        self._parts: tuple[torch.Tensor, ...] = parts
        self._slot: Slot | None = None
        self._gathering: _Room | None = None
        self._places: list[tuple[int, int, torch.dtype]] = []
        self._writes: list[Transfer] = []
        self._reads: list[Transfer] = []
        self._arriving: _Room | None = None
        if then is not None and self._kept is None:
            tier = stores.tier(then.tier, then.path, self._device)
            self._slot = tier.take(
                _slot_bytes([p.numel() * p.element_size() for p in parts], tier.align), number
            )
            at = 0
            for part in parts:
                self._places.append((at, part.numel(), part.dtype))
                self._writes.append(tier.write(part.view(torch.uint8), self._slot, at))
                at += _slot_bytes([part.numel() * part.element_size()], tier.align)

    @property
    def waiting_bytes(self) -> int:
        """Bytes that are held until the copy out has finished."""
        return self.move.encoded_bytes if self._writes else 0

    @property
    def can_begin(self) -> bool:
        """Whether something can be done ahead of need: a read, or a gather."""
        return self._slot is not None or self._group is not None

    def settle(self) -> None:
        """Wait for the copy out, and let go of what it copied from."""
        writes, self._writes = self._writes, []
        for transfer in writes:
            transfer.wait()
        if self._slot is not None:
            self._parts = ()

    def begin(self) -> None:
        """Start fetching, if it is not under way."""
        if self._slot is None:
            if self._group is not None and self._gathering is None:
                self._gathering = self._gather(self._parts[0])
            return
        if self._reads:
            return
        encoded = self._group is not None or self._codec is not None
        sizes = [elements * dtype.itemsize for _, elements, dtype in self._places]
        self._arriving = room = self._room(sizes, self.move.arrival if encoded else self.move.place)
        for (at, _, _), target in zip(self._places, room.targets, strict=True):
            self._reads.append(self._slot.tier.read(self._slot, target, at))
        room.pending(self._reads)

    def _room(self, sizes: list[int], at: int) -> _Room:
        """Where bytes of these sizes come to: at their place in the slab, if it is free, or in memory of
        their own.
        """
        starts = [sum(-(-size // _PART_ALIGN) * _PART_ALIGN for size in sizes[:k]) for k in range(len(sizes))]
        taken = self._slab.take(at, starts[-1] + sizes[-1]) if self._slab is not None and at >= 0 else None
        if taken is None:
            self._stores.unplaced += 1
        return _Room(starts, sizes, self._device, taken)

    def _gather(self, part: torch.Tensor) -> _Room:
        assert self._group is not None
        room = self._room([part.numel() * part.element_size() * self._group.size], self.move.place)
        room.pending([self._group.gather(part, room.targets[0])])
        return room

    def fetch(self) -> torch.Tensor:
        """The value as a flat tensor of its own."""
        if self._kept is not None:
            return self._kept
        try:
            return self._fetch()
        finally:
            self._slab = None

    def _fetch(self) -> torch.Tensor:
        arrived: _Room | None = None
        parts: tuple[torch.Tensor, ...] = self._parts
        if self._slot is not None:
            self.begin()
            room, self._arriving, self._reads = self._arriving, None, []
            assert room is not None
            room.wait()
            arrived = room  # it lies there until the value has been put together
            parts = tuple(
                part.view(dtype) for part, (_, _, dtype) in zip(arrived.targets, self._places, strict=True)
            )
        if self._group is not None:
            gathering, self._gathering = self._gathering, None
            room = gathering if gathering is not None else self._gather(parts[0])
            del gathering
            room.wait()
            return room.tensors[0].view(self._dtype)
        if self._codec is not None:
            out = (
                self._room([self._elements * self._dtype.itemsize], self.move.place)
                .tensors[0]
                .view(self._dtype)
            )
            self._codec.decode(parts, out)
            return out
        assert arrived is not None
        return arrived.tensors[0].view(self._dtype)


_PART_ALIGN = 64
"""Parts of an encoded form begin at multiples of this in the slab."""


class _Room:
    """Where something comes to.

    Attributes:
        tensors: flat bytes for each part.
        targets: the same for those who write them, or read what arrived to put a value together: their
            threads let go of it when they get to it.
    """

    __slots__ = ("_pending", "_place", "targets", "tensors")

    def __init__(
        self,
        starts: list[int],
        sizes: list[int],
        device: torch.device,
        taken: tuple[Place, torch.Tensor] | None,
    ) -> None:
        self._pending: list[Any] = []
        self._place: Place | None = None
        if taken is None:
            self.tensors = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
            self.targets = self.tensors
            return
        self._place, whole = taken
        self.tensors = (
            [whole]
            if len(sizes) == 1
            else [whole[at : at + size] for at, size in zip(starts, sizes, strict=True)]
        )
        self.targets = [self._place.target[at : at + size] for at, size in zip(starts, sizes, strict=True)]

    def pending(self, work: list[Any]) -> None:
        """This writes there; until it has, nobody else may."""
        self._pending = list(work)
        if self._place is not None:
            self._place.writing(work)

    def wait(self) -> None:
        """Return when the bytes are there; whoever wrote them is let go of."""
        pending, self._pending = self._pending, []
        for work in pending:
            work.wait()
        if self._place is not None:
            self._place.writing([])


def _slot_bytes(sizes: list[int], align: int) -> int:
    """Bytes of parts that each begin at a multiple of ``align``."""
    return (
        sum(-(-size // align) * align for size in sizes[:-1]) + sizes[-1]
        if len(sizes) > 1
        else -(-sizes[0] // align) * align
    )


def _flat(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    storage = tensor.untyped_storage()
    flat = torch.empty(0, dtype=dtype, device=tensor.device)
    return flat.set_(storage, 0, (storage.nbytes() // dtype.itemsize,), (1,))  # type: ignore[call-overload]


class Fetch:
    """The node that writes a moved value: an operation without inputs.

    Attributes:
        func: for messages.
        order: position in the forward.
        exact: whether every bit comes back.
        output: the value.
    """

    __slots__ = ("__weakref__", "exact", "func", "grad", "mover", "order", "output", "parcel")

    def __init__(self, parcel: Parcel, mover: Mover, order: float) -> None:
        self.func = "a moved value"
        self.parcel = parcel
        self.mover = mover
        self.order = order
        self.exact = parcel.exact
        self.grad = False
        self.output: weakref.ref[LiveValue] | None = None

    def inputs(self) -> list[LiveValue]:
        """None."""
        return []

    def fetch(self) -> torch.Tensor:
        """The bytes, now."""
        self.mover.taken(self.parcel)
        return self.parcel.fetch()


class Mover:
    """The moves of one forward.

    Args:
        plan: has moves.
        stores: where to.
        verify: check that what is sharded is replicated.

    Attributes:
        notes: values that did not fit their codec, with the reason.
    """

    def __init__(self, plan: Plan, stores: Stores, verify: bool) -> None:
        self.plan = plan
        self.stores = stores
        self.verify = verify
        self.notes: list[str] = []
        self._waiting: deque[Parcel] = deque()
        self._waiting_bytes = 0
        self._order: list[weakref.ref[Parcel] | None] = [None] * sum(
            1 for move in plan.moves if move.fetched >= 0
        )
        self._next = 0
        self._early: dict[int, int] = {}
        self._began = False

    def out(self, number: int, tensor: torch.Tensor, order: float) -> Fetch:
        """Store the value that ``tensor`` shows, the ``number``-th of the plan's moves (rules 1 and 2)."""
        move = self.plan.moves[number]
        with unseen():
            parcel = Parcel(move, number, tensor, self.stores, self.verify)
            if parcel.note:
                self.notes.append(parcel.note)
            if move.fetched >= 0:
                self._order[move.fetched] = weakref.ref(parcel)
            if parcel.waiting_bytes:
                self._waiting.append(parcel)
                self._waiting_bytes += parcel.waiting_bytes
                while self._waiting_bytes > self.plan.window_bytes:
                    self._settle()
        return Fetch(parcel, self, order)

    def _settle(self) -> None:
        parcel = self._waiting.popleft()
        self._waiting_bytes -= parcel.waiting_bytes
        parcel.settle()

    def begin(self) -> None:
        """Backward asks for a saved tensor: what is still on its way out is waited for."""
        if self._began or not private.in_backward():
            return
        self._began = True
        while self._waiting:
            self._settle()

    def ahead(self) -> None:
        """Rule 4: start fetching what comes next while there is room."""
        if not self._began:
            return
        room = self.plan.window_bytes - sum(self._early.values())
        while self._next < len(self._order):
            reference = self._order[self._next]
            parcel = reference() if reference is not None else None
            if parcel is not None and parcel.can_begin:
                size = ahead_bytes(parcel.move.decision, parcel.move.bytes, parcel.move.encoded_bytes)
                if size > room:
                    return
                room -= size
                self._early[id(parcel)] = size
                with unseen():
                    parcel.begin()
            self._next += 1

    def taken(self, parcel: Parcel) -> None:
        """A value is in use: it is not ahead of need any more, and neither is anything before it."""
        self._early.pop(id(parcel), None)
        if parcel.move.fetched >= self._next:
            self._order[parcel.move.fetched] = None


def prepare(plan: Plan, stores: Stores, device: torch.device) -> None:
    """Lay out what every step under ``plan`` stores or places, and reserve it, if the stores are not laid out
    for it already.

    Raises:
        StoreError: there is no room for it.
        PlanError: a tier cannot be opened, a codec or a group is not known.
    """
    if stores.prepared is plan:
        return
    by_tier: dict[Any, tuple[list[int], list[int], list[int]]] = {}
    for number, move in enumerate(plan.moves):
        first, then = stages(move.decision)
        if isinstance(first, Compress):
            stores.codec(first.codec)
        if isinstance(first, Shard):
            stores.group(first.group, first.size)
        if then is None:
            continue
        tier = stores.tier(then.tier, then.path, device)
        lower, upper, size = by_tier.setdefault(tier, ([], [], []))
        while len(size) < number:  # places of moves that go elsewhere
            for places in (lower, upper, size):
                places.append(0)
        lower.append(move.born)
        upper.append(max(move.gone, move.born + 1))
        parts = 2 if isinstance(first, Compress) else 1  # a codec's parts begin at whole pages, too
        size.append(move.encoded_bytes + (parts - 1) * tier.align)
    for tier, expected in by_tier.items():
        tier.expect(*expected)
    stores.reserve(plan.slab_bytes, device)
    stores.prepared = plan
