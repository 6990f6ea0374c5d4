"""Gradients in one slab: the same bits, the same place in every step."""

from __future__ import annotations

import copy

import pytest
import torch

from lowtide.errors import PlanError
from lowtide.store.gradients import GradientSlab


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("backwards", [1, 3])
def test_training_is_the_same(to_none: bool, backwards: int) -> None:
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.ReLU(), torch.nn.Linear(7, 3))
    slabbed = copy.deepcopy(plain)
    slab = GradientSlab([*slabbed.parameters(), *slabbed.parameters()])
    (whole,) = slab.slabs
    assert whole.numel() == sum(p.numel() for p in plain.parameters())
    for model in (plain, slabbed):
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        for seed in range(5):
            for k in range(backwards):
                torch.manual_seed(seed + k)
                model(torch.randn(4, 5)).square().sum().backward()
            optimizer.step()
            if model is slabbed:
                assert all(
                    p.grad.untyped_storage()._cdata == whole.untyped_storage()._cdata for p in model.parameters() if p.grad is not None
                )
            optimizer.zero_grad(set_to_none=to_none)
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), slabbed.parameters(), strict=True))
    slab.remove()
    slabbed.zero_grad()
    slabbed(torch.randn(4, 5)).sum().backward()
    assert slabbed[0].weight.grad.untyped_storage()._cdata != whole.untyped_storage()._cdata


def test_nothing_to_keep_is_said() -> None:
    with pytest.raises(PlanError, match="none of the parameters takes a gradient"):
        GradientSlab([torch.nn.Parameter(torch.ones(2), requires_grad=False)])
