"""Carry out a plan's moves: copies out while forward goes on, copies in ahead of backward's need.

The rules are those of `lowtide.extensions.moves.simulate`. A moved value comes back like a replayed one, by
an operation without inputs (`Fetch`). The fetch holds the stored value (`StoredTensor`), and is deleted when
autograd has released the last saved tensor that depends on the value.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import torch

from lowtide import private
from lowtide.accelerator import current_stream
from lowtide.extensions.moves.layout import find
from lowtide.extensions.moves.store.codec import Codec, CodecError
from lowtide.extensions.moves.store.lanes import Transfer
from lowtide.extensions.moves.store.slab import hand_out, offsets_of
from lowtide.extensions.moves.store.stores import Gather, Replicas, Stores, with_index
from lowtide.extensions.moves.store.tier import Tier
from lowtide.interception import unseen
from lowtide.ops import has_plain_storage
from lowtide.plan.data import Compress, Move, Plan, Shard, form_and_tier
from lowtide.run.tensor_bytes import digest, reach, words_of

Destination = Callable[[Sequence[int]], list[torch.Tensor]]
"""From sizes in bytes to flat tensors of so many bytes, into which the parts of a value come back."""


def read_here(parts: list[torch.Tensor]) -> list[torch.Tensor]:
    """The parts, which this thread's stream reads from now on: what lies in memory that was taken on another
    one keeps it until then.
    """
    for part in parts:
        if (stream := current_stream(part.device)) is not None:
            part.record_stream(stream)
    return parts


class OnDevice:
    """Where the parts of a value are that stay on the device.

    This class, `InTier`, `Gathered` and `Decoded` are the sources that a value comes back from, as a whole or
    in parts. Of each, `begin` starts what can be done ahead of need, and `get` waits and gives the parts:
    flat tensors of bytes.
    """

    def __init__(self, parts: Sequence[torch.Tensor]) -> None:
        self._parts = [part.view(torch.uint8) for part in parts]

    def begin(self) -> None:
        """Nothing to start: the parts never left the device."""

    def get(self) -> list[torch.Tensor]:
        """The parts."""
        return read_here(self._parts)


class InTier:
    """Parts of a value that are copied to a tier, and back each time that they are asked for.

    Args:
        parts: flat tensors.
        tier: where they go.
        number: the place of the value's move among the plan's moves.
        destination: gives the memory that the parts come back into.
    """

    def __init__(
        self, parts: Sequence[torch.Tensor], tier: Tier, number: int, destination: Destination
    ) -> None:
        self._tier, self._destination = tier, destination
        self._sizes = [part.nbytes for part in parts]
        self._offsets, total = offsets_of(self._sizes, tier.align)
        self._lease = tier.take(total, number)
        self._leaving = [
            (part, tier.write(part.view(torch.uint8), self._lease, at))
            for at, part in zip(self._offsets, parts, strict=True)
        ]
        self._coming: list[tuple[torch.Tensor, Transfer]] = []

    def settle(self) -> None:
        """Order the device behind the copy out, and release what was copied."""
        leaving, self._leaving = self._leaving, []
        for _, writing in leaving:
            writing.join()

    def begin(self) -> None:
        """Start copying back."""
        if not self._coming:
            targets = self._destination(self._sizes)
            self._coming = [
                (target, self._tier.read(self._lease, target, at))
                for at, target in zip(self._offsets, targets, strict=True)
            ]

    def get(self) -> list[torch.Tensor]:
        """The parts, given out once."""
        self.begin()
        coming, self._coming = self._coming, []
        for _, reading in coming:
            reading.join()
        return read_here([target for target, _ in coming])


class Gathered:
    """The whole of a sharded value: each rank of ``group`` has a part of it, this rank's from ``source``."""

    def __init__(self, source: OnDevice | InTier, group: Replicas, destination: Destination) -> None:
        self._source, self._group, self._destination = source, group, destination
        self._coming: tuple[torch.Tensor, Gather] | None = None

    def begin(self) -> None:
        """Start gathering a part that is here, and fetching one that is not."""
        self._source.begin()
        if self._coming is None and isinstance(self._source, OnDevice):
            self._coming = self._gather()

    def get(self) -> list[torch.Tensor]:
        """The whole, padding included."""
        coming, self._coming = self._coming, None
        whole, gather = coming or self._gather()
        gather.join()
        return read_here([whole])

    def _gather(self) -> tuple[torch.Tensor, Gather]:
        (part,) = self._source.get()
        (whole,) = self._destination([part.nbytes * self._group.size])
        return whole, self._group.gather(part, whole)


