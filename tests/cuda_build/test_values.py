"""Limits on PyTorch's CUDA build without a card, its operations computed by the CPU's kernels: gradients bit
by bit, and bytes by PyTorch's own allocator.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from card_models import (
    CARD,
    COMPUTED,
    ON_THE_CUDA_BUILD,
    check_peak,
    decoder,
    family_on_the_card,
    within_a_third,
)

import lowtide
from lowtide import cli

pytestmark = ON_THE_CUDA_BUILD


def step(model: torch.nn.Module, batch: dict[str, Any]) -> list[torch.Tensor]:
    """Loss and gradients."""
    torch.manual_seed(1)
    model.zero_grad(set_to_none=True)
    loss = model(**batch).loss
    loss.backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad(set_to_none=True)
    return [loss.detach().clone(), *gradients]


@pytest.mark.parametrize("name", sorted(COMPUTED))
def test_families_take_what_was_predicted_and_have_the_same_gradients(name: str) -> None:
    pytest.importorskip("transformers")
    model, batch = family_on_the_card(name)
    buffers = [buffer.clone() for buffer in model.buffers()]

    def again() -> list[torch.Tensor]:
        with torch.no_grad():
            for buffer, before in zip(model.buffers(), buffers, strict=True):
                buffer.copy_(before)
        return step(model, batch)

    exact = again()
    handle = within_a_third(model, lambda: step(model, batch))
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(exact, again(), strict=True))
    check_peak(handle, model, batch, lambda: model(**batch).loss.backward())
    assert handle.plan is not None and handle.plan.replayed


@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("budget", ["80%", "60%"])
def test_tiers_bring_back_the_same_bits_and_do_not_grow(tier: str, budget: str) -> None:
    model, batch = decoder("gpt", layers=4, width=128, positions=128, batch=4, dropout=0.1)
    exact = step(model, batch)
    with lowtide.Stores() as stores:
        policy = lowtide.policies.mixed(tier)
        handle = lowtide.limit_memory(model, budget, policy=policy, stores=stores)
        laid_out, took = [], []
        for _ in range(4):
            assert all(torch.equal(a, b) for a, b in zip(exact, step(model, batch), strict=True))
            if handle.plan is not None and handle.plan.moves:
                laid_out.append(stores.tier(tier, "", CARD).counts.slab_bytes)
            took.append(handle.measured_peak_bytes)
        assert laid_out[1] == laid_out[-1] > 0
        assert took[1:] == [pytest.approx(handle.plan.predicted_peak_bytes, abs=512)] * 3  # a loss's block
        handle.remove()


def test_train_on_the_card_keeps_its_budget(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = tmp_path / "results.json"
    arguments = "train --model gpt-tiny --device cuda --budget 80% --steps 3 --batch 4 --seq 64"
    files = ["--data", str(text), "--json", str(results)]
    monkeypatch.setattr("sys.argv", ["lowtide", *arguments.split(), *files])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code
    found = json.loads(results.read_text())["comparison"]
    assert found["planned"]["peak_bytes"] <= found["budget_bytes"]
    assert found["planned"]["peak_bytes"] == pytest.approx(found["predicted_peak_bytes"], rel=0.01)
