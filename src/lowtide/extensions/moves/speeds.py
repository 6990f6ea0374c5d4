"""How fast tiers, codecs and groups are here, as plain numbers: `Link`s, which the planner weighs.

In: decisions that move values, and the stores that have them. Out: a `Link` for each tier, codec and group.
It loads the stores, and so PyTorch: the rest of the planner imports it where speeds are missing.

A tier on the CPU moves bytes on threads of its own. They share cores, caches, memory and the interpreter's
lock with the step, even where a core is left over. So both are measured together, as they will run: matrix
products and activations on this thread, transfers on the tier's.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

from lowtide import accelerator, private
from lowtide.errors import expect
from lowtide.extensions.moves.store.codec import Codec
from lowtide.extensions.moves.store.disk import BUFFER_BYTES
from lowtide.extensions.moves.store.lanes import Transfer
from lowtide.extensions.moves.store.stores import Replicas, Stores
from lowtide.extensions.moves.store.tier import Tier
from lowtide.meter.resident import device_of
from lowtide.plan.data import Compress, Link, Moving, Shard, codecs_behind, decision_of, form_and_tier
from lowtide.progress import current

_SAMPLE = 1 << 17
"""Elements on which a codec or a gather is timed."""

_TRANSFER_BYTES, _TRANSFERS = BUFFER_BYTES // 4, 24
_COPY_BYTES, _COPIES = 1 << 24, 8
"""Where a device copies by itself: long enough that starting a copy takes no part of its time."""

_WIDTH = 128
_LATENCY_SECONDS = 1e-4
_ROUNDS = 4
_ALONE_SECONDS = 0.02
_ENOUGH_SECONDS, _ENOUGH_ON_DEVICE = 2.0, 0.5
"""No further round begins after so long: tiers may be slow. A limit on an accelerator waits for it."""


@lru_cache(maxsize=64)
def link_speeds(way: Moving, own: tuple[Codec, ...], device: str) -> dict[str, Link]:
    """How fast the tier or codec of a decision is, measured once in a process."""
    return measure_links(way, stores=Stores(codecs=own), device=device)


def measure_links(
    *ways: str | Moving,
    stores: Stores | None = None,
    device: str | torch.device = "cpu",
) -> dict[str, Link]:
    """Measure the speed of tiers, codecs and groups on this machine, by moving a few megabytes.

    Args:
        ways: decisions, or their short names.
        stores: with the groups and codecs that ``ways`` name. If there is a group, all its ranks have to call
            this function, and all get the same result.
        device: the device that values leave.

    Returns:
        The speeds by name, for ``links=`` of the policies.

    Raises:
        PlanError: a tier cannot be opened, or a group or codec is missing.

    Example:
        >>> sorted(measure_links("int8"))
        ['int8']
    """
    given = stores is None or isinstance(stores, Stores)
    expect(given, "measure_links(stores=)", stores, "lowtide.Stores(...), or None")
    place = device_of(device)
    found: dict[str, Link] = {}
    current().say("timing transfers")
    with Stores() as own:
        known = stores or own
        for decision in map(decision_of, ways):
            first, then = form_and_tier(decision)
            if isinstance(first, Compress):
                for name in codecs_behind(first.codec):
                    if name not in found:
                        found[name] = measure_codec(known.codec(name), place)
            elif isinstance(first, Shard) and first.group not in found:
                found[first.group] = measure_group(known.group(first.group, first.size), place)
            if then is not None and then.tier not in found:
                found[then.tier] = measure_tier(own.tier(then.tier, then.path, place), place)
    return found


def measure_tier(tier: Tier, device: torch.device) -> Link:
    """Move some bytes there and back a few times, beside a computation; takes 2 MiB of the device, 16 where
    it copies by itself.

    Args:
        tier: it.
        device: where values come from and go to.
    """
    size, count, enough = _TRANSFER_BYTES, _TRANSFERS, _ENOUGH_SECONDS
    if device.type != "cpu":
        size, count, enough = _COPY_BYTES, _COPIES, _ENOUGH_ON_DEVICE
    data = torch.ones(size, dtype=torch.uint8, device=device)
    leases = [tier.take(size) for _ in range(count)]
    compute, started = _kernels(), time.perf_counter()
    out: list[tuple[float, float]] = []
    back: list[tuple[float, float]] = []
    for number in range(_ROUNDS):
        if number and time.perf_counter() - started > enough:
            break
        out.append(_time_transfers(lambda: [tier.write(data, lease) for lease in leases], compute, device))
        back.append(_time_transfers(lambda: [tier.read(lease, data) for lease in leases], compute, device))
    (writing, out_lost), (reading, back_lost) = (
        map(statistics.median, zip(*rows, strict=True)) for rows in (out, back)
    )
    busy = (out_lost * writing + back_lost * reading) / (writing + reading)
    moved = size * count
    return Link(moved / writing, moved / reading, _LATENCY_SECONDS, busy)


def _time_transfers(
    start: Callable[[], list[Transfer]], compute: Callable[[], Any], device: torch.device
) -> tuple[float, float]:
    """Seconds of some transfers, and the share of a computation beside them that they take; nothing is
    computed where a device copies by itself.
    """
    if device.type != "cpu":
        begin = _clock(device)
        for transfer in start():
            transfer.wait()
        return max(_clock(device) - begin, 1e-9), 0.0
    alone = _each(compute, lambda since: time.perf_counter() - since >= _ALONE_SECONDS)
    begin = time.perf_counter()
    moving = start()
    beside = _each(compute, lambda _: all(transfer.done for transfer in moving))
    seconds = max(time.perf_counter() - begin, 1e-9)
    for transfer in moving:
        transfer.wait()  # raises what went wrong
    return seconds, max(0.0, 1 - alone / beside)


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
    """Bytes a second of encoding and decoding, on numbers that every codec takes: zeros and ones."""
    x = torch.zeros(_SAMPLE, device=device)
    x[1::2] = 1
    parts, out = codec.encode(x), torch.empty_like(x)
    encode = _fastest(lambda: codec.encode(x), device)
    return Link(x.nbytes / encode, x.nbytes / _fastest(lambda: codec.decode(parts, out), device))


def measure_group(replicas: Replicas, device: torch.device) -> Link:
    """Bytes a second of gathered values; the slowest rank's, on every rank."""
    part = torch.ones(-(-_SAMPLE // replicas.size), device=device)
    whole = torch.empty(part.nbytes * replicas.size, dtype=torch.uint8, device=device)
    seconds = _fastest(lambda: replicas.gather(part, whole).join(), device)
    slowest = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=replicas.group)
    speed = whole.nbytes / float(slowest)
    return Link(speed, speed, _LATENCY_SECONDS)


def _fastest(work: Callable[[], Any], device: torch.device) -> float:
    """Seconds of the fastest of three runs."""
    seconds = []
    for _ in range(3):
        begin = _clock(device)
        work()
        seconds.append(_clock(device) - begin)
    return max(min(seconds), 1e-9)


def _clock(device: torch.device) -> float:
    accelerator.synchronize(device)
    return time.perf_counter()
