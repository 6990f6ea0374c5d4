"""The part of a process in a pipeline: stages of the model, and a schedule that runs them in a budget."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import lowtide
from lowtide import budget as budgets
from lowtide import meter
from lowtide.errors import BudgetError
from lowtide.extensions.optimizer.counted import count_reduced
from lowtide.models import ModelSpec
from lowtide.models.build import HuggingFaceModel
from lowtide.models.stage import cut, layers_of_stage, stage_input
from lowtide.parallel.data import average_gradients
from lowtide.parallel.gradients import allreduce_sequence_parallel_gradients
from lowtide.parallel.pipeline import Pipeline, schedule_kind, stages_of
from lowtide.train.arrangements import DEFAULT_SCHEDULE
from lowtide.train.options import TrainOptions
from lowtide.train.part import Batch, Part, count_parameters, raised_note, reduced_over, shared_model
from lowtide.train.ranks import Ranks


class Stages(Part):
    """Some stages of the model, and the schedule that runs them."""

    def __init__(self, spec: ModelSpec, options: TrainOptions, ranks: Ranks) -> None:
        self.options, self.ranks = options, ranks
        kind = schedule_kind(options.schedule or DEFAULT_SCHEDULE)
        model = shared_model(spec, options, ranks)
        self.parameters = count_parameters(spec, model, ranks)
        count = options.pp * kind.stages
        mine = stages_of(ranks.pipeline.rank, options.pp, kind)
        self.stages = [stage.to(ranks.device) for stage in cut(model, count, mine)]
        self.modules = [stage.model for stage in self.stages]
        for stage in self.stages:
            stage.context = self.autocast
        self.example = stage_input(model, options.batch // options.dp, options.seq)
        schedule = options.schedule or DEFAULT_SCHEDULE
        self.pipeline = Pipeline(
            self.stages, schedule, options.grad_accum, self.example, ranks.pipeline, ranks.device
        )
        self._handle: Any = None
        self._tie: Any = self._tie_group() if spec.tied and not kind.v_shaped else None
        self._layers = [layers_of_stage(stage, count, spec.layers) for stage in mine]

    # ---- weights that the first and the last stage share -----------------------------------------

    def _tie_group(self) -> Any:
        """The first and the last rank of this pipeline; every process makes the groups of all pipelines."""
        options, found = self.options, None
        per_stage = options.dp * options.cp * options.tp
        for place in range(per_stage):
            pair = [place, place + (options.pp - 1) * per_stage]
            group = dist.new_group(pair)
            if self.ranks.rank in pair:
                found = group
        return found

    def _tied(self) -> Tensor | None:
        """This rank's copy of the embedding that is also the head."""
        if self._tie is None:
            return None
        model: Any = self.modules[0 if (first := self.ranks.pipeline.rank == 0) else -1]
        if isinstance(model, HuggingFaceModel):
            causal: Any = model.model
            return (causal.get_input_embeddings() if first else causal.get_output_embeddings()).weight
        return model.tokens.weight if first else model.head.weight

    def counted_elsewhere(self) -> Sequence[Tensor]:
        tied = self._tied()
        return () if tied is None or self.ranks.pipeline.rank == 0 else (tied,)

    # ---- the budget ------------------------------------------------------------------------------

    @property
    def plans(self) -> int:
        return len(self._handle.plans) if self._handle is not None else 0

    def limit(self, optimizer: torch.optim.Optimizer) -> None:
        options = self.options
        budget: str | int | None = options.budget
        if budget is None and options.policy == "keep_all":
            return
        if budgets.asks_for(budget) == "auto":
            budget = self.auto_budget(sum(map(meter.resident_bytes, self.modules)))
        self._handle = lowtide.limit_memory(
            self.pipeline.schedule,
            budget,
            policy=options.policy,
            optimizer=optimizer,
            plan_seconds=options.plan_seconds,
            plans=options.kept_plans,
        )
        parameters = chain(*(module.parameters() for module in self.modules))
        count_reduced(self._handle.extensions, reduced_over(parameters, self.ranks))
        self.pipeline.refused = self._raise_budget

    def _raise_budget(self, error: BudgetError) -> None:
        """Where the budget may be raised to the smallest that works: do so, on all ranks alike."""
        if not self.options.raise_budget or error.smallest_bytes is None:
            raise error
        self._handle.set_budget("min")
        self.note = raised_note(self.options.budget, error)

    # ---- a step ----------------------------------------------------------------------------------

    def step(self, batches: Sequence[Batch], optimizer: torch.optim.Optimizer) -> float:
        own = [self.own(batch) for batch in batches]
        loss = self.pipeline.step(
            torch.cat([tokens for tokens, _ in own]), torch.cat([targets for _, targets in own])
        )
        tied = self._tied()
        if tied is not None and tied.grad is not None:
            dist.all_reduce(tied.grad, group=self._tie)
        allreduce_sequence_parallel_gradients(optimizer)
        average_gradients((p for group in optimizer.param_groups for p in group["params"]), self.ranks.data)
        return loss * self.options.pp

    def evaluate(self, batches: Sequence[Batch]) -> float:
        for stage in self.stages:
            stage.eval()
        losses = [self.pipeline.evaluate(*self.own(batch), self.example) for batch in batches]
        for stage in self.stages:
            stage.train()
        return sum(losses) / len(losses) * self.options.pp

    def about(self) -> dict[str, Any]:
        shown: dict[str, Any] = {
            "layers": [[layers.start, layers.stop] for layers in self._layers],
            "in_flight": self.pipeline.in_flight,
        }
        if (handle := self._handle) is not None and (plan := handle.plan) is not None:
            shown |= {
                "recomputed": len(plan.replayed),
                "budget_bytes": handle.budget_bytes,
                "predicted_peak_bytes": plan.predicted_peak_bytes,
                "plain_peak_bytes": plan.plain_peak_bytes,
            }
        return shown

    def release(self) -> None:
        if self._handle is not None:
            self._handle.remove()
