"""Bytes, times, shares, counts and modules as people read them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import floor, log10


def seconds_text(seconds: float) -> str:
    """Seconds with three figures; less than a microsecond is nothing.

    >>> seconds_text(1.234), seconds_text(0.0123), seconds_text(0.9999), seconds_text(83), seconds_text(7500)
    ('1.23 s', '12.3 ms', '1 s', '1 min 23 s', '2 h 05 min')
    """
    size = abs(seconds)
    if size < 1e-6:
        return "0 ms"
    if size >= 59.95:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min {rest:02} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"
    return f"{seconds:.3g} s" if size >= 0.9995 else f"{seconds * 1e3:.3g} ms"


def seconds_texts(*seconds: float) -> tuple[str, ...]:
    """Seconds that are compared, in one unit and with as many decimals: the least has three figures.

    >>> seconds_texts(0.868, 1.001), seconds_texts(12.04, 9.5), seconds_texts(0.99996, 1.5)
    (('868 ms', '1,001 ms'), ('12.04 s', '9.50 s'), ('1.00 s', '1.50 s'))
    """
    least = min(seconds)
    if not 1e-6 <= least < 59.95:
        return tuple(map(seconds_text, seconds))
    unit, size = ("s", 1.0) if least >= 0.9995 else ("ms", 1e-3)
    decimals = max(0, 2 - floor(log10(float(f"{least / size:.3g}"))))
    return tuple(f"{one / size:,.{decimals}f} {unit}" for one in seconds)


def added_text(seconds: float) -> str:
    """Seconds that are added to others, with their sign.

    >>> added_text(0.0123), added_text(-0.0028)
    ('+ 12.3 ms', '- 2.8 ms')
    """
    return f"{'-' if seconds < 0 else '+'} {seconds_text(abs(seconds))}"


def percent_text(share: float) -> str:
    """A signed share of something as percent.

    >>> percent_text(0.0423), percent_text(-0.5)
    ('+4.2 %', '-50.0 %')
    """
    return f"{share * 100:+.1f} %"


def count_text(count: int, one: str, several: str = "") -> str:
    """A number of things.

    Args:
        count: how many.
        one, several: the name of one of them, and of several; empty where that takes an s.

    >>> count_text(1, "micro-batch", "micro-batches"), count_text(1200, "step")
    ('1 micro-batch', '1,200 steps')
    """
    return f"{count:,} {one if count == 1 else several or f'{one}s'}"


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


NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
"""A part of a module's name that is a number: its place in a list."""


def module_in_words(module: str) -> str:
    """A module in words. What no submodule runs, a loss outside among it, is the model itself."""
    return f"module {module!r}" if module else "the model itself"


def outward(module: str) -> Iterator[str]:
    """A module's name, and those around it.

    >>> list(outward("blocks.5.mlp"))
    ['blocks.5.mlp', 'blocks.5', 'blocks']
    """
    while module:
        yield module
        module = module.rpartition(".")[0]


def by_members(module: str) -> tuple[str, tuple[int, ...]]:
    """A module's name with ``#`` for the members of lists that it lies in, and their numbers. A last number
    counts only where it is the only one: ``mlp.0`` and ``mlp.2`` of a layer are two things.

    >>> by_members("stages.1.blocks.5.mlp.2")
    ('stages.#.blocks.#.mlp.2', (1, 5))
    """
    found = list(NUMBER.finditer(module))
    found = found[:1] + [match for match in found[1:] if match.end() < len(module)]
    kind = module
    for match in reversed(found):
        kind = kind[: match.start()] + "#" + kind[match.end() :]
    return kind, tuple(int(match.group()) for match in found)
