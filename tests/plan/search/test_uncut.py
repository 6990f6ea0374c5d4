"""Steps that cannot be cut into short segments: plans are found, and soon."""

from __future__ import annotations

from dataclasses import replace

import pytest
from synthetic import transformer

from lowtide import BudgetError
from lowtide.plan.policies.chosen import least_time
from lowtide.plan.simulate import plain


def test_a_step_that_cannot_be_cut() -> None:
    graph = transformer(layers=14, tokens=64, hidden=32)
    forward = [operation.index for operation in graph.operations if operation.phase == "forward"]
    # Versions that the step overwrites later cross every gap: nothing can be cut there.
    values = tuple(replace(value, storable=value.producer not in forward[10:-10]) for value in graph.values)
    graph = replace(graph, values=values)
    with pytest.raises(BudgetError) as refusal:
        least_time(graph, 1)
    smallest = refusal.value.smallest_bytes
    assert smallest is not None and smallest < plain(graph).peak_bytes
    assert least_time(graph, smallest).predicted_peak_bytes <= smallest
