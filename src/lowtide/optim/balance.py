"""``host_fraction="auto"``: from measured speeds to the share that takes the least time, of those that fit.

The host updates its part while the device updates its own, so the step takes as long as the slower of the
two; where device and host are one processor, it takes the sum. Gradients and parameters of the host part
travel in a pipeline with its update, so the slowest of the three sets its pace, and the first batch's way
down and the last one's way up come on top.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lowtide import accelerator
from lowtide.optim.kernels import Group, on_host
from lowtide.optim.pipeline import Task, Updater, batches
from lowtide.optim.slots import Part, Placement, Slot
from lowtide.optim.tensors import local

_STEPS = 100
_ROUNDS = 3
_FREE_SHARE = 0.9
_BATCHES = 2


@dataclass(frozen=True)
class Speeds:
    """Seconds an element, measured.

    Attributes:
        device, host: an update there.
        down, up: a gradient to the host, a parameter to the device.
        parallel: whether device and host update side by side.
        streamed: gradients are on the host already when the update begins.
        chunk_elements: elements of a batch.
    """

    device: float
    host: float
    down: float
    up: float
    parallel: bool
    streamed: bool
    chunk_elements: int

    def step_seconds(self, elements: int, host_fraction: float) -> float:
        """Seconds that `step` takes.

        >>> speeds = Speeds(1.0, 3.0, 1.0, 1.0, parallel=True, streamed=True, chunk_elements=0)
        >>> speeds.step_seconds(100, 0.0), speeds.step_seconds(100, 0.25), speeds.step_seconds(100, 1.0)
        (100.0, 75.0, 300.0)
        """
        on_host = elements * host_fraction
        batch = min(on_host, self.chunk_elements)
        down = 0.0 if self.streamed else self.down
        host = on_host * max(down, self.host, self.up) + batch * (
            down + self.host + self.up - max(down, self.host, self.up)
        )
        device = (elements - on_host) * self.device
        return max(host, device) if self.parallel else host + device


@dataclass(frozen=True)
class Balance:
    """What ``"auto"`` found.

    Attributes:
        host_fraction: the share chosen.
        least_fraction: the smallest share that fits.
        speeds: what was measured.
        step_seconds: predicted for the update.
    """

    host_fraction: float
    least_fraction: float
    speeds: Speeds
    step_seconds: float


def balance(
    updater: Updater,
    placement: Placement,
    parameters: Sequence[tuple[Tensor, Group]],
    device_budget: int | None,
    streamed: bool,
) -> Balance:
    """Choose the host's share for parameters.

    Args:
        updater, placement: of the optimizer.
        parameters: with their groups.
        device_budget: most bytes of their state on the device, or ``None`` for what is free.
        streamed: gradients leave the device during backward.
    """
    elements = sum(local(p).numel() for p, _ in parameters)
    if device_budget is None:
        device_budget = _free_bytes(local(parameters[0][0]).device)
    whole = sum(local(p).numel() * placement.device_bytes_per_element(p, g) for p, g in parameters)
    least = 0.0 if device_budget is None or whole <= device_budget else 1.0 - device_budget / whole
    return choose(measure(updater, placement, parameters, streamed), elements, least)


def choose(speeds: Speeds, elements: int, least_fraction: float = 0.0) -> Balance:
    """The share of least predicted time at or above ``least_fraction``; of equal ones the largest, which
    leaves the device most memory.

    >>> choose(Speeds(1.0, 3.0, 1.0, 1.0, parallel=True, streamed=True, chunk_elements=0), 100).host_fraction
    0.25
    """
    low, high = least_fraction, 1.0
    chosen, least = high, speeds.step_seconds(elements, high)
    for _ in range(_ROUNDS):
        shares = [low + (high - low) * step / _STEPS for step in range(_STEPS + 1)]
        seconds = {share: speeds.step_seconds(elements, share) for share in shares}
        least = min(seconds.values())
        chosen = max(share for share in shares if seconds[share] <= least * (1 + 1e-9))
        width = (high - low) / _STEPS
        low, high = max(least_fraction, chosen - width), min(1.0, chosen + width)
    return Balance(chosen, least_fraction, speeds, least)


def measure(
    updater: Updater, placement: Placement, parameters: Sequence[tuple[Tensor, Group]], streamed: bool
) -> Speeds:
    """Time updates on both sides and transfers both ways, on scratch tensors of a few batches that are like
    the largest parameter.
    """
    link = updater.link
    largest, group = max(parameters, key=lambda pair: local(pair[0]).numel())
    piece = local(largest)
    count = min(updater.chunk_elements * _BATCHES, max(32, piece.numel() // 32 * 32))
    before = link.bytes_down, link.bytes_up
    scratch = torch.zeros(count, dtype=piece.dtype, device=piece.device)
    gradient = torch.zeros_like(scratch)
    near = updater.staging.zeros([(count, piece.dtype)])[0]

    def timed(work: Callable[[], object]) -> float:
        found = []
        for _ in range(_ROUNDS):
            link.synchronize()
            begin = time.perf_counter()
            work()
            link.synchronize()
            found.append(time.perf_counter() - begin)
        return statistics.median(found[1:]) / count

    def task(fraction: float) -> Task:
        slot: Slot = next(iter(placement.place([(scratch, group)], fraction).values()))
        part: Part = slot.parts()[0]
        part.fresh = bool(updater.kernel.scalars(group))  # these are made by the first update
        updater.refresh(slot)
        return Task(slot, part, group, gradient)

    on_device = task(0.0)
    device = timed(lambda: updater.update_device([on_device]))
    host_task = task(1.0)
    host_group = on_host(group)
    host_task.gradient = near

    def update() -> None:
        for batch in batches([host_task], updater.chunk_elements):
            gradients = [stretch.of(near) for stretch in batch]
            size = sum(stretch.stop - stretch.start for stretch in batch)
            link.on_host(
                lambda batch=batch, gradients=gradients: updater._compute(batch, gradients, host_group), size
            )

    host = timed(update)
    placement.forget([host_task.slot])
    down = up = 0.0
    if not link.direct:
        down = timed(lambda: link.down(near, scratch))
        up = timed(lambda: link.up(scratch, near))
    updater.staging.give_back([near])
    link.bytes_down, link.bytes_up = before
    return Speeds(device, host, down, up, link.parallel, streamed or link.direct, updater.chunk_elements)


def _free_bytes(device: torch.device) -> int | None:
    """What the device has left for state, or ``None`` where nobody knows."""
    if accelerator.is_accelerator(device):
        return int((accelerator.free_bytes(device) + accelerator.unused_bytes(device)) * _FREE_SHARE)
    return None
