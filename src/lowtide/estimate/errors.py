"""What is wrong with a configuration: the flag, what was given, what is allowed."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from string import ascii_letters

from lowtide.errors import LowtideError


class EstimateError(LowtideError):
    """A configuration is malformed or does not hold together; the message names the flag and what would be
    valid.
    """


def divisors(number: int, limit: int = 4096) -> str:
    """The divisors of a number as text, for messages.

    >>> divisors(12)
    '1, 2, 3, 4, 6, 12'
    """
    return ", ".join(str(d) for d in range(1, min(number, limit) + 1) if number % d == 0)


def _parts(name: str) -> tuple[str, str]:
    """The letters that a name begins with, and the rest: ``("llama", "3-8b")``."""
    rest = name.lower().lstrip(ascii_letters)
    return name.lower().removesuffix(rest), rest


def unknown(kind: str, name: str, known: Iterable[str]) -> EstimateError:
    """The error about a name that does not exist, with the nearest one that does.

    >>> str(unknown("setting", "hiden", ["hidden", "heads"]))
    "there is no setting 'hiden': did you mean 'hidden'? The settings are heads, hidden"
    """
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1)
    if near and any(map(str.isdigit, name)):
        (family, size), (meant, its) = _parts(name), _parts(near[0])
        if family != meant and size != its:
            near = []  # another model, not a slip: mixtral-8x7b is no mistral-7b
    hint = f"did you mean {near[0]!r}? The" if near else "the"
    return EstimateError(f"there is no {kind} {name!r}: {hint} {kind}s are {', '.join(names)}")
