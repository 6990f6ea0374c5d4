"""Scopes on fake tensors: a trace knows them, nothing else does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lowtide
from lowtide import PlanError, private

N = 16


def test_fake_tensors_without_a_trace_are_refused() -> None:
    with (
        private.fake_mode(),
        pytest.raises(PlanError, match="cannot record on fake tensors"),
        lowtide.checkpointing(),
    ):
        pass
    with private.fake_mode(), torch.no_grad(), lowtide.checkpointing():
        pass  # there is nothing to record


@pytest.mark.parametrize(
    ("policy", "forced"),
    [
        (None, {"aten.addmm.default", "aten.tanh.default"}),
        ("keep_all", set()),
        (["aten.tanh.default"], {"aten.tanh.default"}),
    ],
)
def test_a_fake_trace_knows_scopes_as_a_real_one_does(policy: Any, forced: set[str]) -> None:
    class Scoped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(N, N)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with lowtide.checkpointing(policy):
                x = F.gelu(self.layer(x)).tanh()
            return x.exp().sin().sum()

    def forced_in(graph: lowtide.StepGraph) -> set[str]:
        producers = (graph.values[saved.value].producer for saved in graph.saved if saved.forced)
        return {graph.operations[producer].name for producer in producers if producer is not None}

    model, x = Scoped(), torch.randn(4, N)
    assert forced_in(lowtide.trace(model, x, fake=True, costs=False)) == forced
    assert forced_in(lowtide.trace(model, x, costs=False)) == forced
