"""A model of PyTorch's caching allocator: what it reserves on a device, beside what is allocated.

In: the sizes that a program asks for and gives back, in order. Out: the blocks that PyTorch would hand out,
and the bytes reserved for them. No device is needed. The rules are those of
``c10/cuda/CUDACachingAllocator.cpp`` in PyTorch 2.11 to 2.13. Docstrings name its functions.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

MIB = 1 << 20
SMALLEST, SMALL = 512, MIB  # the smallest block; the largest one of the small pool
SMALL_SEGMENT, LARGE_SEGMENT, ROUNDING = 2 * MIB, 20 * MIB, 2 * MIB
OWN_SEGMENT = 10 * MIB  # from here on a request has a segment of its own size
UNSPLIT_ROUNDING = 20 * MIB  # how much larger a block may be that `max_split_bytes` keeps whole
ADDRESSES = 1 << 44  # the range of an expandable segment, if no capacity is given
INTERVALS = 16  # powers of two from 1 MiB on that have divisions of their own


@dataclass(eq=False, slots=True)
class Block:
    """Part of a segment, handed out or free.

    Attributes:
        address: where it begins.
        bytes: what was asked for, rounded, and a rest that was too little to be split off.
        stream: the one it was asked for on; a free block serves no other.
    """

    address: int
    bytes: int
    stream: int
    pool: Pool = field(repr=False)
    requested: int = 0
    allocated: bool = False
    mapped: bool = True
    expandable: bool = False
    previous: Block | None = field(default=None, repr=False)
    next: Block | None = field(default=None, repr=False)
    used_by: set[int] = field(default_factory=set)  # other streams, until these are through
    freed_at: int = 0  # the searches of its pool until then

    @property
    def alone(self) -> bool:
        return self.previous is None and self.next is None

    @property
    def joinable(self) -> bool:
        return not (self.allocated or self.used_by)

    @property
    def most(self) -> int:
        """The block's bytes, and the unmapped bytes behind the block that it could grow into."""
        return self.bytes + (self.next.bytes if self.next and not self.next.mapped else 0)


_Key = tuple[int, int, int]


@dataclass(eq=False)
class Pool:
    """One size class: free blocks by stream, size and address; what is not mapped by stream and address."""

    small: bool
    free: list[tuple[_Key, Block]] = field(default_factory=list)
    unmapped: list[tuple[_Key, Block]] = field(default_factory=list)
    searches: int = 0

    @property
    def page(self) -> int:
        return SMALL_SEGMENT if self.small else LARGE_SEGMENT

    def _place(self, block: Block) -> tuple[list[tuple[_Key, Block]], _Key]:
        if block.mapped:
            return self.free, (block.stream, block.bytes, block.address)
        return self.unmapped, (block.stream, block.address, 0)

    def add(self, block: Block) -> None:
        block.freed_at = self.searches
        among, key = self._place(block)
        insort(among, (key, block))

    def remove(self, block: Block) -> None:
        among, key = self._place(block)
        del among[bisect_left(among, (key,))]


@dataclass(eq=False)
class Pools:
    """A small and a large pool: the device's, a captured graph's, or those of a ``torch.cuda.MemPool``."""

    small: Pool = field(default_factory=lambda: Pool(True))
    large: Pool = field(default_factory=lambda: Pool(False))
    released: bool = False


