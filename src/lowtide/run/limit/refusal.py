"""Refusals in a user's words: a budget that no plan meets, and CUDA out of memory in a limited step.

In: the facts that the planner's `BudgetError` of a step has, and its entry; or the allocator's word that it
gives up. Out: an error, or a warning, that says what holds the memory, by names that a user knows, and what
would help. Here alone the planner's refusals become a user's: `in_words` of eager steps, `with_user_names` of
compiled graphs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple
from weakref import WeakSet

import torch

from lowtide import budget as budgets
from lowtide import private
from lowtide.budget import format_bytes
from lowtide.errors import BudgetError
from lowtide.graph import StepGraph
from lowtide.meter.cuda import workspace_bytes
from lowtide.meter.resident import bytes_under, gradient_of
from lowtide.plan.simulate import plain
from lowtide.plan.simulate.holders import planned_holders
from lowtide.remedies import BUFFERS, GRADIENTS, PARAMETERS, STANDING, STATE, UPDATE, WORKSPACES, in_lines
from lowtide.run.limit.entry import Entry, Planned
from lowtide.run.limit.need import own_share
from lowtide.run.messages import OF_GRAPH, OWN_OFF, warn

OPTIMIZER_TOO = "Nor does the budget hold optimizer.step()."
"""Of a refused step, where the optimizer's own step is refused, too."""

_OF_GRAPH = {"workspace": WORKSPACES, "parameter": PARAMETERS, "buffer": BUFFERS, "gradient": GRADIENTS}


@dataclass(frozen=True)
class Demand:
    """A step that is to be planned for, and what it may take.

    Attributes:
        graph: the step, with all that exists beside it.
        limit_bytes: the budget, or ``None``.
        free_bytes: what a plan leaves free of it.
        plain_peak_bytes: of the plain step, or of the largest that was planned for.
        whole_peak_bytes: what a budget in percent is of; ``None`` where it was given otherwise.
        shortage: of the optimizer's own step, or ``None`` where the budget holds that.
    """

    graph: StepGraph
    limit_bytes: int | None
    free_bytes: int
    plain_peak_bytes: int
    whole_peak_bytes: int | None
    shortage: Shortage | None


class Shortage(NamedTuple):
    """The optimizer's own step takes more than the budget.

    Attributes:
        limit_bytes: the budget.
        parts: what stands at its peak, in bytes by name.
    """

    limit_bytes: int
    parts: dict[str, int]

    @property
    def least_bytes(self) -> int:
        """The smallest budget that holds it."""
        return sum(self.parts.values())

    def error(self) -> BudgetError:
        """The refusal, without words (`in_words`)."""
        return BudgetError("", self.least_bytes, budget_bytes=self.limit_bytes, parts=self.parts)


def in_words(
    error: BudgetError, entry: Entry, model: torch.nn.Module, state_bytes: int, demand: Demand | None
) -> BudgetError:
    """The refusal of a step in a user's words, from the facts that the planner raises.

    Args:
        error: the planner's, with the budget that is too small, the smallest peak of any plan and what stands
            there; or that of a `Shortage`. One that names no parts has its words already.
        entry: of the step.
        model: the limited one.
        state_bytes: of the optimizer.
        demand: the step and its budget, once these are known.
    """
    if demand is not None and error.parts and error.budget_bytes is not None:
        error = _of_step_or_optimizer(error, model, state_bytes, demand)
    made = [p for p in model.parameters() if p.requires_grad and not hasattr(p, "gradient_slab")]
    if made and not entry.key.gradients:
        error.add(
            "Where gradients add up over several steps, those after the first take up to "
            f"{sum(own_share(p).nbytes for p in made):,} bytes more."
        )
    if entry.traits.makes_graph:
        error.add(f"Its {OF_GRAPH}.")
    if entry.traits.checkpoints:
        error.remedies = (OWN_OFF, *error.remedies)
    return error


def _of_step_or_optimizer(
    error: BudgetError, model: torch.nn.Module, state_bytes: int, demand: Demand
) -> BudgetError:
    """The refusal that names the larger budget of the two: that has to do for both."""
    short, graph, free = demand.shortage, demand.graph, demand.free_bytes
    least = smallest = error.smallest_bytes or 0
    if UPDATE not in error.parts:
        least = min(plain(graph).peak_bytes + free, budgets.with_slack(smallest + free) + 1)
    if short is not None and least <= short.least_bytes:
        detail = "An optimizer with fused=True takes less for its update." if short.parts[UPDATE] else ""
        return budgets.too_small(
            short.limit_bytes, short.least_bytes, short.parts, subject="optimizer.step()", detail=detail
        )
    shown = dict.fromkeys(_OF_GRAPH.values(), 0)
    for storage in graph.storages:
        if storage.kind in _OF_GRAPH:
            shown[_OF_GRAPH[storage.kind]] += storage.bytes
    gradients = bytes_under([g for p in model.parameters() if (g := gradient_of(p)) is not None])
    device = torch.device(graph.device)
    parts = resident_by_name(error.parts, model, gradients, state_bytes, device, shown)
    found = with_user_names(error, parts, least, demand.whole_peak_bytes)
    if short is not None:
        found.add(OPTIMIZER_TOO)
    return found


