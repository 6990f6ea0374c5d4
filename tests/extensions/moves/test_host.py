"""Page-locked main memory: exact in size, zeroed, and unlocked while it is still mapped. CUDA's runtime is
stood in for.
"""

from __future__ import annotations

import gc
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from lazy_streams import LazyStreams, on_streams

from lowtide.extensions.moves.store.host import Host, host_bytes
from lowtide.extensions.moves.store.tier import StoreError
from lowtide.optim.pool import MemoryPool

GPU = torch.device("cuda:0")
needs_maps = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="reads the process's mappings")


def mapped(address: int) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, stop = (int(edge, 16) for edge in line.split()[0].split("-"))
        if start <= address < stop:
            return True
    return False


class Runtime:
    """Registers like CUDA's runtime, and says whether memory was there when it was unregistered."""

    def __init__(self, code: int = 0) -> None:
        self.code = code
        self.registered: dict[int, int] = {}
        self.there: list[bool] = []

    def cudaHostRegister(self, address: int, count: int, flags: int) -> int:
        self.registered[address] = count
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        self.there.append(mapped(address))
        del self.registered[address]
        return 0


@needs_maps
def test_memory_is_unlocked_with_its_last_view_and_before_it_is_unmapped() -> None:
    runtime = Runtime()
    with patch.object(torch.cuda, "cudart", lambda: runtime):
        memory = host_bytes(5000, GPU)
        address = memory.data_ptr()
        assert runtime.registered == {address: 5000} and memory.eq(0).all()
        view = memory[100:200].view(torch.float32)
        del memory
        gc.collect()
        assert runtime.registered
        view.fill_(2.0)
        del view
        gc.collect()
    assert runtime.there == [True] and not mapped(address)


@needs_maps
def test_the_optimizers_pool_and_the_stores_lock_the_same_way() -> None:
    runtime = Runtime()
    with patch.object(torch.cuda, "cudart", lambda: runtime):
        pinned = MemoryPool(pin=GPU)
        made = pinned.zeros([(1000, torch.float32), (0, torch.float32), (7, torch.bfloat16)])
        assert sorted(runtime.registered.values()) == [14, 4000] and [t.numel() for t in made] == [1000, 0, 7]
        assert pinned.used_bytes == 4014
        del made
        host = on_streams(Host, LazyStreams())
        slot = host.take(8192)
        assert sorted(runtime.registered.values()) == [8192]
        del slot
        host.close()
        gc.collect()
    assert runtime.there == [True] * 3


def test_a_refusal_says_what_to_do() -> None:
    with patch.object(torch.cuda, "cudart", lambda: Runtime(code=2)):
        host = on_streams(Host, LazyStreams())
        with pytest.raises(StoreError, match=r"no room for 8,192 bytes.*error 2.*ulimit -l.*disk tier"):
            host.take(8192)


@needs_maps
def test_only_locked_memory_is_shared_with_forks() -> None:
    """A fork must not move the pages that the device copies from; all else is this process's alone."""
    with patch.object(torch.cuda, "cudart", Runtime):
        for pin, kind in ((GPU, "s"), (None, "p")):
            memory = host_bytes(4096, pin)
            rows = [row.split() for row in Path("/proc/self/maps").read_text().splitlines()]
            spans = [([int(edge, 16) for edge in row[0].split("-")], row[1]) for row in rows]
            (found,) = [how for (start, stop), how in spans if start <= memory.data_ptr() < stop]
            assert found.endswith(kind)
            del memory
