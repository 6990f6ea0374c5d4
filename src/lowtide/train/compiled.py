"""The whole model, or what this process has of it, its step compiled within the budget (``lowtide train
--compile``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

import lowtide
from lowtide import budget as budgets
from lowtide.errors import BudgetError
from lowtide.meter import resident_bytes
from lowtide.models import ModelSpec
from lowtide.plan.data import Plan, in_one_line
from lowtide.progress import current, working
from lowtide.train.compare import Comparison, compare
from lowtide.train.options import TrainOptions
from lowtide.train.part import Batch, WholeModel, raised_note
from lowtide.train.ranks import Ranks


class CompiledModel(WholeModel):
    """The whole model, compiled by `lowtide.compile` with the loss as one step.

    Gradients that later micro-batches find are put in place as zeros before the first one, so that what is
    compiled for it is planned beside them.
    """

    def __init__(self, spec: ModelSpec, options: TrainOptions, ranks: Ranks) -> None:
        super().__init__(spec, options, ranks)
        self._call: Any = self.model
        self._plain: Any = None
        self._backend = options.compile_backend or "inductor"

    @property
    def plans(self) -> int:
        return len(self._handle.plans)

    @property
    def plan(self) -> Plan | None:
        """The plan in force."""
        return self._handle.plan

    def limit(self, optimizer: torch.optim.Optimizer) -> None:
        budget: str | int | None = self.options.budget
        if budgets.asks_for(budget) == "auto":
            budget = self.auto_budget(resident_bytes(self.model))
        assert budget is not None  # checked with the options
        seconds = self.options.plan_seconds
        self._call = lowtide.compile(
            self.model, budget, optimizer=optimizer, backend=self._backend, plan_seconds=seconds
        )
        self._handle = lowtide.handle_of(self._call)
        self._handle.reduced_bytes = self.reduced_bytes

    def step(self, batches: Sequence[Batch], optimizer: torch.optim.Optimizer) -> float:
        if len(batches) > 1:
            self._put_gradients()
        if self._handle.plan is not None:
            return super().step(batches, optimizer)
        with working("compiling", "compiled") as work:
            work.say("compiling and planning one step", silent=True)
            loss = super().step(batches, optimizer)
            if (plan := self._handle.plan) is not None:
                work.done(in_one_line(plan))
        return loss

    def _planned_backward(self, tokens: Tensor, targets: Tensor, count: int) -> float:
        try:
            loss = self._loss(tokens, targets) / count
        except BudgetError as error:  # one graph is planned before its first forward
            self._take_smallest(error)
            loss = self._loss(tokens, targets) / count
        try:
            loss.backward()
        except BudgetError as error:  # several graphs after their first backward, its gradients complete
            self._take_smallest(error)
        return loss.item()

    def _take_smallest(self, error: BudgetError) -> None:
        """Where the budget may be raised to the smallest that works, do so."""
        if not self.options.raise_budget or error.smallest_bytes is None:
            raise error
        self._handle.set_budget("min")
        self.note = raised_note(self.options.budget, error)

    def _loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        with self.autocast():
            return self._call(tokens, targets).loss

    def _put_gradients(self) -> None:
        """Gradients to add to, as every micro-batch but the first finds them."""
        for parameter in self.model.parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def compare(self, batch: Batch, optimizer: torch.optim.Optimizer) -> Comparison:
        tokens, targets = self.own(batch)

        def clear() -> None:
            optimizer.zero_grad(set_to_none=True)
            if self.options.grad_accum > 1:
                self._put_gradients()

        return compare(
            self.model,
            self,
            optimizer,
            lambda: self._loss(tokens, targets),
            self.ranks.device,
            agree=self.any_rank,
            clear=clear,
        )

    @contextmanager
    def paused(self) -> Iterator[None]:
        """In the block the step is what `torch.compile` alone makes of it."""
        if self._plain is None:
            current().say("compiling the plain step", silent=True)
            self._plain = torch.compile(self.model, backend=self._backend)
        planned, self._call = self._call, self._plain
        try:
            yield
        finally:
            self._call = planned
