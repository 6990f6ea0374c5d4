"""The policies that move values in an order that is fixed: offload, compress, partition."""

from __future__ import annotations

from collections.abc import Mapping

from lowtide.errors import BudgetError, PlanError, expect, is_count
from lowtide.extensions.moves.placements import (
    Codec,
    codec_named,
    default_window,
    least_count,
    movable,
    move_of,
    placements_of,
)
from lowtide.extensions.moves.plans import make_plan
from lowtide.extensions.moves.simulate import with_moves
from lowtide.graph import StepGraph
from lowtide.plan.blocks import entering_blocks, full_stored
from lowtide.plan.data import Chain, Compress, Links, Moving, Offload, Plan, Shard
from lowtide.plan.policies.build import Policy
from lowtide.plan.simulate.simulator import Simulator, simulator_of


def offload(
    tier: str = "host",
    path: str = "",
    *,
    values: str = "all",
    keep_last: int | None = None,
    min_bytes: int = 1 << 16,
    window_bytes: int | None = None,
    links: Links | None = None,
    slab: bool | None = None,
) -> Policy:
    """Move saved values to another tier, the earliest of the forward first: they have the most time.

    With a budget as few values move as the budget requires; without one all but the last ``window_bytes``.
    Parameters and buffers never move.

    Args:
        tier: ``host`` or ``disk``.
        path: the folder for the disk tier's file.
        values: ``all`` recomputes nothing, and moves saved values; ``checkpoints`` recomputes every block,
            and moves the blocks' inputs.
        keep_last: this many values, the last ones of the forward, stay on the device: backward needs them
            first, when a transfer has had no time. ``None`` leaves this to ``window_bytes``.
        min_bytes: smaller values stay.
        window_bytes: the most bytes in transfer at one time in each direction; by default a sixteenth of the
            saved bytes.
        links: speeds of the tiers, for the predicted time.
        slab: whether values return into a slab on the device, which is allocated once and held for the whole
            step; ``None`` for a slab if the budget has room for it, or, without a budget, if it adds nothing.
    """
    decision = Offload(tier, path)
    check_moves("offload", min_bytes, window_bytes, links)
    check_values("offload", values, keep_last)

    def offloaded(graph: StepGraph, budget: int | None = None) -> Plan:
        sim = simulator_of(graph)
        everything, order = saved_values(sim, values, min_bytes, keep_last or 0)
        window = window_bytes or default_window(sim, order)
        if budget is None and keep_last is not None:
            count = len(order)
        elif budget is None:
            sizes = [sim.value_bytes[v] for v in order]
            count, tail = len(order), 0
            while count and tail + sizes[count - 1] <= window:  # backward unpacks the last at once
                count -= 1
                tail += sizes[count]
        else:

            def fits(count: int) -> bool:
                moving = with_moves(sim, [move_of(sim, v, decision) for v in order[:count]], window)
                kept = everything.difference(order[:count])
                return sim.simulate(kept, moving).peak_bytes <= budget

            found = least_count(len(order), fits)
            count = len(order) if found is None else found
        moves: dict[int, Moving] = dict.fromkeys(order[:count], decision)
        return make_plan(
            graph, stored=everything, policy="offload", budget=budget, simulator=sim, moves=moves,
            window_bytes=window, links=links, slab=slab
        )  # fmt: skip

    return offloaded


def compress(
    codec: str | Codec = "auto",
    *,
    min_bytes: int = 1 << 12,
    then: Offload | None = None,
) -> Policy:
    """Store saved values in fewer bytes.

    Args:
        codec: ``auto`` for lossless codecs (masks as bits, ReLU's output as bits if only its own backward
            reads it), a codec's name (``bfloat16``, ``int8``, ``int4``, ``mask``), or your own codec, which
            you also pass to `limit_memory` in ``stores=``.
        min_bytes: smaller values are kept.
        then: a tier to which the compressed values move.
    """
    named = isinstance(codec, str) or isinstance(getattr(codec, "name", None), str)
    expect(
        named,
        "compress(codec=)",
        codec,
        "a codec's name, as in 'int8', or a lowtide.store.codec.Codec",
    )
    check_moves("compress", min_bytes, then=then)
    own = () if isinstance(codec, str) else (codec,)
    name = codec if isinstance(codec, str) else codec.name
    if name != "auto":
        codec_named(name, own)

    def compressed(graph: StepGraph, budget: int | None = None) -> Plan:
        sim = simulator_of(graph)
        ways = [Compress(way) for way in dict.fromkeys(("auto", name))]
        offered = [Chain(way, then) if then is not None else way for way in ways]
        moves = {
            value: rows[0].decision for value, rows in placements_of(sim, offered, {}, min_bytes, own).items()
        }
        stored = sim.close(sim.all_stored)
        return make_plan(
            graph, stored=stored, policy="compress", budget=budget, simulator=sim, moves=moves, codecs=own
        )

    return compressed


