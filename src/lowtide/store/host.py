"""The host tier: one slab of main memory, pinned where there is a GPU to pin it for."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from lowtide.store.pinned import host_bytes
from lowtide.store.tier import Fault, Slot, StoreError, Tier, Transfer


class Host(Tier):
    """Bytes in main memory.

    The slab is as large as the layout says, to the page: the caching pinned allocator would round it up to a
    power of two. On a GPU, copies run on a stream of their own, ordered by events in both directions: a copy
    out waits for what computes the value, a copy in waits for the copy out and for whoever used its
    destination's memory before, and `Transfer.wait` makes the current stream, not the program, wait. On a CPU
    the same slots are filled by the tier's two threads.

    Args:
        device: whose bytes are kept.
        fault: for tests.
    """

    name = "host"

    def __init__(self, device: torch.device | str = "cpu", fault: Fault | None = None) -> None:
        super().__init__(512, fault)
        self.device = torch.device(device)
        self._slabs: list[tuple[int, torch.Tensor]] = []
        self._stream = (
            torch.get_device_module(self.device.type).Stream(self.device)
            if self.device.type != "cpu"
            else None
        )

    def _grow(self, end: int) -> None:
        begin = self.counts.slab_bytes
        try:
            slab = host_bytes(end - begin, pin=self.device.type == "cuda")
        except (OSError, ValueError, MemoryError, OverflowError) as error:
            raise StoreError(
                f"the host has no room for {end - begin:,} bytes more of saved values "
                f"({type(error).__name__}: {error}): use a larger budget, a codec, or the disk tier"
            ) from error
        self._slabs.append((begin, slab))

    def _view(self, start: int, count: int) -> torch.Tensor:
        """Bytes of the slab; it grows by pieces, and a region that spans two is put together by the caller's
        parts.
        """
        for begin, tensor in reversed(self._slabs):
            if begin <= start:
                return tensor[start - begin : start - begin + count]
        raise StoreError("a slot lies outside its slab: please report this")

    def _parts(self, start: int, data: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Pieces of the slab with the pieces of ``data`` that belong there."""
        pairs = []
        at = 0
        while at < data.numel():
            view = self._view(start + at, data.numel() - at)
            pairs.append((view, data[at : at + view.numel()]))
            at += view.numel()
        return pairs

    def write(self, data: torch.Tensor, slot: Slot, at: int = 0) -> Transfer:
        """Start copying out."""
        if self._stream is None:
            return super().write(data, slot, at)
        if self.fault is not None:
            self.fault("write", data.numel())
        assert slot.region is not None
        self._stream.wait_stream(self._current())
        with self._on_stream():
            for view, part in self._parts(slot.region.start + at, data):
                view.copy_(part, non_blocking=True)
        slot.writing = _Queued(self, data)
        self.counts.written_bytes += data.numel()
        self.counts.writes += 1
        return slot.writing

    def read(self, slot: Slot, out: torch.Tensor, at: int = 0) -> Transfer:
        """Start copying in."""
        if self._stream is None:
            return super().read(slot, out, at)
        if self.fault is not None:
            self.fault("read", out.numel())
        assert slot.region is not None
        self._stream.wait_stream(self._current())
        with self._on_stream():
            for view, part in self._parts(slot.region.start + at, out):
                part.copy_(view, non_blocking=True)
        self.counts.read_bytes += out.numel()
        self.counts.reads += 1
        return _Queued(self, out)

    def _current(self) -> torch.Stream:
        return torch.get_device_module(self.device.type).current_stream(self.device)

    def _on_stream(self) -> AbstractContextManager[object]:
        return torch.get_device_module(self.device.type).stream(self._stream)

    def _write(self, data: torch.Tensor, start: int) -> None:
        for view, part in self._parts(start, data):
            view.copy_(part)

    def _read(self, start: int, out: torch.Tensor) -> None:
        for view, part in self._parts(start, out):
            part.copy_(view)

    def _drop(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()
        self._slabs.clear()

    def _explain(self, what: str, error: BaseException) -> StoreError:
        return StoreError(
            f"lowtide could not {what} a saved value in host memory ({type(error).__name__}: {error}): clear "
            "the gradients and run the step again"
        )


class _Queued(Transfer):
    """A copy on the tier's stream.

    It holds the tensor until somebody has waited for the copy, and if nobody does, the stream that the tensor
    came from waits before its memory is free. With `torch.Tensor.record_stream` instead, the allocator would
    give the memory out again only once it finds the tier's stream past everything that was queued by then, so
    that the device's memory grew with how far the program runs ahead.
    """

    def __init__(self, tier: Host, tensor: torch.Tensor) -> None:
        super().__init__(tensor.numel())
        self._tier = tier
        self._from = tier._current()
        self._event = torch.get_device_module(tier.device.type).Event()
        self._event.record(tier._stream)
        self._tensor: torch.Tensor | None = tensor

    @property
    def done(self) -> bool:
        """Whether the copy has run."""
        return self._event.query()

    def wait(self) -> None:
        """Let the current stream go on only after the copy."""
        current = self._tier._current()
        current.wait_event(self._event)
        self._let_go(waited=current == self._from)

    def _let_go(self, waited: bool) -> None:
        if self._tensor is not None and not waited:
            self._from.wait_event(self._event)
        self._tensor = None

    def __del__(self) -> None:
        if "_tensor" in self.__dict__:
            self._let_go(waited=False)
