"""Any optimizer that treats every element alone, by its own ``step()`` on stretches of parameters.

Whether one does is tried, not looked up: some steps on two small parameters have to come out the same, bit by
bit, when they are done on flat stretches in calls of their own. What looks at other elements, at a
parameter's shape, or at what it has done before fails that.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lowtide.optim.errors import OptimError
from lowtide.optim.kernels import FUSED, Group, Kernel, Operands, check_options

_SHAPES = ((5, 32), (104,))
_STEPS = 8  # RAdam changes its rule at the sixth
_NOT_OPTIONS = ("params", "param_names")


class ElementwiseKernel(Kernel):
    """The arithmetic of an optimizer class, which its own ``step()`` does.

    Args:
        kind: the class.
        options: what it is made with.

    Raises:
        OptimError: it does not treat every element alone.
    """

    counts_steps = False
    # two vectors of 16 lanes, which loops over elements take at once; what is left over goes through scalar
    # code
    granule = 64
    temporaries = 4  # torch.optim's take three at most

    def __init__(self, kind: type[torch.optim.Optimizer], options: Mapping[str, Any]) -> None:
        self.kind = kind
        self.options = dict(options)
        self._names: dict[tuple[Any, ...], tuple[tuple[str, ...], tuple[str, ...]]] = {}
        self.defaults: dict[str, Any] = self._made([{"params": [torch.zeros(_SHAPES[0])]}]).defaults
        _check_elementwise(self)

    def names(self, group: Group) -> tuple[str, ...]:
        return self._kept(group)[0]

    def scalars(self, group: Group) -> tuple[str, ...]:
        return self._kept(group)[1]

    def update(self, group: Group, operands: Operands) -> None:
        parameters = [parameter.detach() for parameter in operands.parameters]
        for parameter, gradient in zip(parameters, operands.gradients, strict=True):
            parameter.grad = gradient.detach()
        names, scalars = self._kept(group)
        made = self._optimizer(group, parameters, operands.begun)
        if operands.begun:
            for place, parameter in enumerate(parameters):
                pieces = {name: operands.state[name][place] for name in names}
                made.state[parameter] = {**operands.scalars[place], **pieces}
        made.step()
        for place, parameter in enumerate(parameters):
            state = made.state[parameter]
            if set(state) != {*names, *scalars}:
                raise OptimError(
                    f"{self.kind.__name__} keeps other state ({', '.join(state)}) than at its first step "
                    f"({', '.join(names)})"
                )
            for name in names:
                operands.state[name][place] = state[name]
            operands.scalars[place] = {name: state[name] for name in scalars}

    def _optimizer(self, group: Group, parameters: list[Tensor], begun: bool) -> torch.optim.Optimizer:
        """An optimizer of these stretches with the group's options; its state is empty where they have
        begun.
        """
        options = {name: item for name, item in group.items() if name not in _NOT_OPTIONS}
        if not begun:
            return self._made([{**options, "params": parameters}])
        made = self._made([{"params": [torch.zeros(1)]}])
        made.param_groups = [{**made.param_groups[0], **options, "params": parameters}]
        made.state = defaultdict(dict)
        return made

    def _made(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return self.kind(groups, **self.options)

    def _kept(self, group: Group) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Names of what it keeps for every element, and for a parameter as a whole; they depend on which
        options are set.
        """
        key = tuple(
            (name, bool(item)) for name, item in group.items() if isinstance(item, bool | int | float)
        )
        if key not in self._names:
            parameter = torch.zeros(_SHAPES[1])
            parameter.grad = torch.ones(_SHAPES[1])
            made = self._optimizer(group, [parameter], begun=False)
            made.step()
            state = made.state[parameter]
            whole = tuple(
                name
                for name, item in state.items()
                if isinstance(item, Tensor) and item.shape == parameter.shape
            )
            other = tuple(name for name in state if name not in whole)
            strange = [
                name
                for name in other
                if not isinstance(state[name], int | float) and not _is_number(state[name])
            ]
            if strange or any(state[name].dtype != parameter.dtype for name in whole):
                raise OptimError(
                    _refusal(
                        self.kind,
                        f"it keeps {', '.join(strange or whole)} in another form than a number for each "
                        "element",
                    )
                )
            self._names[key] = whole, other
        return self._names[key]


