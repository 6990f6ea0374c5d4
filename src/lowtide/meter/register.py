"""What counts bytes over a block of code, whatever the device."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import ClassVar, Literal

import torch

from lowtide.errors import MeterError

Source = Literal["allocator", "profiler", "cuda"]
LiveSource = Callable[[], int] | tuple[int, int] | tuple[torch.device, int]
"""How C++ reads the bytes that are live, above those at the start: by a Python function that says so; by a C
function, as its address and its only argument; or from a device's allocator, as the device and the requested
bytes that were live at the start."""

Moments = tuple[tuple[float, int], ...]
"""(seconds since the start, bytes live on top of the start) after every allocation and free, in order."""


class Peak:
    """Most bytes live during a block of code, above those live when it was entered; made by
    `lowtide.meter.peak`. Process-wide: every thread counts.

    Reading costs about a microsecond. Blocks may nest and overlap, each sees its own peak. After the block
    the values no longer change.

    Args:
        device: whose memory.
        with_timeline: whether to log every allocation and free.

    Attributes:
        source: what is read: the counting ``allocator`` or the ``profiler`` of main memory, or the statistics
            of CUDA's allocator, ``cuda``.
        timeline: what was logged, after the block.
    """

    source: ClassVar[Source]

    def __init__(self, device: torch.device, with_timeline: bool = False) -> None:
        self.device, self.with_timeline = device, with_timeline
        self.timeline: Moments = ()
        self._is_open = False
        self._kept: tuple[int, int] | None = None

    def __enter__(self) -> Peak:
        if self._is_open or self._kept is not None:
            raise MeterError("a peak() measures one block: make another one for the next")
        self._open()
        self._is_open = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._kept, self.timeline = self._close()

    @property
    def allocated_bytes(self) -> int | None:
        """On CUDA most bytes of the allocator's blocks so far, above those at entry, else None: what was
        requested is rounded up to whole blocks.
        """
        return None

    @property
    def reserved_bytes(self) -> int | None:
        """On CUDA the most that the allocator held of the device so far, fragments included, else None."""
        return None

    @property
    def peak_bytes(self) -> int:
        """Most bytes live so far, above those at entry."""
        return self._read()[0] if self._is_open and self._kept is None else self._now()[0]

    @property
    def live_bytes(self) -> int:
        """Bytes live now, above those at entry; negative when older ones were freed."""
        return self._now()[1]

    def live_source(self) -> LiveSource:
        """Where C++ reads `live_bytes` within the block."""
        return lambda: self.live_bytes

    def _now(self) -> tuple[int, int]:
        if self._kept is not None:
            return self._kept
        if not self._is_open:
            raise MeterError(
                "peak() counts from where its with-block is entered: write `with lowtide.meter.peak() as p: "
                "...`"
            )
        return self._read()

    def _open(self) -> None:
        """Begin to count."""
        raise NotImplementedError

    def _read(self) -> tuple[int, int]:
        """Most bytes live so far, and those live now."""
        raise NotImplementedError

    def _close(self) -> tuple[tuple[int, int], Moments]:
        """Count no longer; what `_read` says at the end, and what was logged."""
        raise NotImplementedError
