"""How each saved value of a step may move, and what each way costs.

In: the decisions that a user offers (`Offload`, `Compress`, `Shard`, `Chain`), and speeds. Out: for each
value that may move, one `Move` for each decision that fits it.
"""

from __future__ import annotations

from collections.abc import Sequence

from lowtide.errors import PlanError
from lowtide.plan.blocks import entering_blocks
from lowtide.plan.data import Chain, Compress, Link, Links, Move, Moving, Offload, Shard, stages
from lowtide.plan.moves.movable import lossless_codec, movable, move_of
from lowtide.plan.moves.supply import Codec, codecs_behind, link_speeds
from lowtide.plan.simulate.simulator import Simulator

Placements = dict[int, list[Move]]
"""value -> the ways in which it may move"""

_WORTH = 0.95
"""A codec is offered where it leaves at most this share of a value's bytes."""


def default_placements(device: str) -> tuple[Moving, ...]:
    """The next tier down, and the codecs that lose nothing."""
    return Offload("disk" if device.partition(":")[0] == "cpu" else "host"), Compress("auto")


def placements_of(
    sim: Simulator,
    decisions: Sequence[Moving],
    links: Links,
    min_bytes: int,
    codecs: Sequence[Codec] = (),
) -> Placements:
    """For each value that may move, the ways that fit it.

    ``Compress("auto")`` is a codec that loses nothing, where one is known to fit; other codecs are offered
    where they save something. Only what enters a block is offered to a `Shard`: what lies within one differs
    between the ranks of a tensor-parallel group.
    """
    firsts = [stages(decision)[0] for decision in decisions]
    entering = entering_blocks(sim) if any(isinstance(f, Shard) for f in firsts) else frozenset[int]()
    found: Placements = {}
    for value in movable(sim, min_bytes):
        rows: dict[Moving, Move] = {}
        for decision in decisions:
            first, then = stages(decision)
            if isinstance(first, Shard) and value not in entering:
                continue
            if first == Compress("auto"):
                name = lossless_codec(sim, value)
                if not name:
                    continue
                decision = Chain(Compress(name), then) if then is not None else Compress(name)
            row = move_of(sim, value, decision, links, codecs)
            if not isinstance(first, Compress) or row.encoded_bytes <= _WORTH * row.bytes:
                rows.setdefault(decision, row)  # "auto" may come to mean a codec that is offered, too
        if rows:
            found[value] = list(rows.values())
    return found


def missing_links(
    decisions: Sequence[Moving],
    links: Links | None,
    codecs: Sequence[Codec],
    device: str,
) -> dict[str, Link]:
    """The links that were given, and those that were not: measured, once in a process.

    Raises:
        PlanError: a group's is missing, which one rank cannot measure.
    """
    given = dict(links or {})
    found: dict[str, Link] = {}
    for decision in decisions:
        first, then = stages(decision)
        if isinstance(first, Shard) and first.group not in given:
            raise PlanError(
                f"how fast is the group {first.group!r}? Planning happens on one rank, so it is measured "
                f"before, by all: links=lowtide.measure_links(Shard({first.group!r}, {first.size}), "
                "stores=...)"
            )
        if isinstance(first, Compress) and not set(codecs_behind(first.codec)) <= given.keys():
            found |= link_speeds(first, tuple(codecs), device)
        if then is not None and then.tier not in given:
            found |= link_speeds(then, tuple(codecs), device)
    return {**found, **given}
