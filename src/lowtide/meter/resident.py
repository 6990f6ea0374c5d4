"""What is resident before a step, the storages of a model and its optimizer, each counted once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from lowtide import accelerator, private
from lowtide.errors import MeterError, expect

_THREADS = 2
"""Threads of a training step that have cuBLAS workspaces of their own: forward's and backward's."""


def storages(tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    """The distinct storages under the tensors, in order. Wrapper subclasses (DTensor and the like) count by
    the tensors inside them; tensors without a storage (sparse ones) by their parts.

    Raises:
        MeterError: they are no tensors.
    """
    one = isinstance(tensors, torch.Tensor)  # its rows are tensors, too
    listed: list[Any] = list(tensors) if isinstance(tensors, Iterable) and not one else [None]
    several = all(isinstance(tensor, torch.Tensor) for tensor in listed)
    expect(several, "storages(tensors=)", tensors, "a list of tensors", MeterError)
    found: dict[int, torch.UntypedStorage] = {}
    for tensor in listed:
        for plain in plain_parts(tensor):
            storage = plain.untyped_storage()
            found.setdefault(private.storage_address(storage), storage)
    return list(found.values())


def bytes_under(tensors: Iterable[torch.Tensor]) -> int:
    """The bytes of the distinct storages under the tensors."""
    return sum(storage.nbytes() for storage in storages(tensors))


def plain_parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The strided tensors that hold a tensor's numbers and indices: itself, or the parts of a sparse tensor
    or a subclass.
    """
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is not None and type(tensor) is not torch.Tensor:
        for name in flatten()[0]:
            inner = getattr(tensor, name)
            if isinstance(inner, torch.Tensor):  # a DTensor names its mesh, too
                yield from plain_parts(inner)
    elif tensor.layout == torch.sparse_coo:
        yield from private.sparse_parts(tensor)
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        yield from (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        yield from (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
    elif tensor.layout == torch.strided:
        yield tensor


def resident_tensors(
    model: torch.nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None
) -> list[torch.Tensor]:
    """Parameters, buffers, gradients (and the slab that these are kept in), and the optimizer's state
    (tensor-valued options such as a tensor ``lr`` included).

    Raises:
        MeterError: an argument is something else.
    """
    _check_resident("resident_tensors", model, optimizer)
    found: list[torch.Tensor] = []
    if model is not None:
        found += [*model.parameters(), *model.buffers()]
    if optimizer is not None:
        optimizer = innermost(optimizer)
        own = getattr(optimizer, "resident_state", None)  # of an optimizer whose state is partly elsewhere
        leaves: list[Any] = private.tree_leaves(
            [own() if own is not None else list(optimizer.state.values()), optimizer.param_groups]
        )
        found += [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    # a slab for gradients is resident even while there are none
    slabs = [slab for t in found if isinstance(slab := getattr(t, "gradient_slab", None), torch.Tensor)]
    return found + slabs + [grad for t in found if (grad := gradient_of(t)) is not None]


def own_share(item: Any) -> Any:
    """This process's part of a DTensor; anything else unchanged."""
    return item.to_local() if hasattr(item, "to_local") else item


def model_device(model: torch.nn.Module) -> torch.device:
    """The device of a model's first parameter, whose memory a budget counts; the CPU where it has none."""
    for parameter in model.parameters():
        return parameter.device
    return torch.device("cpu")


def gradient_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """A parameter's gradient. A computed tensor in a parameter's place (``functional_call``, MAML) has none,
    and PyTorch warns of asking for one.
    """
    return tensor.grad if tensor.is_leaf else None


def innermost(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer that a wrapper (accelerate's, Lightning's) hands everything on to; one that has state of
    its own is itself.

    >>> sgd = torch.optim.SGD([torch.zeros(1)])
    >>> innermost(sgd) is sgd
    True
    """
    inner = getattr(optimizer, "optimizer", None)
    if isinstance(inner, torch.optim.Optimizer) and inner is not optimizer and inner.state is optimizer.state:
        return innermost(inner)
    return optimizer


def resident_bytes(
    model: torch.nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    device: torch.device | str | None = None,
) -> int:
    """Bytes of the unique storages of a model's parameters, buffers and gradients, and of an optimizer's
    state.

    Args:
        model: whose parameters, buffers and gradients count.
        optimizer: whose state counts, with the parameters it steps.
        device: count only what lies there (``cuda`` means every CUDA device); ``None`` counts all.

    Raises:
        MeterError: an argument is something else.
    """
    _check_resident("resident_bytes", model, optimizer)
    where = None if device is None else device_of(device)

    def counts(storage: torch.UntypedStorage) -> bool:
        return where is None or (
            storage.device.type == where.type and where.index in (None, storage.device.index)
        )

    return sum(s.nbytes() for s in storages(resident_tensors(model, optimizer)) if counts(s))


def workspace_bytes(device: torch.device) -> int:
    """Bytes of the cuBLAS workspaces of a training step on ``device``; 0 where none are, as on a CPU."""
    return _THREADS * private.blas_workspace_bytes(device)


def resident_workspace_bytes(device: torch.device) -> int:
    """Allocate the cuBLAS workspaces of steps on this thread and the current stream, and return their bytes
    (`workspace_bytes`). They are resident then, and no part of what a later step is seen to allocate.
    """
    count = workspace_bytes(device)
    if count and accelerator.is_accelerator(device):
        from .cuda import take_workspaces  # loaded where a card is

        take_workspaces(device)
    return count


def _check_resident(function: str, model: Any, optimizer: Any) -> None:
    module = model is None or isinstance(model, torch.nn.Module)
    expect(module, f"{function}(model=)", model, "a torch.nn.Module, or None", MeterError)
    steps = optimizer is None or isinstance(optimizer, torch.optim.Optimizer)
    expect(steps, f"{function}(optimizer=)", optimizer, "a torch.optim.Optimizer, or None", MeterError)


def device_of(name: Any) -> torch.device:
    """The device that ``name`` names.

    Raises:
        MeterError: there is none.
    """
    device = None
    if isinstance(name, str | torch.device):
        try:
            device = torch.device(name)
        except RuntimeError:  # PyTorch's message is a list of all that it was ever built for
            device = None
    expect(device is not None, "device=", name, "'cpu', 'cuda' or 'cuda:N'", MeterError)
    assert device is not None
    return device
