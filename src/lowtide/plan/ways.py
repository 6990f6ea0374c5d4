"""The ways in which each saved value of a step may move, and what each of them costs.

In: the decisions that a user offers (`Offload`, `Compress`, `Shard`, `Chain`), and speeds. Out: for each value that may move, one `Moved` for
each decision that fits it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from lowtide.errors import PlanError
from lowtide.plan.moves import dtypes_of, entering_blocks, fitting_codec, lossless_codec, movable, moved_of
from lowtide.plan.plan import Chain, Compress, Moving, Offload, Shard, stages
from lowtide.plan.simulate import Simulator
from lowtide.plan.traffic import Link, Links, Moved

if TYPE_CHECKING:
    from lowtide.store.codec import Codec
    from lowtide.store.stores import Stores

Ways = dict[int, list[Moved]]
"""value -> the ways in which it may move"""

_WORTH = 0.95
"""A codec is offered where it leaves at most this share of a value's bytes."""

_SAMPLE = 1 << 20
"""Elements on which a codec is timed."""

_LATENCY_SECONDS = 1e-4


def decision_of(way: str | Moving) -> Moving:
    """A decision, also from its short name: ``host``, ``disk``, or a codec's name.

    Raises:
        PlanError: it is neither.

    >>> decision_of("disk")
    Offload(tier='disk', path='', kind='offload')
    """
    if isinstance(way, str):
        return Offload(way) if way in ("host", "disk") else Compress(way)
    if isinstance(way, Offload | Compress | Shard | Chain):
        return way
    raise PlanError(f"{way!r} is no way to move a value: give 'host', 'disk', a codec's name, or an Offload, Compress, Shard or Chain")


def default_ways(device: str) -> tuple[Moving, ...]:
    """The next tier down, and the codecs that lose nothing."""
    return Offload("disk" if torch.device(device).type == "cpu" else "host"), Compress("auto")


def ways_of(
    sim: Simulator, decisions: Sequence[Moving], links: Links, min_bytes: int, codecs: Sequence[Codec] = (), everywhere: bool = False
) -> Ways:
    """For each value that may move, the ways that fit it.

    ``Compress("auto")`` is a codec that loses nothing, where one is known to fit; other codecs are offered where they save something, and as their
    gentler forms where backward is not linear in the value (unless ``everywhere``). Only what enters a block is offered to a `Shard`: what lies
    within one differs between the ranks of a tensor-parallel group.
    """
    dtypes = dtypes_of(sim)
    sharded = any(isinstance(stages(d)[0], Shard) for d in decisions)
    entering = entering_blocks(sim) if sharded else frozenset[int]()
    named = {first.codec for d in decisions if isinstance(first := stages(d)[0], Compress)}
    fitting = {name: fitting_codec(sim, name, codecs, everywhere) for name in named - {"auto"}}
    found: Ways = {}
    for value in movable(sim, min_bytes):
        for decision in decisions:
            first, then = stages(decision)
            if isinstance(first, Shard) and value not in entering:
                continue
            if isinstance(first, Compress):
                name = lossless_codec(sim, value, dtypes[value]) if first.codec == "auto" else fitting[first.codec](value)
                if not name:
                    continue
                first = Compress(name)
                decision = Chain(first, then) if then is not None else first
                if any(m.decision == decision for m in found.get(value, ())):  # another codec's gentler form
                    continue
            (row,) = moved_of(sim, {value: decision}, links, codecs)
            if not isinstance(first, Compress) or row.encoded_bytes <= _WORTH * row.bytes:
                found.setdefault(value, []).append(row)
    return found


def measure_links(*ways: str | Moving, stores: Stores | None = None, device: str | torch.device = "cpu") -> dict[str, Link]:
    """How fast the tiers, codecs and groups of some decisions are here, by moving a few megabytes.

    Args:
        ways: decisions, or their short names.
        stores: with the groups and codecs that ``ways`` name. Where there is a group, all its ranks have to call this, and all get the same.
        device: where values come from.

    Returns:
        The speed of each by its name, as ``links=`` of the policies takes them.

    Raises:
        PlanError: a tier cannot be opened, or a group or codec is not there.

    Example:
        >>> sorted(measure_links("int8"))
        ['int8']
    """
    from lowtide.store.stores import Stores

    place = torch.device(device)
    found: dict[str, Link] = {}
    with Stores() as own:
        known = stores or own
        for decision in map(decision_of, ways):
            first, then = stages(decision)
            if isinstance(first, Compress):
                for name in _codecs_behind(first.codec, known.codecs):
                    found.setdefault(name, _codec_link(known.codec(name), place))
            elif isinstance(first, Shard) and first.group not in found:
                found[first.group] = _group_link(known.group(first.group, first.size), place)
            if then is not None and then.tier not in found:
                found[then.tier] = _tier_link(own, then, place)
    return found


def missing_links(decisions: Sequence[Moving], links: Links | None, codecs: Sequence[Codec], device: str) -> dict[str, Link]:
    """The links that were given, and those that were not, measured now.

    Raises:
        PlanError: a group's is missing, which one rank cannot measure.
    """
    from lowtide.store.stores import Stores

    found = dict(links or {})
    open_: list[Moving] = []
    for decision in decisions:
        first, then = stages(decision)
        if isinstance(first, Shard) and first.group not in found:
            raise PlanError(
                f"how fast is the group {first.group!r}? Planning happens on one rank, so it is measured before, by all: "
                f"links=lowtide.measure_links(Shard({first.group!r}, {first.size}), stores=...)"
            )
        if isinstance(first, Compress) and not set(_codecs_behind(first.codec, codecs)) <= found.keys():
            open_.append(first)
        if then is not None and then.tier not in found:
            open_.append(then)
    if open_:
        found = {**measure_links(*open_, stores=Stores(codecs=codecs), device=device), **found}
    return found


def _codecs_behind(name: str, own: Sequence[Codec]) -> tuple[str, ...]:
    """The codecs that a name may come to mean."""
    from lowtide.store.codec import codec_named

    if name == "auto":
        return ("mask", "positive")
    gentler = codec_named(name, own).gentler
    return (name, gentler) if gentler else (name,)


def _tier_link(stores: Stores, decision: Offload, device: torch.device) -> Link:
    from lowtide.store.measure import measure_tier

    speed = measure_tier(stores.tier(decision.tier, decision.path, device), device)
    return Link(speed.write_bytes_per_second, speed.read_bytes_per_second, _LATENCY_SECONDS, speed.busy)


def _codec_link(codec: Codec, device: torch.device) -> Link:
    """Seconds of encoding and decoding, on numbers that every codec takes: zeros and ones."""
    x = (torch.arange(_SAMPLE, device=device) % 2).to(torch.float32)
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


def _group_link(replicas: object, device: torch.device) -> Link:
    """Bytes a second of gathered values; the slowest rank's, on every rank."""
    import torch.distributed as dist

    from lowtide.store.shard import Replicas

    assert isinstance(replicas, Replicas)
    part = torch.ones(-(-_SAMPLE // replicas.size), device=device)
    whole = torch.empty(part.nbytes * replicas.size, dtype=torch.uint8, device=device)
    seconds = []
    for _ in range(3):
        begin = _clock(device)
        replicas.gather(part, whole).wait()
        seconds.append(_clock(device) - begin)
    slowest = torch.tensor(min(seconds), dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=replicas.group)
    speed = whole.nbytes / max(float(slowest), 1e-9)
    return Link(speed, speed, _LATENCY_SECONDS)


def _clock(device: torch.device) -> float:
    if device.type != "cpu":
        torch.get_device_module(device.type).synchronize(device)
    return time.perf_counter()
