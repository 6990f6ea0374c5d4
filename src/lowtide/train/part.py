"""What one process holds of the model that a run trains, behind one interface: the whole, a share of every
layer, or stages of a pipeline.

A part runs forward and backward of an optimizer step, and leaves gradients that are those of the whole batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import lowtide
from lowtide import budget as budgets
from lowtide.errors import BudgetError
from lowtide.extensions.optimizer.counted import count_reduced
from lowtide.meter import resident_bytes
from lowtide.models import ModelSpec, build_model
from lowtide.models.build import HuggingFaceModel
from lowtide.parallel.context import context_parallel
from lowtide.parallel.data import average_gradients
from lowtide.parallel.gradients import (
    allreduce_sequence_parallel_gradients,
    partial_gradients,
    reduced_bytes,
)
from lowtide.parallel.grads import clip_grad_norm
from lowtide.parallel.parallelize import parallelize
from lowtide.report import Measured, Report
from lowtide.train.compare import Comparison, compare
from lowtide.train.options import DTYPES, OptionError, TrainOptions
from lowtide.train.ranks import Ranks

Batch = tuple[Tensor, Tensor]


class Part(ABC):
    """This process's part of the model.

    Attributes:
        modules: what it holds; their state dicts have the names of the whole model.
        parameters: of the whole model.
        plans: how many plans were made.
        note: what was chosen that nobody asked for, to be told once.
    """

    note: str = ""
    modules: Sequence[nn.Module]
    parameters: int
    options: TrainOptions
    ranks: Ranks

    @property
    def plans(self) -> int:
        """How many plans were made."""
        return 0

    @abstractmethod
    def limit(self, optimizer: torch.optim.Optimizer) -> None:
        """Put the budget into force."""

    @abstractmethod
    def step(self, batches: Sequence[Batch], optimizer: torch.optim.Optimizer) -> float:
        """Forward and backward of the micro-batches; leaves the whole batch's gradients and returns a loss
        whose mean over all processes is the batch's."""

    @abstractmethod
    def evaluate(self, batches: Sequence[Batch]) -> float:
        """The mean loss over batches without training; its mean over all processes is the batches'."""

    def clip(self, most: float) -> float:
        """Scale the gradients so that their norm over the whole model is at most ``most``; returns the norm
        before.
        """
        if self.ranks.alone:
            return nn.utils.clip_grad_norm_(self.modules[0].parameters(), most).item()
        parameters = [parameter for module in self.modules for parameter in module.parameters()]
        pipeline = self.ranks.pipeline
        return clip_grad_norm(
            parameters, most, pipeline=pipeline, counted_elsewhere=self.counted_elsewhere()
        ).item()

    def counted_elsewhere(self) -> Sequence[Tensor]:
        """Parameters that another process holds, too, and counts in the norm."""
        return ()

    def compare(self, batch: Batch, optimizer: torch.optim.Optimizer) -> Comparison:
        """Measure the plain and the planned step side by side.

        Raises:
            OptionError: this part is no step of its own.
        """
        raise OptionError("--compare: the comparison is of one process's step: leave it out with --pp")

    def report(self, comparison: Comparison) -> Report | None:
        """All that is to be shown of the step that was compared; ``None`` where no plan is this part's own.

        Args:
            comparison: what was measured.
        """
        return None

    def release(self) -> None:  # noqa: B027  (a part without a handle has nothing to do)
        """Take the budget out of force."""

    def about(self) -> dict[str, Any]:
        """What is worth telling of this part at the end, as plain values."""
        return {}

    def autocast(self) -> Any:
        """The context that computes in the run's dtype."""
        dtype = self.options.dtype
        return torch.autocast(self.ranks.device.type, DTYPES[dtype], enabled=dtype != "fp32")

    def auto_budget(self, resident: int) -> int:
        """What ``--budget auto`` is for this process."""
        device = self.ranks.device
        return budgets.auto_bytes(budgets.available_bytes(device, resident), str(device))

    def own(self, batch: Batch) -> Batch:
        """This process's sequences of a micro-batch, on its device."""
        rows = self.ranks.share_of(self.options.batch)
        tokens, targets = batch
        return tokens[rows].to(self.ranks.device), targets[rows].to(self.ranks.device)


