"""peft's LoRA under `lowtide.compile`: only adapters get gradients, those of eager, within the budget."""

from __future__ import annotations

import copy

import pytest
import torch
from compiled_models import Model, real_peak

import lowtide

peft = pytest.importorskip("peft")


def test_lora_has_the_gradients_of_eager_within_the_budget() -> None:
    config = peft.LoraConfig(r=4, target_modules=["up", "down"], lora_dropout=0.1, init_lora_weights=False)
    model, x = peft.get_peft_model(Model(), config), torch.randn(1024, 32)
    twin = copy.deepcopy(model)
    compiled = lowtide.compile(model, "85%", backend="aot_eager")
    for seed in range(2):
        for one, callee in ((twin, twin), (model, compiled)):
            one.zero_grad()
            torch.manual_seed(seed)
            callee(x).backward()
        for (name, a), b in zip(model.named_parameters(), twin.parameters(), strict=True):
            assert (a.grad is not None) == ("lora_" in name)
            assert a.grad is None or torch.equal(a.grad, b.grad)
    handle = lowtide.handle_of(compiled)
    real = real_peak(compiled, model, x)
    assert handle.plan.replayed
    assert abs(real - handle.predicted_peak_bytes) <= 16
    assert real <= handle.plan.budget_bytes
