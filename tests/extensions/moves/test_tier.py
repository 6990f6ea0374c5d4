"""Tiers: what goes in comes out, whatever the order and the delays; failures are said and leave nothing."""

from __future__ import annotations

import errno
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from faults import before_each

from lowtide import meter
from lowtide.extensions.moves.store.disk import BUFFER_BYTES, Disk
from lowtide.extensions.moves.store.host import Host
from lowtide.extensions.moves.store.slab import Arena, Lease
from lowtide.extensions.moves.store.tier import StoreError, Tier

Make = Callable[..., Tier]


@pytest.fixture(params=["disk", "host"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    made: list[Tier] = []

    def build(**options: object) -> Tier:
        made.append(Disk(tmp_path, **options) if request.param == "disk" else Host(**options))  # type: ignore
        return made[-1]

    yield build  # type: ignore[misc]
    for tier in made:
        tier.close()


def noise(count: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def test_what_goes_in_comes_out_under_random_delays(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    source = random.Random(1)
    before_each(monkeypatch, lambda _: time.sleep(source.random() * 0.003))
    tier = make()
    sizes = [1, 4095, 4096, 4097, 100_000, BUFFER_BYTES + 5]
    expected = {}
    slots = {}
    for turn in range(60):
        size = sizes[turn % len(sizes)]
        data = noise(size, turn)
        slots[turn] = tier.take(size)
        expected[turn] = data.clone()
        writing = tier.write(data, slots[turn])
        if source.random() < 0.3:
            writing.wait()
            data.zero_()  # after the transfer the source may go
        if source.random() < 0.6 and expected:
            which = source.choice(sorted(expected))
            out = torch.empty(expected[which].numel(), dtype=torch.uint8)
            tier.read(slots[which], out).wait()  # at once after its write: ordered
            assert torch.equal(out, expected.pop(which))
            del slots[which]
    reading = [(k, torch.empty(expected[k].numel(), dtype=torch.uint8)) for k in expected]
    transfers = [tier.read(slots[k], out) for k, out in reading]
    for transfer in transfers:
        transfer.wait()
    assert all(torch.equal(out, expected[k]) for k, out in reading)
    assert tier.counts.written_bytes == sum(sizes[t % len(sizes)] for t in range(60))


def test_a_static_layout_allocates_once_and_steps_reuse_it(make: Make) -> None:
    tier = make()
    sizes = [8192, 12_288, 4096]
    tier.expect([0, 8192, 20_480], sizes)
    for step in range(20):
        slots = [tier.take(size, k) for k, size in enumerate(sizes)]
        for k, slot in enumerate(slots):
            tier.write(noise(sizes[k], step), slot).wait()
        del slot, slots
    assert tier.counts.allocations == 1
    assert tier.arena.taken_bytes == 0
    assert tier.counts.slab_bytes == tier.arena.static_bytes


def test_a_second_forward_gets_places_of_its_own(make: Make) -> None:
    tier = make()
    tier.expect([0], [5000])
    one, two = tier.take(5000, 0), tier.take(5000, 0)
    a, b = noise(5000, 1), noise(5000, 2)
    tier.write(a, one)
    tier.write(b, two)
    out = torch.empty(5000, dtype=torch.uint8)
    tier.read(one, out).wait()
    assert torch.equal(out, a)
    tier.read(two, out).wait()
    assert torch.equal(out, b)


def test_no_fragmentation_after_many_steps_of_varying_sizes() -> None:
    source = random.Random(0)
    arena = Arena(64)
    most = 0
    for _ in range(200):
        taken = [arena.take(source.randint(1, 10_000)) for _ in range(source.randint(1, 40))]
        most = max(most, arena.taken_bytes)
        assert max(r.end for r in taken) == arena.taken_bytes  # packed without a hole
        source.shuffle(taken)
        while taken:
            taken.pop()
    assert arena.taken_bytes == 0
    assert arena.take(most).start == 0


def test_regions_never_meet_whatever_kinds_of_steps_take_turns() -> None:
    """Layouts change while regions of others are taken; a spare region may then lie under a static one."""
    for seed in range(200):
        source = random.Random(seed)
        arena = Arena(4)
        kinds = []
        for _ in range(4):
            offsets = [4 * source.randint(0, 20) for _ in range(source.randint(1, 6))]
            kinds.append((offsets, [source.choice([4, 8, 12, 40]) for _ in offsets]))
        sizes: list[int] = []
        taken: list[Lease] = []
        for _ in range(200):
            draw = source.random()
            if draw < 0.1 or not sizes:
                arena.expect(*(kind := source.choice(kinds)))
                sizes = kind[1]
            elif draw < 0.6:
                number = source.randrange(len(sizes))
                region = arena.take(sizes[number], number)
                assert region.end - region.start == sizes[number]
                assert all(region.end <= other.start or other.end <= region.start for other in taken)
                taken.append(region)
                del region
            elif taken:
                del taken[source.randrange(len(taken))]
            assert arena.taken_bytes == sum(region.end - region.start for region in taken)


@pytest.mark.parametrize("what", ["write", "read"])
def test_an_error_in_a_transfer_is_raised_where_it_is_awaited(
    make: Make, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    failing = {what}

    def fault(kind: str) -> None:
        if kind in failing:
            raise OSError(errno.EIO, "Input/output error")

    before_each(monkeypatch, fault)
    tier = make()
    slot = tier.take(100)
    writing = tier.write(noise(100, 0), slot)
    out = torch.empty(100, dtype=torch.uint8)
    with pytest.raises(StoreError, match=f"could not {what}.*run the step again"):
        tier.read(slot, out).wait()
    if what == "write":
        with pytest.raises(StoreError, match="could not write"):
            writing.wait()
    failing.clear()
    again = tier.take(100)
    tier.write(noise(100, 3), again)
    tier.read(again, out).wait()
    assert torch.equal(out, noise(100, 3))


def test_no_memory_on_the_host_is_said() -> None:
    host = Host()
    with pytest.raises(StoreError, match=r"the host has no room.*disk tier"):
        host.take(1 << 60)
    assert host.arena.taken_bytes == 0
    host.close()


def test_closing_waits_for_what_is_under_way_and_ends_the_threads(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = set(threading.enumerate())
    before_each(monkeypatch, lambda _: time.sleep(0.01))
    tier = make()
    writing = tier.write(noise(1000, 0), tier.take(1000))
    tier.close()
    assert writing.done
    with pytest.raises(StoreError, match="closed"):
        tier.take(10)
    assert set(threading.enumerate()) <= before


def test_transfers_go_through_buffers_that_do_not_grow(make: Make) -> None:
    for size in (BUFFER_BYTES, 8 * BUFFER_BYTES):
        tier = make()
        data, slot = noise(size, 0), tier.take(size)
        out = torch.empty(size, dtype=torch.uint8)
        assert (
            meter.measure(lambda t=tier, d=data, s=slot: t.write(d, s).wait(), timeline=False).peak_bytes == 0
        )
        assert (
            meter.measure(lambda t=tier, o=out, s=slot: t.read(s, o).wait(), timeline=False).peak_bytes == 0
        )
        assert torch.equal(data, out)
