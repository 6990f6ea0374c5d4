"""Steps that a limit leaves as they are, and what is said of them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from lowtide import private
from lowtide.interception import interceptors
from lowtide.run.limit.key import Members
from lowtide.run.record.recorder import Recorder
from lowtide.trace.results import tensors_inside


class Unlimited(NamedTuple):
    """Why a step runs as it is.

    Attributes:
        key: of the reason; each is said once.
        text: what is said, empty where nobody would be surprised.
    """

    key: str
    text: str = ""


AROUND_COMPILED = (
    "torch.compile around a limited model does not reach into it: compile its submodules, which stay compiled"
)
CROWDED = (
    "several limited models take part in one step: each is planned for its own part, and what they take "
    "together is not held against a budget. To have one budget for all, put one limit on a module that runs "
    "them"
)

_NOTHING_TO_LIMIT = Unlimited("nothing to limit")
_TRANSFORMED = Unlimited(
    "transformed",
    "this limited model runs inside a function transform (torch.func.vmap, grad, jvp or the like, "
    "torch.cond): such steps run as they are, without a limit. Put the limit on a module whose forward "
    "holds the transform, or use torch.autograd.grad",
)
_LAZY = Unlimited(
    "lazy",
    "some parameters of this limited model are not initialized yet (lazy modules): this step runs as it "
    "is, without a limit, and later ones within the budget. To limit it, too, run the model once under "
    "torch.no_grad() before",
)
_UNTRAINED = Unlimited(
    "untrained",
    "no parameter of this limited model requires grad, so its steps are not planned: what autograd keeps "
    "for the gradients of its inputs is not limited. Put the limit on a module around it that has "
    "parameters to train",
)


def why_unlimited(members: Members, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Unlimited | None:
    """Why a step with these arguments is not limited, or ``None``.

    Args:
        members: of the model.
        args, kwargs: of its forward.
    """
    if private.transformed():
        return _TRANSFORMED
    if members.are_lazy():
        return _LAZY
    if any(parameter.requires_grad for parameter in members.parameters):
        return None
    asked = any(tensor.requires_grad for tensor in tensors_inside((args, kwargs)))
    return _UNTRAINED if asked else _NOTHING_TO_LIMIT


def governed() -> bool:
    """Whether another limited model around this one decides what it keeps."""
    return any(isinstance(one, Recorder) for one in interceptors())


def keeps_nothing() -> bool:
    """Whether autograd keeps nothing here, or the model is written down as a program (`torch.export`,
    `torch.jit.trace`) and no step runs.
    """
    if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        return True
    return torch.compiler.is_exporting() or torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage]
