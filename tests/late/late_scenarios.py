"""Scenarios for devices whose streams run late (`late_cuda`), by name."""

from __future__ import annotations

from collections.abc import Callable

Run = Callable[[int], None]
"""Runs a scenario that is set up once more, for a seed; it raises where a bit differs."""

SCENARIOS: dict[str, Callable[[], Run]] = {}
"""Each sets itself up, on the devices that are current then."""


def scenario(made: Callable[[], Run]) -> Callable[[], Run]:
    """Make a scenario known by its name."""
    SCENARIOS[made.__name__] = made
    return made


def check(fact: object, what: str) -> None:
    """Raise where a scenario found something wrong."""
    if not fact:
        raise AssertionError(what)
