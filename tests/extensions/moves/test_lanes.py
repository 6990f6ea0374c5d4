"""Lanes: transfers in order, on threads and on streams; a stand-in for streams runs everything as late as
it may.
"""

from __future__ import annotations

import threading
import weakref
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from lazy_streams import LazyStreams, on_streams
from moving_net import net, same, step

import lowtide
from lowtide import policies
from lowtide.extensions.moves.store.disk import BUFFER_BYTES, Disk
from lowtide.extensions.moves.store.host import Host, host_bytes
from lowtide.extensions.moves.store.lanes import StreamLane, ThreadLane


def noise(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def test_a_thread_does_jobs_in_order_and_says_what_failed() -> None:
    lane, seen, begin = ThreadLane("test"), [], threading.Event()
    first = lane.do(lambda: begin.wait(10) and seen.append(1))
    second = lane.do(lambda: seen.append(2))
    failing = lane.do(lambda: 1 // 0)
    assert not first.done and not second.done
    begin.set()
    second.join()
    with pytest.raises(ZeroDivisionError):
        failing.wait()
    assert seen == [1, 2] and failing.done
    lane.close()
    assert not threads("test")


def test_a_lane_that_is_let_go_of_ends_its_thread() -> None:
    lane = ThreadLane("lost")
    lane.do(lambda: None).wait()
    (thread,) = threads("lost")
    del lane
    thread.join(10)
    assert not thread.is_alive()


def threads(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(f"lowtide-{name}")]


def test_what_a_copy_reads_is_held_until_somebody_waits_or_the_device_does() -> None:
    streams = LazyStreams()
    lane = StreamLane(streams)
    memory, target = noise(1000), torch.zeros(1000, dtype=torch.uint8)
    for way in ("wait", "join", "lost"):
        expected = memory.clone()
        data = memory.view(-1)
        gone = weakref.ref(data)
        transfer = lane.copy([(target, data)], data)
        del data
        assert gone() is not None and not transfer.done
        if way != "lost":
            getattr(transfer, way)()
            assert gone() is None
            assert transfer.done == (way == "wait"), "joining holds the device, not the program"
        del transfer
        assert gone() is None
        streams.compute(lambda: memory.add_(1))  # what comes to lie in its memory
        streams.synchronize()
        assert torch.equal(target, expected)
    assert streams.waits == 1


def test_a_copy_waits_for_what_computes_its_source() -> None:
    streams = LazyStreams()
    lane = StreamLane(streams)
    source, target = torch.zeros(8), torch.zeros(8)
    streams.compute(lambda: source.fill_(3))
    lane.copy([(target, source)], source).wait()
    assert target.eq(3).all()


def test_another_stream_that_joins_leaves_the_memory_to_the_one_it_came_from() -> None:
    streams = LazyStreams()
    lane = StreamLane(streams)
    memory, target = noise(100), torch.zeros(100, dtype=torch.uint8)
    expected, origin = memory.clone(), streams.running
    transfer = lane.copy([(target, memory)], memory)
    streams.running = streams.new()
    transfer.join()
    streams.running = origin
    streams.compute(lambda: memory.zero_())
    streams.synchronize()
    assert torch.equal(target, expected)


@pytest.fixture
def locked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes that would have been page-locked."""
    found: list[int] = []

    def unlocked(count: int, pin: torch.device | None = None) -> torch.Tensor:
        found.extend([count] if pin is not None else [])
        return host_bytes(count)

    for module in ("disk", "host"):
        monkeypatch.setattr(f"lowtide.extensions.moves.store.{module}.host_bytes", unlocked)
    return found


def test_the_host_tier_on_streams(locked: list[int]) -> None:
    """Values go out and come back in step after step, through the same memory, while the program never
    waits.
    """
    streams = LazyStreams()
    host = on_streams(Host, streams)
    host.expect([0, 512], [400, 600])
    assert len(streams.made) == 2, "a stream for each direction"
    memory, back = noise(600), torch.zeros(600, dtype=torch.uint8)
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    for turn in range(5):
        streams.compute(lambda turn=turn: memory.copy_(noise(600, turn)))
        slot = host.take(600, 1)
        data = memory.view(-1)
        host.write(data, slot).join()
        del data
        streams.compute(lambda: memory.zero_())  # others use it during the turn
        out = back.view(-1)
        host.read(slot, out).join()
        del out
        streams.compute(lambda turn=turn: seen.append((back.clone(), noise(600, turn))))
        del slot
    assert streams.waits == 0 and not seen
    streams.synchronize()
    assert len(seen) == 5 and all(torch.equal(a, b) for a, b in seen)
    assert host.counts.allocations == 1 and host.counts.read_bytes == host.counts.written_bytes == 3000
    assert not threads("host"), "no thread is needed"
    host.close()


def test_a_slot_is_not_written_to_while_a_lost_read_is_under_way(locked: list[int]) -> None:
    streams = LazyStreams()
    host = on_streams(Host, streams)
    first, out = host.take(100), torch.zeros(100, dtype=torch.uint8)
    one, two = noise(100, 1), noise(100, 2)
    host.write(one, first)
    reading = host.read(first, out)
    del first
    assert host.arena.taken_bytes, "the read keeps the slot"
    del reading
    second = host.take(100)
    assert second.start == 0
    host.write(two, second).wait()
    streams.synchronize()
    assert torch.equal(out, one)


def test_a_read_comes_after_the_write_that_nobody_has_waited_for(locked: list[int]) -> None:
    host = on_streams(Host, LazyStreams())
    slot, out = host.take(100), torch.zeros(100, dtype=torch.uint8)
    writing = host.write(noise(100, 1), slot)
    host.read(slot, out).wait()
    assert torch.equal(out, noise(100, 1)) and writing.done


def test_the_disk_tier_goes_through_streams_of_its_own(tmp_path: Path, locked: list[int]) -> None:
    streams = LazyStreams()
    disk = on_streams(Disk, streams, tmp_path)
    count = BUFFER_BYTES + 5000
    data, out = torch.zeros(count, dtype=torch.uint8), torch.zeros(count, dtype=torch.uint8)
    streams.compute(lambda: data.copy_(noise(count)))
    slot = disk.take(count)
    disk.write(data, slot)
    disk.read(slot, out).wait()
    assert torch.equal(out, noise(count)), "written after it was computed"
    assert locked == [BUFFER_BYTES] * 2 and len(streams.made) == 2
    disk.close()


@pytest.mark.parametrize("way", ["host", "disk"])
def test_whole_steps_over_streams(way: str, tmp_path: Path, locked: list[int]) -> None:
    """Every copy runs as late as events allow, and the gradients are the plain step's."""
    streams = LazyStreams(eager=True)
    plain, limited = net(layers=2), net(layers=2)
    policy = policies.offload(way, str(tmp_path) if way == "disk" else "", min_bytes=1, window_bytes=20_000)
    with patch("lowtide.extensions.moves.store.tier.streams_of", lambda _: streams):
        handle = lowtide.limit_memory(limited, policy=policy)
        for seed in range(3):
            assert same(step(plain, seed=seed), step(limited, seed=seed))
        assert handle.plan is not None and handle.plan.moves and streams.made and locked
        assert way == "disk" or streams.waits == 0, "the program never waits for the link"
        handle.remove()