class WholeModel(Part):
    """Every layer, or this process's share of every layer."""

    def __init__(self, spec: ModelSpec, options: TrainOptions, ranks: Ranks) -> None:
        self.options, self.ranks = options, ranks
        self.model = shared_model(spec, options, ranks).to(ranks.device)
        self.modules = (self.model,)
        self.parameters = count_parameters(spec, self.model, ranks)
        if options.shard_parameters:
            from lowtide.train.sharded import shard  # importing FSDP takes seconds

            shard(self.model, options, ranks)
        self._handle: Any = None
        self._refused: BudgetError | None = None  # in the step that runs

    @property
    def plans(self) -> int:
        return len(self._handle.plans)

    def limit(self, optimizer: torch.optim.Optimizer) -> None:
        budget: str | int | None = self.options.budget
        if budgets.asks_for(budget) == "auto":
            budget = self.auto_budget(resident_bytes(self.model))
        self._handle = lowtide.limit_memory(
            self.model,
            budget,
            policy=self.options.policy,
            host_budget=self.options.host_budget,
            tiles=self.options.tiles,
            optimizer=optimizer,
            plan_seconds=self.options.plan_seconds,
            plans=self.options.kept_plans,
        )
        count_reduced(self._handle.extensions, self.reduced_bytes)

    @property
    def reduced_bytes(self) -> int:
        """What gradients take once more while ranks add them up after backward; FSDP averages within it."""
        if self.options.shard_parameters:
            return reduced_bytes(partial_gradients(self.model.parameters()))
        return reduced_over(self.model.parameters(), self.ranks)

    def _raise_budget(self, error: BudgetError) -> None:
        """Where the budget may be raised to the smallest that works: do so. The next forward plans within
        it.
        """
        if not self.options.raise_budget or error.smallest_bytes is None:
            raise error
        self._handle.set_budget("min")
        self.note, self._refused = raised_note(self.options.budget, error), error

    def _planned_backward(self, tokens: Tensor, targets: Tensor, count: int) -> float:
        """One of ``count`` parts of the loss, from a micro-batch; its gradients are added to the
        parameters'.
        """
        try:
            loss = self._loss(tokens, targets) / count
        except BudgetError as error:
            self._raise_budget(error)
            loss = self._loss(tokens, targets) / count
        try:
            loss.backward()
        except BudgetError as error:  # at the end of the first, whose gradients are complete
            self._raise_budget(error)
        return loss.item()

    def _loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        with self.autocast():
            return self.model(tokens, targets).loss

    def _backward(self, batches: Sequence[Batch]) -> float:
        """The mean loss; its gradients are added to the parameters'."""
        loss = 0.0
        for batch in batches:
            loss += self._planned_backward(*self.own(batch), count=len(batches))
        return loss

    def step(self, batches: Sequence[Batch], optimizer: torch.optim.Optimizer) -> float:
        before = self._handle.plan
        loss = self._backward(batches)
        plan = self._handle.plan
        if before is None and plan is not None and budgets.asks_for(self.options.budget) == "min":
            self.note = f"budget {budgets.format_bytes(plan.budget_bytes)}, the smallest that works"
        if self._refused is not None and plan is not None and len(batches) > 1:
            # those that add to gradients take more than the first: one budget for all
            self.note = raised_note(self.options.budget, self._refused, plan.budget_bytes)
            self._handle.set_budget(plan.budget_bytes)
        self._refused = None
        if not self.ranks.alone:
            self.reduce(optimizer)
        return loss

    def reduce(self, optimizer: torch.optim.Optimizer) -> None:
        """Make the gradients those of the whole batch, after backward."""
        allreduce_sequence_parallel_gradients(optimizer)
        if not self.options.shard_parameters:
            average_gradients(self.model.parameters(), self.ranks.data)

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch]) -> float:
        self.model.eval()
        losses = [self._loss(*self.own(batch)).item() for batch in batches]
        self.model.train()
        if self.options.shard_parameters:
            self.model.reshard()  # type: ignore[operator]  # no backward follows that would let go of weights
        return sum(losses) / len(losses)

    def compare(self, batch: Batch, optimizer: torch.optim.Optimizer) -> Comparison:
        tokens, targets = self.own(batch)
        return compare(
            self.model,
            self._handle,
            optimizer,
            lambda: self._loss(tokens, targets),
            self.ranks.device,
            agree=self.any_rank,
        )

    def any_rank(self, flag: bool) -> bool:
        """Whether ``flag`` holds on any of the ranks that have to run the same steps."""
        all_ranks = self.options.shard_parameters or self.options.cp > 1
        return self.ranks.any(flag, None if all_ranks else self.ranks.tensor)

    def report(self, comparison: Comparison) -> Report | None:
        options, plain, planned = self.options, comparison.plain, comparison.planned
        return self._handle.make_report(
            f"{options.model}, {options.batch} x {options.seq} tokens, {options.dtype}",
            measured_plain=None
            if plain is None
            else Measured.of(plain.peak_bytes, plain.seconds, plain.curve),
            measured_planned=Measured.of(planned.peak_bytes, planned.seconds, planned.curve),
            measured_extra=comparison.extra,
        )

    def release(self) -> None:
        self._handle.remove()

    def about(self) -> dict[str, Any]:
        plan = self._handle.plan
        if plan is None:
            return {}
        return {
            "budget_bytes": self._handle.budget_bytes,
            "predicted_peak_bytes": plan.predicted_peak_bytes,
            "plain_peak_bytes": plan.plain_peak_bytes,
        }


