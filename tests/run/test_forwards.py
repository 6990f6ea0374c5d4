"""Compiled submodules of a limited model stay compiled, and gradients stay the plain step's."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import lowtide

N = 16


class Backend:
    """Counts compilations and runs of what was compiled."""

    def __init__(self) -> None:
        self.compiled = 0
        self.ran = 0

    def __call__(self, module: Any, inputs: Any) -> Any:
        self.compiled += 1

        def run(*args: Any) -> Any:
            self.ran += 1
            return module(*args)

        return run

    def __deepcopy__(self, memo: Any) -> Backend:
        return self


class Middle(nn.Module):
    """Of a class of its own: dynamo does not compile a bare `nn.Sequential` by ``module.compile()``."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(N, 4 * N), nn.Linear(4 * N, N)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(N, 4 * N), nn.GELU(), nn.Linear(4 * N, N))
        self.middle: Any = Middle()
        self.last = nn.Sequential(nn.Linear(N, 4 * N), nn.GELU(), nn.Linear(4 * N, N))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(self.first(x).exp()).sin()).square().sum()


def batch() -> torch.Tensor:
    return torch.randn(100, N, generator=torch.Generator().manual_seed(3))


def grads(model: nn.Module) -> list[torch.Tensor]:
    model.zero_grad()
    model(batch()).backward()
    return [p.grad.clone() for p in model.parameters()]


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("way", ["torch.compile", "module.compile"])
@pytest.mark.parametrize("limit", ["full", "70%"])
def test_compiled_submodule_stays_compiled(same: Any, way: str, limit: str, everything: Any) -> None:
    torch.manual_seed(0)
    plain = Model()
    model = copy.deepcopy(plain)
    backend = Backend()
    if way == "torch.compile":
        model.middle = torch.compile(model.middle, backend=backend)
    else:
        model.middle.compile(backend=backend)
    options: dict[str, Any] = {"policy": everything} if limit == "full" else {"budget": "80%"}
    expected = grads(plain)
    handle = lowtide.limit_memory(model, **options)
    for _ in range(2):  # the second may compile once more, without the trace's global hooks
        assert all(map(same, expected, grads(model)))
    ran, compiled = backend.ran, backend.compiled
    assert 1 <= compiled <= 3
    for _ in range(4):
        assert all(map(same, expected, grads(model)))
    assert backend.ran == ran + 4, "one compiled run a step: not in eager, and not replayed"
    assert backend.compiled == compiled, "compiled once"
    assert handle.plan.replayed
    inside = {handle.graph.operations[i].module for i in handle.plan.replayed}
    assert not any("middle" in name for name in inside)


class Calls(nn.Module):
    """Its forward calls a function that the user has compiled."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.first, self.last, self.norm = nn.Linear(N, 4 * N), nn.Linear(4 * N, N), nn.LayerNorm(4 * N)
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.function(self.norm, self.first(x).exp()).sin()).square().sum()


def alone(norm: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x * 2 + x.shape[0])


def calls_a_module(norm: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return norm(torch.tanh(x * 2 + x.shape[0]))


@pytest.mark.parametrize("function", [alone, calls_a_module])
@pytest.mark.parametrize("backend", [Backend, lambda: "aot_eager"], ids=["eager", "aot_eager"])
def test_a_compiled_function_whose_sizes_become_symbols(
    same: Any, function: Any, backend: Any, everything: Any
) -> None:
    torch.manual_seed(0)
    plain = Calls(function)
    model = copy.deepcopy(plain)
    made = backend()
    model.function = torch.compile(function, backend=made, fullgraph=True)
    lowtide.limit_memory(model, policy=everything)
    for rows in (100, 100, 120, 90, 120, 100):
        x = torch.randn(rows, N)
        for one in (plain, model):
            one.zero_grad()
            one(x).backward()
        for a, b in zip(plain.parameters(), model.parameters(), strict=True):
            assert same(a.grad, b.grad)
    if isinstance(made, Backend):  # for the first size, and for all; a trace's hooks on modules change guards
        assert made.compiled <= (2 if function is alone else 4)


def test_limited_model_that_is_compiled_whole(same: Any) -> None:
    """Compiling around a limited model: right numbers; the limited forward itself is not compiled."""
    torch.manual_seed(0)
    plain = Model()
    model = copy.deepcopy(plain)
    lowtide.limit_memory(model, policy="full")
    whole = torch.compile(model, backend=Backend())
    expected = grads(plain)
    for step in range(3):
        model.zero_grad()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            whole(batch()).backward()
        said = [w for w in caught if "compile its submodules" in str(w.message)]
        assert len(said) == (step == 0)
        assert all(same(a, p.grad) for a, p in zip(expected, model.parameters(), strict=True))


def test_what_is_compiled_around_a_limited_model_sees_the_backward() -> None:
    """A compiled call takes the interception away when it returns, so its step is looked at on its own."""
    plans = []
    for wrap in (lambda model: model, lambda model: torch.compile(model, backend=Backend())):
        torch.manual_seed(0)
        model = Model()
        handle = lowtide.limit_memory(model, "80%")
        whole = wrap(model)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(3):
                model.zero_grad()
                whole(batch()).backward()
        assert not [w for w in caught if "set_eval_frame" in str(w.message)], "dynamo left it alone"
        assert handle.measured_peak_bytes is not None and handle.plan is not None
        assert handle.measured_peak_bytes <= (handle.plan.budget_bytes or 0)
        plans.append((handle.plan.plain_peak_bytes, handle.plan.predicted_peak_bytes, handle.plannings))
    assert plans[0] == plans[1]


@pytest.mark.parametrize("planned", [False, True])
def test_a_limited_model_is_exported_and_traced_as_it_is(planned: bool) -> None:
    torch.manual_seed(0)
    model = Model()
    expected = model(batch())
    plain = [node.target for node in torch.export.export(model, (batch(),)).graph.nodes]
    handle = lowtide.limit_memory(model, "80%")
    if planned:
        for _ in range(2):
            grads(model)
    plans = len(handle.plans)
    exported = torch.export.export(model, (batch(),))
    assert [node.target for node in exported.graph.nodes] == plain
    assert torch.equal(exported.module()(batch()), expected)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        traced: Any = torch.jit.trace(model, batch())
        assert torch.equal(traced(batch()), expected)
    assert not [w for w in caught if "Python boolean" in str(w.message)], "nothing of ours is traced"
    assert len(handle.plans) == plans
    with pytest.raises(AttributeError, match=r"torch\.jit\.script.*remove\(\)"):
        torch.jit.script(model)


def test_limit_on_a_compiled_model() -> None:
    """Compiled by a backend of the user's, a model is opaque as a whole."""
    with pytest.raises(lowtide.PlanError, match="a budget can be held for inductor, aot_eager"):
        lowtide.limit_memory(torch.compile(Model(), backend=Backend()), "100%")
    with pytest.raises(lowtide.PlanError, match="knows no policy="):
        lowtide.limit_memory(torch.compile(Model(), backend="aot_eager"), "100%", policy="full")


