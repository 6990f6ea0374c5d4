"""The ranks of a limited model, and what they agree on (`Peers`).

Ranks that share collectives share a plan, so that a recomputed collective is issued by all of them or by
none. Before a plan is made, the ranks of a tensor-parallel group exchange the bytes that their budgets leave
for activations, and what the last step showed. The group is that of lowtide's layers, or the one that a
profiled forward has collectives over, as DTensors do. The first rank solves for the fewest bytes and sends
the plan to the others. The ranks of a group that `Stores` may shard over do the same: each keeps a part of
the same values.

Collectives are recomputed only where all ranks trace the same program; otherwise each plans alone and
keeps the results of collectives. Pipeline stages share no layers, and never wait for one another here. Ranks
that FSDP shards a model over, and those of DDP, exchange once, when the first profiled step has ended: what
one of them refuses fails on all. FSDP's begin with one plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from lowtide import private
from lowtide.errors import BudgetError
from lowtide.graph import StepGraph
from lowtide.interception import unseen
from lowtide.ops import IS_COLLECTIVE
from lowtide.plan.data import Plan
from lowtide.run.limit.refusal import on_rank
from lowtide.trace.transforms import with_collectives

T = TypeVar("T")

LEARNING_STEPS = 4
"""After so many steps under a plan ranks stop exchanging what their steps showed."""


@dataclass(frozen=True)
class Agreement:
    """The ranks that share a model's layers.

    Args:
        process_group: their ``torch.distributed`` group.
        first: the place of the first of them in the world.
        rank: this process's place among them.
    """

    process_group: Any
    first: int
    rank: int

    def gather(self, item: Any) -> list[Any]:
        """The item of every rank, by rank. A collective."""
        found: list[Any] = [None] * self.process_group.size()
        with unseen():
            torch.distributed.all_gather_object(found, item, group=self.process_group)
        return found

    def broadcast(self, item: Any) -> Any:
        """The item of the first rank. A collective."""
        found = [item]
        with unseen():
            torch.distributed.broadcast_object_list(found, src=self.first, group=self.process_group)
        return found[0]

    def same_program(self, graph: StepGraph) -> bool:
        """Whether all ranks traced equal operations, whatever the order of frees, which the backend's threads
        change. A collective.
        """
        return len(set(self.gather(replace(graph, resident_bytes=0, events=()).fingerprint()))) == 1

    def first_of_any(self, item: T | None) -> T | None:
        """The first rank's item that has one, on every rank: a refusal, say. A collective."""
        return next((found for found in self.gather(item) if found is not None), None)

    def solve(self, solve: Callable[[int | None], Plan], graph: StepGraph, limit: int | None) -> Plan:
        """One plan for all ranks: solved by the first, for the fewest bytes that any budget leaves. A
        collective.

        Args:
            solve: from a budget in bytes on this rank to a plan.
            graph: this rank's step.
            limit: this rank's budget, or ``None``.

        Raises:
            BudgetError: no plan fits; on every rank.
        """
        left = self.gather(None if limit is None else limit - graph.resident_bytes)
        least = None if None in left else min(left)
        answer: str | BudgetError = ""
        if self.rank == 0:
            try:
                answer = solve(None if least is None else least + graph.resident_bytes).to_json()
            except BudgetError as error:
                answer = error
        answer, first_resident = self.broadcast((answer, graph.resident_bytes))
        if isinstance(answer, BudgetError):
            raise on_rank(answer, graph.resident_bytes - first_resident)
        return adopt(answer, graph.resident_bytes, first_resident)


def adopt(plan_json: str, resident_bytes: int, their_bytes: int) -> Plan:
    """Another rank's plan for this one: only what is resident before the step differs.

    Args:
        plan_json: the plan, as `Plan.to_json` writes it.
        resident_bytes: what is resident here.
        their_bytes: what is resident on the rank that made it.
    """
    plan = Plan.from_json(plan_json)
    return replace(plan, predicted_peak_bytes=plan.predicted_peak_bytes + resident_bytes - their_bytes)


