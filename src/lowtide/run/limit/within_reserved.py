"""Hold what PyTorch's caching allocator reserves on CUDA, which is more than what a plan's tensors take.

In: a plan, its step, and the allocator as it stands. Out: the bytes that are reserved once steps run under
the plan; and of the plans that a smaller budget gives, the first that is within the budget with these.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from lowtide import accelerator
from lowtide.budget import asks_for, format_bytes
from lowtide.errors import BudgetError, PlanError
from lowtide.graph import StepGraph
from lowtide.meter.cuda import caching_allocator
from lowtide.meter.reserved import MIB
from lowtide.meter.resident import model_device
from lowtide.plan.choose import choose
from lowtide.plan.data import Plan
from lowtide.plan.policies.build import Policy
from lowtide.plan.reserved_bytes import reserved_after
from lowtide.run.limit.need import OptimizerNeed

_STEPS = 3
"""Steps until what is reserved has settled."""

_MARGIN = 0.02
"""What the prediction may be short by, as a share of the budget: what an operation asks for, and in which
order, is known of one run in the profiled step, and of none where the program records the history itself.
"""

RANKS = "the budget counts requested bytes here: ranks that share a plan reserve different bytes"


def holds_reserved(asked: bool | None, model: torch.nn.Module, budget: str | int | None) -> bool:
    """Whether a budget counts what is reserved: where that is asked for, and for ``"auto"`` on CUDA.

    Raises:
        PlanError: it is asked for, and the device or its allocator has nothing of the kind, or the budget is
            a share of what the step requests.
    """
    if asked is False:
        return False
    device = model_device(model)
    auto = asks_for(budget) == "auto"
    native = accelerator.is_accelerator(device) and accelerator.allocator() == "native"
    if not asked:
        return auto and native
    if not native:
        found = f"under {accelerator.allocator()}" if accelerator.is_accelerator(device) else f"on {device}"
        raise PlanError(
            "reserved=True holds what PyTorch's caching allocator for CUDA takes, and this model is "
            f"{found}, which has none: leave reserved out; the budget counts requested bytes"
        )
    if not auto and isinstance(budget, str) and (asks_for(budget) or budget.strip().endswith("%")):
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

    room = int(limit * (1 - _MARGIN))
    try:
        plan = choose(graph, room, price, policy=policy, target=plan.predicted_peak_bytes, first=plan)
    except BudgetError:
        least, lowest = min(taken, key=lambda one: one[0])
        smallest = int(least / (1 - _MARGIN)) + MIB
        raise BudgetError(
            f"the budget of {format_bytes(limit)} is too small for what PyTorch's allocator reserves: "
            f"{format_bytes(least)} for {format_bytes(lowest.predicted_peak_bytes)} requested",
            smallest,
            "The rest is lost between blocks: with PYTORCH_ALLOC_CONF=expandable_segments:True it is often "
            "less.",
            budget_bytes=limit,
            remedies=[f"give a budget of {format_bytes(smallest)} or more, or leave reserved=True out"],
        ) from None
    found = next(bytes for bytes, one in taken if one is plan)
    note = f"PyTorch's allocator reserves {format_bytes(found)} for its steps, as predicted"
    return replace(plan, notes=(*plan.notes, note))


def reserved_bytes(graph: StepGraph, plan: Plan, model: torch.nn.Module, need: OptimizerNeed | None) -> int:
    """What is reserved once steps run under a plan, from now on, after one ``torch.cuda.empty_cache()``.

    Args:
        graph: of the step.
        plan: keeps, recomputes and no more: what moves has memory of its own.
        model: its gradients go before the next step, unless the step was profiled with them.
        need: what the optimizer takes, or ``None``.
    """
    allocator, standing = caching_allocator(model_device(model))
    allocator.empty_cache()
    # what is left of the profiled step: the optimizer's update, and then its gradients go
    sizes = [parameter.nbytes for parameter in model.parameters() if parameter.requires_grad]
    for size in _blocks(need.to_come_bytes if need is not None else 0, sizes):
        allocator.allocate(size)
    update = _blocks(need.step_bytes if need is not None else 0, sizes)
    for block in [allocator.allocate(size) for size in update]:
        allocator.free(block)
    if not any(storage.kind == "gradient" for storage in graph.storages):
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        for address in {gradient.untyped_storage().data_ptr() for gradient in gradients}:
            if address in standing:
                allocator.free(standing[address])
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
