"""Many compiled models of one class in a process: each has its budget, and goes when nobody holds it."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide.compiled import compiled_handle
from lowtide.meter import peak, resident_bytes
from lowtide.private import compiling


class Model(nn.Module):
    def __init__(self, returns_loss: bool = True) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)
        self.returns_loss = returns_loss

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.down(nn.functional.gelu(self.up(x)))
        return x.square().mean() if self.returns_loss else x


def peak_of(compiled: Any, x: torch.Tensor) -> int:
    compiled.zero_grad(set_to_none=True)
    resident = resident_bytes(compiled) + x.nbytes
    with peak("cpu") as seen:
        compiled(x).sum().backward()
    return seen.peak_bytes + resident


@pytest.fixture(params=[True, False], ids=["counted apart", "more room"])
def room(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where PyTorch counts each backend's recompiles apart, and as where it counts all together."""
    if request.param and not compiling.counted_apart():
        pytest.skip("this PyTorch counts recompiles of all backends together")
    if not request.param:
        for module in (compiling, compiled_handle):
            monkeypatch.setattr(module, "counted_apart", dict)


@pytest.mark.usefixtures("room")
@pytest.mark.parametrize("returns_loss", [True, False], ids=["one graph", "recorded"])
def test_budgets_are_held_beyond_dynamos_recompile_limit(returns_loss: bool) -> None:
    """The limit is 8; here 1, which is the same with fewer models. The accumulated one is 256."""
    x = torch.randn(256, 16)
    with torch._dynamo.config.patch(recompile_limit=1, accumulated_recompile_limit=2):
        models = [lowtide.compile(Model(returns_loss), "min", backend="aot_eager") for _ in range(3)]
        for _ in range(2):
            for compiled in models:
                compiled(x).sum().backward()
        for compiled in models:
            plan = lowtide.handle_of(compiled).plan
            assert plan is not None and peak_of(compiled, x) <= plan.budget_bytes + 16
        handle = lowtide.handle_of(models[0])
        handle.set_budget("100%")
        models[0](x).sum().backward()
        assert handle.plan is not None and handle.plan.changes_nothing


@pytest.mark.filterwarnings("error:.*recompile_limit:lowtide.LowtideWarning")
def test_blocks_that_are_compiled_one_by_one_have_room_too() -> None:
    x = torch.randn(256, 16, requires_grad=True)
    with torch._dynamo.config.patch(recompile_limit=1):
        for _ in range(2):
            blocks = nn.Sequential(nn.Sequential(*(Model(False) for _ in range(2))))
            compiled = lowtide.compile(blocks, "min", backend="aot_eager", regional=True)
            for _ in range(2):
                compiled(x).sum().backward()
            handle = lowtide.handle_of(compiled)
            assert handle.plan is not None and len(handle.variants) == 1, "the blocks share a graph"


def test_a_recompile_limit_that_is_reached_is_named() -> None:
    with torch._dynamo.config.patch(recompile_limit=1):
        compiled = lowtide.compile(Model(), "100%", backend="aot_eager", dynamic=False)
        compiled(torch.randn(8, 16)).backward()
        compiled.zero_grad(set_to_none=True)
        with pytest.warns(lowtide.LowtideWarning, match="as often as .*recompile_limit allows"):
            compiled(torch.randn(9, 16)).backward()


def test_a_compiled_model_that_nobody_holds_is_freed() -> None:
    compiled = lowtide.compile(Model(), "100%", backend="aot_eager")
    compiled(torch.randn(8, 16)).backward()
    model = weakref.ref(compiled._orig_mod)
    del compiled
    gc.collect()
    assert model() is None
