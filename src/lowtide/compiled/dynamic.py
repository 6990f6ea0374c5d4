"""Plan graphs that leave sizes open, and guard each plan by the largest sizes for which it holds.

A plan is made for the sizes at hand, and serves all up to the largest with which its predicted peak is within
the budget; a guard compiles anew beyond. Where sizes have grown beyond a plan, the next plan is made for
sizes a quarter larger than the old one held for: so lengths that rise step by step need few plans.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Generator

from scipy.optimize import brentq

from lowtide import budget as budgets
from lowtide.compiled.choose_cuts import Chosen, Cuts, CutSearch, Rejected
from lowtide.compiled.joint import Joint
from lowtide.compiled.lower import Size
from lowtide.errors import BudgetError
from lowtide.private import partitioning
from lowtide.private.partitioning import FreeSize, SizesAt
from lowtide.run.messages import warn

RESERVE = 1.25
"""Of the largest size that the plans before held for, what the next is made for."""

_FACTOR = 1 << 16
"""How many times larger the sizes at hand may become before their growth is taken for unlimited."""

_SPAN = 8
"""How many times larger each of two sizes may become while their product stays within one bound."""

Numbers = tuple[int, ...]

UNBOUNDED = sys.maxsize


def search_range(
    joint: Joint,
    budget: str | int,
    search_at: Callable[[Size], CutSearch],
    resident_at: Callable[[Size], int],
    held: dict[str, Numbers],
) -> CutSearch:
    """Search for the cut of a graph at the sizes at hand, and guard it where it would break the budget.

    Args:
        joint: the graph.
        budget: as of `lowtide.limit_memory`.
        search_at: searches for sizes as numbers.
        resident_at: bytes that are resident beside what the graph allocates.
        held: structure of a graph -> sizes up to which its largest plan holds; this one's is noted.

    Raises:
        BudgetError: no plan is found that fits.
    """
    free, unknown = partitioning.free_sizes(joint.module)
    if unknown:
        warn(
            f"sizes of a compiled graph depend on data ({len(unknown)} of them: "
            f"{', '.join(unknown[:3])}), and the plan assumes {partitioning.UNKNOWN_SIZE} for each: "
            "steps with larger sizes may exceed the budget. lowtide.limit_memory without torch.compile "
            "uses the real sizes"
        )
    if not free:
        return (yield from search_at(joint.size))
    before = held.get(joint.structure, ())
    if len(before) != len(free):
        before = ()
    planned, numbers = yield from _first_that_fits(free, before, search_at)

    def room(numbers: Numbers) -> int:
        size_of = _sizes_at(free, numbers)
        resident = resident_at(size_of)
        limit = planned.plan.budget_bytes or 0
        if budgets.is_share(budget):
            limit = budgets.parse(budget, _peak(planned.plain, size_of) + resident)
        return limit - budgets.slack_bytes(limit) - _peak(planned.cuts, size_of) - resident

    if any(one.declared for one in free):
        return planned  # made for the largest sizes there are
    upto = (UNBOUNDED,) * len(free)
    if budgets.asks_for(budget) != "min":
        upto = largest(numbers, room)
    if len(free) == 2 and UNBOUNDED not in upto and (product := largest_product(numbers, room)):
        partitioning.guard(joint.module, free[0].symbol * free[1].symbol <= product)
        upto = tuple(_SPAN * number for number in numbers)
    for one, most in zip(free, upto, strict=True):
        if most < (one.most or UNBOUNDED):
            partitioning.guard(joint.module, one.symbol <= most)
    if len(free) == 1 and before and before[0] < free[0].seen:
        partitioning.guard(joint.module, free[0].symbol > before[0])  # there the plan before costs less
    held[joint.structure] = tuple(map(max, upto, before)) if before else upto
    return planned


def _peak(cuts: Cuts, size_of: Size) -> int:
    return max(part.peak_bytes for one in cuts for part in one.at(size_of))


def _sizes_at(free: list[FreeSize], numbers: Numbers) -> SizesAt:
    return SizesAt({one.symbol: number for one, number in zip(free, numbers, strict=True)})


def _reserve(free: list[FreeSize], before: Numbers) -> Numbers:
    """The sizes to plan for at first: the largest where that is declared, and somewhat beyond what was held
    before.
    """
    wanted: list[int] = []
    for one, most in zip(free, before or (UNBOUNDED,) * len(free), strict=True):
        size = one.seen if one.seen <= most else max(one.seen, int(most * RESERVE))
        if one.most is not None:
            size = one.most if one.declared else min(size, one.most)
        wanted.append(size)
    return tuple(wanted)


def _first_that_fits(
    free: list[FreeSize], before: Numbers, search_at: Callable[[Size], CutSearch]
) -> Generator[Cuts | Rejected, None, tuple[Chosen, Numbers]]:
    seen = tuple(one.seen for one in free)
    for numbers in dict.fromkeys((_reserve(free, before), seen)):
        try:
            return (yield from search_at(_sizes_at(free, numbers))), numbers
        except BudgetError as error:
            declared = any(one.declared for one in free)
            if numbers == seen or declared:
                sizes = ", ".join(f"{one.symbol} = {at}" for one, at in zip(free, numbers, strict=True))
                where = "the largest that mark_dynamic(max=) allows" if declared else "those at hand"
                error.add(f"The plan was for the sizes {sizes}, {where}.")
                raise
    raise AssertionError("the sizes at hand come last")


def largest(numbers: Numbers, room: Callable[[Numbers], int]) -> Numbers:
    """The largest sizes, all grown by the same factor, that leave room; `UNBOUNDED` where none is too large.

    Args:
        numbers: sizes that the plan was made for.
        room: bytes left at some sizes, below zero where they do not fit; it does not grow with a size.

    Example:
        >>> largest((100,), lambda sizes: 1000 - 3 * sizes[0])
        (333,)
    """

    def scaled(factor: float) -> Numbers:
        return tuple(int(number * factor) for number in numbers)

    if room(numbers) < 0:
        return numbers
    if room(scaled(_FACTOR)) >= 0:
        return (UNBOUNDED,) * len(numbers)
    high = 2.0
    while room(scaled(high)) >= 0:
        high *= 2
    apart = 0.5 / max(numbers)  # by which a size changes

    def off(factor: float) -> float:
        return room(scaled(factor)) + 0.5  # no size leaves exactly nothing

    met: float = brentq(off, high / 2, high, xtol=apart)  # pyright: ignore
    factor = next(met + step * apart for step in (1, 0, -1) if room(scaled(met + step * apart)) >= 0)
    return scaled(factor)


def largest_product(numbers: Numbers, room: Callable[[Numbers], int]) -> int:
    """The largest product of two sizes that leaves room as far as one grows while the other shrinks, or 0.

    Bytes are sums of products of sizes, which are largest at the ends of such a range.

    Example:
        >>> largest_product((8, 100), lambda sizes: 1600 - sizes[0] * sizes[1])
        1600
    """

    def worst(product: Numbers) -> int:
        second, first = (-(-product[0] // (_SPAN * number)) for number in numbers)  # the other at its most
        ends = (-(-product[0] // second), second), (first, -(-product[0] // first))
        return min(room(end) for end in (*ends, (numbers[0], -(-product[0] // numbers[0]))))

    whole = (math.prod(numbers),)
    return largest(whole, worst)[0] if worst(whole) >= 0 else 0
