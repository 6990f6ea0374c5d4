"""Values that move: which may, in which ways, and what each way costs.

In: a `Simulator`, the decisions that a user offers (`Offload`, `Compress`, `Shard`, `Chain`), and speeds.
Out: `Move`s, one for each value and decision that fits it; and sets of stored and moved values made feasible.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from lowtide.errors import PlanError
from lowtide.extensions.moves.simulate import Transfers
from lowtide.graph import StepGraph
from lowtide.plan.blocks import entering_blocks
from lowtide.plan.data import (
    Chain,
    Compress,
    Link,
    Links,
    Move,
    Moving,
    Offload,
    Shard,
    codecs_behind,
    form_and_tier,
)
from lowtide.plan.simulate.index import replay_set
from lowtide.plan.simulate.simulator import Simulation, Simulator

if TYPE_CHECKING:
    from lowtide.extensions.moves.store.codec import Codec
else:
    Codec = object  # for annotations: the class itself loads PyTorch

_UNDER_WAY = ("c10d.", "c10d_functional.", "_dtensor.", "fsdp.", "symm_mem.")
"""Operations that may still be writing when they return, and that only user code can wait for."""


Placements = dict[int, list[Move]]
"""value -> the ways in which it may move"""

_WORTH = 0.95
"""A codec is offered where it leaves at most this share of a value's bytes."""


def codec_named(name: str, own: Sequence[Codec] = ()) -> Codec:
    """The codec of that name, one of ``own`` or of lowtide's."""
    from lowtide.extensions.moves.store.codec import codec_named as find

    return find(name, own)


def encoded_bytes(codec: Codec, elements: int, dtype: str) -> int:
    """The most bytes that a value of so many elements takes in a codec."""
    import torch

    from lowtide.extensions.moves.store.codec import Form

    return codec.encoded_bytes(Form(elements, getattr(torch, dtype, torch.uint8)))


def why_not(sim: Simulator, value: int) -> str:
    """Why a value may not move, in words; empty where it may."""
    v = sim.graph.values[value]
    if v.producer is None:
        return (
            f"value {value} ({sim.describe(value)}) was resident before the step: parameters, buffers and "
            "inputs never move"
        )
    op = sim.graph.operations[v.producer]
    if not v.storable or op.phase != "forward":
        return (
            f"value {value} cannot move: {sim.describe(value)} is overwritten later in the step, or made in "
            "backward"
        )
    if op.name.startswith(_UNDER_WAY):
        return (
            f"value {value} cannot move: {op.name} may still be writing it when it returns. Use a functional "
            "collective (torch.distributed._functional_collectives), which lowtide can wait for"
        )
    return ""


def movable(sim: Simulator, min_bytes: int = 1) -> list[int]:
    """The saved values of at least ``min_bytes`` that may move, in the order of the forward."""
    found = [
        value
        for value in sim.droppable
        if sim.value_bytes[value] >= max(1, min_bytes)
        and value not in sim.evicted_by_scopes
        and not why_not(sim, value)
    ]
    return sorted(found, key=lambda value: sim.producer[value])


def refuse_moves(sim: Simulator, moves: Iterable[int]) -> None:
    """Check that values may move.

    Raises:
        PlanError: one may not.
    """
    for value in moves:
        if not 0 <= value < len(sim.graph.values):
            raise PlanError(f"there is no value {value} to move: this step has {len(sim.graph.values)}")
        if reason := why_not(sim, value):
            raise PlanError(reason)


