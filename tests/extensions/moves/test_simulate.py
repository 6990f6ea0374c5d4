"""Values that move are written in order, within the window, and waited for at backward's first unpack."""

from __future__ import annotations

import pytest
from moving_steps import graph_of

from lowtide.extensions.moves.placements import movable, move_of
from lowtide.extensions.moves.simulate import with_moves
from lowtide.plan.data import Link, Offload
from lowtide.plan.simulate import Simulation, Simulator

LINK = Link(write_bytes_per_second=1e6, read_bytes_per_second=1e6)


@pytest.fixture(scope="module")
def sim() -> Simulator:
    return Simulator(graph_of(4))


def moved(sim: Simulator, window: int, link: Link = LINK) -> Simulation:
    values = movable(sim, 1)
    rows = [move_of(sim, value, Offload("host")) for value in values]
    moves = with_moves(sim, rows, window, {"host": link})
    return sim.simulate(sim.close(sim.all_stored).difference(values), moves)


def test_a_wider_window_holds_more_bytes(sim: Simulator) -> None:
    largest = max(sim.value_bytes[value] for value in movable(sim, 1))
    narrow, wide = moved(sim, largest), moved(sim, 1 << 30)
    assert narrow.peak_bytes < wide.peak_bytes
    assert narrow.transfers is not None and wide.transfers is not None
    assert wide.transfers.seconds <= narrow.transfers.seconds, "nobody waits for a copy but at the end"


def test_a_link_without_limits_takes_no_time(sim: Simulator) -> None:
    fast, slow = moved(sim, 1 << 20, Link(1e18, 1e18)).transfers, moved(sim, 1 << 20).transfers
    assert fast is not None and slow is not None
    assert fast.seconds == pytest.approx(0, abs=1e-9)
    assert slow.seconds > 0.01


def test_what_a_transfer_takes_from_the_operations_beside_it_is_part_of_its_time(sim: Simulator) -> None:
    plain, busy = moved(sim, 1 << 20).transfers, moved(sim, 1 << 20, Link(1e6, 1e6, busy=0.25)).transfers
    assert plain is not None and busy is not None and plain.crowding_seconds == 0
    sizes = sum(sim.value_bytes[value] for value in movable(sim, 1))
    assert busy.crowding_seconds == pytest.approx(0.25 * 2 * sizes / 1e6)
    assert busy.seconds == pytest.approx(plain.seconds + busy.crowding_seconds)


def test_a_moved_value_is_stored_from_its_operation_to_its_last_unpack(sim: Simulator) -> None:
    found = moved(sim, 1 << 20).transfers
    assert found is not None and set(found.order) == set(movable(sim, 1)) == set(found.lifetimes)
    for value, (born, gone) in found.lifetimes.items():
        assert born == sim.op_event[sim.producer[value]] and gone > sim.first_unpack
