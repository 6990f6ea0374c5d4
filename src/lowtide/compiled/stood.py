"""What stands in memory when a step of a compiled model begins, counted anew for each step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lowtide.meter import storages
from lowtide.meter.resident import gradient_of
from lowtide.trace.results import tensors_inside


class Stood:
    """Counts the bytes that stand when a step begins: what is there in every step is counted once.

    Args:
        model: whose gradients come and go.
        optimizer: whose state comes with its first step, or ``None``.
        device: whose memory counts.
        standing: counts parameters, buffers, gradients and the optimizer's state.

    Attributes:
        gradient_bytes: of the gradients that stood before the latest step.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None,
        device: torch.device,
        standing: Callable[[], int],
    ) -> None:
        self._parameters = list(model.parameters())
        self._optimizer, self._device, self._standing = optimizer, device, standing
        self.gradient_bytes = 0
        self._always: tuple[int, int] | None = None  # parameters with state, and the bytes that do not change

    def __call__(self, *given: Any) -> int:
        """Bytes that stand before a step that is given these arguments."""
        gradients = self.gradients_now()
        states = len(self._optimizer.state) if self._optimizer is not None else 0
        if self._always is None or self._always[0] != states:
            self._always = states, self._standing() - gradients
        here = [one for one in tensors_inside(given) if one.device.type == self._device.type]
        self.gradient_bytes = gradients
        return self._always[1] + gradients + _bytes(here)

    def gradients_now(self) -> int:
        """Bytes of the gradients that stand now."""
        return _bytes([one for p in self._parameters if (one := gradient_of(p)) is not None])


def _bytes(tensors: list[torch.Tensor]) -> int:
    return sum(storage.nbytes() for storage in storages(tensors))
