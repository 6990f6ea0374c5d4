"""The policy of a limit on a card: auto, which keeps, recomputes, or moves to main memory.

In: what `limit_memory` was given, and the device. Out: a policy that knows the link to main memory and how
much of that it may take. It makes two plans, by recomputing alone (`lowtide.plan.policies.optimal`) and with
moves (`lowtide.extensions.moves.mixed`), and takes the one that adds less time. Where nothing can move it is
recomputing alone, and the plan says why.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from lowtide import accelerator
from lowtide import budget as budgets
from lowtide.errors import BudgetError, LowtideError, PlanError, expect
from lowtide.extensions.moves.mixed import Mixed
from lowtide.graph import StepGraph
from lowtide.plan.data import Link, Links, Offload, Plan
from lowtide.plan.policies.build import Policy
from lowtide.plan.policies.chosen import hurried, least_time
from lowtide.words import format_bytes

_SHARE = 4
"""A limit takes at most one part in so many of the main memory that is free, unless it is told."""

_MIN_BYTES = 1 << 16
"""Smaller values do not move."""

_NO_LINK = "nothing moves to main memory: {}"

_RANKS = (
    "ranks of this machine share its main memory and its links, which one of them cannot measure. Give each "
    "the same host_budget= to move values"
)


@dataclass(frozen=True, eq=False)
class Auto:
    """What `auto` returns: a policy.

    Attributes:
        links: the speed of the link to main memory; ``None`` to measure it once.
        host_bytes: the most that moves there; ``None`` for a quarter of what is free.
        given: whether somebody has said so.
        measured: whether ``links`` is that of an accelerator here.
        why_not: why nothing moves; empty where something may.
        seconds: about how long to search; ``None`` for as long as it takes.
        at_once: other ranks wait.
    """

    links: Links | None = None
    host_bytes: int | None = None
    given: bool = False
    measured: bool = False
    why_not: str = ""
    seconds: float | None = None
    at_once: bool = False

    usual = True
    """It searches for as long as is usual."""

    def __call__(self, graph: StepGraph, budget: int | None = None) -> Plan:
        known = self.with_links(graph.device)
        alone, refusal = None, None
        try:
            alone = known.recomputing(graph, budget)
        except BudgetError as error:
            refusal = error
        if known.why_not or (alone is not None and budget and not alone.predicted_extra_seconds):
            return _told(alone, refusal, _NO_LINK.format(known.why_not) if known.why_not else "")
        try:
            moving = known.moving(graph, budget, refusal is not None)
        except BudgetError as error:
            if refusal is not None and (error.smallest_bytes or 0) < (refusal.smallest_bytes or 0):
                refusal = error
            return _told(alone, refusal, _NO_LINK.format(known.in_vain))
        except PlanError as error:
            return _told(alone, refusal, _NO_LINK.format(error))
        if alone is None or (moving.moves and _better(moving, alone, budget)):
            return moving
        return _told(alone, None, _NO_LINK.format(known.in_vain))

    @property
    def recomputing(self) -> Policy:
        """The policy that recomputes alone, with this one's patience."""
        if self.seconds is None:
            return least_time
        return hurried(least_time, self.seconds, "cpu", self.at_once)

    def moving(self, graph: StepGraph, budget: int | None, refused: bool) -> Plan:
        """A plan that moves values, too.

        Args:
            graph, budget: as of a policy.
            refused: recomputing alone cannot meet the budget. Then no time is spent on one below what a mix
                takes at least.

        Raises:
            BudgetError: none fits.
        """
        mixed = Mixed(
            (Offload("host"),), self.links, _MIN_BYTES, None, (), None, self.seconds, self.host_bytes, "auto"
        )
        if refused and budget is not None:
            least = mixed.smallest(graph)
            if least > budget:
                raise BudgetError(None, least, budget_bytes=budget)
        return mixed(graph, budget)

    def with_links(self, device: str) -> Auto:
        """The same, which knows the link's speed and how much of main memory it may take, or why it moves
        nothing.
        """
        if self.why_not:
            return self
        own = self.links is None or self.measured
        if own and not accelerator.is_accelerator(torch.device(device)):
            return replace(self, why_not="the step is not on an accelerator")
        host_bytes = self.host_bytes if self.host_bytes is not None else default_host_bytes()
        if not host_bytes:
            return replace(self, why_not="the system does not say how much of it is free")
        if self.links is not None:
            return replace(self, host_bytes=host_bytes)
        try:
            return replace(self, links=_measured(device), measured=True, host_bytes=host_bytes)
        except (LowtideError, MemoryError, torch.OutOfMemoryError) as error:
            return replace(self, why_not=f"its link cannot be measured ({error})")

    def within_host(self, host_bytes: int) -> Auto:
        """The same, which moves no more than so many bytes to main memory."""
        return replace(self, host_bytes=host_bytes, given=True)

    @property
    def in_vain(self) -> str:
        """Why nothing moves where no plan that moves is better."""
        link, most = (self.links or {})["host"], format_bytes(self.host_bytes or 0)
        speed = min(link.write_bytes_per_second, link.read_bytes_per_second) / 1e9
        return f"over its link ({speed:.3g} GB/s), and with {most} of it, no better plan was found"

    def without_moves(self, why: str) -> Auto:
        """The same, which moves nothing."""
        return replace(self, why_not=why)

    @property
    def searches(self) -> bool:
        """Whether nothing says for how long it searches."""
        return self.seconds is None

    def hurried(self, seconds: float, device: str) -> Auto:
        """The same, whose search takes about so many seconds for each of its two plans."""
        return replace(self.with_links(device), seconds=seconds)


