"""Tiers: what goes in comes out, whatever the order and the delays; failures are said and leave nothing."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lowtide import meter
from lowtide.errors import PlanError
from lowtide.store.arena import Arena, Region
from lowtide.store.disk import Disk
from lowtide.store.host import Host
from lowtide.store.tier import BUFFER_BYTES, StoreError, Tier

Make = Callable[..., Tier]


@pytest.fixture(params=["disk", "host"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    made: list[Tier] = []

    def build(**options: object) -> Tier:
        made.append(Disk(tmp_path, **options) if request.param == "disk" else Host(**options))  # type: ignore[arg-type]
        return made[-1]

    yield build  # type: ignore[misc]
    for tier in made:
        tier.close()


def noise(count: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def test_what_goes_in_comes_out_under_random_delays(make: Make) -> None:
    source = random.Random(1)
    tier = make(fault=lambda what, count: time.sleep(source.random() * 0.003))
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
            slots.pop(which).release()
    reading = [(k, torch.empty(expected[k].numel(), dtype=torch.uint8)) for k in expected]
    transfers = [tier.read(slots[k], out) for k, out in reading]
    for transfer in transfers:
        transfer.wait()
    assert all(torch.equal(out, expected[k]) for k, out in reading)
    assert tier.counts.written_bytes == sum(sizes[t % len(sizes)] for t in range(60))


def test_a_static_layout_allocates_once_and_steps_reuse_it(make: Make) -> None:
    tier = make()
    sizes = [5000, 12_000, 700]
    tier.expect([0, 1, 2], [9, 8, 7], sizes)
    for step in range(20):
        slots = [tier.take(size, k) for k, size in enumerate(sizes)]
        for k, slot in enumerate(slots):
            tier.write(noise(sizes[k], step), slot).wait()
        for slot in slots:
            slot.release()
    assert tier.counts.allocations == 1
    assert tier.arena.taken_bytes == 0
    assert tier.counts.slab_bytes == tier.arena.static_bytes == tier.counts.most_slab_bytes


def test_a_second_forward_gets_places_of_its_own(make: Make) -> None:
    tier = make()
    tier.expect([0], [1], [5000])
    one, two = tier.take(5000, 0), tier.take(5000, 0)
    a, b = noise(5000, 1), noise(5000, 2)
    tier.write(a, one)
    tier.write(b, two)
    out = torch.empty(5000, dtype=torch.uint8)
    tier.read(one, out).wait()
    assert torch.equal(out, a)
    tier.read(two, out).wait()
    assert torch.equal(out, b)


class Queue:
    """Stands for a stream: writes down what it is told."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: Queue) -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: Mark) -> None:
        self.log.append(f"{self.name} waits for copy {event.number}")

    def synchronize(self) -> None:
        self.log.append(f"the program waits for {self.name}")


class Mark:
    """Stands for an event."""

    count = 0

    def record(self, stream: Queue) -> None:
        Mark.count += 1
        self.number = Mark.count
        stream.log.append(f"{stream.name} marks copy {self.number}")

    def query(self) -> bool:
        return False


