"""The part of a process in a pipeline: stages of the model, a schedule, and a window of micro-batches that
are kept whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lowtide import accelerator, meter
from lowtide import budget as budgets
from lowtide.errors import BudgetError
from lowtide.meter.cuda import resident_workspace_bytes
from lowtide.models import ModelSpec
from lowtide.models.build import HuggingFaceModel
from lowtide.models.stage import cut, layers_of_stage, stage_input
from lowtide.parallel.data import average_gradients
from lowtide.parallel.gradients import allreduce_sequence_parallel_gradients
from lowtide.parallel.pipeline import Pipeline, schedule_kind, stages_of
from lowtide.parallel.window import MicroBatch, StageMemory, measure_micro_batch
from lowtide.run.limit.need import missing_gradient_bytes, optimizer_need
from lowtide.train.arrangements import DEFAULT_SCHEDULE
from lowtide.train.options import TrainOptions
from lowtide.train.part import Batch, Part, count_parameters, raised, reduced_over, shared_model
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
        self.memory: StageMemory | None = None
        self._limit_bytes: int | None = None
        self._standing_bytes = 0
        self._predicted_bytes: int | None = None
        self._tie: Any = self._tie_group() if spec.tied and not kind.v_shaped else None
        self._layers = [layers_of_stage(stage, count, spec.layers) for stage in mine]

    # ---- weights that the first and the last stage share -----------------------------------------

    def _tie_group(self) -> Any:
        """The first and the last rank of this pipeline; every process makes the groups of all pipelines."""
        options, found = self.options, None
        per_stage = options.dp * options.tp
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

    # ---- the window ------------------------------------------------------------------------------

    def limit(self, optimizer: torch.optim.Optimizer) -> None:
        """Choose how many micro-batches are kept whole.

        Raises:
            BudgetError: not even recomputing all of them fits on some rank; on every rank, with its name.
        """
        options = self.options
        if options.policy in ("keep_all", "full") and options.budget is None:
            self.pipeline.window.capacity = None if options.policy == "keep_all" else 0
            return
        problem: tuple[str, int | None] | None = None
        try:
            self._choose(optimizer)
        except BudgetError as error:
            problem = f"{self.ranks.name}: {error}", error.smallest_bytes
        problems = [found for found in self.ranks.gather(problem) if found is not None]
        if problems:
            text, smallest = max(problems, key=lambda found: found[1] or 0)
            raise BudgetError(text, smallest)
        assert self.memory is not None
        capacity = self.pipeline.window.capacity = self._agreed(self.pipeline.window.capacity or 0)
        self._predicted_bytes = self._standing_bytes + self.memory.peak_bytes(capacity)

    def _choose(self, optimizer: torch.optim.Optimizer) -> None:
        device = self.ranks.device
        if self.ranks.any(not accelerator.is_accelerator(device) and not meter.available()):
            raise BudgetError(
                "a --budget with --pp needs the counting allocator, and this machine has no C++ compiler: "
                "pass --policy full or keep_all"
            )
        found = [self._measure(stage, whole) for whole in (True, False) for stage in self.stages]
        half = len(self.stages)
        optimizer.zero_grad(set_to_none=True)
        travelling = self._travelling_bytes()
        whole, recomputed = (_most(found[:half], travelling), _most(found[half:], travelling))
        self.memory = StageMemory(whole, recomputed, self.pipeline.in_flight)
        need = optimizer_need(optimizer)
        standing = (
            meter.resident_bytes(self.modules[0], optimizer, device)
            + resident_workspace_bytes(device)
            + need.state_bytes
            + missing_gradient_bytes(optimizer)
        )
        plain = standing + self.memory.peak_bytes(self.memory.in_flight)
        budget = self.options.budget
        assert budget is not None
        fullest = max(self.ranks.gather(plain))  # devices are alike: a percentage is of the fullest one
        fixed = {"keep_all": self.memory.in_flight, "full": 0}.get(self.options.policy or "")
        needed = self.memory.least_bytes if fixed is None else self.memory.peak_bytes(fixed)
        reduced = reduced_over(chain(*(stage.parameters() for stage in self.modules)), self.ranks)
        least = standing + max(needed, need.step_bytes, reduced)
        if budgets.asks_for(budget) == "auto":
            limit = self.auto_budget(meter.resident_bytes(self.modules[0], device=device))
        else:
            limit = budgets.resolve(budget, fullest, least)
        if least > limit:
            parts = {budgets.PARAMETERS: standing, budgets.ACTIVATIONS: least - standing}
            detail = (
                f"Parameters are with their gradients and optimizer state; {self.memory.in_flight} "
                "micro-batches are in flight."
            )
            refusal = budgets.too_small(limit, least, parts, detail=detail)
            if not self.options.raises_budget:
                raise refusal
            limit, self.note = least, raised(budget, refusal)
        capacity = self.memory.capacity(limit - standing) if fixed is None else fixed
        assert capacity is not None
        self._limit_bytes, self._standing_bytes = limit, standing
        self.pipeline.window.capacity = capacity

    def _agreed(self, capacity: int) -> int:
        """The smallest of the tensor-parallel ranks', since what is recomputed holds collectives that all of
        them issue.
        """
        if self.ranks.tensor.size == 1:
            return capacity
        found = torch.tensor(capacity, device=self.ranks.device)
        dist.all_reduce(found, dist.ReduceOp.MIN, group=self.ranks.tensor.process_group)
        return int(found)

    def _measure(self, stage: Any, whole: bool) -> MicroBatch:
        shape, device = tuple(self.example.shape), self.ranks.device
        tokens = torch.zeros(shape[0], self.options.seq, dtype=torch.long, device=device)
        first = lambda: tokens  # noqa: E731
        dtype = self.example.dtype
        later = lambda: torch.zeros(shape, dtype=dtype, device=device, requires_grad=True)  # noqa: E731
        return measure_micro_batch(
            stage, first if stage.first else later, tokens if stage.last else None, whole, device
        )

    def _travelling_bytes(self) -> int:
        """What is on its way at once at most: an output (of all in flight where sends end late), a gradient
        out, and one that comes in.
        """
        each = self.example.numel() * self.example.element_size()
        late = 1 if self.pipeline.kind.sends_end == "next" else self.pipeline.in_flight
        return each * (2 + late)

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
        window = self.pipeline.window
        return {
            "layers": [[layers.start, layers.stop] for layers in self._layers],
            "in_flight": self.pipeline.in_flight,
            "window": window.capacity,
            "most_whole": window.most_whole,
            "recomputed": window.recomputed,
            "budget_bytes": self._limit_bytes,
            "predicted_peak_bytes": self._predicted_bytes,
        }


def _most(found: Sequence[MicroBatch], travelling_bytes: int) -> MicroBatch:
    """What a micro-batch takes on the stage where it takes most."""
    return MicroBatch(
        max(each.held_bytes for each in found), max(each.passing_bytes for each in found) + travelling_bytes
    )
