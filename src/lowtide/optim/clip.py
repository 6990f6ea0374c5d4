"""The norm of gradients that lie on two sides and in several processes, and clipping by it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lowtide.optim.stream import sent
from lowtide.optim.tensors import is_shared, local


def clip_(
    gradients: Sequence[tuple[Tensor, Tensor | None]],
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
) -> tuple[Tensor, Tensor]:
    """Scale gradients so that their norm is at most ``max_norm``; returns the norm before, and the factor.

    Raises:
        RuntimeError: the norm is not finite and ``error_if_nonfinite`` is set; nothing has changed then.
    """
    order = float(norm_type)
    total = total_norm(gradients, order)
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise RuntimeError(
            f"the norm of order {order} of the gradients is {total.item()}, so they cannot be clipped: "
            "zero_grad() and skip this step, or pass error_if_nonfinite=False"
        )
    factor = torch.clamp(float(max_norm) / (total + 1e-6), max=1.0)
    scale_by([gradient for _, gradient in gradients if gradient is not None], factor)
    return total, factor


def total_norm(gradients: Sequence[tuple[Tensor, Tensor | None]], order: float) -> Tensor:
    """The norm of all gradients as one vector, over every process that holds a part of one.

    Args:
        gradients: (parameter, ``.grad``), in order; the same parameters on every process.
        order: of the norm, ``inf`` included.

    Raises:
        ParallelError: a gradient is only this process's part of a sum.
    """
    if not any(is_shared(parameter) for parameter, _ in gradients):
        return _norm_of_all([gradient for _, gradient in gradients if gradient is not None], order)
    from lowtide.parallel import grads

    return grads.total_norm(gradients, order, lambda some: _norm_of_all(some, order))


def _norm_of_all(gradients: Sequence[Tensor], order: float) -> Tensor:
    """The norm of what this process holds of gradients, combined as `torch.nn.utils.get_total_norm` does.

    The norms of each device are brought together at once: one by one, each would wait for its device.
    """
    norms = [norm_of(gradient, order) for gradient in gradients]
    if not norms:
        return torch.tensor(0.0)
    places: dict[torch.device, list[int]] = {}
    for place, norm in enumerate(norms):
        places.setdefault(norm.device, []).append(place)
    if len(places) == 1:
        return torch.linalg.vector_norm(torch.stack(norms), order)
    together = [torch.stack([norms[place] for place in some]).to(norms[0].device) for some in places.values()]
    found = torch.cat(together)  # in the gradients' order again: a sum depends on it
    back = torch.empty(len(norms), dtype=torch.int64)
    back[torch.tensor([place for some in places.values() for place in some])] = torch.arange(len(norms))
    return torch.linalg.vector_norm(found[back.to(found.device)], order)


def norm_of(gradient: Tensor, order: float) -> Tensor:
    """The norm of what this process holds of one gradient, on the host or on the device."""
    stand_in = sent(gradient)
    if stand_in is None:
        return torch.linalg.vector_norm(local(gradient).detach(), order)
    held = stand_in.stream.current(stand_in)
    for wait in (lambda: None, held.wait):  # one that was gathered as the gradient left needs no transfer
        wait()
        if not held.scales and (norm := held.norm) is not None and norm[0] == order:
            return norm[1]
    if held.scales:
        held.rescale()
        held.norm = None
    elements = held.elements
    if stand_in.device_elements is not None:  # a norm of parts would differ in its last bits
        cut = stand_in.device_elements.numel()
        elements = torch.empty(cut + held.elements.numel(), dtype=held.elements.dtype)
        stand_in.stream.link.down(elements[:cut], stand_in.device_elements).wait()
        elements[cut:] = held.elements
    return torch.linalg.vector_norm(elements, order)


def scale_by(gradients: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply gradients by a factor: at once where they lie on the device, with the update where they lie on
    the host.
    """
    factors = {factor.device: factor}

    def on(device: torch.device) -> Tensor:
        if device not in factors:  # once each: it waits for the device that has the factor
            factors[device] = factor.to(device)
        return factors[device]

    for gradient in gradients:
        stand_in = sent(gradient)
        if stand_in is None:
            piece = local(gradient)
            piece.mul_(on(piece.device))
            continue
        held = stand_in.stream.current(stand_in)
        held.scales.append(on(torch.device("cpu")))
        held.norm = None
        if stand_in.device_elements is not None:
            stand_in.device_elements.mul_(on(stand_in.device_elements.device))
