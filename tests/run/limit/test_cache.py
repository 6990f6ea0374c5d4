"""Cached plans: what was verified at one size is not verified again, a plan serves smaller steps, and a
budget in per cent is of the largest step that was planned.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide import meter
from lowtide.graph import StepGraph
from lowtide.run.limit.cache import MOST_ENTRIES
from lowtide.run.limit.entry import Planned
from lowtide.run.limit.entry_states import State
from lowtide.run.limit.key import StepKey
from lowtide.run.profile.profiler import Profiler

EMPTY = StepGraph((), (), (), (), ())


class Net(nn.Module):
    """Blocks over rows of 64 numbers; it may ask for a value, and may run another operation for few rows."""

    def __init__(self, asks: bool = False, few: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(3)
        )
        self.asks, self.few = asks, few

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.asks and x.sum().item() < -1e9:
            x = -x
        if len(x) < self.few:
            x = x.sin()
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


def rows(count: int) -> torch.Tensor:
    return torch.randn(count, 64, generator=torch.Generator().manual_seed(count))


def peak_of(net: nn.Module, count: int) -> int:
    x = rows(count)
    return lowtide.measure(lambda: net(x).backward(), timeline=False).peak_bytes


def step(net: nn.Module, count: int) -> list[torch.Tensor]:
    net.zero_grad()
    net(rows(count)).backward()
    return [p.grad.clone() for p in net.parameters() if p.grad is not None]


@pytest.fixture
def verified(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each look, whether it verified."""
    found: list[bool] = []
    before = Profiler.__init__

    def noted(self: Profiler, *args: Any, **kwargs: Any) -> None:
        before(self, *args, **kwargs)
        found.append(self.verified)

    monkeypatch.setattr(Profiler, "__init__", noted)
    return found


def test_a_larger_step_is_looked_at_without_verifying_again(verified: list[bool]) -> None:
    plain, net = Net(), Net()
    lowtide.limit_memory(net, "80%")
    for count in (256, 512, 512):
        assert all(map(torch.equal, step(net, count), step(plain, count)))
    assert verified == [True, False]


def test_another_program_at_another_size_is_verified(verified: list[bool]) -> None:
    plain, net = Net(few=300), Net(few=300)
    handle = lowtide.limit_memory(net, "80%")
    for count in (256, 512, 512, 512):
        assert all(map(torch.equal, step(net, count), step(plain, count)))
    assert verified == [True, False, True], "the second look met another program, and the third verified it"
    assert len(handle.plans) == 2


def test_always_and_never_mean_what_they_say(verified: list[bool]) -> None:
    net = Net()
    lowtide.limit_memory(net, "80%", verify="never")
    for count in (256, 512):
        step(net, count)
    assert verified == [False, False]


@pytest.mark.parametrize("asks", [False, True])
def test_a_plan_serves_smaller_steps(verified: list[bool], asks: bool) -> None:
    plain, net = Net(asks), Net(asks)
    resident = sum(p.nbytes for p in net.parameters()) * 2
    handle = lowtide.limit_memory(net, int(0.7 * (resident + peak_of(plain, 1024))))
    step(net, 1024)
    assert handle.plan is not None and handle.plan.replayed
    for count in (128, 900, 100):
        assert all(map(torch.equal, step(net, count), step(plain, count)))
    for one in (net, plain):
        one.zero_grad()
    assert peak_of(net, 1024) < peak_of(plain, 1024)
    assert len(verified) == 1 and len(handle.plans) == 1


def test_a_step_above_a_plan_that_changes_nothing_is_not_said_to_have_run_other_operations() -> None:
    net = Net()
    handle = lowtide.limit_memory(net, "100%")
    step(net, 64)
    held: list[Any] = []

    def backward(inputs: torch.Tensor) -> torch.Tensor:
        held.append(torch.empty(1 << 20))
        return inputs

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        net.zero_grad()
        x = rows(64).requires_grad_()
        y = rows(64) * 1.0
        loss = net(y)
        loss.register_hook(backward)
        loss.backward()
    said = [str(one.message) for one in caught if "above the budget" in str(one.message)]
    assert x is not None and handle.plan is not None
    assert len(said) == 1 and "it ran other operations" not in said[0] and "profiles the next one" in said[0]


@pytest.mark.skipif(not meter.available(), reason="needs the counting allocator")
@pytest.mark.parametrize("counts", [(64,), (72, 64, 72), (16, 64, 72)])
def test_every_step_above_the_budget_is_said(counts: tuple[int, ...]) -> None:
    model = Net()
    handle = lowtide.limit_memory(model, "min", progress=False)
    exceeded = 0
    for count in counts:
        model.zero_grad()
        x = rows(count)
        resident = meter.resident_bytes(model) + x.nbytes
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            peak = resident + meter.measure(lambda x=x: model(x).backward(), timeline=False).peak_bytes
        assert handle.plan is not None and handle.plan.budget_bytes is not None
        above = peak > handle.plan.budget_bytes
        assert sum(", and the budget is" in str(one.message) for one in caught) == above, count
        exceeded += above
    assert exceeded


