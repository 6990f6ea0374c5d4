"""The policies that search: optimal and mixed."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lowtide.errors import BudgetError, expect
from lowtide.graph import StepGraph
from lowtide.plan.bound import Bound
from lowtide.plan.data import Links, Moving, Plan, decision_of
from lowtide.plan.mixes import MixedSearch
from lowtide.plan.moves import Codec, default_placements, missing_links, placements_of
from lowtide.plan.policies.build import Policy, check_moves, make_plan
from lowtide.plan.search import Candidate, Search, search_of

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
    return obey_scopes(functools.partial(_least_time, seconds=seconds))


def obey_scopes(choose: Policy) -> Policy:
    """A policy that evicts what checkpointing scopes evict, wherever the budget can be met so. Where it
    cannot, as below what long scopes take by themselves, ``choose`` decides about that, too.
    """
    return functools.partial(_obey_scopes, choose)


def _obey_scopes(choose: Policy, graph: StepGraph, budget: int | None = None) -> Plan:
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


def _least_time(
    graph: StepGraph, budget: int | None = None, seconds: float | None = None, at_once: bool = False
) -> Plan:
    """The plan with the least extra seconds whose peak is within ``budget`` bytes (``None``: the smallest
    peak that can be met).

    Raises:
        BudgetError: no plan fits; the error carries the smallest budget that can be met.
    """
    search = search_of(graph)
    with search.lock:
        limit = _least(search, seconds, at_once).simulation.peak_bytes if budget is None else budget
        best = search.solve(limit, seconds, at_once)
        early = search.ended_early(best, limit) or (at_once and budget is None)
        return make_plan(
            graph, stored=best.stored, policy="optimal", budget=budget,
            notes=(ENDED_EARLY,) if early else (),
            simulator=search.sim, bound=search.relaxation.bound(limit),
        )  # fmt: skip


def _least(search: Search, seconds: float | None, at_once: bool) -> Candidate:
    """The plan with the smallest peak that is found."""
    return search.lowest_within(seconds / 2) if at_once and seconds else search.lowest


least_time = obey_scopes(_least_time)


@dataclass(frozen=True, eq=False)
class Mixed:
    """What `mixed` returns: a policy, which another process can be given.

    Args:
        ways, links, min_bytes, window_bytes, codecs, slab: as of `mixed`.
        seconds: about how long to search; ``None`` for as long as it takes.
    """

    ways: tuple[Moving, ...]
    links: Links | None
    min_bytes: int
    window_bytes: int | None
    codecs: Sequence[Codec]
    slab: bool | None
    seconds: float | None = None

    def __call__(self, graph: StepGraph, budget: int | None = None) -> Plan:
        return obey_scopes(self._choose)(graph, budget)

    def with_links(self, device: str) -> Mixed:
        """The same, with the speeds of all that values may move to."""
        ways = self.ways or default_placements(device)
        return replace(self, ways=ways, links=missing_links(ways, self.links, self.codecs, device))

    def _choose(self, graph: StepGraph, budget: int | None = None) -> Plan:
        known, search = self.with_links(graph.device), search_of(graph)
        speeds, notes = known.links or {}, tuple[str, ...]()
        with search.lock:
            mixed_search = MixedSearch(
                search,
                placements_of(search.sim, known.ways, speeds, self.min_bytes, self.codecs),
                speeds,
                self.window_bytes,
            )
            if self.seconds is None:
                limit = budget if budget is not None else mixed_search.least().simulation.peak_bytes
                best = mixed_search.solve(limit)
                floor = mixed_search.relaxation.bound(limit)
            else:
                best, notes = mixed_search.solve_quickly(budget, self.seconds), (ENDED_EARLY,)
                floor = Bound(0.0, 0)  # another program of the size of the search
        return make_plan(
            graph, stored=best.stored, policy="mixed", budget=budget, simulator=search.sim,
            moves={v: m.decision for v, m in best.moves.items()}, window_bytes=best.window,
            links=speeds, codecs=self.codecs, bound=floor, slab=self.slab, notes=notes,
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
    least memory that is found. See `lowtide.plan.mixes`.

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
    return Mixed(chosen, links, min_bytes, window_bytes, tuple(codecs), slab)


def split_search(policy: Policy, seconds: float, device: str) -> tuple[Policy, Policy | None]:
    """A policy whose plan others wait for, and the one that goes on in a process of its own.

    Args:
        policy: of a user.
        seconds: about how long the first may search.
        device: that values leave.

    Returns:
        Both; the second is ``None`` where the policy does not search, or has codecs of the user's own, which
        another process may not know.
    """
    if policy is least_time:
        hurried = functools.partial(_least_time, seconds=seconds, at_once=True)
        return obey_scopes(hurried), policy
    if isinstance(policy, Mixed) and not policy.codecs:
        policy = policy.with_links(device)
        return replace(policy, seconds=seconds), policy
    return policy, None