def reduced_over(parameters: Iterable[Tensor], ranks: Ranks) -> int:
    """The bytes that gradients take once more after backward, while ranks add them up or average them."""
    parameters = list(parameters)
    averaged = reduced_bytes(parameters) if ranks.data.size > 1 else 0
    return max(averaged, reduced_bytes(partial_gradients(parameters)))


def raised_note(asked: str | None, error: BudgetError, smallest_bytes: int | None = None) -> str:
    """What is told of a budget that was raised to the smallest that works.

    Args:
        asked: the budget that is too small.
        error: that says so.
        smallest_bytes: what it was raised to, where that is more than the error says.
    """
    smallest = error.smallest_bytes if smallest_bytes is None else smallest_bytes
    assert smallest is not None
    chosen = f"budget {budgets.format_bytes(smallest)}, the smallest that works"
    if budgets.asks_for(asked) == "min" or error.budget_bytes is None:
        return chosen
    return (
        f"{chosen}: the default of {asked} of the plain step's peak is "
        f"{budgets.format_bytes(error.budget_bytes)}"
    )


def shared_model(spec: ModelSpec, options: TrainOptions, ranks: Ranks) -> nn.Module:
    """The model, its layers shared among the tensor-parallel ranks, and its sequences among those of the
    context.
    """
    exchange: Any = options.cp_exchange
    shared = spec.config is not None and ranks.tensor.size > 1
    model = build_model(spec, ranks.tensor, options.sequence_parallel) if shared else build_model(spec)
    if not isinstance(model, HuggingFaceModel):
        return context_parallel(model, ranks.context, exchange)
    if ranks.tensor.size > 1:
        model.model = parallelize(model.model, ranks.tensor, options.sequence_parallel)
    model.model = context_parallel(model.model, ranks.context, exchange)
    return model


def count_parameters(spec: ModelSpec, model: nn.Module, ranks: Ranks) -> int:
    """Parameters of the whole model."""
    if ranks.tensor.size == 1:
        return sum(parameter.numel() for parameter in model.parameters())
    from lowtide.train.memory import BYTES_PER_PARAMETER, training_bytes

    return training_bytes(spec) // BYTES_PER_PARAMETER
