"""The arithmetic: `torch.optim`'s own functions with ``fused=True``, on stretches of tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from lowtide.optim.errors import OptimError
from lowtide.optim.layout import LEAST_ELEMENTS

Group = Mapping[str, Any]
"""The hyper-parameters of one parameter group."""


@dataclass
class Operands:
    """What one call of a kernel works on, stretch by stretch; everything of one stretch lies in the same
    order.

    Attributes:
        parameters: stretches of parameters or of their masters, written.
        gradients: their gradients, in the same dtype.
        state: by name, the stretches of state, written; ``None`` where there is none yet, and the kernel's is
            put there.
        steps: steps done, a float32 scalar a stretch, counted up.
        scalars: by stretch and name, what a kernel keeps for a parameter as a whole; replaced by what they
            are after the update.
        begun: whether there has been an update: of all of them, or of none.
    """

    parameters: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    state: dict[str, list[Any]] = field(default_factory=dict)
    steps: list[Tensor] = field(default_factory=list)
    scalars: list[dict[str, Any]] = field(default_factory=list)
    begun: bool = True


class Kernel(ABC):
    """One kind of optimizer.

    Attributes:
        defaults: its hyper-parameters.
        counts_steps: it keeps the number of steps, and state that begins with zeros; else an update makes the
            state where there is none.
        granule: elements that a cut has to be a multiple of, so that every element stays in the kind of lane
            that it has in the whole tensor.
        temporaries: how many times the elements of a batch an update allocates in passing.
    """

    defaults: dict[str, Any]
    counts_steps = True
    granule = LEAST_ELEMENTS
    temporaries = 0

    @abstractmethod
    def names(self, group: Group) -> tuple[str, ...]:
        """The state that it keeps for every element."""

    def scalars(self, group: Group) -> tuple[str, ...]:
        """What it keeps for a parameter as a whole, the steps of `counts_steps` apart."""
        return ()

    @abstractmethod
    def update(self, group: Group, operands: Operands) -> None:
        """Update parameters and state in place."""


class AdamKernel(Kernel):
    """Adam, and AdamW by its group's ``decoupled_weight_decay``."""

    def names(self, group: Group) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if group["amsgrad"] else ("exp_avg", "exp_avg_sq")

    def update(self, group: Group, operands: Operands) -> None:
        adam(
            operands.parameters,
            operands.gradients,
            operands.state["exp_avg"],
            operands.state["exp_avg_sq"],
            operands.state.get("max_exp_avg_sq", []),
            operands.steps,
            fused=True,
            amsgrad=group["amsgrad"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
            decoupled_weight_decay=group["decoupled_weight_decay"],
        )


class SGDKernel(Kernel):
    """SGD, with or without momentum. A momentum buffer begins as a copy of the first gradient, which
    `torch.optim` makes itself.
    """

    counts_steps = False

    def names(self, group: Group) -> tuple[str, ...]:
        return ("momentum_buffer",) if group["momentum"] != 0 else ()

    def update(self, group: Group, operands: Operands) -> None:
        sgd(
            operands.parameters,
            operands.gradients,
            operands.state.get("momentum_buffer", [None] * len(operands.parameters)),
            fused=True,
            weight_decay=group["weight_decay"],
            momentum=group["momentum"],
            lr=group["lr"],
            dampening=group["dampening"],
            nesterov=group["nesterov"],
            maximize=group["maximize"],
        )


FUSED: dict[type[torch.optim.Optimizer], type[Kernel]] = {
    torch.optim.AdamW: AdamKernel,
    torch.optim.Adam: AdamKernel,
    torch.optim.SGD: SGDKernel,
}


_FIXED = {"capturable": (False,), "differentiable": (False,)}
_FUSED_ONLY = {"foreach": (None, False), "fused": (None, True)}


def check_options(options: Mapping[str, Any], fused: bool) -> None:
    """Refuse what would ask for another implementation than the one that runs.

    Args:
        options: of the optimizer, or of a group.
        fused: the fused kernels run.

    Raises:
        OptimError: such an option is set.
    """
    for name, allowed in _FIXED.items():
        if options.get(name, False) not in allowed:
            raise OptimError(
                f"{name}={options[name]!r}: HostOptimizer updates stretches of parameters in place; leave "
                f"{name} out"
            )
    for name, allowed in _FUSED_ONLY.items() if fused else ():
        if options.get(name) not in allowed:
            raise OptimError(
                f"{name}={options[name]!r}: HostOptimizer runs torch.optim's fused kernels for this "
                f"optimizer; leave {name} out"
            )


def detached_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """The hyper-parameters as they are now, for an update that runs later."""
    return {
        name: item.clone() if isinstance(item, Tensor) else item
        for name, item in group.items()
        if name != "params"
    }


def on_host(group: Group) -> Group:
    """The group with hyper-parameters that lie on an accelerator read from there."""
    far = [name for name, item in group.items() if isinstance(item, Tensor) and item.device.type != "cpu"]
    return {**group, **{name: group[name].item() for name in far}} if far else group
