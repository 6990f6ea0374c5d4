"""Parameters as the flat memory that this process holds of them, FSDP2's shards included."""

from __future__ import annotations

import torch
from torch import Tensor

from lowtide import private
from lowtide.optim.errors import OptimError


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is a ``DTensor``, of which this process holds a part."""
    return private.is_distributed(tensor)


def is_shared(parameter: Tensor) -> bool:
    """Whether other processes hold parts of a parameter, or of its gradient: FSDP2 or `lowtide.parallel` cut
    it.
    """
    return is_sharded(parameter) or hasattr(parameter, "_lowtide_share") or is_partial(parameter)


def is_partial(parameter: Tensor) -> bool:
    """Whether the gradient is this process's part of a sum that `lowtide.parallel` makes after backward."""
    return getattr(parameter, "_lowtide_partial", None) is not None


def local(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor: the tensor itself unless it is sharded. Version counter and
    storage are the tensor's own.
    """
    return private.local_tensor(tensor)


def sharded_like(piece: Tensor, like: Tensor) -> Tensor:
    """``piece`` as this process's part of a tensor that is laid out like ``like``; ``piece`` itself when that
    is not sharded.
    """
    return private.distributed_like(piece, like) if is_sharded(like) else piece


def dense(tensor: Tensor) -> bool:
    """Whether the elements fill one stretch of memory, each once, in whatever order of dimensions."""
    expected = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda pair: pair[1]):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def flat(tensor: Tensor) -> Tensor:
    """The elements in the order of memory, on the same storage and version counter, without autograd
    history.
    """
    tensor = tensor.detach()
    if tensor.is_contiguous():
        return tensor if tensor.ndim == 1 else tensor.view(-1)
    return tensor.as_strided((tensor.numel(),), (1,))


def flat_gradient(gradient: Tensor, like: Tensor) -> Tensor:
    """A gradient's elements in the order in which the parameter ``like`` has them; a copy only where the two
    lie differently.
    """
    if (gradient.is_contiguous() and like.is_contiguous()) or gradient.stride() == like.stride():
        return flat(gradient)
    return flat(torch.empty_like(like, dtype=gradient.dtype).copy_(gradient.detach()))


def in_shape_of(elements: Tensor, like: Tensor) -> Tensor:
    """Flat elements seen in the shape and strides of ``like``."""
    return elements.as_strided(like.shape, like.stride())


def check(parameter: Tensor) -> None:
    """Refuse a parameter that the fused kernels or a split by elements cannot take.

    Raises:
        OptimError: it is not real, or not dense.
    """
    piece = local(parameter)
    described = f"a parameter of shape {tuple(parameter.shape)}"
    if not piece.is_floating_point():
        raise OptimError(
            f"{described} is {piece.dtype}: HostOptimizer takes real floating-point parameters; give this "
            "one to another optimizer"
        )
    if piece.layout is not torch.strided or not dense(piece):
        raise OptimError(
            f"{described} and strides "
            f"{tuple(piece.stride()) if piece.layout is torch.strided else piece.layout} is not dense in "
            "memory, so it has no order of elements to split: call .contiguous() before making it a "
            "parameter"
        )


def check_gradient(gradient: Tensor) -> None:
    """Refuse a gradient that cannot be taken by elements.

    Raises:
        OptimError: it is sparse.
    """
    if gradient.layout is not torch.strided:
        raise OptimError(
            "HostOptimizer takes dense gradients: make the embedding with sparse=False, or give it to "
            "torch.optim.SparseAdam"
        )
