"""What an engineer who has read only the README does in the first hour, and what must not be silent there."""

from __future__ import annotations

import copy
import gc
import logging
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import Limit, check, peak_of, run_limited
from loops import data, mlp, sgd
from torch import nn
from torch.utils.checkpoint import checkpoint

import lowtide

LOOKED = " step, from which lowtide plans, took"
"""What a step that is looked at says above the budget: small models without blocks take their plain peak."""


def said_by(run: Any) -> tuple[Any, list[warnings.WarningMessage]]:
    """What a function returns, and everything that it warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        return run(), caught


def step(model: nn.Module, number: int = 0) -> None:
    """One forward and backward."""
    model(data(number).to(next(model.parameters()).dtype)).float().square().mean().backward()


def test_a_model_that_is_cast_between_steps_is_another_kind_of_step() -> None:
    """Nothing of the inputs tells: tokens are integers whatever the model computes in."""

    def make() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(50, 64), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU())

    model, tokens = make().bfloat16(), torch.arange(512) % 50
    handle = lowtide.limit_memory(model, "80%")
    for number in range(6):
        if number == 2:
            model.float()
        model.zero_grad()
        (peak, _), said = said_by(
            lambda: peak_of(lambda: model(tokens).float().sum().backward(), [model], tokens)
        )
        assert handle.plan is not None and handle.plan.budget_bytes is not None
        looked = number in (0, 2)  # a layer is a block here, and what enters blocks stays in such a step
        assert len(said) == (peak > handle.plan.budget_bytes), number
        assert looked or not said, number
    assert len(handle.plans) == 2


class Checkpointed(nn.Module):
    """A stack that checkpoints its blocks by itself, as ``gradient_checkpointing=True`` makes models do."""

    def __init__(self, reentrant: bool, blocks: int = 4) -> None:
        super().__init__()
        self.reentrant, self.on = reentrant, True
        self.blocks = nn.ModuleList(mlp(64, 16, 16) for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant) if self.on else block(x)
        return x


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_of_the_models_own_is_told_once(reentrant: bool) -> None:
    def pattern(limit: Limit) -> Iterator[Any]:
        torch.manual_seed(0)
        model = limit(Checkpointed(reentrant))
        for number in range(3):
            model.zero_grad()
            step(model, number)
            yield model

    run = check(pattern, "100%")
    assert len([message for message in run.messages if "checkpoints by itself" in message]) == 1


def test_a_budget_that_checkpointing_stands_in_the_way_of_says_so() -> None:
    torch.manual_seed(0)
    model = Checkpointed(reentrant=False)
    lowtide.limit_memory(model, "60%")
    with (
        pytest.warns(lowtide.LowtideWarning, match="by itself"),
        pytest.raises(lowtide.BudgetError) as caught,
    ):
        step(model)
    assert "gradient checkpointing off" in caught.value.remedies[0]
    model.on = False
    model.zero_grad()
    handle = lowtide.limit_memory(model, "100%")
    _, said = said_by(lambda: [step(model, number) for number in range(3)])
    assert handle.plan is not None and not [one for one in said if "by itself" in str(one.message)]


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


def test_steps_that_add_to_gradients_are_no_matter_of_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    model = mlp()
    handle = lowtide.limit_memory(model, "90%")
    with caplog.at_level(logging.INFO, "lowtide"):
        _, said = said_by(lambda: [step(model, number) for number in range(4)])
    assert not [one for one in said if LOOKED not in str(one.message)] and len(handle.plans) == 2
    assert "planned for steps that add to gradients" in caplog.text


class Autocast:
    """A forward inside another, as accelerate leaves it on a model for mixed precision."""

    def __init__(self, forward: Any) -> None:
        self.__wrapped__ = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return self.__wrapped__(*args, **kwargs)


def test_a_limit_is_found_replaced_and_removed_inside_a_wrapped_forward() -> None:
    model = mlp()
    first = lowtide.limit_memory(model, "100%")
    wrapper = Autocast(model.forward)
    model.forward = wrapper  # type: ignore[method-assign]
    assert lowtide.handle_of(model) is first
    step(model)
    second = lowtide.limit_memory(model, "90%")
    assert lowtide.handle_of(model) is second is not first
    step(model)
    assert second.plan is not None and len(first.plans) == 1, "the limit inside is not in force any more"
    second.remove()
    assert model.__dict__["forward"] is wrapper and lowtide.handle_of(model) is None
    step(model)
    assert len(first.plans) == 1


def test_a_limit_that_was_bound_to_its_model_runs() -> None:
    """accelerate's ``unwrap_model(keep_fp32_wrapper=False)`` binds what it finds below its wrappers."""
    import types

    model = mlp()
    handle = lowtide.limit_memory(model, "100%")
    model.forward = types.MethodType(model.forward, model)  # type: ignore[method-assign]
    step(model)
    assert handle.plan is not None and lowtide.handle_of(model) is not None


