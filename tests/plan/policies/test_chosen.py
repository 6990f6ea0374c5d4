"""Steps of which autograd saves nothing that a plan could evict."""

from __future__ import annotations

import pytest
from synthetic import Tape

import lowtide.plan
from lowtide.errors import BudgetError
from lowtide.graph import StepGraph
from lowtide.plan.bound import Relaxation
from lowtide.plan.simulate import Simulator, plain


def one_linear() -> StepGraph:
    """A product of an input and a parameter, which both stay anyway."""
    tape = Tape()
    tape.module = "linear"
    x, weight = tape.before(64, "input"), tape.before(32, "parameter")
    (out,) = tape.op("mm", [x, weight], [64], seconds=1.0)
    tape.node("mm_backward", [tape.save(x)], out, [weight], 2.0, 0)
    tape.backward()
    return tape.graph(replay_overhead_seconds=0.25, overhead_seconds=0.5)


def test_every_policy_that_searches_refuses_below_the_plain_peak():
    graph = one_linear()
    peak = plain(graph).peak_bytes
    for policy in ("optimal", "mixed"):
        assert lowtide.plan.make(graph, peak, policy).predicted_peak_bytes == peak
        with pytest.raises(BudgetError) as refused:
            lowtide.plan.make(graph, peak - 1, policy)
        assert refused.value.smallest_bytes == peak


def test_a_program_without_columns_says_whether_its_rows_hold():
    relaxation = Relaxation(Simulator(one_linear()))
    peak = plain(one_linear()).peak_bytes
    assert relaxation.solve(peak)[0] == 0.0
    assert relaxation.solve_whole(peak, 0.0)[0] == 0.0
    assert relaxation.solve(peak - 1)[0] == float("inf")
    assert relaxation.solve_whole(peak - 1, 0.0)[0] == float("inf")
