"""The host tier: one slab of main memory, page-locked where there is a GPU to lock it for.

`host_bytes` gives such memory to the byte, `reserve` the blocks of a file.
"""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Event, Tensor

from lowtide import accelerator
from lowtide.budget import format_bytes
from lowtide.extensions.moves.store.lanes import Queued, StreamLane, Transfer
from lowtide.extensions.moves.store.slab import Lease
from lowtide.extensions.moves.store.tier import StoreError, Tier
from lowtide.meter import free_main_memory


def host_bytes(count: int, pin: torch.device | None = None) -> Tensor:
    """``count`` zeroed bytes of main memory, page-aligned, as a tensor; they go with the last tensor on them.

    PyTorch's own pinned allocator rounds up to a power of two; this does not.

    Args:
        count: bytes, at least 1.
        pin: page-lock them for this device, so that transfers run beside computing.

    Raises:
        MemoryError: there is no room, or CUDA refuses to page-lock them.

    >>> host_bytes(3)
    tensor([0, 0, 0], dtype=torch.uint8)
    """
    # Memory of this process alone, but for locked pages: after a fork (of data loaders, say) a write to a
    # private page would move it away from the one that the device copies from.
    kind = mmap.MAP_PRIVATE if pin is None else mmap.MAP_SHARED
    check_free(count)
    try:
        memory = _Mapping(-1, count, flags=kind | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError, OverflowError) as error:
        raise MemoryError(str(error)) from error
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    if pin is not None:
        memory.lock(tensor.data_ptr(), count, pin)
    return tensor


class _Mapping(mmap.mmap):
    """A mapping that unlocks its pages in its finalizer: a callback of a weak reference would run after the
    pages are unmapped.
    """

    _unlock: Any = None

    def lock(self, address: int, count: int, device: torch.device) -> None:
        self._unlock = accelerator.lock_pages(address, count, device)

    def __del__(self) -> None:
        if self._unlock is not None and not sys.is_finalizing():  # else the system unlocks
            self._unlock()


def check_free(count: int) -> None:
    """Check that so many bytes of main memory are free.

    Raises:
        MemoryError: they are not.
    """
    free = free_main_memory()
    if free is not None and count > free:
        raise MemoryError(f"{format_bytes(free)} of main memory are free")


def reserve(handle: int, size: int) -> None:
    """Make a file's blocks reach to ``size``, so that a full disk is known now.

    Raises:
        OSError: there is no room.
    """
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(handle, 0, size)
    else:
        os.ftruncate(handle, size)


class Host(Tier):
    """Bytes in main memory.

    The slab is as large as the layout says, to the page. On a GPU each direction has a stream: a copy out
    waits for what computes the value, a copy in for the copy out and for earlier uses of its destination's
    memory. On a CPU the tier's two threads fill the same leases.

    Args:
        device: whose bytes are kept.
    """

    name = "host"

    def __init__(self, device: torch.device | str = "cpu") -> None:
        super().__init__(512, device)
        found = self.streams
        self._ways = (StreamLane(found), StreamLane(found)) if found is not None else None
        self._slabs: list[tuple[int, Tensor]] = []

    def _grow(self, end: int) -> None:
        begin = self.counts.slab_bytes
        try:
            self._slabs.append((begin, host_bytes(end - begin, self.device if self.streams else None)))
        except MemoryError as error:
            raise StoreError(
                f"the host has no room for {end - begin:,} bytes more of saved values ({error}): use a "
                "larger budget, a codec, or the disk tier"
            ) from error

    def _pairs(self, start: int, data: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Pieces of the slab, which grows by pieces, with the pieces of ``data`` that belong there."""
        for begin, slab in self._slabs:
            first, last = max(start, begin), min(start + data.numel(), begin + slab.numel())
            if first < last:
                yield slab[first - begin : last - begin], data[first - start : last - start]

    def write(self, data: Tensor, lease: Lease, at: int = 0) -> Transfer:
        """Start copying out."""
        if self._ways is None:
            return super().write(data, lease, at)
        # a read holds its lease, so this copy comes after all reads of what was here before
        lease.writing = self._ways[0].copy(self._pairs(lease.start + at, data), data)
        self.counts.written_bytes += data.numel()
        return lease.writing

    def read(self, lease: Lease, out: Tensor, at: int = 0) -> Transfer:
        """Start copying in."""
        if self._ways is None:
            return super().read(lease, out, at)
        pairs = ((part, view) for view, part in self._pairs(lease.start + at, out))
        lane, written = self._ways[1], lease.writing
        after = [lane.streams.mark(lane.streams.current())]
        after += [written.event] if isinstance(written, Queued) else []
        reading = lane.copy(pairs, (out, lease), after)
        self.counts.read_bytes += out.numel()
        return reading

    def _write(self, data: Tensor, start: int, ready: Event | None) -> None:
        for view, part in self._pairs(start, data):
            view.copy_(part)

    def _read(self, out: Tensor, start: int, ready: Event | None) -> None:
        for view, part in self._pairs(start, out):
            part.copy_(view)

    def _drop(self) -> None:
        for lane in self._ways or ():
            lane.close()
        self._slabs.clear()

    def _explain(self, what: str, error: BaseException) -> StoreError:
        return StoreError(
            f"lowtide could not {what} a saved value in host memory ({type(error).__name__}: {error}): clear "
            "the gradients and run the step again"
        )
