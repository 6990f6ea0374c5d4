"""One report for several files."""

import pytest
from synthetic import transformer

from lowtide import policies
from lowtide.plan import make
from lowtide.plan.blocks import sqrt_stored
from lowtide.plan.simulate import Simulator
from lowtide.report import Measured, Report, make_report
from lowtide.report.tradeoff import tradeoff


@pytest.fixture(scope="session")
def report() -> Report:
    """A step of four layers under 60 % of its peak, with something measured."""
    graph = transformer(4)
    plan = make(graph, "60%")
    points = tradeoff(graph, points=4)
    made = make_report(graph, plan, title="four <layers> & </script>", points=points)
    curve = tuple(
        (tick.seconds, live) for tick, live in zip(made.plain.ticks, made.plain.live_bytes(), strict=True)
    )
    plain = Measured(
        made.plain.peak_bytes, made.plain.seconds, tuple((when, int(live)) for when, live in curve)
    )
    planned = Measured(made.planned.peak_bytes - 8, 1.1 * made.planned.seconds, plain.curve[::2])
    return make_report(
        graph, plan, title=made.title, points=points, measured_plain=plain, measured_planned=planned,
        measured_extra=0.25,
    )  # fmt: skip


@pytest.fixture(scope="session")
def deep() -> Report:
    """A step of 96 layers, recomputed in segments."""
    graph = transformer(96)
    sim = Simulator(graph)
    plan = policies.make_plan(graph, stored=sqrt_stored(sim), simulator=sim)
    return make_report(graph, plan, points=())
