"""What a meter reads, whatever it reads it from."""

from __future__ import annotations

from dataclasses import dataclass

Moments = tuple[tuple[float, int], ...]
"""(seconds since the start, bytes live on top of the start) after every allocation and free, in order."""


@dataclass(frozen=True, slots=True)
class Reading:
    """Bytes since a register was opened.

    Attributes:
        peak_bytes: most bytes live, above those at the start.
        live_bytes: bytes live now, above those at the start.
        start_bytes: bytes that were live at the start, where they are known.
        reserved_bytes: on CUDA the most that the allocator held of the device, else ``None``.
        timeline: where it was asked for, and the register is closed.
    """

    peak_bytes: int
    live_bytes: int
    start_bytes: int | None = None
    reserved_bytes: int | None = None
    timeline: Moments = ()
