"""Bytes as people read them."""

from __future__ import annotations

SIZES = {f"{letter}iB": 1024**power for power, letter in enumerate("KMGTP", 1)}
"""Units in powers of 1024, the smallest first."""


def format_bytes(count: int | float) -> str:
    """Bytes as people read them, in powers of 1024: ``"512 B"``, ``"1.5 KiB"``, ``"600 MiB"``, ``"5.37
    GiB"``.
    """
    if abs(count) < 1024:
        return f"{count:.0f} B"
    unit = next((unit for unit, size in SIZES.items() if abs(count) < 999.5 * size), "PiB")
    value = count / SIZES[unit]
    digits = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    shown = f"{value:.{digits}f}"
    return f"{shown.rstrip('0').rstrip('.') if digits else shown} {unit}"