def partition(
    group: str,
    size: int,
    *,
    values: str = "checkpoints",
    keep_last: int = 0,
    min_bytes: int = 1 << 10,
    then: Offload | None = None,
    slab: bool | None = None,
) -> Policy:
    """ZeRO-R's P_a (arXiv 1910.02054, section 6.1): recompute every block, and shard the blocks' inputs into
    ``size`` parts over the ranks of a group.

    Args:
        group: the name of the process group in the stores. The inputs of a block have to be the same on all
            of its ranks.
        size: the number of ranks.
        values: ``checkpoints`` shards the values that the policy ``full`` keeps; ``all`` recomputes nothing,
            and shards all saved values.
        keep_last: this many values, the last ones of the forward, stay whole on the device: backward needs
            them first.
        min_bytes: smaller values are not sharded.
        then: a tier to which the parts move (P_a+cpu).
        slab: whether the parts are gathered into a slab on the device, which is allocated once and held for
            the whole step (ZeRO-R's M_D); ``None`` for a slab unless a budget has no room for it.
    """
    decision = Shard(group, size)
    check_moves("partition", min_bytes, then=then)
    check_values("partition", values, keep_last)

    def sharded(graph: StepGraph, budget: int | None = None) -> Plan:
        sim = simulator_of(graph)
        stored, chosen = saved_values(sim, values, min_bytes, keep_last)
        moves: dict[int, Moving] = {
            v: Chain(decision, then) if then is not None else decision for v in chosen
        }
        if not moves:
            raise BudgetError(
                f"partition finds nothing of {min_bytes:,} bytes or more to shard: lower min_bytes= or "
                "keep_last=, or use the policy 'full'"
            )
        # the next while one is in use
        window = max(2 * move_of(sim, v, decision).ahead_bytes for v, decision in moves.items())
        wanted = True if slab is None and budget is None else slab
        return make_plan(
            graph, stored=stored, policy="partition", budget=budget, simulator=sim, moves=moves,
            window_bytes=window, slab=wanted,
        )  # fmt: skip

    return sharded


def saved_values(
    sim: Simulator, values: str, min_bytes: int, keep_last: int
) -> tuple[frozenset[int], list[int]]:
    """What is stored, and which of these values move, in the order of the forward.

    Args:
        sim: of the step.
        values: ``all``, or the ``checkpoints`` that the policy ``full`` stores.
        min_bytes: smaller values stay.
        keep_last: so many of those that might move stay, the last ones.
    """
    if values == "all":
        stored, order = sim.close(sim.all_stored), movable(sim, min_bytes)
    else:
        stored = sim.close(full_stored(sim))
        entering = [v for v in stored & entering_blocks(sim) if sim.storable[v]]
        order = sorted(v for v in entering if sim.value_bytes[v] >= max(1, min_bytes))
    return stored, order[: max(0, len(order) - keep_last)]


def check_values(policy: str, values: str, keep_last: int | None) -> None:
    """Check which values a policy is to move.

    Raises:
        PlanError: these are others than there are, or their number is negative.
    """
    if values not in ("checkpoints", "all"):
        raise PlanError(f"{policy}(values={values!r}): give 'checkpoints' or 'all'")
    counted = keep_last is None or is_count(keep_last)
    expect(counted, f"{policy}(keep_last=)", keep_last, "a number of values, 0 or more")


def check_moves(
    policy: str,
    min_bytes: int,
    window_bytes: int | None = None,
    links: Links | None = None,
    then: Offload | None = None,
) -> None:
    """Check what the policies that move have in common.

    Raises:
        PlanError: one is of another type, or negative.
    """
    expect(is_count(min_bytes), f"{policy}(min_bytes=)", min_bytes, "bytes, 0 or more")
    window = window_bytes is None or is_count(window_bytes, 1)
    expect(window, f"{policy}(window_bytes=)", window_bytes, "bytes, 1 or more, or None")
    speeds = links is None or isinstance(links, Mapping)
    expect(speeds, f"{policy}(links=)", links, "what lowtide.measure_links returns, or None")
    tier = then is None or isinstance(then, Offload)
    expect(tier, f"{policy}(then=)", then, "lowtide.Offload(...), or None")