def test_a_limit_has_one_handle() -> None:
    """Whoever asks gets the object that `limit_memory` or `lowtide.compile` made; a copy has its own, and a
    model goes when nobody holds it or its handle.
    """
    model = mlp()
    handle = lowtide.limit_memory(model, "100%")
    twin = copy.deepcopy(model)
    step(model)
    handle.set_budget("90%")
    assert lowtide.handle_of(model) is handle is lowtide.handle_of(model) and {handle: 1}[handle] == 1
    own = lowtide.handle_of(twin)
    assert own is lowtide.handle_of(twin) is not handle and own is not None and own.model is twin
    gone = weakref.ref(model)
    del model, handle
    gc.collect()
    assert gone() is None
    compiled = lowtide.compile(mlp(), "100%", backend="aot_eager")
    made = lowtide.handle_of(compiled)
    made.set_budget("90%")  # type: ignore[union-attr]
    assert made is not None and lowtide.handle_of(compiled) is made


def test_a_handle_whose_limit_is_gone_says_so() -> None:
    model = mlp()
    old = lowtide.limit_memory(model, "80%")
    new = lowtide.limit_memory(model, "90%")
    for use in (lambda: old.set_budget("50%"), lambda: old.prepare(data(0))):
        with pytest.raises(lowtide.PlanError, match="handle_of"):
            use()
    new.set_budget("85%")
    old.remove()
    assert lowtide.handle_of(model) is not None, "the limit in force stays"


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


def test_a_limit_that_never_engages_is_told_where_the_step_is_run() -> None:
    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

    module = Module()
    lowtide.limit_memory(module, "80%")
    with pytest.warns(lowtide.LowtideWarning, match="has not engaged") as said:
        step(module.net)
    assert said[0].filename == __file__


@pytest.mark.parametrize("first", ["prepared", "paused"])
def test_it_is_told_as_well_after_a_first_look_or_a_pause(first: str) -> None:
    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x)

    module = Module()
    handle = lowtide.limit_memory(module, "100%", loss_fn=lambda output: output.square().mean())
    if first == "prepared":
        handle.prepare(data(0))
    else:
        with handle.paused():
            step(module.net)
    with pytest.warns(lowtide.LowtideWarning, match="has not engaged"):
        step(module.net)


def test_a_limit_whose_steps_cannot_be_measured_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowtide.run.watch.available", lambda: False)
    model = mlp()
    lowtide.limit_memory(model, "100%")
    with pytest.warns(lowtide.LowtideWarning, match="cannot be measured.*C\\+\\+ compiler") as said:
        for _ in range(3):
            step(model)
    assert len([w for w in said if "cannot be measured" in str(w.message)]) == 1


def test_a_loop_with_all_of_it_warns_of_nothing() -> None:
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
        assert [message for message in run.messages if LOOKED not in message] == []