def test_failure_in_a_compiled_submodule_leaves_no_mode(same: Any) -> None:
    torch.manual_seed(0)
    plain = Model()
    model = copy.deepcopy(plain)
    backend = Backend()
    model.middle = torch.compile(model.middle, backend=backend)
    lowtide.limit_memory(model, policy="full")
    grads(model)
    fail = model.last[0].register_forward_pre_hook(lambda *_: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        model(batch())
    fail.remove()
    with pytest.raises(Exception, match=r"shape|size|dimension|rank"):
        model(torch.randn(3, N + 1))
    assert all(map(same, grads(plain), grads(model)))
    assert not model.middle._forward_pre_hooks and not model.middle._forward_hooks


def test_compiled_function_in_forward(same: Any) -> None:
    """A compiled function is no module, and stays compiled as well."""
    backend = Backend()

    @torch.compile(backend=backend)
    def function(x: torch.Tensor) -> torch.Tensor:
        return (x.exp() * x).sin()

    class Calls(Model):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(function(self.first(x))).square().sum()

    torch.manual_seed(0)
    model = Calls()
    plain = copy.deepcopy(model)
    lowtide.limit_memory(model, policy="full")
    for step in range(4):
        assert all(map(same, some(plain), some(model)))
        if step == 1:
            ran = backend.ran
    assert backend.ran == ran + 2 * 2 and backend.compiled <= 2


def test_compiled_function_in_a_scope(same: Any) -> None:
    backend = Backend()

    @torch.compile(backend=backend)
    def function(x: torch.Tensor) -> torch.Tensor:
        return (x.exp() * x).sin()

    found = []
    for policy in ("keep_all", "full", "full"):
        x = batch().requires_grad_()
        with lowtide.checkpointing(policy=policy):
            y = function(x.cos()).exp()
        y.sum().backward()
        found.append(x.grad)
    assert same(found[0], found[1]) and same(found[1], found[2])
    assert backend.ran == 3 and backend.compiled <= 2


def some(model: nn.Module) -> list[Any]:
    model.zero_grad()
    model(batch()).backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def test_what_is_compiled_after_a_limit_was_removed_compiles_once() -> None:
    """Autograd puts back what the thread had let in when backward began; Dynamo would guard on it."""
    torch._dynamo.reset()
    compiled: list[torch.nn.Module] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        compiled.append(graph)
        return graph.forward

    model, x = (
        torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 1)),
        torch.ones(4, 8),
    )
    handle = lowtide.limit_memory(model, "150%")
    model(x).sum().backward()
    handle.remove()
    fast = torch.compile(model, backend=backend)
    fast(x).sum()
    fast(x)
    assert len(compiled) == 1
