"""Check the arguments of `limit_memory` when it is called, not in the middle of the first step."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from lowtide import private
from lowtide.errors import PlanError
from lowtide.plan import resolve
from lowtide.run.scope.rules import takes
from lowtide.store.stores import Stores


class CallError(PlanError, TypeError):
    """``loss_fn`` takes other arguments than it will be given."""


def check_arguments(model: torch.nn.Module, policy: Any, loss_fn: Any, optimizer: Any, stores: Any) -> None:
    """Check the types of the arguments, and that they go with the model.

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
    check_optimizer(model, optimizer)
    if stores is not None and not isinstance(stores, Stores):
        raise PlanError(f"stores= takes lowtide.Stores(...), not {type(stores).__name__}")


def check_optimizer(model: torch.nn.Module, optimizer: Any) -> None:
    """Check that this is ``None`` or an optimizer of the model's parameters.

    Raises:
        PlanError: it is neither.
    """
    if optimizer is None:
        return
    if not isinstance(optimizer, torch.optim.Optimizer):
        given = optimizer.__name__ + ", a class" if isinstance(optimizer, type) else type(optimizer).__name__
        raise PlanError(f"optimizer= takes a torch.optim.Optimizer of the model's parameters, not {given}")
    own = {id(parameter): parameter.requires_grad for parameter in model.parameters()}
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if any(own.values()) and not held & own.keys():  # a frozen model is not limited
        raise PlanError(
            f"optimizer= was given {type(optimizer).__name__} that holds none of this model's parameters: "
            "give the one that trains the model, or leave optimizer= out and subtract what it takes from "
            "the budget"
        )


def sharded_units(model: torch.nn.Module) -> list[str]:
    """Names of the modules that FSDP shards, the model itself (an empty name) among them."""
    named = model.named_modules()
    return [name for name, module in named if private.is_unit(module) or private.is_first_fsdp(module)]


def refuse_first_fsdp(model: torch.nn.Module) -> None:
    """Refuse a model that the first FSDP shards: it swaps the storages of the weights, so a replay would find
    others.

    Raises:
        PlanError: the model is one, or holds one.
    """
    if any(map(private.is_first_fsdp, model.modules())):
        raise PlanError(
            "FullyShardedDataParallel, the first FSDP, swaps the weights' storages in every step, so nothing "
            "can be recomputed from them: shard with torch.distributed.fsdp.fully_shard (FSDP2), which "
            "lowtide.limit_memory takes"
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
