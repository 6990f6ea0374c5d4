"""`torch.compile` around a limited model: the compiled engine holds the limit, with the backend as given."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compiled_models import Residual
from torch import nn

import lowtide
from lowtide.compiled.compiled_handle import CompiledHandle
from lowtide.meter import peak, resident_bytes


class Layers(nn.Sequential):
    """Of a class whose forward is PyTorch's own, which Dynamo passes over by itself."""

    def __init__(self) -> None:
        super().__init__(*(nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in "123"))


X = torch.randn(1024, 32, generator=torch.Generator().manual_seed(0))


def step(called: Any, model: nn.Module) -> tuple[list[torch.Tensor], int]:
    """Gradients of a step, and its peak with what was resident before it."""
    model.zero_grad(set_to_none=True)
    resident = resident_bytes(model) + X.nbytes
    with peak("cpu") as seen:
        called(X).square().mean().backward()
    return [p.grad for p in model.parameters() if p.grad is not None], resident + seen.peak_bytes


def engine(handle: Any) -> CompiledHandle | None:
    return handle._limiter.compiled_handle


@pytest.mark.filterwarnings("error::lowtide.LowtideWarning", "ignore:.*it compiled code")
@pytest.mark.parametrize("fullgraph", [False, True], ids=["breaks", "fullgraph"])
@pytest.mark.parametrize(
    "make",
    [lambda: Residual(layers=3), lambda: Residual(False, 3), Layers],
    ids=["loss", "outputs", "torch.nn"],
)
def test_the_limit_is_held_by_the_compiled_engine(make: Callable[[], nn.Module], fullgraph: bool) -> None:
    model = make()
    wanted, plain = step(twin := copy.deepcopy(model), twin)
    handle = lowtide.limit_memory(model, "min")
    compiled: Any = torch.compile(model, backend="aot_eager", fullgraph=fullgraph)
    for _ in range(3):
        found, took = step(compiled, model)
        assert all(map(torch.equal, wanted, found))
    held = engine(handle)
    assert held is not None and held._backend.name == "aot_eager"
    assert handle.plan is held.plan and handle.plan.replayed and len(handle.plans) == 1
    assert handle.measured_peak_bytes == took < 0.8 * plain
    assert took <= handle.plan.budget_bytes + 16
    assert lowtide.handle_of(compiled) is handle
    with torch.no_grad():
        assert torch.equal(compiled(X), twin(X))


def test_eager_steps_before_leave_nothing_that_dynamo_guards_on() -> None:
    """Else a step compiles anew once what the eager ones left is gone."""
    eager = Residual(layers=3)
    lowtide.limit_memory(eager, "min")
    for _ in range(2):
        step(eager, eager)
    model = Residual(layers=3)
    handle = lowtide.limit_memory(model, "min")
    compiled: Any = torch.compile(model, backend="aot_eager")
    step(compiled, model)
    del eager
    gc.collect()
    for _ in range(2):
        step(compiled, model)
    assert engine(handle) is not None and len(handle.plans) == 1


def test_a_limit_that_comes_after_and_another_budget() -> None:
    model = Residual(layers=3)
    compiled: Any = torch.compile(model, backend="aot_eager")
    step(compiled, model)
    handle = lowtide.limit_memory(model, "100%")  # as a callback does, which sees the model alone
    _, whole = step(compiled, model)
    handle.set_budget("min")
    step(compiled, model)
    assert step(compiled, model)[1] <= handle.plan.budget_bytes < 0.8 * whole
    with handle.paused():
        assert step(compiled, model)[1] >= 0.99 * whole
    handle.remove()
    assert step(compiled, model)[1] >= 0.99 * whole
    assert lowtide.handle_of(compiled) is None


def test_a_model_that_was_compiled_in_place() -> None:
    model = Residual(layers=3)
    model.compile(backend="aot_eager")
    handle = lowtide.limit_memory(model, "min")
    for _ in range(2):
        _, took = step(model, model)
    assert engine(handle) is not None and took <= handle.plan.budget_bytes


