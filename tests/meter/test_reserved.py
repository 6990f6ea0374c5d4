"""The model of PyTorch's caching allocator: worked sequences, each by the rule that it shows."""

from __future__ import annotations

from typing import Any

import pytest

from lowtide.meter.reserved import CachingAllocator

MIB = 1 << 20

SEQUENCES: list[tuple[str, dict[str, Any], str, str]] = [
    ("the smallest block", {}, "a=1B", "R2 A512B"),
    ("rounding", {}, "a=1000B b=1000B c=1000B", "R2 A3072B Q3000B"),
    ("a small segment is full", {}, "a=1 b=1 c=512B", "R4 A2+512B"),
    ("a byte more than small", {}, "a=1+1B", "R20 A1+512B"),
    ("a rest of 1 MiB is not split off", {}, "a=9.5 b=9.5 c=1.5", "R40 A21.5"),
    ("segments of their own", {}, "a=10 b=10+1B", "R22 A20+512B"),
    ("a rest of half a MiB stays", {}, "a=11.5", "R12 A12"),
    ("best fit", {}, "a=30 b=24 c=40 -a -b -c d=22 e=2", "R94 A24"),
    ("a whole free block", {}, "a=24 -a b=23", "R24 A24"),
    ("free neighbours merge", {}, "a=4 b=4 c=4 -a -c d=9 -b e=8", "R20 A17"),
    ("holes do not add up", {}, "a=4 b=4 c=4 d=4 -a -c e=5", "R40 A13"),
    ("cached segments are given back", {"capacity": 64}, "a=40 -a b=50", "R50 A50 T1"),
    ("a segment in use is not", {"capacity": 64}, "a=30 b=30 -a c=20 d=16!", "R60 A50 T1"),
    ("streams do not share", {}, "a=30@1 -a b=30@2", "R60 A30"),
    ("an event is waited for", {}, "a=30 a~1 -a b=30", "R60 A30 V60"),
    ("an event that is through", {}, "a=30 a~1 -a b=30 ~1 c=30", "R60 A60"),
    ("blocks that are not split", {"max_split_bytes": 100}, "a=150 -a b=40", "R190 A40"),
    (
        "nor served to smaller ones",
        {"max_split_bytes": 100},
        "a=150 -a b=40 c=140 -c d=120",
        "R310 A160",
    ),
    ("powers of two", {"roundup_power2_divisions": 4}, "a=1200B b=5000B c=33", "R42 A40+6656B"),
    (
        "garbage",
        {"capacity": 200, "fraction": 0.5, "garbage_collection_threshold": 0.6},
        "a=40 b=30 -a -b c=50",
        "R50 A50 T0",
    ),
    ("pages", {"expandable_segments": True}, "a=30 b=12", "R60 A42"),
    ("pages are given back", {"expandable_segments": True}, "a=30 b=12 -a -b empty", "R0 A0"),
    ("a whole page in a hole", {"expandable_segments": True}, "a=30 b=30 -a empty", "R40 A30"),
    ("a hole is mapped again", {"expandable_segments": True}, "a=30 b=30 -a empty c=30", "R60 A60"),
    # of the four pages two are free: 15 MiB and three pages are too many, and no page is kept
    (
        "a mapping that fails keeps no page",
        {"expandable_segments": True, "capacity": 80},
        "a=25 c=60!",
        "R40 A25 T1",
    ),
    # 15 MiB of the card are no page
    (
        "less than a page is no memory",
        {"expandable_segments": True, "capacity": 75},
        "a=60 b=1.5!",
        "R60 A60 T1",
    ),
    # [0,30) is free behind b's end; c does not fit behind b before [0,20) is given back
    (
        "a retry gives back whole pages",
        {"expandable_segments": True, "capacity": 60},
        "a=30 b=10 -a c=40",
        "R60 A50 T1",
    ),
    (
        "of which there may be too few",
        {"expandable_segments": True, "capacity": 60},
        "a=30 b=10 -a c=45!",
        "R20 A10 T1",
    ),
    # c needs [30,60) twice: first its event is waited for, then [0,20) is given back and mapped again
    (
        "a retry waits for streams",
        {"expandable_segments": True, "capacity": 60},
        "a=30 a~1 -a b=30 c=30",
        "R60 A60 T1",
    ),
    # the hole [0,20) is mapped, which joins [20,60), and then 20 behind that
    (
        "a first hole that was mapped is given back",
        {"expandable_segments": True, "capacity": 90},
        "a=20 b=20 c=20 -a empty -b -c d=80",
        "R80 A80 T0",
    ),
    # d maps [0,20), too, but the two pages behind [0,60) fail: all is given back, and 90 fail again
    (
        "and mapped again in one piece",
        {"expandable_segments": True, "capacity": 90},
        "s=1B a=20 b=20 c=20 -a empty -b -c d=90! e=80",
        "R82 A80+512B T1",
    ),
    ("two sizes of pages", {"expandable_segments": True}, "a=1.5 b=1000B", "R22 A1.5+1024B"),
    (
        "a workspace",
        {},
        "a=40000B b=40B c=4000B w=8519680B d=40B",
        "R22 A8565248B",
    ),
    (
        "the smallest unsplit block with enough",
        {"capacity": 300, "max_split_bytes": 100},
        "a=150 b=120 -a -b c=50",
        "R200 A50 T0",
    ),
]