def test_shapes_prepared_together_are_planned_for_once_by_the_largest() -> None:
    plain, net = Net(), Net()
    handle = lowtide.limit_memory(net, "90%")
    plans = handle.prepare_all([rows(256), (rows(512),), [rows(128)]])
    assert len(plans) == 3 and len(set(map(id, handle.plans.values()))) == 1
    assert handle.graph is not None and handle.plannings == 1
    assert plans[0].predicted_peak_bytes == plans[2].predicted_peak_bytes, "the largest comes first"
    for count in (128, 512, 256):
        assert all(map(torch.equal, step(net, count), step(plain, count)))
    assert handle.plannings == 1


def test_plans_of_old_kinds_of_steps_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowtide.run.limit.cache.MOST_ENTRIES", 2)
    net = Net()
    handle = lowtide.limit_memory(net, "90%")
    for count in (128, 256, 512, 640):
        step(net, count)
    assert len(handle.plans) <= 2


def test_the_plan_of_the_commonest_kind_of_steps_stays() -> None:
    """The oldest one went, however often it was used: after 24 more kinds it was profiled again."""
    handle = lowtide.limit_memory(nn.Linear(4, 1), "100%", progress=False)
    cache = handle._limiter.cache
    kind = lambda rows, like="": StepKey(((rows, 4),), (), like, 0, (), 0, 0, 0)  # noqa: E731
    common, largest = cache.find(kind(64)), cache.find(kind(4096, "other"))
    largest.state, largest.planned = (
        State.PLANNED,
        Planned(largest.key, EMPTY, EMPTY, lowtide.policies.make_plan(EMPTY, stored=())),
    )
    seldom = cache.find(kind(1))
    for rows in range(100, 100 + MOST_ENTRIES):
        cache.find(kind(rows))
        assert cache.find(kind(64)) is common
        assert cache.find(kind(8, "other")) is largest, "whose plan serves smaller steps"
    assert len(cache.known) == MOST_ENTRIES and seldom.key not in cache.known and seldom.state is State.GONE


def deep() -> nn.Sequential:
    return nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(8)], nn.Linear(64, 1))


def test_a_small_last_batch_has_as_much_memory_as_those_before() -> None:
    model = deep()
    handle = lowtide.limit_memory(model, "50%", loss_fn=torch.mean)
    budgets = []
    for rows in (2048, 16, 4096, 2048):
        model(torch.randn(rows, 64)).mean().backward()
        model.zero_grad()
        plan = handle.plan
        assert plan is not None and plan.budget_bytes is not None
        budgets.append(plan.budget_bytes)
        assert plan.predicted_peak_bytes <= plan.budget_bytes
    assert budgets[0] == budgets[1] < budgets[2] and budgets[0] <= budgets[3] <= budgets[2]


def test_a_small_first_batch_is_refused_in_its_own_terms() -> None:
    handle = lowtide.limit_memory(deep(), "50%", loss_fn=torch.mean)
    with pytest.raises(lowtide.BudgetError, match="100% of the plain step's peak"):
        handle.prepare(torch.randn(16, 64))
    assert handle.prepare(torch.randn(2048, 64)).budget_bytes is not None


def test_a_policy_is_asked_once_for_steps_that_are_alike() -> None:
    asked = []

    def policy(graph: lowtide.StepGraph, budget: int | None) -> lowtide.Plan:
        asked.append(graph)
        if len(asked) > 1:
            raise lowtide.BudgetError("this policy plans once")
        return lowtide.policies.sqrt()(graph, budget)

    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4096))
    handle = lowtide.limit_memory(model, "100%", policy=policy, loss_fn=lambda output: output.square().sum())
    gradients = []
    for _ in range(3):
        torch.manual_seed(0)
        model(torch.randn(64, 64)).square().sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
        model.zero_grad()
    assert len(asked) == 1 and handle.plan is not None
    assert all(torch.equal(one, other) for one, other in zip(gradients[0], gradients[2], strict=True))


def test_after_a_refusal_a_step_is_no_longer_planned_for_from_a_siblings_graph(verified: list[bool]) -> None:
    """Each later step was planned for, and refused, from the same graph of steps without gradients before."""

    def policy(graph: lowtide.StepGraph, budget: int | None) -> lowtide.Plan:
        if len(verified) == 1 and asked:
            raise lowtide.BudgetError("no plan fits what adds to gradients")
        asked.append(graph)
        return lowtide.policies.sqrt()(graph, budget)

    asked: list[lowtide.StepGraph] = []
    net = Net()
    lowtide.limit_memory(net, "100%", policy=policy)
    net(rows(64)).backward()
    with pytest.raises(lowtide.BudgetError, match="adds to gradients"):
        net(rows(64)).backward()
    net(rows(64)).backward()
    assert len(verified) == len(asked) == 2, "profiled, and planned for from what it showed"
