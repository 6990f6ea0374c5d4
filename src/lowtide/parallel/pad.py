"""`pad_model`: attention whose heads the ranks do not divide, with heads of zeros behind them.

A layer that was built for fewer heads is cut anew: each rank gets whole heads, the last ranks' are zeros. The
zeros are no part of the parameter: no gradient reaches them, they are not saved, and no norm counts them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.errors import expect
from lowtide.parallel.checkpoint import whole_of
from lowtide.parallel.errors import ParallelError
from lowtide.parallel.given import check_counts
from lowtide.parallel.layers import ColumnParallelLinear, RowParallelLinear, SharedHeadsLinear
from lowtide.parallel.partition import Partition


def get_number_of_extra_heads(n_head: int, tp_degree: int) -> int:
    """How many heads make ``n_head`` divide among ``tp_degree`` ranks.

    >>> get_number_of_extra_heads(6, 4), get_number_of_extra_heads(8, 4)
    (2, 0)

    Source: neuronx-distributed, ``parallel_layers.pad.get_number_of_extra_heads``.
    """
    check_counts("get_number_of_extra_heads", 1, n_head=n_head, tp_degree=tp_degree)
    return -n_head % tp_degree


def pad_model(
    model: nn.Module,
    tp_degree: int,
    n_heads: int,
    wrapped_classes: Any = (),
    pad_hook_fn: Callable[[nn.Module, float], Any] | None = None,
    *,
    n_key_value_heads: int | None = None,
) -> nn.Module:
    """Pad the attention heads of a model of parallel layers, so that each rank has as many, in place.

    The output size of each `ColumnParallelLinear` and the input size of each `RowParallelLinear` grow from
    ``n_heads`` to the padded number of heads; with ``stride`` those of each block do. The heads at the end
    are zeros, which are never trained. Outputs, gradients, norms and checkpoints are those of the model
    without padding. Call it before the optimizer is made. A collective: every rank of the layers calls it.

    Args:
        model: with layers of `lowtide.parallel`. An attention module has to be written for the padded heads
            of a rank, (``n_heads`` + `get_number_of_extra_heads`) / ``tp_degree``, and its layers need
            ``gather_output=False`` and ``input_is_parallel=True``. If a layer's features do not divide before
            it is padded, build it with ``pad=True``.
        tp_degree: number of ranks; a multiple of the number of ranks that share the layers.
        n_heads: attention heads of the whole model.
        wrapped_classes: classes of modules; only layers in a module of one of these are padded. ``()`` is all
            layers.
        pad_hook_fn: called with each module of ``wrapped_classes`` (each module, if there are none) and the
            padded number of heads divided by ``n_heads``, after the modules in it.
        n_key_value_heads: heads of keys and values, if they are fewer. They are padded to a multiple of
            ``tp_degree``, and the query heads by as many for each of them.

    Returns:
        The model.

    Raises:
        ParallelError: a layer does not consist of ``n_heads`` equal heads, keys and values have fewer heads
            and ``n_key_value_heads`` is not given, or ranks share a head (`SharedHeadsLinear`).

    Example:
        >>> up, down = ColumnParallelLinear(8, 12, gather_output=False), RowParallelLinear(12, 8, True, True)
        >>> model = pad_model(nn.Sequential(up, down), tp_degree=2, n_heads=3)
        >>> up.weight.shape, model(torch.randn(5, 2, 8)).shape
        (torch.Size([16, 8]), torch.Size([5, 2, 8]))

    Source: neuronx-distributed, ``parallel_layers.pad.pad_model``. Theirs appends zeros to each rank's part,
        so that a head may lie on two ranks, and trains them; it knows no ``n_key_value_heads``.
    """
    expect(isinstance(model, nn.Module), "pad_model(model=)", model, "a torch.nn.Module", ParallelError)
    check_counts("pad_model", 1, tp_degree=tp_degree, n_heads=n_heads)
    several = isinstance(wrapped_classes, Iterable)
    classes: tuple[Any, ...] = tuple(wrapped_classes) if several else (wrapped_classes,)
    kinds = all(isinstance(one, type) for one in classes)
    expect(kinds, "pad_model(wrapped_classes=)", wrapped_classes, "classes of modules", ParallelError)
    called = pad_hook_fn is None or callable(pad_hook_fn)
    expect(called, "pad_model(pad_hook_fn=)", pad_hook_fn, "a function, or None", ParallelError)
    if n_key_value_heads is not None:
        check_counts("pad_model", 1, n_key_value_heads=n_key_value_heads)
        divides = n_heads % n_key_value_heads == 0
        allowed = f"a divisor of n_heads={n_heads}"
        expect(divides, "pad_model(n_key_value_heads=)", n_key_value_heads, allowed, ParallelError)
    own = n_key_value_heads or n_heads
    ratio = Fraction(own + get_number_of_extra_heads(own, tp_degree), own)
    inside = list(_inside(model, classes))
    for name, module in inside:
        _check(name, module, tp_degree, n_heads, n_key_value_heads)
    linear = any(isinstance(module, ColumnParallelLinear | RowParallelLinear) for _, module in inside)
    found = (
        "layers of lowtide.parallel in these classes" if classes else "a model of lowtide.parallel's layers"
    )
    expect(linear, "pad_model(model=)", type(model).__name__, found, ParallelError)
    _check_ties(model, {module for _, module in inside})
    made: dict[int, nn.Parameter] = {}  # a padded parameter by the id of the one before: ties stay
    for _, module in inside:
        if isinstance(module, ColumnParallelLinear | RowParallelLinear):
            for key, where in module.partitions.items():
                parameter = module._parameters.get(key)
                grown = _grown(where, ratio)
                if parameter is None or grown == where:
                    continue
                padded = made.get(id(parameter))
                if padded is None:
                    padded = made[id(parameter)] = _padded(parameter, where, grown)
                module.partitions[key] = grown
                setattr(module, key, padded)
        if pad_hook_fn is not None and (not classes or isinstance(module, classes)):
            pad_hook_fn(module, float(ratio))
    return model


def _inside(model: nn.Module, classes: Any) -> Iterator[tuple[str, nn.Module]]:
    """The modules whose layers are padded, those in a module before it, each once."""
    names = {module: name for name, module in reversed(list(model.named_modules()))}
    wrapped = [name for module, name in names.items() if not classes or isinstance(module, classes)]
    for module, name in names.items():
        if any(not of or name == of or name.startswith(f"{of}.") for of in wrapped):
            yield name, module


def _check(name: str, module: nn.Module, tp_degree: int, n_heads: int, n_key_value_heads: int | None) -> None:
    """Refuse what does not consist of such heads."""
    if isinstance(module, SharedHeadsLinear):
        raise ParallelError(
            f"pad_model: {name} is a SharedHeadsLinear, whose heads several ranks share: use a number of "
            f"ranks that divides n_heads={n_heads}"
        )
    if isinstance(module, ColumnParallelLinear | RowParallelLinear):
        heads, size = n_key_value_heads or n_heads, _block(module)
        if size % heads:
            raise ParallelError(
                f"pad_model: the {size} features of {name or type(module).__name__} are not {heads} equal "
                "heads: name the classes that hold attention (wrapped_classes=), or correct n_heads"
            )
        if tp_degree % module.group.size:
            raise ParallelError(
                f"pad_model(tp_degree={tp_degree}): {module.group.size} ranks share {name}, which have to "
                "divide it"
            )
    elif n_key_value_heads is None:
        sizes: dict[type, list[int]] = {ColumnParallelLinear: [], RowParallelLinear: []}
        for layer in module.children():
            for kind, found in sizes.items():
                if isinstance(layer, kind):
                    found.append(_block(layer))
        columns, rows = sizes.values()
        if columns and rows and min(columns) < max(rows):
            raise ParallelError(
                f"pad_model: in {name or type(module).__name__} a ColumnParallelLinear makes {min(columns)} "
                f"features and a RowParallelLinear takes {max(rows)}: pass n_key_value_heads= if keys and "
                "values have fewer heads, or name the classes that hold attention (wrapped_classes=)"
            )


def _check_ties(model: nn.Module, inside: set[nn.Module]) -> None:
    """Refuse a parameter that is padded in one module and not in another."""
    linear = ColumnParallelLinear | RowParallelLinear
    apart = {
        id(parameter): name
        for name, module in model.named_modules()
        if module not in inside or not isinstance(module, linear)
        for parameter in module.parameters(recurse=False)
    }
    for module in inside:
        if isinstance(module, linear) and id(module.weight) in apart:
            raise ParallelError(
                f"pad_model: {apart[id(module.weight)]} has the weight of a layer that is to be padded: name "
                "the classes that hold attention (wrapped_classes=)"
            )


def _block(layer: Any) -> int:
    """Features that are cut, of one block."""
    where = layer.partitions["weight"]
    return where.shape[where.dimension] // where.stride


def _grown(where: Partition, ratio: Fraction) -> Partition:
    """The same part of a parameter with padding for the padded heads."""
    if where.dimension is None:
        return where
    return replace(where, padded=int(where.shape[where.dimension] * ratio))


@torch.no_grad()
def _padded(parameter: Tensor, where: Partition, grown: Partition) -> nn.Parameter:
    """The parameter in its new part."""
    if parameter.device.type == "meta":
        part = parameter.new_empty(grown.local_shape)
    else:
        part = grown.take(whole_of(parameter.detach(), where))
    return nn.Parameter(part, requires_grad=parameter.requires_grad)