def _told(plan: Plan | None, refusal: BudgetError | None, note: str) -> Plan:
    """A plan with a note, or the refusal."""
    if plan is None:
        assert refusal is not None
        raise refusal
    return replace(plan, notes=(*plan.notes, note)) if note and not plan.changes_nothing else plan


def _better(moving: Plan, alone: Plan, budget: int | None) -> bool:
    """Whether a plan that moves is better: in time, or where there is no budget in bytes."""
    if budget is None:
        return moving.predicted_peak_bytes < alone.predicted_peak_bytes
    return moving.predicted_extra_seconds < alone.predicted_extra_seconds


def auto(*, links: Links | None = None, host_budget: str | int | None = None) -> Policy:
    """Keep, recompute or move to main memory each value: the least extra time within the budget. It is the
    default on a card; on a CPU without ``links`` it is `optimal`.

    Args:
        links: the speed of ``"host"``; measured once where it is not given.
        host_budget: the most that moves to main memory, in bytes or as ``"8GiB"``; by default a quarter of
            what is free there.

    Example:
        >>> from lowtide import policies
        >>> from lowtide.plan.data import Link
        >>> policy = policies.auto(links={"host": Link(25e9, 25e9)}, host_budget="8GiB")
    """
    named = links is None or (isinstance(links, Mapping) and isinstance(links.get("host"), Link))
    expect(named, "auto(links=)", links, 'the speed of "host", as lowtide.measure_links returns it, or None')
    if host_budget is None:
        return Auto(links)
    return Auto(links, host_bytes_of(host_budget, "auto(host_budget=)"), True)


def host_bytes_of(given: Any, name: str) -> int:
    """A budget of main memory in bytes.

    Raises:
        PlanError: it is no number of bytes above 0.
    """
    try:
        size = budgets.parse(given)
    except BudgetError:
        size = 0
    expect(size > 0, name, given, "bytes, as 8589934592 or '8GiB'")
    return size


def default_host_bytes() -> int | None:
    """What a limit may take of main memory where it is not told: a quarter of what is free there, in equal
    parts for the ranks of this machine. ``None`` where the system does not say.
    """
    free = budgets.available_bytes("cpu")
    return None if free is None else free // _SHARE


def _measured(device: str) -> Links:
    from lowtide.extensions.moves.speeds import link_speeds

    return link_speeds(Offload("host"), (), device)


def settled(
    policy: str | Callable[..., Plan] | None, host_budget: str | int | None, device: torch.device
) -> Policy:
    """The policy of a limit that may move values, with the link measured and main memory counted.

    Args:
        policy, host_budget: as of `lowtide.limit_memory`.
        device: of the model.

    Raises:
        PlanError: ``host_budget`` is no number of bytes, or more than is free; the device is no accelerator,
            or the policy moves nothing to main memory.
    """
    from lowtide.plan import resolve

    chosen = resolve("auto" if policy is None else policy)
    if host_budget is not None:
        what = "limit_memory(host_budget=)"
        size = host_bytes_of(host_budget, what)
        if not accelerator.is_accelerator(device):
            raise PlanError(
                f"{what} is what values that leave an accelerator may take of main memory, and the model is "
                f"on {device}: leave it out, or move the model before"
            )
        within = getattr(chosen, "within_host", None)
        if within is None:
            name = policy if isinstance(policy, str) else getattr(policy, "__name__", type(policy).__name__)
            raise PlanError(
                f"{what} is for policies that choose what moves to main memory, 'auto' and 'mixed', and the "
                f"policy is {name}: leave one of them out"
            )
        free = budgets.available_bytes("cpu")
        if free is not None and size > free:
            raise PlanError(
                f"{what} is {format_bytes(size)}, and {format_bytes(free)} of main memory are free: give less"
            )
        chosen = within(size)
    if not isinstance(chosen, Auto):
        return chosen
    if not chosen.given and _several_ranks():
        return replace(chosen, why_not=_RANKS)
    return chosen.with_links(str(device))


def _several_ranks() -> bool:
    """Whether this process is one of several."""
    from torch import distributed

    here = distributed.is_available() and distributed.is_initialized()
    return here and distributed.get_world_size() > 1
