"""What a limited model warns of, and that it warns of nothing in training as everybody writes it."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import Limit, check, run_limited
from loops import data, mlp, said_by, sgd, step
from torch import nn

import lowtide

RAISED = "a larger step has run"
"""What is said where a share becomes more bytes, as in the first step that adds to gradients."""


def test_the_look_leaves_compiled_submodules_without_hooks() -> None:
    """PyTorch warns of hooks on every module around compiled ones, and would run them twice."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.body, self.last = nn.Linear(16, 32), mlp(32, 32, 32), nn.Linear(32, 4)
            self.compiled = torch.compile(self.body, backend="eager")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.compiled(F.gelu(self.first(x))))

    model = Net()
    lowtide.limit_memory(model, "90%")
    _, said = said_by(lambda: [step(model, number) for number in range(3)])
    assert not [one for one in said if "hooks" in str(one.message)]


def test_steps_that_add_to_gradients_raise_a_share_once(caplog: pytest.LogCaptureFixture) -> None:
    model = mlp(width=128)  # of whose longer step gradients are more than an eighth
    handle = lowtide.limit_memory(model, "90%")
    with caplog.at_level(logging.INFO, "lowtide"):
        _, said = said_by(lambda: [step(model, number) for number in range(4)])
    (one,) = said
    assert RAISED in str(one.message) and len(handle.plans) == 2
    assert "planned for steps that add to gradients" in caplog.text


def test_one_step_with_two_forwards_does_not_spoil_those_after_it() -> None:
    """A cell is run by mistake: what it took besides is no reason to refuse all later steps."""
    torch.manual_seed(0)
    model = nn.Sequential(*(mlp(64, 16, 16) for _ in range(4)))
    handle = lowtide.limit_memory(model, "70%")

    def loss(number: int) -> torch.Tensor:
        return model(data(number)).square().mean()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lowtide.LowtideWarning)
        for number in range(2):
            model.zero_grad()
            loss(number).backward()
        model.zero_grad()
        (loss(3) + loss(4)).backward()
        for number in range(4):
            if number == 2:
                model.zero_grad()
            loss(number).backward()
    assert handle.plan is not None


def test_a_limit_whose_steps_cannot_be_measured_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowtide.run.watch.open_peak", lambda device: None)
    model = mlp()
    lowtide.limit_memory(model, "100%")
    with pytest.warns(lowtide.LowtideWarning, match="cannot be measured.*C\\+\\+ compiler") as said:
        for _ in range(3):
            step(model)
    assert len([w for w in said if "cannot be measured" in str(w.message)]) == 1


def test_a_loop_with_all_of_it_says_no_more_than_that_its_share_was_raised() -> None:
    """Accumulation, clipping, a shorter last batch, evaluation between: normal training."""

    def pattern(limit: Limit) -> Iterator[Any]:
        model = limit(mlp(64))
        optimizer = sgd(model)
        for number, rows in enumerate((128, 128, 128, 40)):
            loss = model(data(number, rows)).square().mean()
            loss.backward()
            yield model
            if number % 2:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                model.eval()
                with torch.no_grad():
                    yield model(data(9))
                model.train()

    for run in (check(pattern, "80%"), run_limited(pattern, "80%")):
        assert [message for message in run.messages if RAISED not in message] == []
