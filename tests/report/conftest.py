"""Makes the hand-made step graphs of the planner's tests importable, and one report for several files."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "plan"))

from synthetic import transformer

from lowtide.plan import make
from lowtide.report import Measured, Report, make_report


@pytest.fixture(scope="session")
def report() -> Report:
    """A step of four layers under 60 % of its peak, with something measured."""
    graph = transformer(4)
    plan = make(graph, "60%")
    made = make_report(graph, plan, title="four <layers> & </script>")
    curve = tuple(
        (tick.seconds, live) for tick, live in zip(made.plain.ticks, made.plain.live_bytes(), strict=True)
    )
    plain = Measured(
        made.plain.peak_bytes, made.plain.seconds, tuple((when, int(live)) for when, live in curve)
    )
    planned = Measured(made.planned.peak_bytes - 8, 1.1 * made.planned.seconds, plain.curve[::2])
    return make_report(
        graph, plan, title=made.title, points=made.points, measured_plain=plain, measured_planned=planned,
        measured_extra=0.25,
    )  # fmt: skip