def with_user_names(
    error: BudgetError, parts: Mapping[str, int], smallest_bytes: int, plain_peak_bytes: int | None = None
) -> BudgetError:
    """The planner's refusal, with names that a user knows for what stands at the peak.

    Args:
        error: the planner's.
        parts: what stands at the peak, in bytes by name.
        smallest_bytes: the budget that would do.
        plain_peak_bytes: what a budget in percent is of.
    """
    assert error.budget_bytes is not None
    found = budgets.too_small(
        error.budget_bytes,
        smallest_bytes,
        parts,
        policy=error.policy,
        plain_peak_bytes=plain_peak_bytes,
        detail=error.detail,
        made=error.made,
    )
    for note in getattr(error, "__notes__", ()):
        found.add_note(note)
    return found


def resident_by_name(
    parts: Mapping[str, int],
    model: torch.nn.Module,
    gradient_bytes: int,
    state_bytes: int,
    device: torch.device,
    shown: Mapping[str, int] | None = None,
) -> dict[str, int]:
    """The parts of a peak, with names in place of "what else stands" as far as its bytes go.

    Args:
        parts: what stands at the peak, in bytes by name.
        model: whose parameters and buffers these are.
        gradient_bytes: of the gradients that stood before the step.
        state_bytes: of the optimizer.
        device: whose memory counts.
        shown: how many of a name's bytes are not in "what else stands", since the step itself has them.

    Example:
        >>> layer, cpu = torch.nn.Linear(2, 2), torch.device("cpu")
        >>> found = resident_by_name({"what else stands": 30}, layer, 0, 0, cpu)
        >>> found["parameters"], found["what else stands"]
        (24, 6)
    """
    wholes = {
        WORKSPACES: workspace_bytes(device),
        STATE: state_bytes,
        PARAMETERS: bytes_under(model.parameters()),
        BUFFERS: bytes_under(model.buffers()),
        GRADIENTS: gradient_bytes,
    }
    found = dict(parts)
    rest = found.pop(STANDING, 0)
    for name, whole in wholes.items():
        more = min(rest, max(0, whole - (shown or {}).get(name, 0)))
        found[name] = found.get(name, 0) + more
        rest -= more
    return {name: count for name, count in (found | {STANDING: rest}).items() if count}


class OutOfMemory:
    """Tells of limited models when their device is out of memory. PyTorch knows no way to take an observer
    away, so there is one a process: `out_of_memory`.
    """

    def __init__(self) -> None:
        self._limiters: WeakSet[Any] = WeakSet()
        self._attached = False

    def follow(self, limiter: Any) -> None:
        """Tell of this limiter's plan in force from now on; its model is on a CUDA device."""
        self._limiters.add(limiter)
        if not self._attached:
            self._attached = True
            private.on_cuda_out_of_memory(self.warn)

    def warn(self, device: int, asked_bytes: int) -> None:
        """Warn of each limited model that has a plan; ``asked_bytes`` more were not to be had."""
        for limiter in tuple(self._limiters):
            planned = limiter.cache.latest
            if planned is not None and not limiter.removed:
                warn(_in_words(planned, limiter.maker.optimizer_bytes, device, asked_bytes), each_time=True)


@cache
def out_of_memory() -> OutOfMemory:
    """The observer of this process."""
    return OutOfMemory()


def _in_words(planned: Planned, optimizer_bytes: int, device: int, asked_bytes: int) -> str:
    plan = planned.plan
    limit = "no budget" if plan.budget_bytes is None else f"a budget of {format_bytes(plan.budget_bytes)}"
    lines = [
        f"CUDA device {device} has no {format_bytes(asked_bytes)} more, in a process with a model limited "
        f"to {limit}, whose plan takes {format_bytes(plan.predicted_peak_bytes)}. A budget does not count "
        "what is beside that: other tensors, fragments of the allocator, the driver's own. Give a smaller "
        "one, or 'auto'",
        "What holds most at the plan's peak, and what frees how much:",
        *(f"  - {line}" for line in in_lines(planned_holders(planned.graph, plan, optimizer_bytes))),
    ]
    return "\n".join(lines)
