"""Two cards: limits work on the model's, whichever is current."""

from __future__ import annotations

import pytest
import torch
from card_models import ON_THE_CUDA_BUILD, decoder, taken
from torch import nn

import lowtide

pytestmark = ON_THE_CUDA_BUILD


def test_there_are_two() -> None:
    assert torch.cuda.device_count() == 2


@pytest.mark.parametrize("policy", [None, "mixed"])
def test_a_model_on_the_second_while_the_first_is_current(policy: str | None) -> None:
    model, batch = decoder("gpt", layers=4, width=128, positions=128, batch=4, dropout=0.1, on="cuda:1")

    def step() -> list[torch.Tensor]:
        torch.cuda.manual_seed_all(1)
        model.zero_grad(set_to_none=True)
        model(**batch).loss.backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    exact, idle = step(), torch.cuda.memory_allocated(0)
    with lowtide.Stores() as stores:
        chosen = lowtide.policies.mixed("host") if policy else None
        handle = lowtide.limit_memory(model, "60%", policy=chosen, stores=stores)
        for _ in range(3):
            assert torch.cuda.current_device() == 0
            assert all(torch.equal(a, b) for a, b in zip(exact, step(), strict=True))
        model.zero_grad(set_to_none=True)
        assert handle.plan is not None and handle.plan.budget_bytes is not None
        slab = handle.plan.slab_bytes  # into which values come back; it is resident already
        peak = slab + taken(model, batch, lambda: model(**batch).loss.backward())
        assert peak <= handle.plan.budget_bytes
        assert peak == pytest.approx(handle.plan.predicted_peak_bytes, rel=0.001)
        assert torch.cuda.memory_allocated(0) == idle
        handle.remove()


def test_a_model_on_both_is_refused() -> None:
    layers = [nn.Linear(8, 8, device=f"cuda:{at}") for at in range(2)]

    class Apart(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = layers

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x).to("cuda:1")).sum()

    model = Apart()
    model(torch.ones(2, 8, device="cuda:0")).backward()
    with pytest.raises(lowtide.PlanError, match=r"on several devices .*first\.weight on cuda:0"):
        lowtide.limit_memory(model, "80%")
    parallel = nn.DataParallel(nn.Linear(8, 8).cuda(0), [0, 1])
    with pytest.raises(lowtide.PlanError, match="DataParallel copies the model"):
        lowtide.limit_memory(parallel, "80%")
