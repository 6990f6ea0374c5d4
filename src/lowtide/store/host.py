"""The host tier: one slab of main memory, page-locked where there is a GPU to lock it for."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Event, Tensor

from lowtide.store.arena import Region
from lowtide.store.lanes import Queued, StreamLane, Transfer
from lowtide.store.memory import host_bytes
from lowtide.store.tier import StoreError, Tier


class Host(Tier):
    """Bytes in main memory.

    The slab is as large as the layout says, to the page. On a GPU each direction has a stream: a copy out
    waits for what computes the value, a copy in for the copy out and for earlier uses of its destination's
    memory. On a CPU the tier's two threads fill the same regions.

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
            self._slabs.append((begin, host_bytes(end - begin, pin=self.streams is not None)))
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

    def write(self, data: Tensor, region: Region, at: int = 0) -> Transfer:
        """Start copying out."""
        if self._ways is None:
            return super().write(data, region, at)
        # a read holds its region, so this copy comes after all reads of what was here before
        region.writing = self._ways[0].copy(self._pairs(region.start + at, data), data)
        self.counts.written_bytes += data.numel()
        return region.writing

    def read(self, region: Region, out: Tensor, at: int = 0) -> Transfer:
        """Start copying in."""
        if self._ways is None:
            return super().read(region, out, at)
        pairs = ((part, view) for view, part in self._pairs(region.start + at, out))
        lane, written = self._ways[1], region.writing
        after = [lane.streams.mark(lane.streams.current())]
        after += [written.event] if isinstance(written, Queued) else []
        reading = lane.copy(pairs, (out, region), after)
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
