"""What an optimizer needs is known before its first step, and is what the meter reads."""

from __future__ import annotations

import copy
import sys
import warnings
from typing import Any
from unittest.mock import patch

import pytest
import torch
from small_model import batch, small
from torch import nn

import lowtide
from lowtide import meter
from lowtide.extensions.optimizer.counted import CountedOptimizer
from lowtide.extensions.optimizer.need import missing_gradient_bytes, optimizer_need, smaller_update
from lowtide.meter import available, measure
from lowtide.meter.resident import innermost
from lowtide.optim import HostOptimizer

OPTIMIZERS: dict[str, Any] = {
    "AdamW": lambda p: torch.optim.AdamW(p),
    "AdamW fused": lambda p: torch.optim.AdamW(p, fused=True),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "Adam amsgrad": lambda p: torch.optim.Adam(p, amsgrad=True),
    "SGD": lambda p: torch.optim.SGD(p, 0.1),
    "SGD momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p),
    "Adagrad": lambda p: torch.optim.Adagrad(p),
    "NAdam": lambda p: torch.optim.NAdam(p),
    "RAdam": lambda p: torch.optim.RAdam(p),
    "Adafactor": lambda p: torch.optim.Adafactor(p),
}


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    return sum(t.nbytes for s in optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor))


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.skipif(not available(), reason="needs a C++ compiler for the counting allocator")
def test_need_is_what_the_meter_reads(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 32))
    optimizer = OPTIMIZERS[name](model.parameters())
    before = optimizer_need(optimizer)
    assert all(p.grad is None for p in model.parameters())
    assert missing_gradient_bytes(optimizer) == sum(p.nbytes for p in model.parameters())
    for step in range(8):
        model.zero_grad()
        model(torch.randn(2, 64)).sum().backward()
        if step in (0, 7):  # and some update otherwise from the sixth step on
            values = copy.deepcopy(optimizer.state_dict()["state"])
            need = optimizer_need(optimizer)
            assert str(values) == str(optimizer.state_dict()["state"]), "asking changes nothing"
        measured = measure(optimizer.step)
        if step == 7:
            assert need.state_bytes == before.state_bytes == state_bytes(optimizer)
    assert abs(need.step_bytes - (measured.peak_bytes - measured.end_bytes)) <= 64  # numbers on the way
    assert abs(before.step_bytes - need.step_bytes) <= 64
    assert missing_gradient_bytes(optimizer) == 0


@pytest.mark.parametrize("change", ["option", "state", "frozen", "group"])
def test_a_need_is_worked_out_again_where_it_rests_on_something_else(change: str) -> None:
    model, more = nn.Linear(8, 8), nn.Linear(8, 32)
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    counted = CountedOptimizer(optimizer)
    counted.attach(model)
    first = counted.need
    assert first == optimizer_need(optimizer)
    with patch(
        "lowtide.extensions.optimizer.counted.optimizer_need", side_effect=AssertionError("worked out again")
    ):
        assert counted.need == first
        model(torch.randn(2, 8)).sum().backward()
        assert counted.need == first
        model.zero_grad()
        optimizer.step()  # without gradients
        schedule.step()
        optimizer.param_groups[0]["betas"] = (0.8, 0.99)
        assert counted.need == first, "no memory depends on these numbers"
    if change == "option":
        optimizer.param_groups[0]["amsgrad"] = True
    elif change == "state":
        optimizer.state[model.weight] = {
            name: torch.zeros(8, 8, dtype=torch.float64) for name in ("exp_avg", "exp_avg_sq")
        }
        optimizer.state[model.weight]["step"] = torch.tensor(1.0)
    elif change == "frozen":
        model.weight.requires_grad_(False)
    else:
        optimizer.add_param_group({"params": list(more.parameters())})
    assert counted.need == optimizer_need(optimizer) != first


