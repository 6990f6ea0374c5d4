"""`limit_memory`: a model whose training step stays within a budget."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lowtide import budget as budgets
from lowtide import private
from lowtide.errors import BudgetError, PlanError
from lowtide.graph import StepGraph
from lowtide.plan.plan import Plan
from lowtide.run.key import StepKey
from lowtide.run.limiter import Limiter
from lowtide.run.planning import Policy
from lowtide.run.record import Verify
from lowtide.run.refuse import refuse_other_kinds, refuse_sharded
from lowtide.run.told import limit_line
from lowtide.store.stores import Stores


class Handle:
    """What `limit_memory` returns.

    Attributes:
        model: the limited model.
    """

    def __init__(self, limiter: Limiter) -> None:
        self._limiter = limiter
        self.model = limiter.model

    def __repr__(self) -> str:
        return limit_line(self.model, self._limiter.budget, len(self._limiter.plans), self.plan)

    @property
    def plan(self) -> Plan | None:
        """The plan of the latest step, or ``None`` before the first. Its seconds are those of operations timed alone until some steps have
        run, and then at the pace that the latest of the whole steps that are timed had: the first ones, and every fourth of the others."""
        latest = self._limiter.latest
        return latest.paced() if latest is not None else None

    @property
    def graph(self) -> StepGraph | None:
        """The step graph that `plan` was made for."""
        latest = self._limiter.latest
        return latest.graph if latest is not None else None

    @property
    def plans(self) -> dict[StepKey, Plan]:
        """Every plan so far, by what the step looked like."""
        return {key: planned.paced() for key, planned in self._limiter.plans.items()}

    @property
    def kept(self) -> dict[str, str]:
        """Operations whose results are kept because they do not reproduce, with the reason."""
        return dict(self._limiter.planner.kept)

    def prepare(self, *args: Any, **kwargs: Any) -> Plan:
        """Plan for a step with these arguments now, without running it.

        Raises:
            BudgetError: no plan fits.
        """
        with self._limiter._inside():
            return self._limiter.planned(args, kwargs).paced()

    def share_costs(self, other: Handle) -> None:
        """Take over what ``other`` found out about the costs of operations, so that they are not timed again."""
        self._limiter.planner.costs.update(other._limiter.planner.costs)

    def remove(self) -> None:
        """Give the model its own forward back. Steps that are under way finish under their plan."""
        if self.model.__dict__.get("forward") is self._limiter:
            if self._limiter.original is None:
                del self.model.__dict__["forward"]
            else:
                self.model.__dict__["forward"] = self._limiter.original
            if self._limiter.own_stores:
                self._limiter.stores.retire()


def limit_memory(
    model: torch.nn.Module,
    budget: str | int | None = None,
    *,
    policy: Policy | None = None,
    loss_fn: Callable[[Any], torch.Tensor] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    verify: Verify = "first",
    stores: Stores | None = None,
) -> Handle:
    """Make the training steps of ``model`` fit a budget, at the least extra time, with bitwise the same gradients.

    The first step with inputs of a new kind is traced on fake tensors, its operations are timed one at a time, and a plan is made; steps
    then run under it. Other kinds (another shape, evaluation, gradients that are there or not) get plans of their own. What cannot be
    traced on fake tensors runs one extra step for real, in little memory. While a plan is made, other threads see fake parameters in the model:
    call ``handle.prepare(...)`` before threads share it. When the loss lies outside the model and ``loss_fn`` is not given,
    the first step runs under the plan of least memory and the loss is measured.

    Args:
        model: any module; its forward is replaced on the instance until ``handle.remove()``.
        budget: bytes, or text such as ``"600MiB"`` or ``"60%"`` of the plain step's peak (of the largest step planned so far). ``None``
            needs a policy that does without.
        policy: a policy or its name; ``None`` is ``optimal``.
        loss_fn: from the model's output to the loss, for a model that does not return its loss. It is used to plan, not to train.
        optimizer: its state and its step count against the budget, too.
        stores: process groups to shard over and codecs of your own, for plans that move values; tiers open by themselves.
        verify: ``first`` compares every replay of the first step, ``always`` also checks digests in every step, ``never`` trusts.

    Raises:
        BudgetError: the budget is malformed; at the first step, when no plan fits, with the smallest budget that does.
        PlanError: an argument that cannot be.

    Example:
        >>> import torch, lowtide
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 1))
        >>> handle = lowtide.limit_memory(model, budget="100%", loss_fn=torch.sum)
        >>> model(torch.randn(4, 8)).sum().backward()
        >>> handle.plan.predicted_peak_bytes <= handle.plan.budget_bytes
        True
        >>> handle.remove()
    """
    if not isinstance(model, torch.nn.Module):
        raise PlanError(f"limit_memory takes a torch.nn.Module, not {type(model).__name__}")
    if verify not in ("first", "always", "never"):
        raise PlanError(f"verify={verify!r} is not known: use 'first', 'always' or 'never'")
    if budget is None and policy is None:
        raise BudgetError("limit_memory needs a budget (bytes, '600MiB' or '60%'), or a policy that works without one, such as 'full'")
    if budget is not None:
        budgets.parse(budget, 1 << 60)
    refuse_other_kinds(model, policy, loss_fn, optimizer, stores)
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        model = model.module
    if private.is_compiled(model):
        raise PlanError(
            "this model is compiled as a whole, which lowtide cannot look into: limit the model itself and compile its submodules instead "
            "(they stay compiled)"
        )
    if isinstance(model.__dict__.get("forward"), Limiter):
        raise PlanError("this model is limited already: call remove() on its handle first")
    refuse_sharded(model)
    limiter = Limiter(model, budget=budget, policy=policy, loss_fn=loss_fn, optimizer=optimizer, verify=verify, stores=stores)
    model.__dict__["forward"] = limiter
    return Handle(limiter)