class Decoded:
    """A compressed value, decoded from the parts that ``source`` gives.

    Args:
        source: gives the parts, as bytes.
        codec: decodes them.
        parts: the encoded parts, for their dtypes.
        flat: the value, for its size and dtype.
        destination: gives the memory that the value is decoded into.
    """

    def __init__(
        self,
        source: OnDevice | InTier,
        codec: Codec,
        parts: Sequence[torch.Tensor],
        flat: torch.Tensor,
        destination: Destination,
    ) -> None:
        self._source, self._codec, self._destination = source, codec, destination
        self._dtypes = [part.dtype for part in parts]
        self._nbytes, self._dtype = flat.nbytes, flat.dtype

    def begin(self) -> None:
        """Start fetching the parts."""
        self._source.begin()

    def get(self) -> list[torch.Tensor]:
        """The value."""
        parts = self._source.get()
        (out,) = self._destination([self._nbytes])
        typed = tuple(part.view(dtype) for part, dtype in zip(parts, self._dtypes, strict=True))
        self._codec.decode(typed, out.view(self._dtype))
        return [out]


class StoredTensor:
    """One value in a store: whole, encoded or as this rank's part.

    Args:
        move: the plan's move of the value.
        number: the move's place among the plan's moves.
        tensor: a tensor on the value.
        stores: the stores that the value goes to.
        verify: check that a value that is sharded is the same on all ranks.

    Attributes:
        move: as given.
        exact: whether every bit comes back.
        replayable_from: whether operations may be replayed from what comes back.
        note: why the value is kept unchanged after all; empty where it is not.
        leaving: the parts that are copied to a tier; ``None`` where none are.
    """

    __slots__ = ("__weakref__", "_dtype", "_source", "exact", "leaving", "move", "note", "replayable_from")

    def __init__(self, move: Move, number: int, tensor: torch.Tensor, stores: Stores, verify: bool) -> None:
        self.move, self.note = move, ""
        self.exact = self.replayable_from = True
        self.leaving: InTier | None = None
        device, nbytes = tensor.device, tensor.untyped_storage().nbytes()
        self._dtype = torch.uint8 if nbytes % tensor.element_size() else tensor.dtype
        flat = words_of(tensor, self._dtype, nbytes)
        first, then = form_and_tier(move.decision)
        parts: tuple[torch.Tensor, ...] = (flat,)
        group: Replicas | None = None
        codec: Codec | None = None
        if isinstance(first, Shard):
            group = stores.group(first.group, first.size)
            if verify:
                what = f"a saved value of {nbytes:,} bytes (shape {tuple(tensor.shape)})"
                group.check(digest(tensor, nbytes), what)
            parts = (group.cut(flat),)
        elif isinstance(first, Compress):
            codec = stores.codec(first.codec)
            try:
                parts = codec.encode(flat)
            except CodecError as error:  # it stays as it is
                self.note, codec, then = str(error), None, None
            else:
                self.replayable_from = codec.replayable_from
                self.exact = codec.lossless and codec.replayable_from
        here = partial(stores.destination, device, move.place)
        source: OnDevice | InTier = OnDevice(parts)
        if then is not None:
            arrival = here if first is None else partial(stores.destination, device, move.arrival)
            tier = stores.tier(then.tier, then.path, device)
            source = self.leaving = InTier(parts, tier, number, arrival)
        self._source: OnDevice | InTier | Gathered | Decoded = source
        if group is not None:
            self._source = Gathered(source, group, here)
        elif codec is not None:
            self._source = Decoded(source, codec, parts, flat, here)

    def begin(self) -> None:
        """Start fetching the value, if that is not under way."""
        self._source.begin()

    def fetch(self) -> torch.Tensor:
        """The value as a flat tensor."""
        (found,) = self._source.get()
        return hand_out(found).view(self._dtype)


