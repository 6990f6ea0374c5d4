"""From a wish to a plan, where values may move, too: what moves is closed, simulated and laid out."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from lowtide.errors import PlanError, expect
from lowtide.extensions.moves.layout import with_slab
from lowtide.extensions.moves.placements import (
    Codec,
    close_with_moves,
    move_of,
    refuse_moves,
    simulated_moves,
)
from lowtide.extensions.moves.simulate import Transfers, with_moves
from lowtide.graph import StepGraph
from lowtide.plan.bound import Bound
from lowtide.plan.data import Links, ModuleRow, Moving, Plan
from lowtide.plan.data.text import fold
from lowtide.plan.policies import build
from lowtide.plan.simulate.simulator import Simulator, simulator_of
from lowtide.words import module_in_words, seconds_text

_PLACES = 3
"""How many places where a step waits for a link are told."""

_NO_BOUND = "no lower bound is stated for a plan that moves values: the linear program knows only recomputing"


def make_plan(
    graph: StepGraph,
    *,
    stored: Collection[int],
    policy: str = "own",
    budget: int | None = None,
    bound: Bound | None = None,
    notes: tuple[str, ...] = (),
    simulator: Simulator | None = None,
    moves: Mapping[int, Moving] | None = None,
    window_bytes: int = 0,
    links: Links | None = None,
    codecs: Sequence[Codec] = (),
    slab: bool | None = None,
) -> Plan:
    """Make a plan that stores the values ``stored``, and simulate and bound it.

    Args:
        graph: the step.
        stored: ids of the values that stay. Every other saved value is evicted if that is possible. Values
            that replays need are added.
        policy: the name of the plan's policy.
        budget: the largest peak, or ``None``.
        bound: lower bounds, if they are known; otherwise they are computed by a linear program, if no value
            moves.
        notes: remarks on the plan.
        simulator: of ``graph``, if there is one already.
        moves: value id -> decision, for values that move.
        window_bytes: the most bytes in transfer out at one time, and the most bytes that are fetched ahead; 0
            for the size of the largest moved value.
        links: speeds of the tiers; without it transfers take no time.
        codecs: codecs of your own that ``moves`` name.
        slab: whether moved values return into a slab on the device, which is allocated once
            (docs/stores.md); ``None`` for a slab if the budget has room for it, or, without a budget, if it
            adds nothing.

    Raises:
        BudgetError: the plan's peak is above the budget.
        PlanError: a value cannot be moved, or an argument is not valid.
    """
    if moves is None and slab is None:
        return build.make_plan(
            graph, stored=stored, policy=policy, budget=budget, bound=bound, notes=notes, simulator=simulator
        )
    if slab not in (None, True, False):
        raise PlanError(f"slab={slab!r}: give True, False, or None (a slab if the budget has room for it)")
    build.check_wish(graph, stored, budget)
    placed = moves is None or isinstance(moves, Mapping)
    expect(placed, "make_plan(moves=)", moves, "decisions by values, as in {3: Offload()}, or None")
    sim = simulator or simulator_of(graph)
    wanted = dict(moves or {})
    refuse_moves(sim, wanted)
    closed, moved = close_with_moves(
        sim, stored, [move_of(sim, value, decision, links, codecs) for value, decision in wanted.items()]
    )
    window = window_bytes or max((m.encoded_bytes for m in moved.values()), default=0)
    simulation = sim.simulate(closed, with_moves(sim, moved.values(), window, links))
    if bound is None and moved:
        bound, notes = Bound(0.0, 0), (*notes, _NO_BOUND)
    rows = simulated_moves(graph, moved, simulation)
    if isinstance(simulation.transfers, Transfers):
        notes = (*notes, *waiting_notes(simulation.transfers))
    plan = build.plan_of(sim, simulation, policy, budget, bound, notes, rows, window)
    return plan if slab is False else with_slab(sim, plan, required=slab is True)


def waiting_notes(transfers: Transfers) -> list[str]:
    """Where a step waits for a link, and for how long: the longest waits; nothing where it waits nowhere.

    >>> waits = {("backward", "h.0.mlp"): 2e-3, ("backward", "h.1.mlp"): 1e-3}
    >>> waiting_notes(Transfers(3e-3, 0.0, [], {}, {}, waits))
    ["the step waits 3 ms for the link: 3 ms in backward in module 'h.0-1.mlp'"]
    """
    total = sum(transfers.waits.values())
    if seconds_text(total) == seconds_text(0):
        return []
    places = [
        (row.extra_seconds, way, row.module)
        for way in ("forward", "backward")
        for row in fold([ModuleRow(m, 0, 0, 0, s) for (w, m), s in transfers.waits.items() if w == way])
    ]
    longest = sorted(places, reverse=True)[:_PLACES]
    where = ", ".join(f"{seconds_text(s)} in {way} in {module_in_words(m)}" for s, way, m in longest)
    more = f", and less in {len(places) - _PLACES} more places" if len(places) > _PLACES else ""
    return [f"the step waits {seconds_text(total)} for the link: {where}{more}"]
