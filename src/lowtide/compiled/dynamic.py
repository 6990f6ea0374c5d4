"""Plans for graphs that leave sizes open: for which sizes one is made, and up to which it holds.

A plan is made for the sizes at hand, and serves all up to the largest with which its predicted peak is within
the budget; a guard compiles anew beyond. Who has seen a program grow beyond its plan plans with a quarter in
reserve, so that lengths that rise step by step need few plans.
"""

from __future__ import annotations

import hashlib
import math
import operator
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import fx

from lowtide import budget as budgets
from lowtide.compiled.costs import Size
from lowtide.compiled.planner import Planned
from lowtide.compiled.stored import ANY, Sizes
from lowtide.errors import BudgetError
from lowtide.private import partitioning
from lowtide.private.partitioning import FreeSize, SizesAt
from lowtide.run.messages import warn

RESERVE = 1.25
"""Of the largest size that the plans before held for, what the next is made for."""

_FACTOR = 1 << 16
"""Beyond so many times the sizes at hand nobody asks."""

_SPANS = ((8, 8), (8, 2), (2, 8), (2, 2), (8, 1), (1, 8))
"""How many times larger each of two sizes may become while their product stays within one bound."""

Numbers = tuple[int, ...]

UNBOUNDED = sys.maxsize


@dataclass(frozen=True)
class Range:
    """Sizes that a plan holds for.

    Attributes:
        upto: the largest of each.
        product: the largest product of all.
    """

    upto: Numbers
    product: int = UNBOUNDED

    def __contains__(self, numbers: Numbers) -> bool:
        return math.prod(numbers) <= self.product and all(map(operator.le, numbers, self.upto))


def program_of(module: fx.GraphModule) -> str:
    """A digest of what a graph calls, whatever its sizes."""
    text = "\n".join(str(node.target) for node in module.graph.nodes if node.op == "call_function")
    return hashlib.sha256(text.encode()).hexdigest()


def plan_range(
    module: fx.GraphModule,
    budget: str | int,
    plan_at: Callable[[Size], Planned],
    standing_at: Callable[[Size], int],
    ranges: dict[str, Range],
) -> tuple[Planned, Sizes]:
    """Plan a graph for the sizes at hand, and guard it where the plan would break the budget.

    Args:
        module: the joint graph.
        budget: as of `lowtide.limit_memory`.
        plan_at: plans it for sizes as numbers.
        standing_at: bytes that stand beside what the graph allocates.
        ranges: program -> sizes that its largest plan holds for; this one's is noted.

    Returns:
        The plan, and the sizes that it serves.

    Raises:
        BudgetError: no plan is found that fits.
    """
    free, unknown = partitioning.free_sizes(module)
    if unknown:
        warn(
            f"{len(unknown)} sizes of a compiled graph follow from data ({', '.join(unknown[:3])}) and were "
            f"taken for {partitioning.UNKNOWN_SIZE}: steps with larger ones may exceed the budget. "
            "lowtide.limit_memory on the model itself sees the real ones"
        )
    if not free:
        return plan_at(partitioning.hint), ANY
    program = program_of(module)
    seen = tuple(one.seen for one in free)
    before = ranges.get(program)
    if before is not None and len(before.upto) != len(free):
        before = None
    planned, numbers = _first_that_fits(free, seen, before, plan_at)

    def room(numbers: Numbers) -> int:
        size_of = _sizes_at(free, numbers)
        standing = standing_at(size_of)
        limit = planned.limit_bytes
        if isinstance(budget, str) and budget.strip().endswith("%"):
            limit = budgets.parse(budget, planned.plain_at(size_of) + standing)
        return limit - budgets.slack_bytes(limit) - planned.made_at(size_of) - standing

    if budgets.asks_for(budget) == "min":
        held = Range((UNBOUNDED,) * len(free))
    else:
        held = range_of(numbers, tuple(one.most or UNBOUNDED for one in free), room)
    sizes = _served(free, held, before)
    _guard(module, free, sizes)
    if before is None or math.prod(numbers) >= min(before.product, math.prod(before.upto)):
        ranges[program] = held
    return planned, sizes


def _sizes_at(free: list[FreeSize], numbers: Numbers) -> SizesAt:
    return SizesAt({one.symbol: number for one, number in zip(free, numbers, strict=True)})


def _reserve(free: list[FreeSize], before: Range | None) -> Numbers:
    """The sizes to plan for at first: the largest where that is declared, and somewhat beyond what was held
    before.
    """
    wanted = [one.seen for one in free]
    if before is not None and tuple(wanted) not in before:
        for at, most in enumerate(before.upto):
            if wanted[at] > most:
                wanted[at] = max(wanted[at], int(most * RESERVE))
        short = RESERVE * before.product / math.prod(wanted)
        if before.product != UNBOUNDED and short > 1:
            wanted[-1] = int(wanted[-1] * short)
    for at, one in enumerate(free):
        if one.most is not None:
            wanted[at] = one.most if one.declared else min(wanted[at], one.most)
    return tuple(wanted)