def _is_number(item: Any) -> bool:
    return isinstance(item, Tensor) and item.ndim == 0


def _refusal(kind: type[torch.optim.Optimizer], reason: str) -> str:
    return (
        f"HostOptimizer cannot split {kind.__name__}: {reason}. It takes every optimizer that updates each "
        "element by itself (AdamW, Adam, SGD, RMSprop, Adagrad, NAdam, RAdam, Adamax, ASGD, Adadelta, Rprop "
        "and their like); use this one without HostOptimizer, or give it the parameters that it is for and "
        "HostOptimizer the rest"
    )


def _check_elementwise(kernel: ElementwiseKernel) -> None:
    """Raise unless steps on stretches have the same bits as steps on whole parameters."""
    kind = kernel.kind
    generator = torch.Generator().manual_seed(0)
    draw = partial(torch.randn, generator=generator)
    start = [draw(shape) for shape in _SHAPES]
    gradients = [[draw(shape) for shape in _SHAPES] for _ in range(_STEPS)]
    try:
        expected = _whole(kernel, [tensor.clone() for tensor in start], gradients)
        found = _by_stretches(kernel, [tensor.flatten() for tensor in start], gradients)
    except OptimError:
        raise
    except Exception as error:  # whatever an optimizer says of stretches that it cannot take
        raise OptimError(
            _refusal(
                kind,
                f"it does not step on flat parameters with dense gradients ({type(error).__name__}: {error})",
            )
        ) from error
    if not all(torch.equal(a.flatten(), b) for a, b in zip(expected, found, strict=True)):
        raise OptimError(
            _refusal(
                kind,
                "what it does to an element depends on other elements, on the parameter's shape, or on "
                "earlier calls",
            )
        )


def _whole(
    kernel: ElementwiseKernel, parameters: list[Tensor], gradients: Iterable[list[Tensor]]
) -> list[Tensor]:
    """The parameters after the optimizer's own steps."""
    optimizer = kernel._made([{"params": parameters}])
    for some in gradients:
        for parameter, gradient in zip(parameters, some, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
    return parameters


def _by_stretches(
    kernel: ElementwiseKernel, parameters: list[Tensor], gradients: Iterable[list[Tensor]]
) -> list[Tensor]:
    """The parameters after steps on stretches of them, each in a call of its own."""
    group = kernel.defaults
    cut = [(parameter, slice(0, kernel.granule)) for parameter in parameters] + [
        (parameter, slice(kernel.granule, None)) for parameter in parameters
    ]
    kept: list[Operands] = [
        Operands(
            [parameter[where]],
            state={name: [None] for name in kernel.names(group)},
            steps=[torch.zeros(())],
            scalars=[{}],
            begun=False,
        )
        for parameter, where in cut
    ]
    for some in gradients:
        of = {id(parameter): gradient.flatten() for parameter, gradient in zip(parameters, some, strict=True)}
        for operands, (parameter, where) in zip(kept, cut, strict=True):
            operands.gradients = [of[id(parameter)][where]]
            kernel.update(group, operands)
            operands.begun = True
    return parameters


def kernel_of(kind: Any, options: Mapping[str, Any]) -> Kernel:
    """The kernel of an optimizer class made with ``options``, which ``kind`` itself checks.

    Raises:
        OptimError: it does not treat every element alone, or an option cannot be served.
    """
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        raise OptimError(
            f"HostOptimizer wraps a class of optimizers, such as torch.optim.AdamW, and was given {kind!r}"
        )
    found = FUSED.get(kind)
    check_options(options, fused=found is not None)
    if found is None:
        return ElementwiseKernel(kind, options)
    kernel = found()
    kernel.defaults = kind([torch.zeros(1, requires_grad=True)], **{**options, "fused": True}).defaults
    return kernel
