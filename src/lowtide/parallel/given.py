"""What the functions and layers of this room are given: refused where it is given, with what is allowed."""

from __future__ import annotations

import os
from collections.abc import Iterable
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.errors import expect, is_count
from lowtide.meter.resident import device_of
from lowtide.parallel.errors import ParallelError


def check_tensors(function: str, **given: Any) -> None:
    """Refuse what is no tensor.

    >>> check_tensors("parallel_cross_entropy", target=torch.ones(2))
    """
    for name, tensor in given.items():
        if not isinstance(tensor, Tensor):  # Dynamo may not trace what raises
            expect(False, f"{function}({name}=)", tensor, "a torch.Tensor", ParallelError)


def check_input(layer: nn.Module, given: Any, features: int | None = None) -> None:
    """Refuse an input of a layer that is no tensor, or has not that many features."""
    name = f"{type(layer).__name__}'s input"
    if not isinstance(given, Tensor):  # Dynamo may not trace what raises
        expect(False, name, given, "a torch.Tensor", ParallelError)
    if features is not None:
        fits = given.ndim > 0 and given.shape[-1] == features
        if not fits:
            shape, allowed = tuple(given.shape), f"a last dimension of {features}"
            expect(fits, f"{name} shape", shape, allowed, ParallelError)


def check_dimension(function: str, given: Tensor, dimension: Any) -> None:
    """Refuse what is no dimension of a tensor."""
    fits = is_count(dimension, -given.ndim) and dimension < given.ndim
    if not fits:
        allowed = f"a dimension of a tensor of shape {tuple(given.shape)}"
        expect(fits, f"{function}(dimension=)", dimension, allowed, ParallelError)


def check_counts(function: str, least: int, **given: Any) -> None:
    """Refuse what is no whole number, or below ``least``."""
    for name, count in given.items():
        allowed = f"a whole number, {least} or more"
        expect(is_count(count, least), f"{function}({name}=)", count, allowed, ParallelError)


def check_numbers(function: str, least: float, **given: Any) -> None:
    """Refuse what is no number, or below ``least``; a tensor of one element is a number."""
    for name, number in given.items():
        one = isinstance(number, Tensor) and number.numel() == 1
        is_number = one or (isinstance(number, Real) and not isinstance(number, bool))
        allowed = f"a number, {least:g} or more"
        expect(is_number and float(number) >= least, f"{function}({name}=)", number, allowed, ParallelError)


def check_dtypes(function: str, **given: Any) -> None:
    """Refuse what is no dtype of floating-point numbers; ``None`` is the default."""
    for name, dtype in given.items():
        fits = dtype is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point)
        allowed = "a floating-point dtype, as in torch.bfloat16"
        expect(fits, f"{function}({name}=)", dtype, allowed, ParallelError)


def check_made(function: str, dtype: Any, device: Any, init_method: Any = None) -> None:
    """Refuse how a layer's parameters are to be made."""
    check_dtypes(function, dtype=dtype)
    if device is not None and not is_count(device):  # the number of an accelerator
        device_of(device)
    made = init_method is None or callable(init_method)
    allowed = "a function that fills a tensor in place, or None"
    expect(made, f"{function}(init_method=)", init_method, allowed, ParallelError)


def check_path(function: str, path: Any) -> None:
    """Refuse what is no path."""
    expect(isinstance(path, str | os.PathLike), f"{function}(path=)", path, "a folder's path", ParallelError)


def parameters_of(function: str, given: Any, name: str = "parameters") -> list[Tensor]:
    """The parameters in a list, each once: tied ones are one gradient.

    >>> [tuple(one.shape) for one in parameters_of("clip_grad_norm", torch.nn.Linear(2, 1).parameters())]
    [(1, 2), (1,)]
    """
    several = isinstance(given, Iterable) and not isinstance(given, str)
    found: list[Any] = [given] if isinstance(given, Tensor) else list(given) if several else [None]
    tensors = all(isinstance(one, Tensor) for one in found)
    expect(tensors, f"{function}({name}=)", given, "tensors, as in model.parameters()", ParallelError)
    return list({id(parameter): parameter for parameter in found}.values())
