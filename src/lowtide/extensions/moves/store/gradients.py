"""Parameter gradients in one preallocated slab: ZeRO-R's M_D for what lives longest in a step (arXiv
1910.02054, section 6.3).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch

from lowtide.errors import PlanError


class GradientSlab:
    """Keeps the gradients of some parameters in one contiguous tensor, the slab, for each type and device.

    Backward allocates each gradient as usual. As soon as a gradient is accumulated, its bytes are copied into
    the slab and ``.grad`` becomes a view of the slab, so long-lived gradients never lie scattered among
    short-lived activations. Works with ``zero_grad(set_to_none=True)`` and with accumulation over several
    backwards; values are bitwise those without it. The slab stays allocated, also while ``.grad`` is
    ``None``: `lowtide.meter.resident_bytes` and a budget count it with the model (make it before the first
    limited step).

    Args:
        parameters: those whose gradients move; duplicates count once.

    Attributes:
        slabs: the tensors, one for each (type, device).

    Raises:
        PlanError: no parameter takes a gradient.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> slab = GradientSlab(model.parameters())
        >>> model(torch.ones(3, 4)).sum().backward()
        >>> slab.slabs[0].numel(), bool((slab.slabs[0][:8] == 3).all())
        (10, True)
        >>> slab.remove()
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        own = list({id(p): p for p in parameters if p.requires_grad}.values())
        if not own:
            raise PlanError("none of the parameters takes a gradient: pass the trainable ones")
        kinds: dict[tuple[torch.dtype, torch.device], list[torch.nn.Parameter]] = {}
        for parameter in own:
            kinds.setdefault((parameter.dtype, parameter.device), []).append(parameter)
        self.slabs: list[torch.Tensor] = []
        self._hooks = []
        self._parameters = own
        for (dtype, device), members in kinds.items():
            slab = torch.zeros(sum(p.numel() for p in members), dtype=dtype, device=device)
            self.slabs.append(slab)
            at = 0
            for parameter in members:
                view = slab[at : at + parameter.numel()].view(parameter.shape)
                at += parameter.numel()
                if parameter.grad is not None:
                    view.copy_(parameter.grad)
                    parameter.grad = view
                parameter.gradient_slab = slab  # type: ignore[attr-defined]
                self._hooks.append(parameter.register_post_accumulate_grad_hook(partial(_into, view)))

    def remove(self) -> None:
        """Take the hooks off the parameters: new gradients stay where backward allocates them. A gradient in
        the slab stays there until ``.grad`` is set to ``None``.
        """
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for parameter in self._parameters:
            if hasattr(parameter, "gradient_slab"):
                del parameter.gradient_slab  # pyright: ignore[reportAttributeAccessIssue]
        self._parameters.clear()


def _into(view: torch.Tensor, parameter: torch.Tensor) -> None:
    """Copy a parameter's gradient into its place in the slab, and make ``.grad`` a view of that."""
    gradient = parameter.grad
    if gradient is not None and gradient.data_ptr() != view.data_ptr():
        view.copy_(gradient)
        parameter.grad = view
