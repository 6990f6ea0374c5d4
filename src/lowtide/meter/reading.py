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
        timeline: where it was asked for, and the register is closed.
    """

    peak_bytes: int
    live_bytes: int
    timeline: Moments = ()
