"""How fast tiers, codecs and groups are here, as plain numbers.

A tier on the CPU moves bytes on threads of its own. They share cores, caches, memory and the interpreter's
lock with the step, even where a core is left over. So both are measured together, as they will run: matrix
products and activations on this thread, transfers on the tier's.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

from lowtide import private
from lowtide.links import Link
from lowtide.store.codec import Codec
from lowtide.store.disk import BUFFER_BYTES
from lowtide.store.shard import Replicas
from lowtide.store.tier import Tier

_SAMPLE = 1 << 17
"""Elements on which a codec or a gather is timed."""

_TRANSFER_BYTES, _TRANSFERS = BUFFER_BYTES // 4, 24
_WIDTH = 128
_LATENCY_SECONDS = 1e-4
_ROUNDS = 4
_ALONE_SECONDS = 0.02
_ENOUGH_SECONDS = 2.0
"""No further round begins after so long: tiers may be slow."""


def measure_tier(tier: Tier, device: torch.device) -> Link:
    """Move some bytes there and back a few times, beside a computation; takes 2 MiB of the device.

    Args:
        tier: it.
        device: where values come from and go to.
    """
    data = torch.ones(_TRANSFER_BYTES, dtype=torch.uint8, device=device)
    slots = [tier.take(_TRANSFER_BYTES) for _ in range(_TRANSFERS)]
    waits = device.type != "cpu"
    compute, clock = _kernels(), time.perf_counter
    seconds: dict[bool, list[float]] = {True: [], False: []}
    lost: dict[bool, list[float]] = {True: [], False: []}
    started = clock()
    for number in range(_ROUNDS):
        if number and clock() - started > _ENOUGH_SECONDS:
            break
        for writes in (True, False):
            alone = 0.0 if waits else _each(compute, lambda since: clock() - since >= _ALONE_SECONDS)
            begin = clock()
            moving = [tier.write(data, slot) if writes else tier.read(slot, data) for slot in slots]
            if waits:
                for transfer in moving:
                    transfer.wait()
                torch.get_device_module(device.type).synchronize(device)
                lost[writes].append(0.0)
            else:
                beside = _each(compute, lambda _, moving=moving: all(transfer.done for transfer in moving))
                lost[writes].append(max(0.0, 1 - alone / beside))
            seconds[writes].append(max(clock() - begin, 1e-9))
            for transfer in moving:
                transfer.wait()  # raises what went wrong
    writing, reading = statistics.median(seconds[True]), statistics.median(seconds[False])
    busy = (statistics.median(lost[True]) * writing + statistics.median(lost[False]) * reading) / (
        writing + reading
    )
    moved = _TRANSFER_BYTES * _TRANSFERS
    return Link(moved / writing, moved / reading, _LATENCY_SECONDS, busy)


def _each(compute: Callable[[], Any], over: Callable[[float], bool]) -> float:
    """Seconds of one computation, repeated until ``over(begin)``."""
    begin, count = time.perf_counter(), 0
    while not count or not over(begin):
        compute()
        count += 1
    return max(time.perf_counter() - begin, 1e-9) / count


def _kernels() -> Callable[[], Any]:
    """A few milliseconds of a step's kind of work: a matrix product and its activation, on other inputs each
    time.
    """
    with private.without_fake_mode():
        inputs = itertools.cycle(torch.ones(8, _WIDTH, _WIDTH).unbind())
        weight = torch.ones(4 * _WIDTH, _WIDTH)

    def compute() -> None:
        with torch.no_grad(), private.without_fake_mode():
            functional.gelu(functional.linear(next(inputs), weight))

    return compute


def measure_codec(codec: Codec, device: torch.device) -> Link:
    """Seconds of encoding and decoding, on numbers that every codec takes: zeros and ones."""
    x = torch.zeros(_SAMPLE, device=device)
    x[1::2] = 1
    out = torch.empty_like(x)
    seconds: list[list[float]] = [[], []]
    for _ in range(3):
        begin = _clock(device)
        parts = codec.encode(x)
        middle = _clock(device)
        codec.decode(parts, out)
        seconds[0].append(middle - begin)
        seconds[1].append(_clock(device) - middle)
    encode, decode = (max(min(row), 1e-9) for row in seconds)
    return Link(x.nbytes / encode, x.nbytes / decode)


def measure_group(replicas: Replicas, device: torch.device) -> Link:
    """Bytes a second of gathered values; the slowest rank's, on every rank."""
    part = torch.ones(-(-_SAMPLE // replicas.size), device=device)
    whole = torch.empty(part.nbytes * replicas.size, dtype=torch.uint8, device=device)
    seconds = []
    for _ in range(3):
        begin = _clock(device)
        replicas.gather(part, whole).join()
        seconds.append(_clock(device) - begin)
    slowest = torch.tensor(min(seconds), dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=replicas.group)
    speed = whole.nbytes / max(float(slowest), 1e-9)
    return Link(speed, speed, _LATENCY_SECONDS)


def _clock(device: torch.device) -> float:
    if device.type != "cpu":
        torch.get_device_module(device.type).synchronize(device)
    return time.perf_counter()