def size(text: str) -> int:
    """Bytes of ``10+1B``, which is 10 MiB and one byte."""
    return sum(int(part[:-1]) if part.endswith("B") else int(float(part) * MIB) for part in text.split("+"))


@pytest.mark.parametrize("row", SEQUENCES, ids=lambda row: row[0])
def test_sequence(row: tuple[str, dict[str, Any], str, str]) -> None:
    _, options, steps, end = row
    in_bytes = {key: value * MIB for key, value in options.items() if key in ("capacity", "max_split_bytes")}
    allocator = CachingAllocator(**{**options, **in_bytes})
    blocks: dict[str, Any] = {}
    for step in steps.split():
        if step == "empty":
            allocator.empty_cache()
        elif step.startswith("~"):
            allocator.complete(int(step[1:]))
        elif step.startswith("-"):
            allocator.free(blocks.pop(step[1:]))
        elif "~" in step:
            name, stream = step.split("~")
            allocator.record_stream(blocks[name], int(stream))
        else:
            name, rest = step.split("=")
            bytes, _, stream = rest.rstrip("!").partition("@")
            if rest.endswith("!"):
                with pytest.raises(MemoryError, match="do not fit"):
                    allocator.allocate(size(bytes))
            else:
                blocks[name] = allocator.allocate(size(bytes), int(stream or 0))
    for said in end.split():
        found = {
            "R": allocator.reserved_bytes,
            "A": allocator.allocated_bytes,
            "V": allocator.active_bytes,
            "Q": allocator.requested_bytes,
            "T": allocator.retries,
        }[said[0]]
        assert found == (int(said[1:]) if said[0] == "T" else size(said[1:])), said


def test_a_capture_has_pools_of_its_own() -> None:
    allocator = CachingAllocator(capacity=64 * MIB)
    allocator.free(allocator.allocate(30 * MIB))
    with allocator.private_pool() as pools:
        inside = allocator.allocate(30 * MIB)
        assert allocator.reserved_bytes == 60 * MIB
        with pytest.raises(MemoryError):  # nothing cached is given back while a graph is captured
            allocator.allocate(20 * MIB)
    allocator.free(inside)
    allocator.empty_cache()
    assert allocator.reserved_bytes == 30 * MIB
    pools.released = True
    allocator.empty_cache()
    assert allocator.reserved_bytes == 0


def test_divisions_of_their_own_for_each_power_of_two() -> None:
    allocator = CachingAllocator(roundup_power2_divisions=[8, 1, 4] + [0] * 13)
    assert allocator.round_up(MIB + 1) == MIB + MIB // 8
    assert allocator.round_up(2 * MIB + 1) == 2 * MIB + 512
    assert allocator.round_up(5 * MIB) == 5 * MIB and allocator.round_up(5 * MIB + 1) == 6 * MIB
    assert allocator.round_up(8 * MIB + 1) == 8 * MIB + 512