class Peers:
    """The other ranks that take part in the steps of a limited model.

    Args:
        model: the model, which may not be complete yet, as a copied one.
        groups: process groups over which plans may shard, by name.

    Attributes:
        agreement: the ranks that share the model and its plans, or ``None``.
        replicas: the process group over which `DistributedDataParallel` averages the gradients of the step
            that was profiled last, or that of a pipeline's stages; or ``None``.
        await_plan: ranks that this one has met wait in a step until it has a plan.
    """

    def __init__(self, model: torch.nn.Module, groups: Callable[[], Mapping[str, Any]]) -> None:
        self._model, self._groups = model, groups
        self.agreement: Agreement | None = None
        self.replicas: Any = None
        self.await_plan = False
        self._looked = self._met = self._has_collectives = False

    @property
    def wait(self) -> bool:
        """Whether other ranks wait while this one searches: those that share the plan, that take part in the
        forward's collectives, that FSDP shards the model over, or DDP's.
        """
        waits = self.agreement is not None or self._has_collectives or self.replicas is not None
        return waits or _agreement_of_shards(self._model) is not None

    def agree_on_step(
        self, graph: StepGraph, groups: Sequence[Any], given: Sequence[int]
    ) -> tuple[StepGraph, Agreement | None]:
        """The step to plan for, from one that was profiled: its collectives may run again where the ranks
        that share the model agree on the program. A collective, where there are such ranks.

        Args:
            graph: the profiled step.
            groups: process groups over which its forward has collectives.
            given: digests of what it was given.

        Returns:
            The step, and the ranks that share the model where each has to plan alone.
        """
        ran = (op for op in graph.operations if op.phase == "forward")
        self._has_collectives |= any(op.reason == IS_COLLECTIVE for op in ran)
        if not self._looked:
            self._looked = True
            shares = _agreement_of(self._model) or _agreement_over(self._groups())
            self.agreement = shares or _agreement_across(groups, given)
        shared = self.agreement
        if shared is None:
            return graph, None
        if shared.same_program(graph):
            return with_collectives(replace(graph, events=shared.broadcast(graph.events))), None
        self.agreement = None  # on every rank alike
        return graph, shared

    def stages(self) -> Agreement | None:
        """The ranks of a pipeline, until they have met."""
        return None if self._met else _agreement_over({"stages": self.replicas})

    def meet(self) -> tuple[Agreement | None, bool]:
        """The ranks that wait for this one in a step, and whether all of them are to hold one plan.

        These are the ranks that FSDP shards the model over, which hold one, or those that DDP averages
        gradients over. ``None`` from the second time on: all ranks profile a first step together, and a later
        one perhaps alone.
        """
        if self._met:
            return None, False
        self._met = True
        shards = _agreement_of_shards(self._model)
        found = shards or _agreement_over({} if self.replicas is None else {"replicas": self.replicas})
        self.await_plan = found is not None
        return found, shards is not None


def _agreement_of(model: torch.nn.Module) -> Agreement | None:
    """The ranks that share layers of ``model``; ``None`` where there are none, or several different
    groups.
    """
    groups = {module.group for module in model.modules() if _is_group(getattr(module, "group", None))}
    if len(groups) != 1:
        return None
    (group,) = groups
    shared: Any = group
    return Agreement(shared.process_group, shared.global_rank(0), shared.rank)


def _agreement_over(groups: Mapping[str, Any]) -> Agreement | None:
    """The ranks of the one group that a plan may shard over; ``None`` without one, or with several, or for a
    single rank.
    """
    if len(groups) != 1:
        return None
    (group,) = groups.values()
    if torch.distributed.get_world_size(group) == 1:
        return None
    return Agreement(group, torch.distributed.get_global_rank(group, 0), torch.distributed.get_rank(group))


def _agreement_across(groups: Sequence[Any], given: Sequence[int]) -> Agreement | None:
    """The ranks that took part in collectives over these groups (those of a mesh's dimension, where
    parameters are DTensors), if all were given the same: then steps of another size come to all of them at
    once. ``None`` where there are no such ranks, or they are in several groups and not all of the world. A
    collective.
    """
    named = {str(place): group for place, group in enumerate(groups)}
    found = _agreement_over(named) if len(named) < 2 else _agreement_of_world(groups)
    return found if found is not None and len(set(found.gather(tuple(given)))) == 1 else None


def _agreement_of_shards(model: torch.nn.Module) -> Agreement | None:
    """The ranks that FSDP shards ``model`` over, and those that hold the same shards; ``None`` where there
    are none, or they are in several groups and not all of the world.
    """
    groups = private.process_groups(model)
    return _agreement_over({"shards": groups[0]}) if len(groups) == 1 else _agreement_of_world(groups)


def _agreement_of_world(groups: Sequence[Any]) -> Agreement | None:
    """All ranks, where these groups are the dimensions of one mesh of them."""
    sizes = [torch.distributed.get_world_size(group) for group in groups]
    whole = torch.distributed.group.WORLD
    if sizes and whole is not None and math.prod(sizes) == torch.distributed.get_world_size():
        return _agreement_over({"world": whole})
    return None


def _is_group(group: Any) -> bool:
    return (
        getattr(group, "process_group", None) is not None and hasattr(group, "global_rank") and group.size > 1
    )
