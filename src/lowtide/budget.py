"""Budgets: ``"6GiB"`` and ``"60%"`` become bytes, and bytes become text."""

from __future__ import annotations

import math
import re
from fractions import Fraction

from .errors import BudgetError

_UNITS = {"": 1, "b": 1, "byte": 1, "bytes": 1}
_UNITS |= {f"{letter}b": 1000**power for power, letter in enumerate("kmgtp", 1)}
_UNITS |= {f"{letter}ib": 1024**power for power, letter in enumerate("kmgtp", 1)}
_FORMS = (
    "write bytes as a whole number (629145600), a size with a unit ('600MiB', '6GiB' are powers of 1024; '1.5GB', '600MB' powers of 1000), "
    "or a share of the plain step's peak ('60%')"
)
_NUMBER = re.compile(r"([0-9]+(?:_[0-9]+)*(?:\.[0-9]*)?|\.[0-9]+)\s*(%|[a-zA-Z]*)")


def parse(text: str | int | float, plain_peak_bytes: int | None = None) -> int:
    """A budget in bytes, rounded down.

    Args:
        text: a number of bytes, a size with a unit (``"600MiB"``, ``"1.5GB"``; case does not matter), or a percentage above 0.
        plain_peak_bytes: the plain step's peak, which a percentage is of.

    Raises:
        BudgetError: when it is none of these, is not above zero, or is a percentage and the plain peak is not known.
    """
    if isinstance(text, bool) or not isinstance(text, str | int | float):
        raise BudgetError(f"a budget cannot be {text!r}: {_FORMS}")
    if not isinstance(text, str):
        if not math.isfinite(text) or text != int(text):
            raise BudgetError(f"the budget {text!r} is not a whole number of bytes: {_FORMS}")
        return _positive(int(text), text)
    found = _NUMBER.fullmatch(text.strip())
    if found is None:
        raise BudgetError(f"the budget {text!r} is not understood: {_FORMS}")
    number, unit = Fraction(found[1].replace("_", "").rstrip(".")), found[2].lower()
    if unit == "%":
        if plain_peak_bytes is None:
            raise BudgetError(
                f"the budget {text!r} is a share of the plain step's peak, which is not known here: give bytes, such as '600MiB'"
            )
        return _positive(int(plain_peak_bytes * number / 100), text)
    if unit not in _UNITS:
        raise BudgetError(f"the budget {text!r} has the unknown unit {found[2]!r}: {_FORMS}")
    if unit in ("", "b", "byte", "bytes") and number.denominator != 1:
        raise BudgetError(f"the budget {text!r} is not a whole number of bytes: {_FORMS}")
    return _positive(int(number * _UNITS[unit]), text)


def _positive(value: int, text: str | int | float) -> int:
    if value <= 0:
        raise BudgetError(f"the budget {text!r} is {value} bytes; a budget has to be above zero: {_FORMS}")
    return value


def format_bytes(count: int | float) -> str:
    """Bytes as people read them, in powers of 1024: ``"512 B"``, ``"1.5 KiB"``, ``"600 MiB"``, ``"5.37 GiB"``."""
    if abs(count) < 1024:
        return f"{count:.0f} B"
    power = 1
    while power < 5 and abs(count) >= 999.5 * 1024**power:
        power += 1
    value = count / 1024**power
    digits = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    shown = f"{value:.{digits}f}"
    return f"{shown.rstrip('0').rstrip('.') if '.' in shown else shown} {'KMGTP'[power - 1]}iB"
