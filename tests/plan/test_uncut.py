"""Steps that cannot be cut into short stages: plans are found, and soon."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lowtide import BudgetError
from lowtide.plan.optimal import optimal
from lowtide.plan.segment import LONGEST_SEGMENT
from lowtide.plan.simulate import Simulator, plain
from lowtide.plan.stages import find_stages

from .synthetic import transformer


def test_a_stage_that_is_longer_than_what_is_searched_together() -> None:
    graph = transformer(layers=14, tokens=64, hidden=32)
    forward = [operation.index for operation in graph.operations if operation.phase == "forward"]
    # Versions that the step overwrites later cross every gap: nothing can be cut there.
    values = tuple(replace(value, storable=value.producer not in forward[10:-10]) for value in graph.values)
    graph = replace(graph, values=values)
    stages = find_stages(Simulator(graph))
    assert max(len(stages.operations(k, k + 1)) for k in range(len(stages))) > LONGEST_SEGMENT
    with pytest.raises(BudgetError) as refusal:
        optimal(graph, 1)
    smallest = refusal.value.smallest_bytes
    assert smallest is not None and smallest < plain(graph).peak_bytes
    assert optimal(graph, smallest).predicted_peak_bytes <= smallest
