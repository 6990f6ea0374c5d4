"""Arguments and models that a limit refuses, in words; and what is refused of a step (`Demand`).

In: arguments and models, when the limit is put on, and later as they have become. Out: nothing, or an error
that says what was given, and what to give.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from lowtide import budget as budgets
from lowtide import private
from lowtide.errors import BudgetError, PlanError, takes
from lowtide.graph import StepGraph
from lowtide.plan import resolve
from lowtide.run.limit.entry import Entry


def check_given(budget: str | int | None, policy: Any, what: str = "limit_memory") -> None:
    """Check that there is a well-written budget, or a policy that needs none.

    Raises:
        BudgetError: there is neither.
    """
    if budget is None and policy is None:
        raise BudgetError(
            f"{what} needs a budget (bytes, '600MiB' or '60%'), or a policy that works without one, such as "
            "'full'"
        )
    if budget is not None:
        budgets.check(budget)


class CallError(PlanError, TypeError):
    """``loss_fn`` takes other arguments than it will be given."""


def check_arguments(policy: Any, loss_fn: Any) -> None:
    """Check the types of the arguments.

    Raises:
        PlanError: one does not; a `CallError`, which is a `TypeError`, too, where ``loss_fn`` takes other
            arguments than it will be given.
    """
    if policy is not None:
        resolve(policy)
    if loss_fn is not None and not callable(loss_fn):
        raise PlanError(f"loss_fn={loss_fn!r}: give a function from the model's output to the loss")
    is_module = isinstance(loss_fn, torch.nn.Module)
    adds_arguments = is_module and private.forward_pre_hooks(loss_fn)
    if loss_fn is not None and not adds_arguments and not takes(loss_fn.forward if is_module else loss_fn, 1):
        name = getattr(loss_fn, "__qualname__", type(loss_fn).__name__)
        raise CallError(
            f"loss_fn={name} cannot be called with one argument: it is given the model's output "
            "alone. Put the rest into a function of the output, as in loss_fn=lambda output: "
            "criterion(output, target)"
        )


def refuse_several_devices(model: torch.nn.Module) -> None:
    """Refuse a model that is on several devices, by itself or by `torch.nn.DataParallel`: a budget is of the
    memory of one.

    Raises:
        PlanError: it is one, or holds one.
    """
    for module in model.modules():
        if isinstance(module, torch.nn.DataParallel) and len(module.device_ids) > 1:
            no_replicas()
    named: dict[torch.device, str] = {}
    for name, parameter in model.named_parameters():
        if parameter.device.type != "meta":
            named.setdefault(parameter.device, name)
    if len(named) > 1:
        places = ", ".join(f"{name} on {device}" for device, name in named.items())
        raise PlanError(
            f"the model is on several devices ({places}), and a budget is of one device's memory: move the "
            f"model to one of them, or start one process for each device (torchrun) and share the model "
            "between them, with fully_shard (FSDP2) or as pipeline stages (docs/guides/sharded.md)"
        )


def refuse_nested(entry: Entry) -> None:
    """Refuse to evict anything of a step in which nested tensors take bytes that no plan sees.

    Raises:
        PlanError: the step is one.
    """
    if entry.facts.nested:
        raise PlanError(
            f"the forward makes a nested tensor without a layout ({entry.facts.nested}), as PyTorch's "
            "attention on jagged tensors does where no fused kernel takes them (on a CPU, say). No plan "
            "counts the bytes of such tensors, so no budget below the plain step can be held. Pad the rows "
            "and mask them (x.to_padded_tensor(0.0), attn_mask=), or run attention for one row after the "
            'other (x.unbind()). A budget of "100%" runs the step as it is'
        )


def no_replicas() -> NoReturn:
    """In the place of what copies a limited model for `torch.nn.DataParallel`.

    Raises:
        PlanError: always.
    """
    raise PlanError(
        "torch.nn.DataParallel copies the model to each of its devices in every step, and no limit reaches "
        "the copies: start one process for each device (torchrun) with DistributedDataParallel and limit the "
        "model there, or run on one device without DataParallel (model.module is what it wraps)"
    )


@dataclass(frozen=True)
class Demand:
    """A step that is to be planned for, and what it may take.

    Attributes:
        graph: the step, with all that exists beside it.
        limit_bytes: the budget, or ``None``.
        free_bytes: what a plan leaves free of it.
        plain_peak_bytes: of the plain step, or of the largest that was planned for.
        whole_peak_bytes: what a budget in percent is of; ``None`` where it was given otherwise.
        refusal: of what an extension claims, or ``None`` where the budget holds that.
    """

    graph: StepGraph
    limit_bytes: int | None
    free_bytes: int
    plain_peak_bytes: int
    whole_peak_bytes: int | None
    refusal: BudgetError | None
