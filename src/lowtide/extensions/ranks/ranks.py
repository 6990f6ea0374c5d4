"""The ranks of a limited model, and what they agree on (`Ranks`).

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
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from lowtide.errors import BudgetError, PlanError
from lowtide.extension import Extension
from lowtide.extensions.ranks.agreement import (
    Agreement,
    adopt,
    of_collectives,
    of_group,
    of_groups,
    of_layers,
    of_shards,
)
from lowtide.extensions.ranks.context import explained
from lowtide.extensions.ranks.pipeline import PipelineLimiter, group_of
from lowtide.extensions.ranks.presence import AHEAD_SECONDS, BEHIND_SECONDS, Presence
from lowtide.extensions.ranks.sharded import UNCALLED, ShardedLimiter
from lowtide.graph import StepGraph
from lowtide.interception import unseen
from lowtide.ops import IS_COLLECTIVE
from lowtide.plan.data import Plan
from lowtide.plan.simulate import plain
from lowtide.private import distributed, fsdp, storage_key
from lowtide.run.limit.entry import Entry
from lowtide.run.limit.limiter import Limiter
from lowtide.run.limit.step import PlannedStep, ProfiledStep
from lowtide.run.profile.profiler import Profiler
from lowtide.run.watch import meter_gathered
from lowtide.trace.transforms import with_collectives

LEARNING_STEPS = 4
"""After so many steps under a plan ranks stop exchanging what their steps showed."""


class Ranks(Extension):
    """The other ranks that take part in the steps of a limited model.

    Args:
        stages: the process group of a pipeline's stages; ``None`` for another model.

    Attributes:
        agreement: the ranks that share the model and its plans, or ``None``.
        replicas: the process group over which `DistributedDataParallel` averages the gradients of the step
            that was profiled last, or that of a pipeline's stages; or ``None``.
        awaited: ranks that this one has met wait in a step until it has a plan. They hold one number of
            bytes.
    """

    name = "ranks"

    def __init__(self, stages: Any = None) -> None:
        self._stages = stages
        self.agreement: Agreement | None = None
        self.replicas: Any = None
        self.awaited = False
        self._presence: Presence | None = None
        self._in_step = False  # in one of the program's, in which the ranks move tensors
        self._looked = self._met = self._has_collectives = self._shows_ranks = False
        self._neighbours: Agreement | None = None
        self._steps = 0  # that all ranks have begun

    def copied(self) -> Ranks:
        """The same ranks, which have not met."""
        return Ranks(self._stages)

    def keeps(self) -> Mapping[str, Any] | None:
        """That the ranks have met, and whether they share a plan. ``None`` before, and where only a profiled
        step shows which ranks share layers, as of DTensors.
        """
        shares, neighbours = self.agreement is not None, self._neighbours is not None
        if not self._met or ((shares or neighbours) and not self._shows_ranks):
            return None
        met = {"awaited": self.awaited, "has_collectives": self._has_collectives}
        return {**met, "shares_plan": shares, "neighbours": neighbours}

    def resumes(self, kept: Mapping[str, Any] | None) -> bool:
        """Whether all ranks have plans to use. If so, they have met: none waits for another one that profiles
        a step. FSDP makes what it gathers weights into, which is there before the steps that were planned
        for. A collective.
        """
        self.replicas = self._stages or distributed.replicated_by(self.model)
        self._announce()
        shared = self._neighbours = self._sharing()
        self._refuse_unlimited(() if shared is None else shared.process_groups)
        ranks = self._all_ranks()
        if ranks is not None:
            together = all(ranks.gather(kept is not None))
        else:
            others = self.replicas or shared or fsdp.process_groups(self.model)
            together = kept is not None and not others
        self._neighbours = None
        if together and kept is not None:
            self._looked = self._met = True
            self.awaited, self._has_collectives = kept["awaited"], kept["has_collectives"]
            self.agreement = shared if kept["shares_plan"] else None
            self._neighbours = shared if kept["neighbours"] else None
            with unseen(), meter_gathered(self.model):
                fsdp.gather_once(self.model)
        return together

    def _announce(self) -> None:
        """Have the other ranks know that this one has a limit."""
        if self._presence is None:
            self._presence = Presence(type(self.model).__name__ if self._stages is None else "pipeline")

    def close(self) -> None:
        """The other ranks know that this one has no limit."""
        if self._presence is not None and torch.distributed.is_initialized():
            self._presence.close()
        self._presence = None

    @property
    def hurries(self) -> bool:
        """Whether other ranks wait while this one searches: those that share the plan, that take part in the
        forward's collectives, that FSDP shards the model over, or DDP's.
        """
        waits = self.shares_plan or self._has_collectives or self.replicas is not None
        return waits or of_shards(self.model) is not None

    @property
    def shares_plan(self) -> bool:
        """Whether the ranks hold one plan."""
        return self.agreement is not None

    @property
    def raises_together(self) -> bool:
        """Whether a share's bytes are raised on all ranks alike: once these have met."""
        return self.awaited or (self._met and self.agreement is not None)

    # ---- a step ----------------------------------------------------------------------------------

    def gather(self, item: Any) -> list[Any]:
        """What each of the ranks that share the model gives. A collective, where there are any."""
        shared = self._sharing()
        return [item] if shared is None else shared.gather(item)

    def key(self, model: torch.nn.Module) -> Hashable:
        """The settings of FSDP."""
        return fsdp.settings(model) or None

    def begins(self, entry: Entry) -> None:
        """The ranks that share the plan exchange what the last step showed: if one of them has to profile or
        to plan again, all do. At steps 1, 2, 4, 8, ... all ranks exchange what a share has come to.
        """
        maker, planned = self.maker, entry.planned
        self._announce()
        self._raise_together()
        # ranks exchange nothing more after so many steps; they count the same ones, and stop at the same one
        learned = planned is not None and planned.history.steps > LEARNING_STEPS
        if self.agreement is None or learned:
            return
        mine = (entry.is_listened, maker.version, maker.findings)
        listens, versions, findings = zip(*self.agreement.gather(mine), strict=True)
        maker.version = max(versions)
        entry.is_asked = any(listens)
        for found in findings:
            maker.findings.update(found)

    def _raise_together(self) -> None:
        """The largest step that any rank has seen raises a share on all of them. A collective at each step
        whose number is a power of two. Ranks of DDP count the steps in which they average gradients.
        """
        replicated = self.replicas is not None and self._stages is None
        if replicated and not distributed.averages_gradients(self.model):
            return
        self._steps += 1
        if not self.raises_together or self._steps & (self._steps - 1):
            return
        ranks = self._all_ranks()
        if ranks is not None:
            maker = self.maker
            asked, plain_bytes = zip(*ranks.gather((maker.asked_bytes, maker.greatest_plain)), strict=True)
            maker.greatest_plain = max(plain_bytes)
            if any(asked):
                maker.raise_to(max(asked), together=True)

    def _sharing(self) -> Agreement | None:
        """The ranks that share the model's layers, as far as the model and the limit show them."""
        found = of_layers(self.model) or of_group(self.maker.groups())
        self._shows_ranks = found is not None
        return found

    def _all_ranks(self) -> Agreement | None:
        """All ranks that this one waits for in a step."""
        layers = self.agreement or self._neighbours
        groups = fsdp.process_groups(self.model)
        groups += [] if layers is None else layers.process_groups
        groups += [] if self.replicas is None else [self.replicas]
        return of_groups(groups)

    @contextmanager
    def around(self, step: ProfiledStep | PlannedStep) -> Iterator[None]:
        """Note who averages the gradients of a step that is written down. Of one that is not, note what FSDP
        gathers, and which of its units runs: what a unit evicts may be brought back with the unit's own
        weights alone.
        """
        if isinstance(step, ProfiledStep):
            refuse_first_fsdp(self.model)
            self._in_step = True
            self.replicas = self._stages or distributed.replicated_by(self.model)
            with explained():
                yield
            return
        step.gathered = {storage_key(tensor) for _, tensor in fsdp.gathered(self.model)}

        def begins(unit: int, gathered: Iterable[tuple[str, torch.Tensor]]) -> None:
            if step.recorder is not None:
                step.recorder.tape.unit_begins(unit, (tensor for _, tensor in gathered))

        def ends() -> None:
            if step.recorder is not None:
                step.recorder.tape.unit_ends()

        with fsdp.around_units(self.model, begins, ends):
            yield

    # ---- a plan ----------------------------------------------------------------------------------

    def transform(self, graph: StepGraph, entry: Entry, profiler: Profiler) -> StepGraph:
        """The step to plan for: its collectives may run again where the ranks that share the model agree on
        the program. A collective, where there are such ranks.
        """
        ran = (op for op in graph.operations if op.phase == "forward")
        self._has_collectives |= any(op.reason == IS_COLLECTIVE for op in ran)
        groups = profiler.collectives.groups
        if not self._looked:
            shares = self._sharing()
            self._refuse_unlimited(shares.process_groups if shares is not None else groups)
            self._looked = True
            self.agreement = shares or of_collectives(groups, profiler.given)
        shared, self._neighbours = self.agreement, None
        if shared is not None and shared.same_program(graph):
            graph = with_collectives(replace(graph, events=shared.broadcast(graph.events)))
        elif shared is not None:  # on every rank alike
            self.agreement, self._neighbours = None, shared
        entry.graph = graph
        ranks = None if self._met else self._all_ranks()
        if ranks is not None:
            self._exchange_peaks(ranks, entry)
        return graph

    def _refuse_unlimited(self, groups: Iterable[Any]) -> None:
        """Refuse to go on where a rank of these groups, or one that holds shards or copies of the model, has
        no limit: before anything is exchanged.
        """
        replicas = [] if self.replicas is None else [self.replicas]
        known = (*groups, *fsdp.process_groups(self.model), *replicas)
        ranks = {rank for group in known for rank in torch.distributed.get_process_group_ranks(group)}
        if ranks and self._presence is not None:
            seconds = BEHIND_SECONDS if self._in_step else AHEAD_SECONDS
            self._presence.refuse_absent(sorted(ranks), seconds)

    def _exchange_peaks(self, ranks: Agreement, entry: Entry) -> None:
        """The ranks exchange what their first profiled steps take: devices are alike, so a percentage is of
        what the fullest rank takes.
        """
        maker = self.maker
        plain_bytes = plain(maker.transform(entry)).peak_bytes + entry.facts.hidden_bytes
        own = max(plain_bytes, maker.claim.peak_bytes + maker.claim.moved_bytes, maker.greatest_plain)
        maker.greatest_plain = max(ranks.gather(own))

    def agree(self, refusal: BudgetError | None) -> BudgetError | None:
        """The refusal of the first rank that has one, of those that share the plan. A collective."""
        return refusal if self.agreement is None else self.agreement.first_of_any(refusal)

    def solve(self, solve: Callable[[int | None], Plan], graph: StepGraph, limit_bytes: int | None) -> Plan:
        """One plan for the ranks that share it. A collective."""
        if self.agreement is None:
            return solve(limit_bytes)
        return self.agreement.solve(solve, graph, limit_bytes)

    def settle(self, entry: Entry, refusal: BudgetError | None) -> BudgetError | None:
        """The first refusal of any of the ranks that wait for one another in this step: those that share the
        model and plan alone, those that FSDP shards it over, which begin with one plan, or those that DDP
        averages gradients over. The latter two meet once: all ranks profile a first step together, and a
        later one perhaps alone.
        """
        layers = self.agreement or self._neighbours
        if layers is not None:  # if one refused alone, the others would wait in a collective
            refusal = layers.first_of_any(refusal)
        if self._met:
            return refusal
        self._met = True
        shards = of_shards(self.model)
        waiting = shards or of_group({} if self.replicas is None else {"replicas": self.replicas})
        self.awaited = waiting is not None
        if shards is not None:
            return self._agree_on_plan(shards, entry, refusal)
        return refusal if waiting is None else waiting.first_of_any(refusal)

    def _agree_on_plan(
        self, agreement: Agreement, entry: Entry, refusal: BudgetError | None
    ) -> BudgetError | None:
        """Exchange with the ranks that shard the model what each refuses and plans. Where all of them run the
        same program they begin with the plan of the one with the fewest bytes left.

        Returns:
            The first refusal of any.
        """
        assert entry.graph is not None
        planned = None if refusal is not None else entry.planned
        program = replace(entry.graph, resident_bytes=0, events=()).fingerprint()
        left, text = math.inf, ""
        if planned is not None:
            text = planned.plan.to_json()
            if planned.plan.budget_bytes is not None:
                left = planned.plan.budget_bytes - planned.step_graph.resident_bytes
        resident = 0 if planned is None else planned.step_graph.resident_bytes
        refusals, programs, *plans = zip(
            *agreement.gather((refusal, program, left, resident, text)), strict=True
        )
        found = next((one for one in refusals if one is not None), None)
        if found is None and planned is not None and len(set(programs)) == 1:
            _, theirs, text = min(zip(*plans, strict=True), key=lambda one: one[0])
            plan = replace(adopt(text, resident, theirs), budget_bytes=planned.plan.budget_bytes)
            entry.planned = replace(planned, plan=plan)
        return found


def ranks_of(limiter: Limiter) -> Ranks:
    """The ranks that take part in the steps of a limiter's model.

    Raises:
        PlanError: FSDP shards the model, and the limit was put on before there were ranks.
    """
    if isinstance(limiter, PipelineLimiter):
        return Ranks(group_of(limiter.schedule))
    if fsdp.is_root(limiter.model) and not isinstance(limiter, ShardedLimiter):
        raise PlanError(UNCALLED)
    return Ranks()


def refuse_first_fsdp(model: torch.nn.Module) -> None:
    """Refuse a model that the first FSDP shards: it swaps the storages of the weights, so a replay would find
    others.

    Raises:
        PlanError: the model is one, or holds one.
    """
    if any(map(fsdp.is_first_fsdp, model.modules())):
        raise PlanError(
            "FullyShardedDataParallel, the first FSDP, swaps the weights' storages in every step, so nothing "
            "can be recomputed from them: shard with torch.distributed.fsdp.fully_shard (FSDP2), which "
            "lowtide.limit_memory takes"
        )
