"""The policies that search: optimal and mixed."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace

from lowtide.errors import BudgetError, expect
from lowtide.graph import StepGraph
from lowtide.plan.data import Links, Moving, Plan, decision_of
from lowtide.plan.moves import default_placements, missing_links, placements_of
from lowtide.plan.policies.build import Policy, check_moves, make_plan
from lowtide.plan.search.mix import MixedSearch
from lowtide.plan.search.search import search_of
from lowtide.plan.supply import Codec

ENDED_EARLY = "the search ended early, and a longer one may find a plan with less extra time"
"""What a plan notes that is not the best that a search could find."""

_FREED = (
    "checkpointing scopes alone take more than this budget, so some of what they evict stays where that "
    "takes less memory"
)


def optimal(seconds: float | None = None) -> Policy:
    """The least extra time within the budget, see `lowtide.plan.search`.

    Args:
        seconds: about how long to search, once there is a plan that fits; ``None`` for half a minute. Counted
            in work that is done, not timed: the same graph gets the same plan.
    """
    given = seconds is None or (isinstance(seconds, (int, float)) and seconds > 0)
    expect(given, "optimal(seconds=)", seconds, "seconds, more than 0, or None")
    if seconds is None:
        return least_time
    return obeying_scopes(functools.partial(_least_time, seconds=seconds))


def obeying_scopes(choose: Policy) -> Policy:
    """A policy that evicts what checkpointing scopes evict, wherever the budget can be met so. Where it
    cannot, as below what long scopes take by themselves, ``choose`` decides about that, too.
    """

    @functools.wraps(choose)
    def chosen(graph: StepGraph, budget: int | None = None) -> Plan:
        free = graph.without_scopes()
        if free is graph:
            return choose(graph, budget)
        plans, refusals = list[Plan](), list[BudgetError]()
        for step in (graph, free):
            try:
                plan = choose(step, budget)
            except BudgetError as error:
                refusals.append(error)
                continue
            if step is free:
                plan = replace(plan, graph=graph.fingerprint(), notes=(*plan.notes, _FREED))
            if budget is not None:
                return plan
            plans.append(plan)
        if plans:
            return min(plans, key=lambda plan: plan.predicted_peak_bytes)
        raise min(refusals, key=lambda error: error.smallest_bytes or math.inf)

    return chosen


@obeying_scopes
def least_time(graph: StepGraph, budget: int | None = None) -> Plan:
    """The plan with the least extra seconds whose peak is within ``budget`` bytes (``None``: the smallest
    peak that can be met).

    Raises:
        BudgetError: no plan fits; the error carries the smallest budget that can be met.
    """
    return _least_time(graph, budget)


def _least_time(graph: StepGraph, budget: int | None = None, seconds: float | None = None) -> Plan:
    search = search_of(graph)
    with search.lock:
        limit = search.lowest.simulation.peak_bytes if budget is None else budget
        best = search.solve(limit, seconds)
        notes = (ENDED_EARLY,) if search.ended_early(best, limit) else ()
        return make_plan(
            graph, stored=best.stored, policy="optimal", budget=budget, notes=notes,
            simulator=search.sim, bound=search.relaxation.bound(limit),
        )  # fmt: skip


def mixed(
    *ways: str | Moving,
    links: Links | None = None,
    min_bytes: int = 1 << 16,
    window_bytes: int | None = None,
    codecs: Sequence[Codec] = (),
    slab: bool | None = None,
) -> Policy:
    """Keep, recompute, offload, compress and shard chosen together within a budget: the least extra time
    found, and how far it is from the least that any schedule with these ways can have. Without a budget: the
    least memory that is found. See `lowtide.plan.search.mix`.

    Args:
        ways: how values may move: ``"host"``, ``"disk"``, a codec's name, ``"auto"`` for codecs that lose
            nothing, or decisions (`Offload` with a path, `Compress`, `Shard` for what enters blocks,
            `Chain`). By default the next tier down (the disk on a CPU, the host on a GPU) and ``"auto"``.
        links: speeds of tiers, codecs and groups by name; tiers and codecs are measured where they are not
            given, a group's speed has to be (`lowtide.measure_links`).
        min_bytes: smaller values do not move.
        window_bytes: the most that is under way at one time in each direction; chosen where it is not given.
        codecs: codecs of your own that ``ways`` name.
        slab: as of `offload`.

    Example:
        >>> from lowtide.plan import policies
        >>> policy = policies.mixed("host", "disk", "auto")
    """
    chosen = tuple(decision_of(way) for way in ways)
    check_moves("mixed", min_bytes, window_bytes, links)
    listed = isinstance(codecs, Sequence) and all(hasattr(codec, "decode") for codec in codecs)
    listed = listed and not isinstance(codecs, bytes)
    expect(listed, "mixed(codecs=)", codecs, "a list of codecs of your own")

    @obeying_scopes
    def chosen_together(graph: StepGraph, budget: int | None = None) -> Plan:
        offered = chosen or default_placements(graph.device)
        search = search_of(graph)
        with search.lock:
            speeds = missing_links(offered, links, codecs, graph.device)
            mixed_search = MixedSearch(
                search,
                placements_of(search.sim, offered, speeds, min_bytes, codecs),
                speeds,
                window_bytes,
            )
            limit = budget if budget is not None else mixed_search.least().simulation.peak_bytes
            best = mixed_search.solve(limit)
            floor = mixed_search.relaxation.bound(limit)
        return make_plan(
            graph, stored=best.stored, policy="mixed", budget=budget, simulator=search.sim,
            moves={v: m.decision for v, m in best.moves.items()}, window_bytes=best.window,
            links=speeds, codecs=codecs, bound=floor, slab=slab,
        )  # fmt: skip

    return chosen_together
