"""accelerate and peft need nothing: a limit sees through what they wrap, put there before or after."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import lowtide


def net() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(3)]
    return nn.Sequential(*blocks)


@pytest.fixture
def accelerator(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A fresh one."""
    accelerate = pytest.importorskip("accelerate")
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)
    yield accelerate.Accelerator(cpu=True, mixed_precision=request.param, gradient_accumulation_steps=2)
    AcceleratorState._reset_state(True)


@pytest.mark.parametrize("accelerator", ["no", "bf16"], indirect=True)
@pytest.mark.parametrize("before", [True, False])
def test_a_limit_before_and_after_prepare(accelerator: Any, before: bool) -> None:
    found = []
    for limited in (False, True):
        model, handle = net(), None
        optimizer = torch.optim.AdamW(model.parameters())
        if limited and before:
            handle = lowtide.limit_memory(model, "90%", optimizer=optimizer)
        prepared, wrapped = accelerator.prepare(model, optimizer)
        if limited and not before:
            handle = lowtide.limit_memory(prepared, "90%", optimizer=wrapped)
        for number in range(4):
            with accelerator.accumulate(prepared):
                x = torch.randn(256, 32, generator=torch.Generator().manual_seed(number))
                accelerator.backward(prepared(x).square().mean())
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(prepared.parameters(), 0.5)
                wrapped.step()
                wrapped.zero_grad()
        if handle is not None:
            assert handle.plan is not None and handle.plan.budget_bytes is not None
            assert (
                handle.measured_peak_bytes is None or handle.measured_peak_bytes <= handle.plan.budget_bytes
            )
            there = lowtide.handle_of(accelerator.unwrap_model(prepared))
            assert there is not None and there.plan is not None
        found.append([parameter.detach().clone() for parameter in model.parameters()])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("accelerator", ["bf16"], indirect=True)
def test_a_model_unwrapped_from_its_mixed_precision_keeps_its_limit(accelerator: Any) -> None:
    model = net()
    lowtide.limit_memory(model, "100%")
    prepared = accelerator.prepare(model)
    prepared(torch.randn(8, 32)).sum().backward()
    plain = accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)
    plain(torch.randn(8, 32)).sum().backward()
    handle = lowtide.handle_of(plain)
    assert handle is not None and len(handle.plans) >= 2
    handle.remove()
    plain(torch.randn(8, 32)).sum().backward()


def test_adapters_of_peft_around_a_frozen_model() -> None:
    peft = pytest.importorskip("peft")
    found = []
    for limited in (False, True):
        config = peft.LoraConfig(r=4, lora_dropout=0.1, target_modules=r".*\.[02]")
        model = peft.get_peft_model(net(), config)
        for parameter in model.parameters():
            if parameter.requires_grad:
                nn.init.normal_(parameter, std=0.1)
        handle = lowtide.limit_memory(model, "90%") if limited else None
        torch.manual_seed(1)
        for _ in range(3):
            model.zero_grad()
            model(torch.randn(256, 32)).square().mean().backward()
        with torch.no_grad(), model.disable_adapter():
            frozen = model(torch.ones(1, 32))
        assert handle is None or handle.plan is not None
        found.append([frozen, *(p.grad for p in model.parameters() if p.grad is not None)])
    assert len(found[0]) > 1 and all(map(torch.equal, *found))