def test_a_limit_on_what_is_compiled_around_a_limited_model() -> None:
    model = Residual(layers=3)
    lowtide.limit_memory(model, "100%")
    compiled: Any = torch.compile(model, backend="aot_eager")
    handle = lowtide.limit_memory(compiled, "min")
    assert "forward" not in model.__dict__ and lowtide.handle_of(compiled) is handle
    step(compiled, model)
    assert step(compiled, model)[1] <= handle.plan.budget_bytes


class Block(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))


@pytest.mark.parametrize("in_place", [True, False], ids=["block.compile()", "torch.compile(block)"])
@pytest.mark.filterwarnings("error::lowtide.LowtideWarning", "ignore:.*it compiled code")
def test_blocks_that_were_compiled_one_by_one(in_place: bool) -> None:
    model = Residual(layers=3)
    model.blocks = nn.ModuleList(Block() for _ in range(3))
    wanted, plain = step(twin := copy.deepcopy(model), twin)
    for at, block in enumerate(model.blocks):
        compiled: Any = block.compile(backend="aot_eager") if in_place else None
        if not in_place:
            compiled = torch.compile(block, backend="aot_eager")
            model.blocks[at] = compiled
    handle: Any = lowtide.limit_memory(model, "80%")
    assert isinstance(handle, CompiledHandle) and handle._backend.name == "aot_eager"
    for _ in range(3):
        found, took = step(model, model)
        assert all(map(torch.equal, wanted, found))
    assert handle.plan is not None and handle.plan.replayed
    assert handle.budget_bytes is not None and took <= handle.budget_bytes + 16
    handle.set_budget("min")
    step(model, model)
    _, took = step(model, model)
    assert handle.budget_bytes is not None and took <= handle.budget_bytes + 16 < 0.7 * plain
    handle.remove()
    assert step(model, model)[1] >= 0.9 * plain and lowtide.handle_of(model) is None


def test_blocks_that_cannot_be_planned_for_stay_compiled_and_it_is_said() -> None:
    model = Residual(layers=3)
    for block in model.blocks:
        block.compile(backend=own_backend)
    with pytest.warns(lowtide.LowtideWarning, match=r"blocks of this model are compiled.*budget can be held"):
        handle = lowtide.limit_memory(model, "100%")
    step(model, model)
    assert not isinstance(handle, CompiledHandle) and handle.plan is not None


def own_backend(module: Any, inputs: Any) -> Any:
    return module


@pytest.mark.parametrize(
    ("options", "how", "why"),
    [
        ({}, {"backend": own_backend}, "a budget can be held for inductor, aot_eager"),
        ({"policy": "full"}, {"backend": "aot_eager"}, "knows no policy="),
        ({"tiles": "auto"}, {"backend": "aot_eager"}, "knows no tiles="),
        ({}, {"mode": "reduce-overhead"}, "CUDA graphs"),
    ],
    ids=["backend", "policy", "tiles", "cudagraphs"],
)
def test_what_it_cannot_hold_runs_eagerly_and_says_why(options: Any, how: Any, why: str) -> None:
    model = Residual(layers=3)
    wanted, _ = step(twin := copy.deepcopy(model), twin)
    handle = lowtide.limit_memory(model, "80%", **options)
    compiled: Any = torch.compile(model, **how)
    with pytest.warns(lowtide.LowtideWarning, match=f"run eagerly under the limit: .*{why}"):
        step(compiled, model)
    found, took = step(compiled, model)
    assert engine(handle) is None and all(map(torch.equal, wanted, found))
    assert took <= handle.plan.budget_bytes + 16


@pytest.mark.skipif(torch.__version__ >= (2, 15), reason="PyTorch compiles recurrent layers from 2.15 on")
def test_what_pytorch_compiles_nothing_of_runs_eagerly_and_says_why() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.lstm(x[:64])[0]

    model = Recurrent()
    handle = lowtide.limit_memory(model, "100%")
    compiled: Any = torch.compile(model, backend="aot_eager")
    with torch._dynamo.config.patch(allow_rnn=False):
        with pytest.warns(lowtide.LowtideWarning, match="eagerly under the limit: PyTorch compiled no part"):
            step(compiled, model)
        step(compiled, model)
    assert engine(handle) is None and handle.plan is not None
