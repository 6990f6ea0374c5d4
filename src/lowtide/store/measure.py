"""How fast a tier is beside a computation, and what its transfers take from that computation.

A tier on the CPU moves bytes on threads of its own. They share cores, caches, memory and the interpreter's lock with the step, even where a core is
left over. So both are measured together, as they will run: matrix products and activations on this thread, transfers on the tier's.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from lowtide import private
from lowtide.store.tier import BUFFER_BYTES, Tier

_ROUNDS = 4
_ALONE_SECONDS = 0.02
_ENOUGH_SECONDS = 2.0
"""No further round begins after so long: tiers may be slow."""


@dataclass(frozen=True, slots=True)
class TierSpeed:
    """What was measured of a tier.

    Attributes:
        write_bytes_per_second, read_bytes_per_second: beside a computation on a CPU, without one on a device that copies by itself.
        busy: share of a transfer's time by which a computation beside it takes longer; 0 where the device copies by itself.
    """

    write_bytes_per_second: float
    read_bytes_per_second: float
    busy: float


def measure_tier(
    tier: Tier,
    device: torch.device,
    total_bytes: int = 48 << 20,
    compute: Callable[[], Any] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> TierSpeed:
    """Move ``total_bytes`` there and back a few times, beside a computation.

    Args:
        tier: it.
        device: where values come from and go to.
        total_bytes: moved each way in each round.
        compute: a few milliseconds of the step's kind of work; by default a matrix product and its activation.
        clock: seconds.
    """
    size = 4 * BUFFER_BYTES
    data = torch.ones(size, dtype=torch.uint8, device=device)
    slots = [tier.take(size) for _ in range(max(1, total_bytes // size))]
    waits = device.type != "cpu"
    compute = compute or _kernels()
    seconds: dict[bool, list[float]] = {True: [], False: []}
    lost: dict[bool, list[float]] = {True: [], False: []}
    started = clock()
    for number in range(_ROUNDS):
        if number and clock() - started > _ENOUGH_SECONDS:
            break
        for writes in (True, False):
            alone = 0.0 if waits else _each(compute, clock, lambda since: clock() - since >= _ALONE_SECONDS)
            begin = clock()
            moving = [tier.write(data, slot) if writes else tier.read(slot, data) for slot in slots]
            if waits:
                for transfer in moving:
                    transfer.wait()
                torch.get_device_module(device.type).synchronize(device)
                lost[writes].append(0.0)
            else:
                beside = _each(compute, clock, lambda _, moving=moving: all(transfer.done for transfer in moving))
                lost[writes].append(max(0.0, 1 - alone / beside))
            seconds[writes].append(max(clock() - begin, 1e-9))
            for transfer in moving:
                transfer.wait()  # raises what went wrong
    for slot in slots:
        slot.release()
    writing, reading = statistics.median(seconds[True]), statistics.median(seconds[False])
    busy = (statistics.median(lost[True]) * writing + statistics.median(lost[False]) * reading) / (writing + reading)
    return TierSpeed(size * len(slots) / writing, size * len(slots) / reading, busy)


def _each(compute: Callable[[], Any], clock: Callable[[], float], over: Callable[[float], bool]) -> float:
    """Seconds of one computation, repeated until it is over."""
    begin, count = clock(), 0
    while not count or not over(begin):
        compute()
        count += 1
    return max(clock() - begin, 1e-9) / count


def _kernels() -> Callable[[], Any]:
    """A matrix product and its activation, on other inputs each time, as a step's are."""
    with private.without_fake_mode():
        inputs = itertools.cycle(torch.ones(16, 256, 256).unbind())
        weight = torch.ones(1024, 256)

    def compute() -> None:
        with torch.no_grad(), private.without_fake_mode():
            functional.gelu(functional.linear(next(inputs), weight))

    return compute