class Fetch:
    """Writes a moved value again: an operation without inputs, for the tape."""

    name = "a moved value"

    def __init__(self, stored: StoredTensor, engine: TransferEngine) -> None:
        self.stored, self.engine = stored, engine

    @property
    def replayable_from(self) -> bool:
        """Whether operations may be replayed from it: it is close enough to what was stored."""
        return self.stored.replayable_from

    def run(self, bases: list[torch.Tensor], sole_reader: list[bool]) -> list[torch.Tensor]:
        """The bytes, now."""
        self.engine.note_use(self.stored)
        return [self.stored.fetch()]


def _is_of(tensor: torch.Tensor, move: Move, smaller: bool) -> bool:
    """Whether this is the tensor that the move is for; in a ``smaller`` step one that is larger in no
    dimension.
    """
    shape, nbytes = tuple(tensor.shape), tensor.untyped_storage().nbytes()
    if str(tensor.dtype) != f"torch.{move.dtype}" or len(shape) != len(move.shape):
        return False
    if smaller:
        return nbytes <= move.bytes and all(a <= b for a, b in zip(shape, move.shape, strict=True))
    return nbytes == move.bytes and shape == move.shape


class TransferEngine:
    """The moves of one forward.

    Args:
        plan: has moves.
        stores: the stores to use; the memory that a step under the plan needs there is reserved once.
        verify: as of `StoredTensor`.
        device: where the step runs; tiers and slab are laid out for it, once. ``None`` is the plan's device,
            or another one of its kind, which the first value shows.

    Raises:
        StoreError: the stores have too little memory.
        PlanError: a tier cannot be opened, a codec or a group is not known.

    Attributes:
        notes: values that did not fit their codec, with the reason.
        told: whether a warning has told of them.
    """

    def __init__(self, plan: Plan, stores: Stores, verify: bool, device: torch.device | None = None) -> None:
        self._device = with_index(torch.device(plan.device) if device is None else device)
        lay_out(plan, stores, self._device)
        self.plan = plan
        self.stores = stores
        self.verify = verify
        self.notes: list[str] = []
        self.told = False
        self._waiting: deque[tuple[int, InTier]] = deque()
        """for each copy out that is under way, the bytes that it holds and its parts; the oldest first"""
        self._order: weakref.WeakValueDictionary[int, StoredTensor] = weakref.WeakValueDictionary()
        """place in the order of fetching -> value that is stored and not in use yet"""
        self._next = 0  # the place of the first value that was not fetched ahead so far
        self._early: dict[int, int] = {}  # id of a value that is fetched ahead of need -> its bytes
        self._began = False

    def out(self, number: int, tensor: torch.Tensor) -> StoredTensor:
        """Store the value of ``tensor``, the ``number``-th of the plan's moves (rules 1 and 2)."""
        move = self.plan.moves[number]
        with unseen():
            if (
                tensor.device != self._device
                and tensor.device.type == self._device.type
                and not self._waiting
            ):
                self._device = tensor.device  # the plan was made on another device of this kind
                lay_out(self.plan, self.stores, self._device)
            stored = StoredTensor(move, number, tensor, self.stores, self.verify)
            if stored.note:
                self.notes.append(stored.note)
            if move.fetched >= 0:
                self._order[move.fetched] = stored
            if stored.leaving is not None:
                self._waiting.append((move.encoded_bytes, stored.leaving))
                while sum(held for held, _ in self._waiting) > self.plan.window_bytes:
                    self._waiting.popleft()[1].settle()
        return stored

    def moves_of(
        self, numbers: Sequence[int], wrote: Sequence[torch.Tensor], smaller: bool
    ) -> tuple[int, ...] | None:
        """For each value of an operation its place among the plan's moves, or -1; ``None`` where one has
        another shape, dtype or size than the plan's, as another operation of that name has written it, or
        main memory has no room for it.

        Args:
            numbers: what the plan says.
            wrote: the values.
            smaller: the step is smaller than the one that was planned for.
        """
        moves = self.plan.moves
        found = [n if n >= 0 and has_plain_storage(t) else -1 for n, t in zip(numbers, wrote, strict=False)]
        if not all(n < 0 or _is_of(t, moves[n], smaller) for n, t in zip(found, wrote, strict=False)):
            return None
        if self.stores.host_bytes is not None and not self._has_room([n for n in found if n >= 0]):
            return None  # another forward of this step has taken the places
        return (*found, *[-1] * (len(wrote) - len(found)))

    def _has_room(self, numbers: Sequence[int]) -> bool:
        """Whether main memory has room for these of the plan's moves."""
        here = [n for n in numbers if self.plan.moves[n].tier == "host"]
        if not here:
            return True
        tier = self.stores.tier("host", "", self._device)
        return tier.has_room([(self.plan.moves[n].encoded_bytes, n) for n in here])

    def move(self, tape: Any, number: int, tensor: torch.Tensor, is_loose: bool) -> None:
        """Store the value of ``tensor``, and have the tape fetch it where it is read.

        Args:
            tape: `lowtide.run.record.tape.Tape`.
            number: of the plan's moves.
            tensor: shows the value.
            is_loose: no kernel has written all of it.
        """
        fetch = Fetch(self.out(number, tensor), self)
        core = tape.core.node(fetch, [], False)
        core.order -= 0.5
        core.exact, core.moved = fetch.stored.exact, True
        value = tape.register(core, tensor, 0 if is_loose else reach(tensor))
        if not fetch.stored.exact:
            value.digest = None

    def begin(self) -> None:
        """A saved tensor is asked for, on this thread's stream. When backward begins, wait for the copies out
        that are under way.
        """
        if self.stores.slab is not None:
            self.stores.slab.read_here()
        if self._began or not private.in_backward():
            return
        self._began = True
        while self._waiting:
            self._waiting.popleft()[1].settle()

    def ahead(self) -> None:
        """Start fetching the values that come next, as far as the window allows (rule 4)."""
        if not self._began:
            return
        free = self.plan.window_bytes - sum(self._early.values())
        while self._next < len(self.plan.moves):
            stored = self._order.get(self._next)
            if stored is not None and stored.move.link_in and not stored.note:
                size = stored.move.ahead_bytes
                if size > free:
                    return
                free -= size
                self._early[id(stored)] = size
                with unseen():
                    stored.begin()
            self._next += 1

    def note_use(self, stored: StoredTensor) -> None:
        """A value that was fetched is in use now, and no longer ahead of need."""
        self._early.pop(id(stored), None)
        self._order.pop(stored.move.fetched, None)


def lay_out(plan: Plan, stores: Stores, device: torch.device) -> None:
    """Lay out and reserve the memory of what every step under ``plan`` stores, once. A step is measured from
    after that on, so the slab counts as resident.
    """
    if stores.prepared is not None and stores.prepared[0] is plan and stores.prepared[1] == device:
        return
    reserve_tiers(plan, stores, device)
    stores.reserve(plan.slab_bytes, device)
    stores.prepared = plan, device


def reserve_tiers(plan: Plan, stores: Stores, device: torch.device) -> None:
    """Lay out and reserve what steps under ``plan`` store in tiers.

    Raises:
        StoreError: there is no room for it.
        PlanError: a tier cannot be opened, a codec or a group is not known.
    """
    lives: dict[Tier, list[tuple[int, int, int]]] = {}
    for number, move in enumerate(plan.moves):
        first, then = form_and_tier(move.decision)
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


@lru_cache(maxsize=64)
def _offsets(lives: tuple[tuple[int, int, int], ...], align: int) -> list[int]:
    """The offset of each (from, until, bytes) in one memory; cached, since several plans take turns."""
    lower, upper, size = zip(*lives, strict=True)
    return find(lower, upper, size, align=align, seconds=2.0).offsets.tolist()
