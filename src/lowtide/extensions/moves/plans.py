"""What moves in a plan: closed and simulated, for `lowtide.policies.make_plan`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from lowtide.errors import expect
from lowtide.extensions.moves.placements import (
    Codec,
    close_with_moves,
    move_of,
    refuse_moves,
    simulated_moves,
)
from lowtide.extensions.moves.simulate import with_moves
from lowtide.plan.data import Links, Move, Moving
from lowtide.plan.simulate.simulator import Simulation, Simulator

NO_BOUND = "no lower bound is stated for a plan that moves values: the linear program knows only recomputing"


def simulate_moving(
    sim: Simulator,
    stored: Collection[int],
    moves: Mapping[int, Moving] | None,
    window_bytes: int,
    links: Links | None,
    codecs: Sequence[Codec],
) -> tuple[Simulation, tuple[Move, ...], int]:
    """The step that stores ``stored`` and moves ``moves``, closed to a feasible set; what moves in it; and
    the window in bytes. The arguments are those of `lowtide.policies.make_plan`.

    Raises:
        PlanError: a value cannot be moved.
    """
    placed = moves is None or isinstance(moves, Mapping)
    expect(placed, "make_plan(moves=)", moves, "decisions by values, as in {3: Offload()}, or None")
    wanted = dict(moves or {})
    refuse_moves(sim, wanted)
    closed, moved = close_with_moves(
        sim, stored, [move_of(sim, value, decision, links, codecs) for value, decision in wanted.items()]
    )
    window = window_bytes or max((m.encoded_bytes for m in moved.values()), default=0)
    simulation = sim.simulate(closed, with_moves(sim, moved.values(), window, links))
    return simulation, simulated_moves(sim.graph, moved, simulation), window
