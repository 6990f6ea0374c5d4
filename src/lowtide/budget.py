"""Budgets: ``"6GiB"``, ``"60%"``, ``"min"`` and ``"auto"`` become bytes, bytes become text."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable
from fractions import Fraction
from typing import Any, NamedTuple

from .errors import BudgetError
from .words import SIZES, format_bytes

SLACK_SHARE = 1e-3
"""Share of a budget, at most `SLACK_BYTES`, that plans leave free for scalars that a trace does not show."""

SLACK_BYTES = 1 << 16

RESERVE_SHARE = 0.1
"""Share of a device's memory, at least `RESERVE_BYTES`, that ``"auto"`` leaves free for fragmentation and for
what is not a tensor.
"""

RESERVE_BYTES = 256 << 20

_UNITLESS = 100
"""A bare number up to this is a share or a size whose unit was forgotten: no step takes so few bytes."""

_UNITS = {"": 1, "b": 1, "byte": 1, "bytes": 1, **{unit.lower(): size for unit, size in SIZES.items()}}
_UNITS |= {f"{letter}b": 1000**power for power, letter in enumerate("kmgtp", 1)}
_FORMS = (
    "write bytes as a whole number (629145600), a size with a unit ('600MiB', '6GiB' are powers of "
    "1024; '1.5GB', '600MB' powers of 1000), a share of the plain step's peak ('60%'), 'min' for the "
    "smallest budget that works, or 'auto' for the device's free memory less a tenth"
)
_NUMBER = re.compile(r"([0-9]+(?:_[0-9]+)*(?:\.[0-9]*)?|\.[0-9]+)\s*(%|[a-zA-Z]*)")


def parse(text: str | int | float, plain_peak_bytes: int | None = None) -> int:
    """A budget in bytes, rounded down.

    Args:
        text: a number of bytes, a size with a unit (``"600MiB"``, ``"1.5GB"``; case does not matter), or a
            percentage above 0.
        plain_peak_bytes: the plain step's peak, which a percentage is of.

    Raises:
        BudgetError: when it is none of these, is not above zero, or is a percentage and the plain peak is not
            known.
    """
    if isinstance(text, bool) or not isinstance(text, str | int | float):
        raise BudgetError(f"a budget cannot be {text!r}: {_FORMS}")
    if isinstance(text, str):
        found = _NUMBER.fullmatch(text.strip())
        if found is None:
            if asks_for(text):
                raise BudgetError(f"the budget {text!r} is not known before the step is: {_FORMS}")
            raise BudgetError(f"the budget {text!r} is not understood: {_FORMS}")
        number, unit = Fraction(found[1].replace("_", "").rstrip(".")), found[2].lower()
    else:  # infinity and NaN are no whole numbers, either
        number, unit = Fraction(text if math.isfinite(text) else 0.5), "b"
    if unit == "%" and plain_peak_bytes is None:
        raise BudgetError(
            f"the budget {text!r} is a share of the plain step's peak, which is not known here: give "
            "bytes, such as '600MiB'"
        )
    if unit != "%" and unit not in _UNITS:
        raise BudgetError(f"the budget {text!r} has the unknown unit {unit!r}: {_FORMS}")
    if _UNITS.get(unit) == 1 and number.denominator != 1:
        raise BudgetError(f"the budget {text!r} is not a whole number of bytes: {_FORMS}")
    if unit == "" and 0 < number <= _UNITLESS:
        raise _without_unit(text, number)
    value = int(number * (Fraction(plain_peak_bytes or 0, 100) if unit == "%" else _UNITS[unit]))
    if value <= 0:
        raise BudgetError(f"the budget {text!r} is {value} bytes; a budget has to be above zero: {_FORMS}")
    return value


def check(budget: str | int | float) -> None:
    """Check how the budget of a training step is written.

    Raises:
        BudgetError: it is malformed, or a bare number of so few bytes that its unit was forgotten.

    Example:
        >>> check("600MiB"), check("min"), check(629145600)
        (None, None, None)
    """
    if asks_for(budget):
        return
    bare = not isinstance(budget, str | bool) or (isinstance(budget, str) and budget.strip()[-1:].isdigit())
    if bare and isinstance(budget, float) and 0 < budget < 1:
        raise BudgetError(
            f"the budget {budget!r} is no number of bytes: did you mean '{budget:.0%}'? Else {_FORMS}"
        )
    found = parse(budget, 1 << 60)
    if bare and found <= _UNITLESS:
        raise _without_unit(budget, Fraction(found))


def _without_unit(given: Any, number: Fraction) -> BudgetError:
    """A share or a size whose unit was forgotten."""
    meant = f"{float(number):g}"
    return BudgetError(
        f"the budget {given!r} has no unit, and no step fits into so few bytes: did you mean '{meant}%' or "
        f"'{meant}GiB'? Else {_FORMS}"
    )


def asks_for(budget: object) -> str:
    """``"min"`` or ``"auto"`` where the budget is that word, else the empty string.

    >>> asks_for(" Min "), asks_for("60%")
    ('min', '')
    """
    word = budget.strip().lower() if isinstance(budget, str) else ""
    return word if word in ("min", "auto") else ""


class Asked(NamedTuple):
    """A budget, as one of its forms: bytes, a share, or a word.

    Attributes:
        given: as it was written; ``None`` for none.
        fixed_bytes: where it is given in bytes.
        share: of a plain step's peak; 0 where it is none.
        word: ``"min"`` or ``"auto"``, or empty.
    """

    given: str | int | None = None
    fixed_bytes: int | None = None
    share: float = 0.0
    word: str = ""

    @classmethod
    def of(cls, budget: str | int | None) -> Asked:
        """A budget that is well written.

        >>> Asked.of("60%"), Asked.of("2KiB").fixed_bytes
        (Asked(given='60%', fixed_bytes=None, share=0.6, word=''), 2048)
        """
        return cls(budget, fixed_bytes(budget), share_of(budget), asks_for(budget))


def fixed_bytes(budget: str | int | None) -> int | None:
    """A budget that is given in bytes; ``None`` where it depends on what steps take, or on the device."""
    if budget is None or asks_for(budget) or is_share(budget):
        return None
    return parse(budget)


def share_of(budget: object) -> float:
    """What share of a plain step's peak a budget is; 0 where it is none.

    >>> share_of("60%"), share_of("6GiB")
    (0.6, 0.0)
    """
    return float(str(budget).strip().rstrip("%")) / 100 if is_share(budget) else 0.0


def is_share(budget: object) -> bool:
    """Whether a budget is a percentage of the plain step's peak.

    >>> is_share("60%"), is_share("60 MB")
    (True, False)
    """
    return isinstance(budget, str) and budget.strip().endswith("%")


def one_for_all(budget: str | int | float | None, planned: Iterable[int | None]) -> int | None:
    """The one budget of steps of several kinds, in bytes: of a share or a word the most that any was
    ``planned`` for; ``None`` where that is not known yet.

    >>> one_for_all("2KiB", []), one_for_all("60%", [600, 700]), one_for_all("min", [])
    (2048, 700, None)
    """
    if budget is None or asks_for(budget) or is_share(budget):
        return max((count for count in planned if count), default=None)
    return parse(budget)


def resolve(
    budget: str | int | float,
    plain_peak_bytes: int | None = None,
    smallest_bytes: int | Callable[[], int] | None = None,
    device: Any = "cpu",
    *,
    resident_bytes: int = 0,
) -> int:
    """A budget in bytes, ``"min"`` and ``"auto"`` included.

    Args:
        budget: what `parse` takes, ``"min"`` (the smallest that works), or ``"auto"`` (what the device has,
            less a reserve).
        plain_peak_bytes: the plain step's peak, which a percentage is of.
        smallest_bytes: the smallest peak of any plan, or what finds it; called for ``"min"`` alone, since
            that may take a search.
        device: whose memory ``"auto"`` is about.
        resident_bytes: of what the budget counts, what is resident already; ``"auto"`` adds it to what is
            free.

    Raises:
        BudgetError: the budget is malformed, or what it is a share of is not known.

    Example:
        >>> resolve("60%", 1000), resolve("min", 1_000_000, lambda: 400_000)
        (600, 400401)
    """
    asked = asks_for(budget)
    if asked == "auto":
        return auto_bytes(available_bytes(device, resident_bytes), str(device))
    if asked == "min":
        if smallest_bytes is None:
            raise BudgetError(
                "the budget 'min' is the smallest that works, which is not known here: give bytes, such as "
                "'600MiB'"
            )
        return with_slack(smallest_bytes() if callable(smallest_bytes) else smallest_bytes)
    return parse(budget, plain_peak_bytes)


def slack_bytes(limit: int | None) -> int:
    """What a plan leaves of a budget of ``limit`` bytes for what no trace shows."""
    return 0 if limit is None else math.ceil(min(limit * SLACK_SHARE, SLACK_BYTES))


def would_reserve(default: int, expandable: int) -> str:
    """What PyTorch's allocator would reserve by default and with expandable segments, in words.

    >>> would_reserve(6 << 30, 5 << 30)
    "PyTorch's allocator would reserve 6 GiB for its steps, 5 GiB with \
PYTORCH_ALLOC_CONF=expandable_segments:True"
    """
    return (
        f"PyTorch's allocator would reserve {format_bytes(default)} for its steps, "
        f"{format_bytes(expandable)} with PYTORCH_ALLOC_CONF=expandable_segments:True"
    )


def with_slack(peak_bytes: float) -> int:
    """The smallest budget for a plan of this peak: plans leave `slack_bytes` of it free."""
    return math.ceil(min(peak_bytes / (1 - SLACK_SHARE), peak_bytes + SLACK_BYTES))


def auto_bytes(available_bytes: int | None, device: str = "cpu") -> int:
    """What ``"auto"`` takes of the bytes that a device has: all but a tenth of them, and but 256 MiB.

    Raises:
        BudgetError: the system does not say what is there, or it is less than the reserve.

    >>> auto_bytes(10 << 30) == 9 << 30
    True
    """
    if available_bytes is None:
        raise BudgetError(
            f"the budget 'auto' needs the free memory of {device!r}, which the system does not report: "
            "give bytes, such as '6GiB'"
        )
    reserve = max(int(available_bytes * RESERVE_SHARE), RESERVE_BYTES)
    if available_bytes <= reserve:
        raise BudgetError(
            f"the budget 'auto' leaves {format_bytes(reserve)} of {device!r} free, and only "
            f"{format_bytes(available_bytes)} are free: free memory, or give bytes"
        )
    return available_bytes - reserve


def available_bytes(device: Any = "cpu", resident_bytes: int = 0) -> int | None:
    """What a step can have of a device's memory; ``None`` where the system does not say.

    What is free, and ``resident_bytes``, which the step counts and which are allocated already. On CUDA free
    is what the device has left and what PyTorch's allocator has reserved without a tensor in it: tensors
    beside the model (another model, a cache) stay where they are. On a CPU it is available main memory within
    the limits of the process's control group, in equal parts where several ranks run on the machine.
    """
    import torch  # here, since `lowtide --help` and the closed forms do without

    place = torch.device(device)
    from lowtide import accelerator

    if accelerator.is_accelerator(place):
        return accelerator.free_bytes(place) + accelerator.unused_bytes(place) + resident_bytes
    from lowtide.meter import free_main_memory  # imports torch

    free = free_main_memory()
    return None if free is None else free // _ranks_here() + resident_bytes


def _ranks_here() -> int:
    """How many ranks share this machine's main memory: those that a launcher says it has started here, else
    all of the process group.
    """
    from torch import distributed

    if not (distributed.is_available() and distributed.is_initialized()):
        return 1
    here = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(here) if here.isdigit() and int(here) else distributed.get_world_size()
