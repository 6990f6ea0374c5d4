"""Budgets that are met by moving optimizer state, by recomputing, or by both; and the trainer's option."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide import meter
from lowtide.extensions.optimizer.need import missing_gradient_bytes, optimizer_need
from lowtide.optim import HostOptimizer
from lowtide.train.options import OptionError, TrainOptions
from lowtide.train.trainer import train

WIDTH = 192


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH)) for _ in range(6)]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def test_what_the_planner_is_told() -> None:
    model = net()
    count = sum(p.numel() for p in model.parameters())
    for fraction in (0.0, 0.4, 1.0):
        optimizer = HostOptimizer(torch.optim.AdamW, model.parameters(), host_fraction=fraction, host="disk")
        need = optimizer_need(optimizer)
        assert abs(need.state_bytes - round(8 * count * (1 - fraction))) < 8 * 16
        assert need.step_bytes == 0
        assert missing_gradient_bytes(optimizer) == 4 * count
        model(torch.ones(2, WIDTH)).backward()
        optimizer.step()
        assert meter.resident_bytes(None, optimizer) - meter.resident_bytes(model) == need.state_bytes
        model.zero_grad()
    inside = HostOptimizer(torch.optim.AdamW, model.parameters(), host_fraction=1.0, host="memory")
    # main memory is where the device's tensors lie, too
    assert optimizer_need(inside).state_bytes == 8 * count


def test_streamed_gradients_take_nothing() -> None:
    model = net()
    optimizer = HostOptimizer(torch.optim.AdamW, model.parameters(), host="disk", stream_gradients=True)
    before = meter.resident_bytes(model)
    model(torch.ones(2, WIDTH)).backward()
    assert meter.resident_bytes(model) == before
    optimizer.step()


@pytest.mark.skipif(not meter.available(), reason="needs the counting allocator")
def test_a_budget_that_recomputing_alone_cannot_meet() -> None:
    """Parameters, gradients and state on the device alone are above the budget; with state on the host it
    holds, and numbers stay the same.
    """
    model, plain_model = net(), net()
    count = sum(p.numel() for p in model.parameters())
    x = torch.randn(64, WIDTH)
    budget = 4 * count * 3
    plain = torch.optim.AdamW(plain_model.parameters(), fused=True)
    handle = lowtide.limit_memory(plain_model, budget, optimizer=plain)
    with pytest.raises(lowtide.BudgetError):
        plain_model(x).backward()
    handle.remove()
    optimizer = HostOptimizer(torch.optim.AdamW, model.parameters(), host_fraction="auto", host="disk")
    handle = lowtide.limit_memory(model, budget, optimizer=optimizer)
    for _ in range(3):
        for each, step in ((plain_model, plain), (model, optimizer)):
            step.zero_grad()
            each(x).backward()
            step.step()
    assert 0 < optimizer.host_fraction <= 1  # type: ignore[operator]
    assert all(torch.equal(a, b) for a, b in zip(plain_model.parameters(), model.parameters(), strict=True))
    optimizer.zero_grad()
    resident = meter.resident_bytes(model, optimizer) + x.nbytes

    def whole() -> None:
        model(x).backward()
        optimizer.step()

    assert resident + meter.measure(whole).peak_bytes <= budget
    assert handle.plan is not None
    assert handle.plan.predicted_peak_bytes <= budget
    handle.remove()


def test_a_budget_with_room_moves_nothing() -> None:
    model = net()
    optimizer = HostOptimizer(torch.optim.AdamW, model.parameters(), host_fraction="auto", host="disk")
    handle = lowtide.limit_memory(model, "100%", optimizer=optimizer)
    model(torch.randn(64, WIDTH)).backward()
    assert optimizer.host_fraction == 0.0
    optimizer.step()
    assert optimizer.host_elements == 0
    handle.remove()


@pytest.mark.parametrize("costly", ["moving", "recomputing"])
def test_whichever_costs_less(costly: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under one budget the cheaper of the two meets it."""
    from lowtide.optim import budgeted

    price = 10.0 if costly == "moving" else 0.0
    monkeypatch.setattr(budgeted, "update_seconds", lambda optimizer: lambda share: price * share)
    model = net()
    optimizer = HostOptimizer(torch.optim.AdamW, model.parameters(), host_fraction="auto", host="disk")
    handle = lowtide.limit_memory(model, "80%", optimizer=optimizer)
    plan = handle.prepare(torch.randn(512, WIDTH))
    if costly == "moving":
        assert optimizer.host_fraction == 0.0
        assert plan.predicted_extra_seconds > 0
    else:
        assert optimizer.host_fraction > 0.0  # type: ignore[operator]
    assert plan.predicted_peak_bytes <= plan.budget_bytes  # type: ignore[operator]
    handle.remove()


def options(**more: Any) -> TrainOptions:
    common = {
        "model": "gpt-nano",
        "steps": 3,
        "batch": 2,
        "seq": 32,
        "warmup": 1,
        "eval_batches": 1,
        "compare": False,
    }
    return TrainOptions(**{**common, **more})


def test_the_trainer(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the tide comes in, the tide goes out. " * 400)
    plain = train(options(data=text, budget="100%"))
    for share in (0.5, "auto"):
        assert train(options(data=text, budget="100%", optimizer_host_fraction=share)).losses == plain.losses
    folder = tmp_path / "run"
    first = train(
        options(data=text, budget="100%", optimizer_host_fraction=1.0, checkpoint_dir=folder, stop_after=2)
    )
    second = train(
        options(data=text, budget="100%", optimizer_host_fraction=0.3, checkpoint_dir=folder, resume=True)
    )
    assert [*first.losses, *second.losses] == plain.losses
    for wrong in (1.5, -0.1):
        with pytest.raises(OptionError, match="optimizer-host-fraction"):
            options(optimizer_host_fraction=wrong)


def test_the_smallest_budget_holds_the_update_too() -> None:
    model, x = net(), torch.ones(2, WIDTH)
    optimizer = HostOptimizer(
        torch.optim.SGD, model.parameters(), host_fraction=0.3, host="memory", lr=0.01, momentum=0.9
    )
    assert optimizer_need(optimizer).step_bytes > meter.resident_bytes(model)
    handle = lowtide.limit_memory(model, "min", optimizer=optimizer)
    for _ in range(3):
        model(x).backward()
        with meter.peak() as seen:
            optimizer.step()
        resident = meter.resident_bytes(model, optimizer)
        optimizer.zero_grad()
    assert resident + seen.peak_bytes <= handle.plan.budget_bytes


@pytest.mark.parametrize("given", [3, {}, {"state": {}}])
def test_what_is_no_state_dict_is_refused(given: Any) -> None:
    optimizer = HostOptimizer(torch.optim.AdamW, net().parameters())
    with pytest.raises(lowtide.LowtideError, match=r"was given .*: give what state_dict\(\)"):
        optimizer.load_state_dict(given)