@pytest.fixture
def foreach_on_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Optimizers choose on a CPU as they do on CUDA: parameters are updated together."""
    module = sys.modules[torch.optim.Optimizer.__module__]
    monkeypatch.setattr(module, "_get_foreach_kernels_supported_devices", lambda: ["cpu"])


class Marked(torch.nn.Parameter):
    """A type that optimizers update one by one."""


@pytest.mark.usefixtures("foreach_on_cpus")
@pytest.mark.parametrize("kind", [torch.nn.Parameter, Marked])
@pytest.mark.parametrize("name", ["AdamW", "SGD", "Adagrad"])
def test_what_an_update_takes_is_that_of_the_real_parameters(name: str, kind: type) -> None:
    parameters = [kind(torch.randn(64, 64)) for _ in range(4)]
    options = {"weight_decay": 0.1} if name == "SGD" else {}
    optimizer = getattr(torch.optim, name)(parameters, **options)
    before = optimizer_need(optimizer)
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        measured = measure(optimizer.step)
    assert optimizer_need(optimizer).step_bytes == before.step_bytes
    assert abs(measured.peak_bytes - before.step_bytes) < 512
    assert (before.step_bytes > 3 * 64 * 64 * 4) is (kind is torch.nn.Parameter)


def test_the_smallest_budget_beside_an_optimizer_will_do() -> None:
    """Where neither the optimizer's state nor any plan fits, what is named holds both."""
    given = []
    for budget in (1024, None):
        model = small()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        handle = lowtide.limit_memory(model, budget or given[0], optimizer=optimizer)
        if budget:
            with pytest.raises(lowtide.BudgetError) as caught:
                model(batch()).backward()
            given.append(caught.value.smallest_bytes)
        else:
            model(batch()).backward()
            optimizer.step()
            assert handle.plan is not None and handle.plan.predicted_peak_bytes <= given[0]


@pytest.mark.skipif(not available(), reason="needs a C++ compiler for the counting allocator")
def test_the_smallest_budget_holds_the_optimizers_own_step() -> None:
    """Few activations beside many parameters: an update by AdamW is the most that is live at once."""
    model = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 5))
    optimizer = torch.optim.AdamW(model.parameters())
    handle = lowtide.limit_memory(model, "min", optimizer=optimizer)
    for step in range(3):
        model(torch.randn(32, 32)).sum().backward()
        assert handle.plan is not None and handle.plan.budget_bytes is not None
        resident = sum(2 * p.nbytes for p in model.parameters()) + state_bytes(optimizer)
        peak = resident + measure(optimizer.step).peak_bytes
        if step:  # the first one makes the state
            assert 0.99 * handle.plan.budget_bytes <= peak <= handle.plan.budget_bytes
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        (torch.optim.AdamW, {}, "AdamW(..., fused=True)"),
        (torch.optim.AdamW, dict(fused=True), ""),
        (torch.optim.SGD, {}, ""),
        (torch.optim.RMSprop, dict(foreach=True), "RMSprop(..., foreach=False)"),
        (torch.optim.RMSprop, dict(foreach=False), ""),
    ],
)
def test_the_option_with_which_an_update_takes_least_is_named(
    kind: Any, options: dict[str, Any], words: str
) -> None:
    parameters = [nn.Parameter(torch.zeros(size, size)) for size in (8, 8, 16, 4)]
    need = optimizer_need(optimizer := kind(parameters, 0.1, **options))
    found, freed = smaller_update(optimizer, need)
    option = {"fused": True} if "fused" in words else {"foreach": False}
    other = optimizer_need(kind(parameters, 0.1, **(option if words else options)))
    assert found == words and freed == need.step_bytes - other.step_bytes


class AsksNumPy(torch.optim.SGD):
    """Its step looks at numbers, which fake tensors do not have."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state.setdefault("sum", torch.zeros_like(p)).add_(p.grad)
                p.data.sub_(float(state["sum"].numpy().max()))


def test_an_optimizer_that_does_not_run_on_fake_tensors_is_told_of() -> None:
    """Without state there is no number to count; with it the state counts, and what does not is said once."""
    model = small()
    optimizer = AsksNumPy(model.parameters(), 0.1)
    with pytest.raises(lowtide.PlanError, match="AsksNumPy cannot be computed before its first step"):
        optimizer_need(optimizer)
    model(batch()).backward()
    optimizer.step()
    need = optimizer_need(optimizer)
    assert need.state_bytes == state_bytes(optimizer) and need.step_bytes == 0 and need.unknown
    lowtide.limit_memory(model, policy="full", budget=10**9, optimizer=optimizer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for rows in (100, 200):
            model.zero_grad()
            model(batch(rows)).backward()
            optimizer.step()
    said = [str(one.message) for one in caught if "lowtide.measure(optimizer.step)" in str(one.message)]
    assert len(said) == 1 and "numpy" in said[0] and "AsksNumPy" in said[0]


EACH = 1 << 20
"""Bytes of a workspace, where a CPU is given them."""


@pytest.fixture
def workspaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU keeps a workspace for each thread that multiplies, as CUDA does."""
    monkeypatch.setattr("lowtide.private.blas_workspace_bytes", lambda device: EACH)