def move_of(
    sim: Simulator, value: int, decision: Moving, links: Links | None = None, codecs: Sequence[Codec] = ()
) -> Move:
    """What moving a value takes."""
    first, then = form_and_tier(decision)
    size, dtype, speeds = sim.value_bytes[value], sim.dtypes.get(value, "uint8"), links or {}
    bits = re.search(r"\d+", dtype)
    item = max(1, int(bits.group()) // 8) if bits else 1
    elements = size // item
    if isinstance(first, Shard):
        # without a tier the gather is ahead of need, beside the operations
        speed = speeds.get(first.group) if then is not None else None
        decode = size / speed.read_bytes_per_second + speed.latency_seconds if speed else 0.0
        return Move(value, decision, size, -(-elements // first.size) * item, decode_seconds=decode)
    if isinstance(first, Compress):
        codec, speed = codec_named(first.codec, codecs), speeds.get(first.codec)
        return Move(
            value,
            decision,
            size,
            min(size, encoded_bytes(codec, elements, dtype)),
            codec.scratch(elements, sim.graph.device),
            size / speed.write_bytes_per_second if speed else 0.0,
            size / speed.read_bytes_per_second if speed else 0.0,
            codec.replayable_from,
        )
    return Move(value, decision, size, size)


def close_with_moves(
    sim: Simulator, stored: Iterable[int], moves: Iterable[Move]
) -> tuple[frozenset[int], dict[int, Move]]:
    """What stays and what moves, made feasible (see `Simulator.close`). What a replay reads stays where its
    codec keeps too little for that.
    """
    staying, going = set(stored), {move.value: move for move in moves}
    while True:
        kept = sim.close(staying | going.keys())
        going = {value: move for value, move in going.items() if value in kept}
        partial = {value for value, move in going.items() if not move.replayable_from}
        if partial:
            evicted = [value for value in sim.droppable if value not in kept]
            there = [value in kept for value in range(len(sim.producer))]
            again = replay_set(evicted, sim.producer, sim.reads, there) - {-1}
            partial &= {u for index in again for u in sim.reads[index]}
        if not partial:
            return kept.difference(going), going
        staying |= partial
        going = {value: move for value, move in going.items() if value not in partial}


def simulated_moves(graph: StepGraph, moves: Mapping[int, Move], simulation: Simulation) -> tuple[Move, ...]:
    """The plan's moves, in the order of the forward, with their order, lifetimes and forms."""
    transfers = simulation.transfers
    if not isinstance(transfers, Transfers):  # nothing moves
        return ()
    order = {value: k for k, value in enumerate(transfers.order)}
    return tuple(
        replace(
            moves[value],
            fetched=order.get(value, -1),
            born=born,
            gone=gone,
            shape=graph.values[value].shape,
            dtype=graph.values[value].dtype,
        )
        for value, (born, gone) in transfers.lifetimes.items()
    )


def default_window(sim: Simulator, values: Sequence[int]) -> int:
    """A sixteenth of what moves, and at least the largest value."""
    sizes = [sim.value_bytes[v] for v in values]
    return max([*sizes, sum(sizes) // 16, 1])


def least_count(most: int, fits: Callable[[int], bool]) -> int | None:
    """The least count up to ``most`` that fits, where more fits sooner; ``None`` when ``most`` does not,
    either.
    """
    count = bisect_left(range(most + 1), True, key=fits)
    return count if count <= most else None


def lossless_codec(sim: Simulator, value: int) -> str:
    """The codec that loses nothing and is known to fit, or empty: masks of comparisons and dropout, ReLU's
    output.
    """
    op, dtype = sim.graph.operations[sim.producer[value]], sim.dtypes[value]
    if dtype == "bool":
        return "mask"
    name = op.name.split(".")[1] if "." in op.name else op.name
    if name in ("bernoulli", "bernoulli_") and dtype != "uint8":
        return "mask"
    # a dropout mask that was scaled: two distinct numbers still
    if name in ("div_", "div") and len(op.reads) == 1:
        above = sim.producer[op.reads[0]]
        if above >= 0 and sim.graph.operations[above].name.split(".")[1] in ("bernoulli", "bernoulli_"):
            return "mask"
    if name in ("relu", "relu_", "threshold") and _only_relu_backward(sim, value):
        return "positive"
    return ""


def _only_relu_backward(sim: Simulator, value: int) -> bool:
    """Whether only ReLU's own backward reads the saved value."""
    graph = sim.graph
    readers = [op for op in graph.operations if op.phase == "backward" and value in op.reads]
    return (
        len(sim.saved_of[value]) == 1
        and len(readers) == 1
        and readers[0].name == "aten.threshold_backward.default"
        and readers[0].reads[-1] == value
    )


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
    firsts = [form_and_tier(decision)[0] for decision in decisions]
    entering = entering_blocks(sim) if any(isinstance(f, Shard) for f in firsts) else frozenset[int]()
    found: Placements = {}
    for value in movable(sim, min_bytes):
        rows: dict[Moving, Move] = {}
        for decision in decisions:
            first, then = form_and_tier(decision)
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
    from lowtide.extensions.moves.speeds import link_speeds

    given = dict(links or {})
    found: dict[str, Link] = {}
    for decision in decisions:
        first, then = form_and_tier(decision)
        if isinstance(first, Shard) and first.group not in given:
            raise PlanError(
                f"the speed of the group {first.group!r} is not known: one rank plans, and all ranks "
                f"have to measure the group before: links=lowtide.measure_links(Shard({first.group!r}, "
                f"{first.size}), stores=...)"
            )
        if isinstance(first, Compress) and not set(codecs_behind(first.codec)) <= given.keys():
            found |= link_speeds(first, tuple(codecs), device)
        if then is not None and then.tier not in given:
            found |= link_speeds(then, tuple(codecs), device)
    return {**found, **given}
