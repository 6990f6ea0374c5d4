"""Gradients in one slab: the same bits, the same place in every step."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch

import lowtide
from lowtide import meter
from lowtide.errors import PlanError
from lowtide.extensions.moves.store.gradients import GradientSlab


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
                    p.grad.untyped_storage()._cdata == whole.untyped_storage()._cdata
                    for p in model.parameters()
                    if p.grad is not None
                )
            optimizer.zero_grad(set_to_none=to_none)
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), slabbed.parameters(), strict=True))
    slab.remove()
    slabbed.zero_grad()
    slabbed(torch.randn(4, 5)).sum().backward()
    assert slabbed[0].weight.grad.untyped_storage()._cdata != whole.untyped_storage()._cdata


def test_a_plan_counts_the_slab_where_gradients_are_resident() -> None:
    """Beside a slab the peak is the predicted one to the byte, when gradients are zeroed and not
    forgotten.
    """
    torch.manual_seed(0)
    plain = torch.nn.Sequential(
        *(torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.GELU()) for _ in range(4))
    )
    model, x = copy.deepcopy(plain), torch.randn(100, 16)
    slab = GradientSlab(model.parameters())
    handle = lowtide.limit_memory(model, policy="full", loss_fn=lambda out: out.sum())

    def step(which: torch.nn.Module) -> None:
        which.zero_grad(set_to_none=False)
        which(x).sum().backward()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lowtide.LowtideWarning)  # gradients are there from the second step on
        for _ in range(3):
            step(plain)
            step(model)
    measured = meter.measure(lambda: step(model), timeline=False)
    assert handle.plan is not None
    assert meter.resident_bytes(model) + x.nbytes + measured.peak_bytes == handle.plan.predicted_peak_bytes
    assert all(
        torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), model.parameters(), strict=True)
    )  # type: ignore[arg-type]
    assert slab.slabs[0].nbytes == sum(p.nbytes for p in model.parameters())


@pytest.mark.parametrize("optimized", [False, True])
def test_a_plan_counts_the_slab_where_gradients_are_forgotten(optimized: bool) -> None:
    """With ``set_to_none=True`` the slab is resident all the same: it is in the budget, and the peak is never
    above what was predicted.
    """
    torch.manual_seed(0)
    plain = torch.nn.Sequential(
        *(torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.GELU()) for _ in range(6))
    )
    model, x = copy.deepcopy(plain), torch.randn(300, 32)
    before = meter.resident_bytes(model)
    slab = GradientSlab(model.parameters())
    (whole,) = slab.slabs
    assert meter.resident_bytes(model) == before + whole.nbytes
    optimizer = torch.optim.SGD(model.parameters(), 0.0) if optimized else None
    handle = lowtide.limit_memory(model, budget="60%", loss_fn=lambda out: out.sum(), optimizer=optimizer)

    def step(which: torch.nn.Module) -> None:
        which(x).sum().backward()

    for _ in range(3):
        for which in (plain, model):
            which.zero_grad(set_to_none=True)
            step(which)
        assert all(
            torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), model.parameters(), strict=True)
        )  # type: ignore[arg-type]
        assert all(
            p.grad is not None and p.grad.untyped_storage()._cdata == whole.untyped_storage()._cdata
            for p in model.parameters()
        )
    model.zero_grad(set_to_none=True)
    resident = meter.resident_bytes(model) + x.nbytes
    assert resident == before + whole.nbytes + x.nbytes
    peak = resident + meter.measure(lambda: step(model), timeline=False).peak_bytes
    plan = handle.plan
    assert plan is not None and plan.budget_bytes is not None and plan.replayed
    assert plan.predicted_peak_bytes - whole.nbytes <= peak <= plan.predicted_peak_bytes <= plan.budget_bytes
    model.zero_grad(set_to_none=True)
    slab.remove()
    assert meter.resident_bytes(model) == before and not any(
        hasattr(p, "gradient_slab") for p in model.parameters()
    )


def test_nothing_to_keep_is_said() -> None:
    with pytest.raises(PlanError, match="none of the parameters takes a gradient"):
        GradientSlab([torch.nn.Parameter(torch.ones(2), requires_grad=False)])