def predicted_and_measured() -> tuple[int, int, int]:
    """The plain step's peak, the plan's, and that of a step under it."""
    torch.manual_seed(0)
    model = small()
    handle = lowtide.limit_memory(model, "100%")
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        model(batch()).backward()
    return handle.plan.plain_peak_bytes, handle.plan.predicted_peak_bytes, handle.measured_peak_bytes


def traced_bytes() -> list[int]:
    model = small()
    step = lambda x: model(x)  # noqa: E731
    return [lowtide.trace(step, batch(), fake=fake, costs=False).resident_bytes for fake in (False, True)]


def test_workspaces_of_cublas_count(request: pytest.FixtureRequest) -> None:
    without = [*predicted_and_measured(), *traced_bytes()]
    request.getfixturevalue("workspaces")
    found = [*predicted_and_measured(), *traced_bytes()]
    assert [one - other for one, other in zip(found, without, strict=True)] == [2 * EACH] * len(found)


@pytest.mark.usefixtures("workspaces")
@pytest.mark.parametrize("refuses", ["step", "optimizer"])
def test_workspaces_of_cublas_are_named_in_a_refusal(refuses: str) -> None:
    model = small()
    optimizer = torch.optim.AdamW(model.parameters())
    lowtide.limit_memory(model, "1MiB", optimizer=optimizer if refuses == "optimizer" else None)
    with pytest.raises(lowtide.BudgetError) as refused:
        model(batch()).backward()
    assert refused.value.parts["cuBLAS workspaces"] == 2 * EACH
    assert "cuBLAS workspaces 2" in str(refused.value)


def test_auto_counts_only_the_state_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what is free, the optimizer's state that the first update makes is still to be taken."""
    free = 1 << 30
    monkeypatch.setattr("lowtide.meter.free_main_memory", lambda: free)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(32, 64)
    parameters = sum(p.nbytes for p in model.parameters())
    handle = lowtide.limit_memory(model, budget="auto", optimizer=optimizer)
    model(x).sum().backward()
    assert handle.plan is not None and handle.plan.budget_bytes is not None
    counted = handle.plan.budget_bytes + (256 << 20) - free  # of what is resident already
    assert parameters <= counted <= parameters + x.nbytes + (1 << 12)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(6)))


def wrapped(optimizer: torch.optim.Optimizer) -> Any:
    accelerate = pytest.importorskip("accelerate")
    return accelerate.Accelerator(cpu=True).prepare_optimizer(optimizer)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    for step in range(3):
        model(torch.randn(256, 64, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def on_host(parameters: Any) -> torch.optim.Optimizer:
    return HostOptimizer(torch.optim.AdamW, parameters, host_fraction=0.5, lr=1e-2)


@pytest.mark.parametrize("make", [adamw, on_host])
def test_a_limit_counts_what_accelerate_wraps(make: Any) -> None:
    plans, results, resident = [], [], []
    for wrap in (lambda optimizer: optimizer, wrapped):
        model = net()
        optimizer = wrap(make(model.parameters()))
        handle = lowtide.limit_memory(model, budget="90%", optimizer=optimizer)
        results.append(steps(model, optimizer))
        plans.append(handle.plan)
        resident.append(meter.resident_bytes(model, optimizer))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert (
        plans[0].budget_bytes == plans[1].budget_bytes
        and plans[0].predicted_peak_bytes == plans[1].predicted_peak_bytes
    )
    assert resident[0] == resident[1]


class Lookahead(torch.optim.Optimizer):
    """An optimizer around another, with state of its own."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        super().__init__([p for group in optimizer.param_groups for p in group["params"]], {})


def test_what_has_state_of_its_own_is_left_as_it_is() -> None:
    inner = adamw(net().parameters())
    assert innermost(inner) is inner
    outer = Lookahead(inner)
    assert innermost(outer) is outer
    accelerated = wrapped(wrapped(inner))
    assert innermost(accelerated) is inner
    assert optimizer_need(innermost(accelerated)) == optimizer_need(inner)