def test_copies_on_a_stream_are_ordered_both_ways_and_hold_their_tensors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The order of waits that the host tier asks of a device's streams, on stand-ins for them; memory is free
    only after a wait.
    """
    log: list[str] = []
    main, other, side = Queue("main", log), Queue("other", log), Queue("side", log)
    running = [main]
    module = SimpleNamespace(Event=Mark, current_stream=lambda _: running[0], stream=lambda _: nullcontext())
    monkeypatch.setattr(Mark, "count", 0)
    monkeypatch.setattr(torch, "get_device_module", lambda *_: module)
    host = Host()
    host._stream = side  # type: ignore[assignment]

    def watched(count: int, name: str) -> torch.Tensor:
        tensor = noise(count, 1)
        weakref.finalize(tensor, log.append, f"{name} is free")
        return tensor

    slot = host.take(1000)
    data, expected = watched(1000, "data"), noise(1000, 1)
    writing = host.write(data, slot)
    del data
    assert log == ["side waits for main", "side marks copy 1"]
    writing.wait()
    assert log[2:] == ["main waits for copy 1", "data is free"]
    out = watched(1000, "out")
    reading = host.read(slot, out)
    assert log[4:] == ["side waits for main", "side marks copy 2"]
    reading.wait()
    assert log[6:] == ["main waits for copy 2"] and torch.equal(out, expected)
    del out
    assert log[7:] == ["out is free"]
    late = watched(1000, "late")
    reading = host.read(slot, late)
    running[0] = other  # what waits is not where the memory came from: both do
    reading.wait()
    del late
    assert log[10:] == ["other waits for copy 3", "main waits for copy 3", "late is free"]
    running[0] = main
    lost = watched(1000, "lost")
    reading = host.read(slot, lost)
    del lost, reading  # a step that was given up
    assert log[15:] == ["main waits for copy 4", "lost is free"]
    host.close()
    assert log[17:] == ["the program waits for side"]


def test_no_fragmentation_after_many_steps_of_varying_sizes() -> None:
    source = random.Random(0)
    arena = Arena(64)
    most = 0
    for _ in range(200):
        taken = [arena.take(source.randint(1, 10_000)) for _ in range(source.randint(1, 40))]
        most = max(most, arena.taken_bytes)
        assert max(r.end for r in taken) == arena.taken_bytes  # packed without a hole
        source.shuffle(taken)
        for region in taken:
            arena.free(region)
    assert arena.taken_bytes == 0
    assert arena.take(most).start == 0


def test_regions_never_meet_whatever_kinds_of_steps_take_turns() -> None:
    """Layouts change while regions of others are taken; a spare region may then lie under a static one."""
    for seed in range(200):
        source = random.Random(seed)
        arena = Arena(4)
        kinds = []
        for _ in range(4):
            lower = [source.randint(0, 5) for _ in range(source.randint(1, 6))]
            kinds.append(
                (
                    lower,
                    [at + source.randint(1, 5) for at in lower],
                    [source.choice([4, 8, 12, 40]) for _ in lower],
                )
            )
        sizes: list[int] = []
        taken: list[Region] = []
        for _ in range(200):
            draw = source.random()
            if draw < 0.1 or not sizes:
                arena.expect(*(kind := source.choice(kinds)))
                sizes = kind[2]
            elif draw < 0.6:
                number = source.randrange(len(sizes))
                region = arena.take(sizes[number], number)
                assert region.end - region.start == sizes[number]
                assert all(region.end <= other.start or other.end <= region.start for other in taken)
                taken.append(region)
            elif taken:
                arena.free(taken.pop(source.randrange(len(taken))))
            assert arena.taken_bytes == sum(region.end - region.start for region in taken)


@pytest.mark.parametrize("what", ["write", "read"])
def test_an_error_in_a_transfer_is_raised_where_it_is_awaited(make: Make, what: str) -> None:
    failing = {what}

    def fault(kind: str, count: int) -> None:
        if kind in failing:
            raise OSError(errno.EIO, "Input/output error")

    tier = make(fault=fault)
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


def test_a_truncated_file_is_said(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    slot = disk.take(100_000)
    disk.write(noise(100_000, 0), slot).wait()
    os.ftruncate(disk._file, 50_000)
    with pytest.raises(StoreError, match=r"cut short.*of 100000 bytes"):
        disk.read(slot, torch.empty(100_000, dtype=torch.uint8)).wait()
    disk.close()


def test_a_full_disk_is_said_before_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    disk = Disk(tmp_path)
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StoreError, match=r"no room.*bytes are free there.*path="):
        disk.expect([0], [1], [1000])
    with pytest.raises(StoreError, match="no room"):
        disk.take(1000)
    assert disk.arena.taken_bytes == 0
    disk.close()


def test_no_memory_on_the_host_is_said() -> None:
    host = Host()
    with pytest.raises(StoreError, match=r"the host has no room.*disk tier"):
        host.take(1 << 60)
    assert host.arena.taken_bytes == 0
    host.close()


def test_folders_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"cannot hold lowtide's file.*give path=") as refused:
        Disk(tmp_path / "missing")
    assert refused.value.__cause__ is None, "the message says all that the system's error says"
    if Path("/dev/shm").is_dir():
        with pytest.raises(PlanError, match="lies in main memory"):
            Disk("/dev/shm")


def test_closing_waits_for_what_is_under_way_and_ends_the_threads(make: Make) -> None:
    tier = make(fault=lambda *_: time.sleep(0.01))
    writing = tier.write(noise(1000, 0), tier.take(1000))
    tier.close()
    assert writing.done
    with pytest.raises(StoreError, match="closed"):
        tier.take(10)
    assert not tier._writer._thread.is_alive() and not tier._reader._thread.is_alive()


def test_kill_leaves_no_file(tmp_path: Path) -> None:
    code = (
        "import sys, torch\nfrom lowtide.store.disk import Disk\nd = Disk(sys.argv[1])\ns = d.take(1 << 20)\n"
        "d.write(torch.ones(1 << 20, dtype=torch.uint8), s).wait()\nprint('ready', flush=True)\n"
        "while True: d.write(torch.ones(1 << 20, dtype=torch.uint8), s)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None and child.stdout.readline() == "ready\n"
    time.sleep(0.05)
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    assert list(tmp_path.iterdir()) == []


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
