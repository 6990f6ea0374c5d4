"""Steps that take more than their budget are said each time, whatever they did."""

from __future__ import annotations

import random
import warnings

import pytest
import torch
from small_model import N, batch, needs_meter, small
from torch import nn

import lowtide


class Recycled(nn.Module):
    """A forward of several passes of which only the last has gradients, as a structure predictor's."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([small().layer(N, 0.0) for _ in range(3)])

    def forward(self, x: torch.Tensor, passes: int) -> torch.Tensor:
        for left in reversed(range(passes)):
            with torch.set_grad_enabled(left == 0):
                out = x
                for block in self.blocks:
                    out = out + block(out)
            x = x + out.detach() if left else out
        return x.square().mean()


def messages(caught: list[warnings.WarningMessage]) -> list[str]:
    return [str(one.message) for one in caught if issubclass(one.category, lowtide.LowtideWarning)]


def total(gradients: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return torch.stack([one.square().sum() for one in gradients]).sum()


@needs_meter
def test_each_step_above_the_budget_is_said_under_the_filters_that_python_begins_with() -> None:
    model, x, drawn = Recycled(), batch(), random.Random(0)
    handle = lowtide.limit_memory(model, "60%", progress=False)
    above, short = 0, 0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for step in range(24):
            before = len(caught)
            model.zero_grad()
            model(x, drawn.randint(1, 4)).backward()
            assert handle.plan is not None and handle.plan.budget_bytes is not None
            assert handle.measured_peak_bytes is not None
            over = handle.measured_peak_bytes > handle.plan.budget_bytes
            said = [text for text in messages(caught[before:]) if "took" in text and "budget of" in text]
            assert bool(said) == over, step
            above += over
            short += any("so far)" in text for text in said)
    assert above > 8 and short


@needs_meter
def test_a_backward_that_makes_a_graph_is_said_to_and_teaches_nothing() -> None:
    """As a Hessian's diagonal is estimated for Sophia, in every third step."""
    model, x = small(dropout=0.0), batch()
    parameters = list(model.parameters())
    handle = lowtide.limit_memory(model, "60%", progress=False)

    def step(hessian: bool) -> list[str]:
        model.zero_grad()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            if hessian:
                first = torch.autograd.grad(model(x), parameters, create_graph=True)
                torch.autograd.grad(total(first), parameters)
            else:
                model(x).backward()
        return messages(caught)

    said = [step(at % 3 == 2) for at in range(9)]
    assert [bool(texts) for texts in said[2:]] == [True, False, False, True, False, False, True]
    for texts in said[2::3]:
        assert "create_graph=True" in texts[0] and "on a part of the batch" in texts[0]
        assert not any("retain_graph" in text or "losses" in text for text in texts)
    assert handle.plannings == 1


@needs_meter
def test_the_refusal_of_a_step_that_makes_a_graph_says_so() -> None:
    model, x = small(dropout=0.0), batch()
    parameters = list(model.parameters())
    lowtide.limit_memory(model, "40%", progress=False)
    first = torch.autograd.grad(model(x), parameters, create_graph=True)
    with pytest.raises(lowtide.BudgetError, match="create_graph=True"):
        torch.autograd.grad(total(first), parameters)