def _first_that_fits(
    free: list[FreeSize], seen: Numbers, before: Range | None, plan_at: Callable[[Size], Planned]
) -> tuple[Planned, Numbers]:
    wanted = _reserve(free, before)
    for numbers in dict.fromkeys((wanted, seen)):
        try:
            return plan_at(_sizes_at(free, numbers)), numbers
        except BudgetError as error:
            declared = any(one.declared for one in free)
            if numbers == seen or declared:
                sizes = ", ".join(f"{one.symbol} = {at}" for one, at in zip(free, numbers, strict=True))
                where = "the largest that mark_dynamic(max=) allows" if declared else "those at hand"
                error.add_note(f"The plan was for the sizes {sizes}, {where}.")
                raise
    raise AssertionError("the sizes at hand come last")


def _served(free: list[FreeSize], held: Range, before: Range | None) -> Sizes:
    if any(one.declared for one in free):
        return ANY  # planned for the largest sizes there are
    upto = {
        str(one.symbol): most
        for one, most in zip(free, held.upto, strict=True)
        if most not in (UNBOUNDED, one.most)
    }
    above: dict[str, int] = {}
    if len(free) == 1 and before is not None and before.upto[0] < free[0].seen:
        above[str(free[0].symbol)] = before.upto[0]  # there the plan before costs less
    return Sizes(above, upto, None if held.product == UNBOUNDED else held.product)


def _guard(module: fx.GraphModule, free: list[FreeSize], sizes: Sizes) -> None:
    symbols = {str(one.symbol): one.symbol for one in free}
    for name, bound in sizes.above.items():
        partitioning.guard(module, symbols[name] > bound)
    for name, bound in sizes.upto.items():
        partitioning.guard(module, symbols[name] <= bound)
    if sizes.product is not None:
        partitioning.guard(module, math.prod(symbols.values()) <= sizes.product)


def range_of(numbers: Numbers, most: Numbers, room: Callable[[Numbers], int]) -> Range:
    """Sizes for which a plan holds.

    Of two sizes it bounds the product, as far as the plan lets each grow while the other shrinks: bytes are
    sums of products of sizes, which are largest at the ends of such a range.

    Args:
        numbers: sizes that the plan was made for.
        most: the largest that each may have.
        room: bytes left at some sizes, below zero where the plan does not hold.

    Example:
        >>> range_of((8, 100), (1 << 40, 1 << 40), lambda sizes: 1600 - sizes[0] * sizes[1])
        Range(upto=(64, 800), product=1600)
    """
    if (
        len(numbers) != 2
        or room(tuple(min(n * _FACTOR, top) for n, top in zip(numbers, most, strict=True))) >= 0
    ):
        return Range(largest(numbers, most, room))
    for spans in _SPANS:
        tops = tuple(min(n * span, top) for n, span, top in zip(numbers, spans, most, strict=True))

        def worst(product: Numbers, tops: Numbers = tops) -> int:
            first, second = _end(product[0], tops[0]), _end(product[0], tops[1])[::-1]
            return min(room(first), room(second), room((numbers[0], -(-product[0] // numbers[0]))))

        whole = (math.prod(numbers),)
        if worst(whole) >= 0:
            return Range(tops, largest(whole, (math.prod(tops),), worst)[0])
    return Range(largest(numbers, most, room))


def _end(product: int, top: int) -> Numbers:
    """Whole sizes with at least this product, the first about ``top``."""
    other = -(-product // top)
    return -(-product // other), other


def largest(numbers: Numbers, most: Sequence[int], room: Callable[[Numbers], int]) -> Numbers:
    """The largest sizes, all grown by the same factor, that leave room; `UNBOUNDED` where none is too large.

    Args:
        numbers: sizes that leave room.
        most: the largest that each may have.
        room: bytes left at some sizes, below zero where they do not fit; it does not grow with a size.

    Example:
        >>> largest((100,), [1 << 40], lambda sizes: 1000 - 3 * sizes[0])
        (333,)
    """

    def grown(factor: float) -> Numbers:
        return tuple(min(int(number * factor), top) for number, top in zip(numbers, most, strict=True))

    if room(grown(_FACTOR)) >= 0:
        return (UNBOUNDED,) * len(numbers)
    low, high = 1.0, 2.0
    left, over = room(numbers), room(grown(high))
    while over >= 0:
        low, high, left = high, 2 * high, over
        over = room(grown(high))
    while max(b - a for a, b in zip(grown(low), grown(high), strict=True)) > 1:
        line = low + (high - low) * max(left, 0) / (max(left, 0) - over)  # where a straight line meets zero
        step = (high - low) / 16
        for factor in (max(line, low + step), min(line + step, high - step)):
            if low < factor < high:
                found = room(grown(factor))
                low, left, high, over = (
                    (factor, found, high, over) if found >= 0 else (low, left, factor, found)
                )
    return grown(low)