@pytest.mark.parametrize(
    "options",
    [
        {"fraction": 0.5},
        {"capacity": 1, "fraction": 2.0},
        {"max_split_bytes": MIB},
        {"garbage_collection_threshold": 1.0},
        {"roundup_power2_divisions": 3},
        {"roundup_power2_divisions": [4, 4]},
    ],
)
def test_what_pytorch_refuses_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="give"):
        CachingAllocator(**options)


def test_a_block_is_freed_once() -> None:
    allocator = CachingAllocator()
    block = allocator.allocate(1)
    allocator.free(block)
    with pytest.raises(ValueError, match="free a block once"):
        allocator.free(block)
    allocator.free(allocator.allocate(0))  # a null pointer, as in PyTorch
    assert allocator.allocated_bytes == 0


def segment(start: int, *blocks: tuple[int, str], **more: Any) -> dict[str, Any]:
    """A segment of a snapshot, from an address on; its blocks in MiB."""
    parts = [{"size": n * MIB, "requested_size": n * MIB, "state": state} for n, state in blocks]
    total = sum(part["size"] for part in parts)
    place = {"address": start * MIB, "total_size": total, "segment_type": "large", "stream": 0}
    return {**place, "blocks": parts, **more}


def test_it_goes_on_from_a_snapshot() -> None:
    allocator = CachingAllocator()
    blocks = [(4, "active_allocated"), (6, "inactive"), (10, "active_allocated")]
    allocator.resume([segment(7, *blocks, stream=99)])
    assert (allocator.reserved_bytes, allocator.allocated_bytes) == (20 * MIB, 14 * MIB)
    assert allocator.allocate(5 * MIB).address == 11 * MIB  # in the hole
    assert allocator.allocate(5 * MIB).address >= 27 * MIB and allocator.reserved_bytes == 40 * MIB


def test_it_goes_on_from_a_snapshot_of_expandable_segments() -> None:
    before = segment(20, (15, "active_allocated"), (5, "inactive"), is_expandable=True)
    after = segment(60, (8, "inactive"), (12, "active_allocated"), is_expandable=True)
    allocator = CachingAllocator(expandable_segments=True)
    live = allocator.resume([before, after])
    assert sorted(live) == [20 * MIB, 68 * MIB] and allocator.reserved_bytes == 40 * MIB
    over_the_hole = allocator.allocate(
        30 * MIB
    )  # 5 MiB, a page of 20 that is mapped again, and 5 of the next
    assert over_the_hole.address == 35 * MIB and allocator.reserved_bytes == 60 * MIB
    assert allocator.allocate(25 * MIB).address == 80 * MIB and allocator.reserved_bytes == 100 * MIB


def test_a_range_of_addresses_is_an_eighth_larger_than_the_card() -> None:
    """Five pages on a card of four: where 40 MiB have no addresses in a row, another range begins."""
    allocator = CachingAllocator(capacity=80 * MIB, expandable_segments=True)
    first, second, third, _ = [allocator.allocate(20 * MIB) for _ in range(4)]
    allocator.free(first)
    allocator.free(third)
    behind = allocator.allocate(40 * MIB)
    assert behind.address == first.address + 100 * MIB
    assert (allocator.reserved_bytes, allocator.retries) == (80 * MIB, 1)
    allocator.free(second)  # [0, 60) has addresses again
    allocator.free(behind)
    assert allocator.allocate(60 * MIB).address == first.address
    assert (allocator.reserved_bytes, allocator.retries) == (80 * MIB, 2)


def test_expandable_blocks_serve_nobody_while_they_are_switched_off() -> None:
    allocator = CachingAllocator(expandable_segments=True)
    block = allocator.allocate(20 * MIB)
    allocator.free(block)
    allocator.expandable_segments = False
    assert allocator.allocate(20 * MIB).address != block.address
    assert allocator.reserved_bytes == 40 * MIB
