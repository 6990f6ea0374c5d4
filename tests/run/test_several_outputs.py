"""Models that return several outputs, among them numbers that are no loss."""

from __future__ import annotations

import gc
import warnings

import pytest
import torch
from small_model import batch, needs_meter
from torch import nn

import lowtide
from lowtide.meter import peak, resident_bytes


class Towers(nn.Module):
    """Two towers and a scale, as CLIP returns them: the loss over all pairs is its caller's."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Sequential(*(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(4)))
            for _ in "ab"
        )
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.first(x), self.second(x), self.scale.exp()


@needs_meter
def test_a_scale_beside_features_is_not_taken_for_the_loss() -> None:
    """The trace went back from the scale alone, and every step took twice what was promised."""
    torch.manual_seed(0)
    model = Towers()
    handle = lowtide.limit_memory(model, "90%")
    for _ in range(3):
        model.zero_grad()
        gc.collect()
        x, standing = batch(200), resident_bytes(model)
        with peak("cpu") as seen:
            first, second, scale = model(x)
            (first @ second.T * scale).logsumexp(1).mean().backward()
            del first, second, scale
        plan = handle.plan
        assert plan is not None
        assert plan.budget_bytes is not None
        assert seen.peak_bytes + standing + x.nbytes <= plan.budget_bytes


class Terms(nn.Module):
    """Two losses over one trunk."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.first, self.second = (
            nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in "abc"
        )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.trunk(x)
        return self.first(h).square().mean(), self.second(h).abs().mean()


@needs_meter
@pytest.mark.parametrize("way", ["two backwards", "one that is retained"])
def test_two_backwards_of_one_forward_keep_to_the_budget(way: str) -> None:
    torch.manual_seed(0)

    def steps(budget: int) -> None:
        model = Terms()
        lowtide.limit_memory(model, budget)
        for _ in range(4):
            model.zero_grad()
            first, second = model(batch(400, 32))
            if way == "two backwards":
                first.backward(retain_graph=True)
                second.backward()
            else:
                (first + second).backward(retain_graph=True)
            del first, second

    with pytest.raises(lowtide.BudgetError) as caught:
        steps(101)
    assert caught.value.smallest_bytes is not None
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        steps(caught.value.smallest_bytes)
    assert not any("a planned step took" in str(one.message) for one in told), (
        "both backwards belong to the step that was looked at"
    )
