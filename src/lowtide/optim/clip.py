"""The norm of gradients that lie on two sides and in several processes, and clipping by it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lowtide.optim.errors import OptimError
from lowtide.optim.stream import sent
from lowtide.optim.tensors import is_sharded, local


def clip_(gradients: Sequence[tuple[Tensor, Tensor]], max_norm: float, norm_type: float, error_if_nonfinite: bool) -> Tensor:
    """Scale gradients so that their norm is at most ``max_norm``; returns the norm before.

    Raises:
        RuntimeError: the norm is not finite and ``error_if_nonfinite`` is set; nothing has changed then.
    """
    order = float(norm_type)
    total = total_norm(gradients, order)
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise RuntimeError(
            f"the norm of order {order} of the gradients is {total.item()}, so they cannot be clipped: zero_grad() and skip this step, or "
            "pass error_if_nonfinite=False"
        )
    scale_by(gradients, torch.clamp(float(max_norm) / (total + 1e-6), max=1.0))
    return total


def total_norm(gradients: Sequence[tuple[Tensor, Tensor]], order: float) -> Tensor:
    """The norm of all gradients as one vector, over every process that holds a shard of one.

    Norms of tensors are combined as `torch.nn.utils.get_total_norm` does; those of shards by a sum of powers over the dimensions of their mesh
    along which they are sharded.

    Args:
        gradients: (parameter, ``.grad``), in order.
        order: of the norm, ``inf`` included.
    """
    if not gradients:
        return torch.tensor(0.0)
    norms = [norm_of(gradient, order) for _, gradient in gradients]
    first = norms[0].device
    norms = [norm.to(first) for norm in norms]
    whole = [norm for norm, (parameter, _) in zip(norms, gradients, strict=True) if not is_sharded(parameter)]
    sharded: dict[object, tuple[Tensor, list[Tensor]]] = {}
    for norm, (parameter, _) in zip(norms, gradients, strict=True):
        if is_sharded(parameter):
            key = (parameter.device_mesh, parameter.placements)  # type: ignore[attr-defined]
            sharded.setdefault(key, (parameter, []))[1].append(norm)
    if not sharded:
        return torch.linalg.vector_norm(torch.stack(whole), order)
    return torch.linalg.vector_norm(torch.stack([*whole, *(_over_mesh(like, some, order) for like, some in sharded.values())]), order)


def norm_of(gradient: Tensor, order: float) -> Tensor:
    """The norm of what this process holds of one gradient, on the host or on the device."""
    stand_in = sent(gradient)
    if stand_in is None:
        return torch.linalg.vector_norm(local(gradient), order)
    held = stand_in.stream.current(stand_in)
    held.wait()
    if held.scales:
        held.rescale()
        held.norm = None
    if held.norm is not None and held.norm[0] == order:
        return held.norm[1]
    elements = held.elements
    if stand_in.device_elements is not None:  # a norm of parts would differ in its last bits
        cut = stand_in.device_elements.numel()
        elements = torch.empty(cut + held.elements.numel(), dtype=held.elements.dtype)
        stand_in.stream.link.down(elements[:cut], stand_in.device_elements).wait()
        elements[cut:] = held.elements
    return torch.linalg.vector_norm(elements, order)


def _over_mesh(like: Tensor, norms: Sequence[Tensor], order: float) -> Tensor:
    """The norm of shards of tensors laid out like ``like``, over their processes."""
    ours = torch.linalg.vector_norm(torch.stack(list(norms)), order)
    largest = order == float("inf")
    power = ours if largest else ours.pow(order)
    mesh, placements = like.device_mesh, like.placements  # type: ignore[attr-defined]
    if power.device.type != mesh.device_type:
        power = power.to(mesh.device_type)
    for dimension, placement in enumerate(placements):
        if placement.is_shard():
            dist.all_reduce(power, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=mesh.get_group(dimension))
        elif not placement.is_replicate():
            raise OptimError(f"the norm of a gradient with placement {placement} is not known: shard or replicate it first")
    return power if largest else power.pow(1.0 / order)


def scale_by(gradients: Sequence[tuple[Tensor, Tensor]], factor: Tensor) -> None:
    """Multiply gradients by a factor: at once where they lie on the device, with the update where they lie on the host."""
    for _, gradient in gradients:
        stand_in = sent(gradient)
        if stand_in is None:
            piece = local(gradient)
            piece.mul_(factor.to(piece.device))
            continue
        held = stand_in.stream.current(stand_in)
        held.scales.append(factor.to("cpu"))
        held.norm = None
        if stand_in.device_elements is not None:
            stand_in.device_elements.mul_(factor.to(stand_in.device_elements.device))
