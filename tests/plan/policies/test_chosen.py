"""Steps of which autograd saves nothing that a plan could evict."""

from __future__ import annotations

import pytest
from synthetic import one_linear

import lowtide.plan
from lowtide.errors import BudgetError
from lowtide.plan.simulate import plain


def test_every_policy_that_searches_refuses_below_the_plain_peak():
    graph = one_linear()
    peak = plain(graph).peak_bytes
    for policy in ("optimal", "mixed"):
        assert lowtide.plan.make(graph, peak, policy).predicted_peak_bytes == peak
        with pytest.raises(BudgetError) as refused:
            lowtide.plan.make(graph, peak - 1, policy)
        assert refused.value.smallest_bytes == peak
