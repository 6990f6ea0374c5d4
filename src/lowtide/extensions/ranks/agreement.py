"""What ranks exchange and agree on, and which ranks these are.

In: a model, or process groups. Out: the `Agreement` of the ranks that share the model's layers, that take
part in a profiled forward's collectives, or that FSDP shards the model over.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from lowtide.errors import BudgetError
from lowtide.graph import StepGraph
from lowtide.interception import unseen
from lowtide.plan.data import Plan
from lowtide.private import fsdp
from lowtide.remedies import BUFFERS, GRADIENTS, PARAMETERS, RESIDENT

T = TypeVar("T")


@dataclass(frozen=True)
class Agreement:
    """The ranks that share a model's layers, or its sequences.

    Args:
        process_groups: their ``torch.distributed`` groups: one, or the rows and columns of a grid of ranks in
            which this one stands.
    """

    process_groups: tuple[Any, ...]

    @property
    def is_first(self) -> bool:
        """Whether this process is the first of the ranks."""
        return not any(map(torch.distributed.get_rank, self.process_groups))

    def gather(self, item: Any) -> list[Any]:
        """The item of every rank, by rank. A collective."""
        items = [item]
        for group in self.process_groups:
            found: list[Any] = [None] * group.size()
            with unseen():
                torch.distributed.all_gather_object(found, items, group=group)
            items = [one for several in found for one in several]
        return items

    def broadcast(self, item: Any) -> Any:
        """The item of the first rank. A collective."""
        found = [item]
        for group in self.process_groups:
            first = torch.distributed.get_global_rank(group, 0)
            with unseen():
                torch.distributed.broadcast_object_list(found, src=first, group=group)
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
        if self.is_first:
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


def on_rank(error: BudgetError, more_bytes: int) -> BudgetError:
    """Another rank's refusal of a step, with this rank's facts: so many more bytes are resident here."""
    if error.budget_bytes is None or error.smallest_bytes is None:
        return error
    parts, rest = dict(error.parts), more_bytes
    for name in (RESIDENT, PARAMETERS, BUFFERS, GRADIENTS) if parts else ():
        count = parts.get(name, 0)
        parts[name] = max(0, count + rest)  # of fewer bytes than have no name others go, too
        rest -= parts[name] - count
    return error.stating(
        budget_bytes=error.budget_bytes + more_bytes,
        smallest_bytes=error.smallest_bytes + more_bytes,
        parts={name: count for name, count in parts.items() if count},
    )


def of_layers(model: torch.nn.Module) -> Agreement | None:
    """The ranks that share layers of ``model``, its sequences, or both; ``None`` where there are none, or
    several groups that are no rows and columns of a grid.
    """
    modules: list[Any] = list(model.modules())
    layers: set[Any] = {module.group for module in modules if _is_group(getattr(module, "group", None))}
    contexts = [module.context for module in modules if hasattr(module, "context")]
    sequences: set[Any] = {one.group for one in contexts if _is_group(getattr(one, "group", None))}
    if len(layers) > 1 or len(sequences) > 1:
        return None
    groups = [group.process_group for group in (*sequences, *layers)]
    shared = [set(torch.distributed.get_process_group_ranks(group)) for group in groups]
    crossing = len(groups) == 1 or (len(groups) == 2 and len(set.intersection(*shared)) == 1)
    return Agreement(tuple(groups)) if crossing else None


def of_group(groups: Mapping[str, Any]) -> Agreement | None:
    """The ranks of the one group that a plan may shard over; ``None`` without one, or with several, or for a
    single rank.
    """
    if len(groups) != 1:
        return None
    (group,) = groups.values()
    if torch.distributed.get_world_size(group) == 1:
        return None
    return Agreement((group,))


def of_collectives(groups: Sequence[Any], given: Sequence[int]) -> Agreement | None:
    """The ranks that took part in collectives over these groups (those of a mesh's dimension, where
    parameters are DTensors), if all were given the same: then steps of another size come to all of them at
    once. ``None`` where there are no such ranks, or they are in several groups and not all of the world. A
    collective.
    """
    named = {str(place): group for place, group in enumerate(groups)}
    found = of_group(named) if len(named) < 2 else of_world(groups)
    return found if found is not None and len(set(found.gather(tuple(given)))) == 1 else None


def of_shards(model: torch.nn.Module) -> Agreement | None:
    """The ranks that FSDP shards ``model`` over, and those that hold the same shards; ``None`` where there
    are none, or they are in several groups and not all of the world.
    """
    return of_groups(fsdp.process_groups(model))


def of_groups(groups: Sequence[Any]) -> Agreement | None:
    """The ranks of these process groups: of one that has all of the others' ranks, or all ranks."""
    ranks = [frozenset(torch.distributed.get_process_group_ranks(group)) for group in groups]
    largest = {
        own: group for own, group in zip(ranks, groups, strict=True) if not any(own < r for r in ranks)
    }
    distinct = list(largest.values())
    return of_group({"all": distinct[0]}) if len(distinct) == 1 else of_world(distinct)


def of_world(groups: Sequence[Any]) -> Agreement | None:
    """All ranks, where these groups are the dimensions of one mesh of them."""
    sizes = [torch.distributed.get_world_size(group) for group in groups]
    whole = torch.distributed.group.WORLD
    if sizes and whole is not None and math.prod(sizes) == torch.distributed.get_world_size():
        return of_group({"world": whole})
    return None


def _is_group(group: Any) -> bool:
    return (
        getattr(group, "process_group", None) is not None and hasattr(group, "global_rank") and group.size > 1
    )
