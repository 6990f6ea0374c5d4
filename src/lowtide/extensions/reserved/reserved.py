"""Plans within a budget with what PyTorch's caching allocator for CUDA reserves for their steps.

In: a plan within a budget in requested bytes. Out: one that is within it in reserved bytes, too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from lowtide import accelerator
from lowtide import budget as budgets
from lowtide.budget import format_bytes
from lowtide.errors import BudgetError, PlanError
from lowtide.extension import Claim, Extension
from lowtide.extensions.reserved.card import caching_allocator
from lowtide.graph import StepGraph
from lowtide.meter.reserved import MIB
from lowtide.meter.resident import model_device
from lowtide.plan.choose import choose
from lowtide.plan.data import Plan
from lowtide.plan.policies.build import Policy
from lowtide.plan.reserved_bytes import reserved_after
from lowtide.run.messages import Once

_STEPS = 3
"""Steps until what is reserved has settled."""

_RESERVED_ERROR = 0.02
"""What the prediction of reserved bytes may be short by, as a share of the budget. An operation may request
other bytes, or in another order, than in the profiled step; in what the allocator recorded by itself it is
not known which operation requested which.
"""


class Reserved(Extension):
    """Holds a budget of reserved bytes.

    Args:
        asked: as ``reserved`` of `limit_memory`; ``None`` holds it for ``"auto"`` alone.
        budget: the one that was given last.
    """

    name = "reserved"

    def __init__(self, asked: bool | None, budget: str | int | None = None) -> None:
        self.asked, self._budget = asked, budget
        self._warn_once = Once()

    def copied(self) -> Reserved:
        """The same once more."""
        return Reserved(self.asked, self._budget)

    def given(self, budget: str | int | None) -> None:
        """Check the budget, which is in bytes or ``"auto"`` where reserved bytes are asked for."""
        holds_reserved(self.asked, self.model, budget)
        self._budget = budget

    def admit(self, plan: Plan, problem: Any, limit_bytes: int) -> Plan:
        """A plan within the budget with what CUDA's allocator reserves for it.

        Raises:
            BudgetError: none was found.
        """
        if not holds_reserved(self.asked, self.model, self._budget):
            return plan
        if problem.shares_plan:
            self._warn_once(
                "the budget counts requested bytes here: ranks that share a plan reserve different bytes"
            )
            return plan
        price = functools.partial(reserved_bytes, problem.graph, model=self.model, claim=problem.claim)
        policy = problem.patience.policy
        try:
            plan = within_reserved(problem.graph, limit_bytes, plan, policy, price)
        except BudgetError:
            alone = getattr(policy, "recomputing", None)
            if alone is None or not plan.moves:
                raise
            patience = replace(problem.patience, policy=alone)
            plan = replace(problem, patience=patience).plan_within(limit_bytes)
            plan = within_reserved(problem.graph, limit_bytes, plan, alone, price)
        accelerator.empty_cache()  # what the profiled step left in pieces
        return plan


def holds_reserved(reserved: bool | None, model: torch.nn.Module, budget: str | int | None) -> bool:
    """Whether a budget counts what is reserved: where that is asked for, and for ``"auto"`` on CUDA.

    Raises:
        PlanError: it is asked for, and the device or its allocator has nothing of the kind, or the budget is
            a share of what the step requests.
    """
    if reserved is False:
        return False
    device = model_device(model)
    auto = budgets.asks_for(budget) == "auto"
    native = accelerator.is_accelerator(device) and accelerator.allocator() == "native"
    if not reserved:
        return auto and native
    if not native:
        found = f"under {accelerator.allocator()}" if accelerator.is_accelerator(device) else f"on {device}"
        raise PlanError(
            "reserved=True limits the memory of PyTorch's caching allocator for CUDA, and this model "
            f"is {found}: leave reserved out; the budget then counts requested bytes"
        )
    if not auto and (budgets.asks_for(budget) or budgets.is_share(budget)):
        raise PlanError(
            f"reserved=True takes a budget in bytes, such as '20GiB', or 'auto', not {budget!r}, which is "
            "measured in requested bytes"
        )
    return True


def within_reserved(
    graph: StepGraph, limit: int, plan: Plan, policy: str | Policy, reserved: Callable[[Plan], int]
) -> Plan:
    """A plan within the budget with what the allocator reserves for it.

    Args:
        graph: the step.
        limit: the budget in bytes.
        plan: the plan for as many requested bytes.
        policy: makes plans for less.
        reserved: what is reserved for a plan.

    Raises:
        BudgetError: none was found; says the least that one reserves.
    """
    taken: list[tuple[int, Plan]] = []  # what is reserved for each plan

    def price(plan: Plan) -> int:
        taken.append((reserved(plan), plan))
        return taken[-1][0]

    room = int(limit * (1 - _RESERVED_ERROR))
    try:
        plan = choose(graph, room, price, policy=policy, target=plan.predicted_peak_bytes, first=plan)
    except BudgetError:
        least, lowest = min(taken, key=lambda one: one[0])
        smallest = int(least / (1 - _RESERVED_ERROR)) + MIB
        raise too_much_reserved(limit, least, lowest.predicted_peak_bytes, smallest) from None
    found = next(bytes for bytes, one in taken if one is plan)
    note = f"PyTorch's allocator reserves {format_bytes(found)} for its steps, as predicted"
    return replace(plan, notes=(*plan.notes, note))


def too_much_reserved(limit: int, least: int, requested: int, smallest: int) -> BudgetError:
    """The refusal of a budget that holds what a plan requests, and not what PyTorch's allocator reserves.

    Args:
        limit: the budget in bytes.
        least: the least that the allocator reserves for any plan that was found.
        requested: what that plan requests.
        smallest: the budget that would do.
    """
    return BudgetError(
        f"the budget of {format_bytes(limit)} is too small for what PyTorch's allocator reserves: "
        f"{format_bytes(least)} for {format_bytes(requested)} requested",
        smallest,
        "The rest is lost between blocks: with PYTORCH_ALLOC_CONF=expandable_segments:True it is often less.",
        budget_bytes=limit,
        remedies=[f"give a budget of {format_bytes(smallest)} or more, or leave reserved=True out"],
    )


def reserved_bytes(graph: StepGraph, plan: Plan, model: torch.nn.Module, claim: Claim) -> int:
    """What is reserved once steps run under a plan, from now on, after one ``torch.cuda.empty_cache()``.

    Args:
        graph: of the step.
        plan: keeps, recomputes and moves. What moves is counted as if it were recomputed, beside the slab
            that it comes back into, and beside a window of what is under way.
        model: its gradients go before the next step, unless the step was profiled with them.
        claim: what an optimizer takes beside the step.
    """
    allocator, live = caching_allocator(model_device(model))
    allocator.empty_cache()
    # what is left of the profiled step: the optimizer's update, and then its gradients go
    sizes = [parameter.nbytes for parameter in model.parameters() if parameter.requires_grad]
    for size in _blocks(claim.to_come_bytes, sizes):
        allocator.allocate(size)
    update = _blocks(claim.step_bytes, sizes)
    for block in [allocator.allocate(size) for size in update]:
        allocator.free(block)
    if not any(storage.kind == "gradient" for storage in graph.storages):
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        for address in {gradient.untyped_storage().data_ptr() for gradient in gradients}:
            if address in live:
                allocator.free(live[address])
    for size in filter(None, (plan.slab_bytes, plan.window_bytes)):
        allocator.allocate(size)
    reserved_after(graph, plan.stored, allocator, _STEPS, update)
    return allocator.peak_reserved_bytes


def _blocks(bytes: int, sizes: list[int]) -> list[int]:
    """Blocks of these sizes that come to so many bytes, the last one cut."""
    blocks: list[int] = []
    while bytes > 0 and sum(sizes) > 0:
        for size in sizes:
            blocks.append(min(size, bytes))
            bytes -= blocks[-1]
            if bytes <= 0:
                break
    return [block for block in blocks if block]
