"""What is measured of a tier, on a clock that the test moves: speeds beside a computation, and what the
transfers take from it.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from moving_steps import graph_of

import lowtide
from lowtide import meter
from lowtide.extensions.moves import speeds
from lowtide.extensions.moves.placements import (
    default_placements,
    missing_links,
)
from lowtide.extensions.moves.speeds import link_speeds
from lowtide.extensions.moves.store.lanes import Transfer
from lowtide.extensions.moves.store.slab import Lease
from lowtide.extensions.moves.store.tier import StoreError
from lowtide.plan.data import Link


class Clock:
    """Seconds that pass only where the test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Slow:
    """A tier that moves its bytes while somebody computes: each computation lets one transfer finish, and
    takes longer for it.
    """

    def __init__(self, clock: Clock, slower: float) -> None:
        self.clock, self.slower = clock, slower
        self.under_way: list[Transfer] = []

    def take(self, bytes_: int) -> Lease:
        return Lease(0, bytes_)

    def write(self, data: torch.Tensor, slot: Lease) -> Transfer:
        self.under_way.append(Transfer())
        return self.under_way[-1]

    def read(self, slot: Lease, data: torch.Tensor) -> Transfer:
        return self.write(data, slot)

    def compute(self) -> None:
        self.clock.now += 0.004 * (self.slower if self.under_way else 1.0)
        if self.under_way:
            self.under_way.pop(0).finish()


Measure = Callable[[Slow, Callable[[], None]], Link]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Measure:
    """Measures a tier beside a computation, on the tier's clock."""

    def measure_tier(tier: Slow, compute: Callable[[], None]) -> Link:
        monkeypatch.setattr(speeds, "_kernels", lambda: compute)
        monkeypatch.setattr(speeds, "time", SimpleNamespace(perf_counter=tier.clock))
        return speeds.measure_tier(tier, torch.device("cpu"))  # type: ignore[arg-type]

    return measure_tier


@pytest.mark.parametrize(("slower", "busy"), [(1.0, 0.0), (1.25, 0.2), (2.0, 0.5)])
def test_what_transfers_take_from_a_computation(slower: float, busy: float, measured: Measure) -> None:
    tier = Slow(Clock(), slower)
    found = measured(tier, tier.compute)
    assert found.busy == pytest.approx(busy)
    speed = pytest.approx((1 << 20) / (0.004 * slower))
    assert found.write_bytes_per_second == speed and found.read_bytes_per_second == speed


def test_a_tier_that_fails_says_so(measured: Measure) -> None:
    clock = Clock()
    tier = Slow(clock, 1.0)

    def fail() -> None:
        clock.now += 0.004
        if tier.under_way:
            tier.under_way.pop(0).finish(StoreError("there is no room"))

    with pytest.raises(StoreError, match="no room"):
        measured(tier, fail)


def test_a_slow_tier_is_not_measured_for_long(measured: Measure) -> None:
    clock = Clock()
    tier = Slow(clock, 1000.0)
    measured(tier, tier.compute)
    assert clock.now < 2 * 24 * 4.0 + 1, "one round: 24 transfers of 4 s each, both ways"


def test_a_name_is_enough_for_the_tiers_and_codecs_of_this_machine() -> None:
    graph = graph_of(4)
    plan = lowtide.plan(graph, budget="90%", policy="mixed")
    assert plan.policy == "mixed" and plan.predicted_peak_bytes <= (plan.budget_bytes or 0)


@pytest.mark.skipif(not meter.available(), reason="needs a C++ compiler for the counting allocator")
def test_speeds_are_measured_once_and_in_little_room() -> None:
    link_speeds.cache_clear()
    device = torch.device("cpu")
    with meter.peak(device) as first:
        links = missing_links(default_placements("cpu"), None, (), "cpu")
    assert 0 < first.peak_bytes <= 6 << 20
    with meter.peak(device) as second:
        assert missing_links(default_placements("cpu"), None, (), "cpu") == links
    assert second.peak_bytes == 0
    link_speeds.cache_clear()