class CachingAllocator:
    """A model of ``torch.cuda``'s native allocator on one device.

    Args:
        capacity: bytes of the device; without it there is no end to them.
        expandable_segments: as in ``PYTORCH_ALLOC_CONF``.
        roundup_power2_divisions: as there: a number, or one for each power of two from 1 MiB to 32 GiB.
        garbage_collection_threshold: as there.
        max_split_bytes: ``max_split_size_mb``, in bytes.
        fraction: as in ``torch.cuda.set_per_process_memory_fraction``; without it no garbage is collected.

    Attributes:
        reserved_bytes: segments, or pages, taken from the device.
        peak_reserved_bytes: the most of them so far.
        allocated_bytes: blocks handed out.
        active_bytes: also those that another stream still uses.
        requested_bytes: of the active ones, before rounding.
        retries: how often all cached segments were given back for one request.

    Raises:
        ValueError: an argument is out of its range.

    Example:
        >>> allocator = CachingAllocator()
        >>> allocator.allocate(1_000).bytes, allocator.reserved_bytes
        (1024, 2097152)
    """

    def __init__(
        self,
        capacity: int | None = None,
        expandable_segments: bool = False,
        roundup_power2_divisions: int | Sequence[int] = 0,
        max_split_bytes: int | None = None,
        garbage_collection_threshold: float = 0.0,
        fraction: float | None = None,
    ) -> None:
        given = roundup_power2_divisions
        self.divisions = [given] * INTERVALS if isinstance(given, int) else [*given]
        if len(self.divisions) != INTERVALS or any(d < 0 or d & (d - 1) for d in self.divisions):
            raise ValueError(
                f"roundup_power2_divisions is {given}: give a power of two, or {INTERVALS} of them"
            )
        if fraction is not None and (capacity is None or not 0 < fraction <= 1):
            raise ValueError(
                f"fraction is {fraction} of a capacity of {capacity}: give both, 0 < fraction <= 1"
            )
        if max_split_bytes is not None and max_split_bytes <= LARGE_SEGMENT:
            raise ValueError(f"max_split_bytes is {max_split_bytes}: give more than {LARGE_SEGMENT} (20 MiB)")
        if not 0 <= garbage_collection_threshold < 1:
            raise ValueError(
                f"garbage_collection_threshold is {garbage_collection_threshold}: give 0 to below 1"
            )
        self.capacity, self.expandable_segments = capacity, expandable_segments
        self.limit = None if fraction is None or capacity is None else int(fraction * capacity)
        self.max_split_bytes, self.threshold = max_split_bytes, garbage_collection_threshold
        self.reserved_bytes = self.peak_reserved_bytes = self.retries = 0
        self.allocated_bytes = self.active_bytes = self.requested_bytes = 0
        self._shared = self._used = Pools()
        self._private: list[Pools] = []
        self._capturing = False
        self._pending: list[tuple[Block, set[int]]] = []  # freed; the streams that have yet to get there
        self._next_address = LARGE_SEGMENT

    def resume(self, snapshot: Iterable[dict[str, Any]]) -> dict[int, Block]:
        """Go on from a real allocator's state, ``torch.cuda.memory_snapshot()`` of one device.

        Returns:
            The blocks that are handed out, by address.
        """
        live: dict[int, Block] = {}
        streams: dict[int, int] = {}
        ends: dict[Pool, dict[int, Block]] = {}  # of a pool's expandable segment for a stream, its last block
        for segment in sorted(snapshot, key=lambda segment: segment["address"]):
            pool = self._shared.small if segment["segment_type"] == "small" else self._shared.large
            stream = streams.setdefault(segment["stream"], len(streams))
            address, expandable = segment["address"], bool(segment.get("is_expandable"))
            block = ends.get(pool, {}).get(stream) if expandable else None
            if block is not None and block.address + block.bytes < address:
                block = self._follow(block, address - block.address - block.bytes, mapped=False)
                pool.add(block)
            for part in segment["blocks"]:
                if block is None:
                    block = Block(address, part["size"], stream, pool, expandable=expandable)
                else:
                    block = self._follow(block, part["size"])
                if part["state"] == "inactive":
                    pool.add(block)
                else:
                    block.allocated, block.requested = True, part["requested_size"]
                    live[block.address] = block
                    self.allocated_bytes += block.bytes
                    self.active_bytes += block.bytes
                    self.requested_bytes += block.requested
            if expandable and block is not None:
                ends.setdefault(pool, {})[stream] = block
            self.reserved_bytes += segment["total_size"]
            self._next_address = max(self._next_address, address + segment["total_size"])
        for pool, of_streams in ends.items():
            for block in of_streams.values():  # the rest of its range; where that begins is not told
                pool.add(self._follow(block, self._range_bytes(pool), mapped=False))
                self._next_address += self._range_bytes(pool)
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return live

    def allocate(self, bytes: int, stream: int = 0) -> Block:
        """The block that PyTorch hands out; ``MemoryError`` where neither device nor cache has room."""
        if bytes < 0:
            raise ValueError(f"{bytes} bytes were asked for: ask for 0 or more")
        if bytes == 0:  # a null pointer
            return Block(0, 0, stream, self._used.small)
        if not self._capturing:
            self._end_frees()
        size = self.round_up(bytes)
        pool = self._used.small if size <= SMALL else self._used.large
        block = self._find(pool, stream, size) or self._new(pool, stream, size)
        rest, most = block.bytes - size, self.max_split_bytes
        small_rests = pool.small or self.expandable_segments
        if rest >= SMALLEST if small_rests else rest > SMALL and (most is None or size < most):
            pool.add(self._cut(block, size))
        block.allocated, block.requested = True, bytes
        self.allocated_bytes += block.bytes
        self.active_bytes += block.bytes
        self.requested_bytes += bytes
        return block

    def free(self, block: Block) -> None:
        """Give a block back. It serves again at once, or when the streams it was recorded on are through."""
        if block.bytes and not block.allocated:
            raise ValueError(f"the block at {block.address} is not handed out: free a block once")
        block.allocated = False
        self.allocated_bytes -= block.bytes
        if block.used_by:
            self._pending.append((block, set(block.used_by)))
        elif block.bytes:
            self._end_free(block)

    def record_stream(self, block: Block, stream: int) -> None:
        """Another stream uses the block, too."""
        if block.bytes and stream != block.stream:
            block.used_by.add(stream)

    def complete(self, stream: int) -> None:
        """All work so far on a stream is over. The next `allocate` sees it, as PyTorch's does."""
        for _, streams in self._pending:
            streams.discard(stream)

    def empty_cache(self) -> None:
        """Wait for all streams and give back what is wholly free, as ``torch.cuda.empty_cache()``:
        ``release_cached_blocks``, of expandable segments the pages that lie wholly in free blocks.
        """
        for _, streams in self._pending:
            streams.clear()
        self._end_frees()
        for pools in (self._shared, *(pools for pools in self._private if pools.released)):
            for _, block in [*pools.large.free, *pools.small.free]:
                if block.expandable:
                    self._unmap(block)
                elif block.alone:
                    self._release(block)

    @contextmanager
    def private_pool(self, capture: bool = True, pools: Pools | None = None) -> Iterator[Pools]:
        """Within, blocks come from pools of their own: new ones, or those given.

        Nothing of them is given back until their ``released`` is set, as when the graph is gone. Under
        ``capture`` no cached segment is given back for a request, and no stream's work is seen to end.
        """
        pools = pools or Pools()
        if pools not in self._private:
            self._private.append(pools)
        before = self._used, self._capturing
        self._used, self._capturing = pools, capture
        try:
            yield pools
        finally:
            self._used, self._capturing = before

    def round_up(self, bytes: int) -> int:
        """The size of the block that so many bytes ask for."""
        divisions = self.divisions[min(max(bytes.bit_length() - MIB.bit_length(), 0), INTERVALS - 1)]
        by_power = divisions > 1 and bytes > SMALLEST * divisions
        unit = (1 << (bytes.bit_length() - 1)) // divisions if by_power else SMALLEST
        return max(-(-bytes // unit) * unit, SMALLEST)

    def _find(self, pool: Pool, stream: int, size: int) -> Block | None:
        """The smallest free block that is large enough, of those the lowest (``get_free_block``). Blocks of
        expandable segments serve nobody while these are switched off.
        """
        pool.searches += 1
        at, most = bisect_left(pool.free, ((stream, size, 0),)), self.max_split_bytes
        while not self.expandable_segments and at < len(pool.free) and pool.free[at][1].expandable:
            at += 1
        if at == len(pool.free) or pool.free[at][1].stream != stream:
            return None
        block = pool.free[at][1]
        for _, other in pool.free[at + 1 :]:
            if not block.expandable or other.stream != stream or other.most >= block.most:
                break
            block = other
        if most and (size < most <= block.bytes or (size >= most and block.bytes >= size + UNSPLIT_ROUNDING)):
            return None
        pool.remove(block)
        return block

    def _new(self, pool: Pool, stream: int, size: int) -> Block:
        """A block from the device, for which cached ones may have to be given back (``malloc``). The second
        ``alloc_block`` is a retry, whether it succeeds or not.
        """
        self._collect_garbage()
        block = self._from_device(pool, stream, size)
        if block is None and self._release_oversized(pool, stream, size):
            block = self._from_device(pool, stream, size)
        if block is None and not self._capturing:
            self.empty_cache()
            self.retries += 1
            block = self._from_device(pool, stream, size)
        if block is None:
            raise MemoryError(
                f"{size:,} bytes do not fit beside {self.reserved_bytes:,} reserved ones, of which "
                f"{self.allocated_bytes:,} are handed out, in {self.limit or self.capacity:,}"
            )
        return block

    def _from_device(self, pool: Pool, stream: int, size: int) -> Block | None:
        """A new segment, or new pages (``alloc_block``). The limit of a fraction is compared with the size
        of a segment, also where pages are mapped, which may be more.
        """
        own = -(-size // ROUNDING) * ROUNDING
        segment = own if size >= OWN_SEGMENT else SMALL_SEGMENT if size <= SMALL else LARGE_SEGMENT
        if self.limit is not None and self.reserved_bytes + segment > self.limit:
            return None
        if self.expandable_segments:
            return self._expand(pool, stream, size)
        return Block(self._range(segment), segment, stream, pool) if self._take(segment) else None

    def _take(self, bytes: int) -> bool:
        if self.capacity is not None and self.reserved_bytes + bytes > self.capacity:
            return False
        self.reserved_bytes += bytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return True

    def _follow(self, block: Block, bytes: int, mapped: bool = True) -> Block:
        """Another block of a segment, behind its last one."""
        block.next = Block(block.address + block.bytes, bytes, block.stream, block.pool, previous=block)
        block.next.mapped, block.next.expandable = mapped, block.expandable
        return block.next

    def _range_bytes(self, pool: Pool) -> int:
        """The address range of an expandable segment: 1 1/8 of the device's memory, in whole pages
        (``ExpandableSegment``'s constructor).
        """
        bytes = ADDRESSES if self.capacity is None else self.capacity + self.capacity // 8
        return -(-bytes // pool.page) * pool.page

    def _range(self, bytes: int) -> int:
        self._next_address += bytes
        return self._next_address - bytes

    def _expand(self, pool: Pool, stream: int, size: int) -> Block | None:
        """Map pages: behind a free block or in a hole, at the lowest address with room
        (``try_allocate_expandable_block``).

        A range may have several holes between its free blocks, which are mapped one after the other. Where
        one fails, those before it stay mapped as free blocks until `empty_cache` gives them back.
        """
        block = self._room(pool, stream, size)
        if not block.mapped and not self._map(block, min(block.bytes, size)):
            return None
        while block.bytes < size:
            hole = block.next
            assert hole is not None
            if not self._map(hole, min(size - block.bytes, hole.bytes)):
                return None
            block = hole  # which the free block before it has joined
        pool.remove(block)
        return block

    def _room(self, pool: Pool, stream: int, size: int) -> Block:
        """Where free and unmapped blocks that follow each other have enough addresses, by the lowest hole
        (``find_expandable_block``). Where none have, another range begins.
        """
        for _, hole in pool.unmapped:
            first = block = hole.previous if hole.previous is not None and hole.previous.joinable else hole
            found = 0
            while found < size and block is not None and block.joinable:
                found, block = found + block.bytes, block.next
            if hole.stream == stream and found >= size:
                return first
        bytes = self._range_bytes(pool)
        hole = Block(self._range(bytes), bytes, stream, pool, mapped=False, expandable=True)
        pool.add(hole)
        return hole

    def _map(self, hole: Block, size: int) -> bool:
        """Map the first pages of a hole; free blocks beside it join it (``map_block``). All of them or none:
        where the device has no memory for one page, ``ExpandableSegment::map`` releases those that it made.
        """
        size = -(-size // hole.pool.page) * hole.pool.page
        if not self._take(size):
            return False
        hole.pool.remove(hole)
        if size < hole.bytes:
            hole.pool.add(self._cut(hole, size))
        hole.mapped = True
        self._join(hole)
        hole.pool.add(hole)
        return True

    def _unmap(self, block: Block) -> None:
        """Give back the pages that lie wholly in a free block; they begin with the address range
        (``unmap_block``).
        """
        first, pool = block, block.pool
        while first.previous is not None:
            first = first.previous
        start = first.address - (first.address - block.address) // pool.page * pool.page
        end = first.address + (block.address + block.bytes - first.address) // pool.page * pool.page
        if end <= start:
            return
        pool.remove(block)
        if start > block.address:
            before, block = block, self._cut(block, start - block.address)
            pool.add(before)
        if block.bytes > end - start:
            pool.add(self._cut(block, end - start))
        self.reserved_bytes -= block.bytes
        block.mapped = False
        self._join(block)
        if not block.alone:  # else nothing of the range is mapped, and it is given up
            pool.add(block)

    def _cut(self, block: Block, size: int) -> Block:
        """Shorten a block to a size. The rest is a block behind it."""
        rest = Block(block.address + size, block.bytes - size, block.stream, block.pool)
        rest.mapped, rest.expandable = block.mapped, block.expandable
        rest.previous, rest.next, block.next, block.bytes = block, block.next, rest, size
        if rest.next is not None:
            rest.next.previous = rest
        return rest

    def _join(self, block: Block) -> None:
        """Take in both neighbours, if they are as free, and as mapped, as the block is."""
        for other in (block.previous, block.next):
            if other is None or not other.joinable or other.mapped != block.mapped:
                continue
            block.pool.remove(other)
            if other is block.previous:
                block.address, block.previous = other.address, other.previous
            else:
                block.next = other.next
            block.bytes += other.bytes
        if block.previous is not None:
            block.previous.next = block
        if block.next is not None:
            block.next.previous = block

    def _end_free(self, block: Block) -> None:
        self.active_bytes -= block.bytes
        self.requested_bytes -= block.requested
        self._join(block)
        block.pool.add(block)

    def _end_frees(self) -> None:
        done = [block for block, streams in self._pending if not streams]
        self._pending = [(block, streams) for block, streams in self._pending if streams]
        for block in done:
            block.used_by.clear()
            self._end_free(block)

    def _release(self, block: Block) -> None:
        block.pool.remove(block)
        self.reserved_bytes -= block.bytes

    def _collect_garbage(self) -> None:
        """Above the threshold: release large segments that are free, first those that have waited longest."""
        if self.limit is None or not self.threshold:
            return
        pool, excess = self._shared.large, self.reserved_bytes - self.threshold * self.limit
        waiting = {
            block: pool.searches - block.freed_at
            for _, block in pool.free
            if block.alone and not block.expandable
        }
        while excess > 0 and waiting:
            mean = sum(waiting.values()) / len(waiting)
            for block in [block for block, searches in waiting.items() if searches >= mean]:
                self._release(block)
                excess -= block.bytes
                del waiting[block]

    def _release_oversized(self, pool: Pool, stream: int, size: int) -> bool:
        """With ``max_split_bytes``: release the smallest such block with enough bytes, or the largest."""
        if self.max_split_bytes is None:
            return False
        wanted, most = max(size, self.max_split_bytes), self.max_split_bytes
        large = [b for _, b in pool.free if b.stream == stream and b.bytes >= most and not b.expandable]
        enough = [block for block in large if block.bytes >= wanted][:1]
        released = 0
        for block in enough or reversed(large):
            if released < wanted:
                released += block.bytes
                self._release(block)
        return released >= wanted
