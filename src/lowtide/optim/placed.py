"""An optimizer whose state lies on two sides: what it holds, and what is placed where."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Literal

import torch
from torch import Tensor

from lowtide.optim.balance import Balance, balance
from lowtide.optim.kernels import Group, Kernel
from lowtide.optim.link import Link
from lowtide.optim.pipeline import Updater
from lowtide.optim.slots import Placement, Slot
from lowtide.optim.stream import GradientStream
from lowtide.optim.undo import Undo


class PlacedOptimizer(torch.optim.Optimizer):
    """What `lowtide.optim.host.HostOptimizer`, which sets it up and steps, shares with those who ask what
    its state takes and with those who save and load it; the options mean what they mean there.
    """

    kind: type[torch.optim.Optimizer]
    kernel: Kernel
    link: Link
    """the way between device and host; it counts bytes"""
    host: Literal["memory", "disk"]
    host_fraction: float | Literal["auto"]
    stream_gradients: bool
    overlap_update: bool
    delayed: bool
    delay_after: int
    reversible: bool
    balance: Balance | None
    _device_budget: int | None
    _slots: dict[Tensor, Slot]
    _steps: int
    _whole: str
    """why the state is not whole, if it is not"""
    _updater: Updater
    _placement: Placement
    _stream: GradientStream
    _undo: Undo | None

    def slot_of(self, parameter: Tensor) -> Slot:
        """What is kept for a parameter, and where; made now for all trainable parameters that have nothing
        yet.
        """
        if parameter not in self._slots:
            self._place({parameter})
        return self._slots[parameter]

    def _place(self, also: Collection[Tensor] = ()) -> None:
        """Give every trainable parameter that has none a slot, and those in ``also``, whose state is at hand
        though they may be frozen.
        """
        wanted: list[tuple[Tensor, Group]] = []
        for group in self.param_groups:
            wanted += [
                (p, group) for p in group["params"] if (p.requires_grad or p in also) and p not in self._slots
            ]
        if not wanted:
            return
        if self.host_fraction == "auto":
            self.balance = balance(
                self._updater, self._placement, wanted, self._device_budget, self.stream_gradients
            )
            fraction = self.balance.host_fraction
        else:
            fraction = self.host_fraction
        made = self._placement.place(wanted, fraction)
        try:
            if self._undo is not None:
                self._undo.reserve(made.values())
            if self.stream_gradients or self.delayed:
                self._stream.reserve(made.values(), twice=self.delayed)
        except BaseException:
            self._forget(made.values())
            raise
        self._slots.update(made)

    def _forget(self, slots: Collection[Slot]) -> None:
        """Give the host memory of slots back, that of gradients apart."""
        self._placement.forget(slots)
        if self._undo is not None:
            self._undo.forget(slots)

    def _group_of(self, parameter: Tensor) -> dict[str, Any]:
        return next(group for group in self.param_groups if any(p is parameter for p in group["params"]))
