"""What one process holds of the model that a run trains, behind one interface: the whole, a share of every layer, or stages of a pipeline.

A part runs forward and backward of an optimizer step, and leaves gradients that are those of the whole batch.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import lowtide
from lowtide.models import ModelSpec, build_model
from lowtide.models.build import HuggingFaceModel
from lowtide.parallel.data import average_gradients, gradient_norm, scale_gradients
from lowtide.parallel.gradients import allreduce_sequence_parallel_gradients
from lowtide.parallel.parallelize import parallelize
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
    """

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
        """Forward and backward of the micro-batches; leaves the whole batch's gradients and returns a loss whose mean over all processes is
        the batch's."""

    @abstractmethod
    def evaluate(self, batches: Sequence[Batch]) -> float:
        """The mean loss over batches without training; its mean over all processes is the batches'."""

    def clip(self, most: float) -> float:
        """Scale the gradients so that their norm over the whole model is at most ``most``; returns the norm before."""
        if self.ranks.alone:
            return nn.utils.clip_grad_norm_(self.modules[0].parameters(), most).item()
        norm = self.norm()
        if math.isfinite(most):
            scale_gradients(self.modules, norm, most)
        return norm

    def norm(self) -> float:
        """The norm of the gradients of the whole model."""
        return gradient_norm(self.modules, self.ranks.model, tensor=self.ranks.tensor, counted_elsewhere=self.counted_elsewhere())

    def counted_elsewhere(self) -> Sequence[Tensor]:
        """Parameters that another process holds, too, and counts in the norm."""
        return ()

    def compare(self, batch: Batch, optimizer: torch.optim.Optimizer) -> Comparison:
        """Measure the plain and the planned step side by side.

        Raises:
            OptionError: this part is no step of its own.
        """
        raise OptionError("--compare: the comparison is of one process's step: leave it out with --pp")

    def release(self) -> None:  # noqa: B027  (a part without a handle has nothing to do)
        """Take the budget out of force."""

    def about(self) -> dict[str, Any]:
        """What is worth telling of this part at the end, as plain values."""
        return {}

    def autocast(self) -> Any:
        """The context that computes in the run's dtype."""
        dtype = self.options.dtype
        return torch.autocast(self.ranks.device.type, DTYPES[dtype], enabled=dtype != "fp32")

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
        self._handle: Any = None

    @property
    def plans(self) -> int:
        return len(self._handle.plans)

    def limit(self, optimizer: torch.optim.Optimizer) -> None:
        self._handle = lowtide.limit_memory(self.model, budget=self.options.budget, policy=self.options.policy, optimizer=optimizer)

    def _loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        with self.autocast():
            return self.model(tokens, targets).loss

    def _backward(self, batches: Sequence[Batch]) -> float:
        """The mean loss; its gradients are added to the parameters'."""
        loss = 0.0
        for batch in batches:
            part = self._loss(*self.own(batch)) / len(batches)
            part.backward()
            loss += part.item()
        return loss

    def step(self, batches: Sequence[Batch], optimizer: torch.optim.Optimizer) -> float:
        loss = self._backward(batches)
        if not self.ranks.alone:
            allreduce_sequence_parallel_gradients(optimizer)
            average_gradients(self.model.parameters(), self.ranks.data)
        return loss

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch]) -> float:
        self.model.eval()
        losses = [self._loss(*self.own(batch)).item() for batch in batches]
        self.model.train()
        return sum(losses) / len(losses)

    def compare(self, batch: Batch, optimizer: torch.optim.Optimizer) -> Comparison:
        tokens, targets = self.own(batch)
        agree = lambda flag: self.ranks.any(flag, self.ranks.tensor)  # noqa: E731
        return compare(self.model, self._handle, optimizer, lambda: self._loss(tokens, targets), self.ranks.device, agree=agree)

    def release(self) -> None:
        self._handle.remove()

    def about(self) -> dict[str, Any]:
        plan = self._handle.plan
        if plan is None:
            return {}
        return {
            "budget_bytes": plan.budget_bytes,
            "predicted_peak_bytes": plan.predicted_peak_bytes,
            "plain_peak_bytes": plan.plain_peak_bytes,
        }


def make_part(spec: ModelSpec, options: TrainOptions, ranks: Ranks) -> Part:
    """This process's part of the model, with the weights that one process alone would have."""
    if options.shard_parameters:
        from lowtide.train.sharded import ShardedModel

        return ShardedModel(spec, options, ranks)
    if options.pp > 1:
        from lowtide.train.stages import Stages

        return Stages(spec, options, ranks)
    return WholeModel(spec, options, ranks)


def shared_model(spec: ModelSpec, options: TrainOptions, ranks: Ranks) -> nn.Module:
    """The model, its layers shared among the tensor-parallel ranks."""
    if ranks.tensor.size == 1:
        return build_model(spec)
    if spec.config is not None:
        return build_model(spec, ranks.tensor, options.sequence_parallel)
    model = build_model(spec)
    assert isinstance(model, HuggingFaceModel)
    model.model = parallelize(model.model, ranks.tensor, options.sequence_parallel)
    return model


def count_parameters(spec: ModelSpec, model: nn.Module, ranks: Ranks) -> int:
    """Parameters of the whole model."""
    if ranks.tensor.size == 1:
        return sum(parameter.numel() for parameter in model.parameters())
    from lowtide.train.memory import BYTES_PER_PARAMETER, training_bytes

    return training_bytes(spec) // BYTES_PER_PARAMETER
