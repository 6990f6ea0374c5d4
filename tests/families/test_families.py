"""Bitwise the same step on every family of models: with everything evicted, and within a budget."""

from __future__ import annotations

import copy
import itertools
import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import zoo

import lowtide
from lowtide import meter
from lowtide.run.record.directors import ScopeDirector
from lowtide.run.record.recorder import Recorder
from lowtide.run.record.tape import Tape

pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("quiet_transformers")

FAMILIES = {family.name: family for family in zoo.FAMILIES}
STEPS = 3
MANY_STEPS = 20
Step = list[torch.Tensor | None]


@pytest.fixture(params=FAMILIES.values(), ids=FAMILIES.keys())
def family(request: pytest.FixtureRequest) -> Any:
    return request.param


def build(family: Any) -> tuple[torch.nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    model, batch = family.build()
    return model.train(), batch


def state(model: torch.nn.Module, loss: torch.Tensor) -> Step:
    """Loss, gradients and buffers, copied."""
    gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    return [loss.detach().clone(), *gradients, *(b.clone() for b in model.buffers())]


def same(one: Step, other: Step) -> bool:
    """Bit by bit."""
    for a, b in zip(one, other, strict=True):
        if (a is None) != (b is None):
            return False
        if (
            a is not None
            and b is not None
            and not torch.equal(a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8))
        ):
            return False
    return True


def steps(model: torch.nn.Module, batch: dict[str, Any], count: int = STEPS) -> tuple[list[Step], list[int]]:
    """Train for a few steps; what each gave, and its peak with all that was resident before it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    given = sum(
        s.nbytes() for s in meter.storages([t for t in batch.values() if isinstance(t, torch.Tensor)])
    )
    found, peaks = [], []
    for number in range(count):
        torch.manual_seed(100 + number)

        def step() -> torch.Tensor:
            loss = model(**batch).loss
            loss.backward()
            return loss.detach()

        resident = meter.resident_bytes(model) + given
        measured = meter.measure(step, timeline=False)
        peaks.append(resident + measured.peak_bytes)
        found.append(state(model, measured.value))
        optimizer.step()
        optimizer.zero_grad()
    return found, peaks


@pytest.mark.parametrize("verify", [True, False], ids=["verified", "trusted"])
def test_everything_evicted(family: Any, verify: bool) -> None:
    model, batch = build(family)
    start = copy.deepcopy(model.state_dict())

    def step(around: AbstractContextManager[Any]) -> Step:
        model.load_state_dict(start)
        model.zero_grad()
        torch.manual_seed(1)
        with around:
            loss = model(**batch).loss
        loss.backward()
        return state(model, loss)

    plain = step(nullcontext())
    asked = itertools.count()
    around = lambda back: (next(asked), back())[1]  # noqa: E731
    recorder = Recorder(ScopeDirector(), tape=Tape(verify), around_unpack=around)
    evicted = step(recorder.recording())
    assert same(plain, evicted)
    assert not recorder.tape.findings
    assert next(asked)


def limited(
    model: torch.nn.Module, batch: dict[str, Any], budget: str | int, again: bool = False
) -> tuple[lowtide.Handle, list[Step], list[int]]:
    """The model's steps within the budget, or where that is refused within the smallest that is named."""
    inside = copy.deepcopy(model)
    handle = lowtide.limit_memory(inside, budget=budget)
    with warnings.catch_warnings():
        warnings.simplefilter("error", lowtide.LowtideWarning)
        random = torch.get_rng_state()
        try:
            handle.prepare(**batch)
        except lowtide.BudgetError as error:
            assert not again and error.smallest_bytes is not None
            return limited(model, batch, error.smallest_bytes, True)
        assert torch.equal(random, torch.get_rng_state())
        found, peaks = steps(inside, batch)
    return handle, found, peaks


EVERY_TIME = ("gpt2", "bert", "vit", "convolutions", "resnet", "mamba", "mixtral", "wav2vec2", "lstm", "unet")


@pytest.mark.parametrize(
    "name", [name if name in EVERY_TIME else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]
)
def test_within_a_budget(name: str) -> None:
    check_within(FAMILIES[name], "70%")


@pytest.mark.parametrize("name", ["gpt2", "lstm"])
def test_within_the_smallest_budget(name: str) -> None:
    check_within(FAMILIES[name], "smallest")


@pytest.mark.slow  # minutes
@pytest.mark.parametrize("name", sorted(set(FAMILIES) - {"gpt2", "lstm"}))
def test_within_the_smallest_budget_in_other_families(name: str) -> None:
    check_within(FAMILIES[name], "smallest")


def check_within(family: Any, budget: str) -> None:
    model, batch = build(family)
    plain, _ = steps(copy.deepcopy(model), batch)
    handle, found, peaks = limited(model, batch, "1 B" if budget == "smallest" else budget)
    assert all(map(same, plain, found))
    plan = handle.plan
    assert plan is not None and plan.budget_bytes is not None and handle.graph is not None
    assert max(peaks) <= plan.budget_bytes
    assert peaks[-1] == pytest.approx(plan.predicted_peak_bytes, rel=family.accuracy)


@pytest.mark.parametrize(
    "name", ["gpt2", "convolutions", pytest.param("mixtral", marks=pytest.mark.slow), "lstm"]
)
def test_many_steps_hold_no_more(name: str) -> None:
    model, batch = build(FAMILIES[name])
    handle = lowtide.limit_memory(model, budget="90%")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> None:
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    with meter.peak() as seen:
        live = []
        for number in range(MANY_STEPS):
            torch.manual_seed(number)
            step()
            live.append(seen.live_bytes)
    assert live[-1] <= live[1]
    handle.remove()
    assert "forward" not in model.__dict__


@pytest.mark.slow
def test_a_shorter_batch_runs_under_the_plan_for_the_longer_one() -> None:
    model, batch = build(FAMILIES["gpt2"])
    plain, batches = copy.deepcopy(model), [batch, {key: t[:, :32] for key, t in batch.items()}]
    handle = lowtide.limit_memory(model, budget="70%")
    for number, given in enumerate([*batches, *batches]):
        results = []
        for which in (plain, model):
            which.zero_grad()
            torch.manual_seed(number)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", lowtide.LowtideWarning)
                loss = which(**given).loss
            loss.backward()
            results.append(state(which, loss))
        assert same(*results)
    assert len(handle.plans) == 1
