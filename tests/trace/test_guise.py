"""Code that goes another way when it sees a fake tensor goes, in a trace, the way that it goes on real ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import lowtide
from lowtide import private
from lowtide.trace.answers import Answers
from lowtide.trace.guise import Alike, passing_for_real
from lowtide.trace.limited import trace_model
from lowtide.trace.real import untouched


def asks_whether_fake(tensor: torch.Tensor) -> bool:
    """As libraries do, to know whether they are exported."""
    return isinstance(tensor, torch._subclasses.FakeTensor)


class Hot(nn.Module):
    """Marks numbers that were computed, and lets experts see what they are marked for where they are."""

    def __init__(self, count: int = 4, loops: bool = False) -> None:
        super().__init__()
        self.inner, self.wide = nn.Linear(8, 8), nn.Linear(count if count > 0 else 3, 8, bias=False)
        self.count, self.loops = count, loops

    def forward(self, x: torch.Tensor) -> Any:
        hot = functional.one_hot((x[:, 0] > 0).float().cumsum(0).clamp(0, 2).long(), num_classes=self.count)
        h = functional.gelu(self.inner(x)) * self.wide(hot.float())
        if self.loops:
            for expert in (hot.sum(0) > 0).nonzero():
                chosen = hot[:, expert.item()].nonzero()[:, 0]
                h = h.index_add(0, chosen, h[chosen].tanh())
        return {"loss": h.square().mean()}


@pytest.mark.parametrize(("count", "loops"), [(4, False), (4, True), (-1, False)])
def test_marks_of_computed_numbers_are_traced_as_they_run(count: int, loops: bool) -> None:
    torch.manual_seed(0)
    model, x = Hot(count, loops), torch.randn(32, 8)
    handle = lowtide.limit_memory(model, budget="80%")
    for _ in range(2):
        model(x)["loss"].backward()
        model.zero_grad()
    assert handle.graph is not None and handle.graph.source == "fake"
    names = [operation.name for operation in handle.graph.operations]
    assert "aten.scatter_.value" in names and "aten.eq.Tensor" not in names
    assert handle._limiter.latest is not None
    assert (handle._limiter.latest.departed, handle._limiter.latest.astray) == (0, False)


@pytest.mark.parametrize("shape", [(3,), (2, 3), (), (0, 2)], ids=str)
def test_fake_marks_have_the_shape_of_real_ones(shape: tuple[int, ...]) -> None:
    real = functional.one_hot(torch.zeros(shape, dtype=torch.int64), 5)
    mode = private.fake_mode()
    with mode, Alike(Answers()):
        fake = functional.one_hot(torch.zeros(shape).long(), 5)
    assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)


class Written(nn.Module):
    """Writes computed numbers into integers that were made of nothing, and goes by what is in them then."""

    def __init__(self, listed: bool) -> None:
        super().__init__()
        self.inner, self.listed = nn.Linear(8, 8), listed

    def forward(self, x: torch.Tensor) -> Any:
        seen = torch.zeros(4, dtype=torch.int64)
        seen.index_add_(0, (x[:, 0] > 0).long(), torch.ones(len(x), dtype=torch.int64))
        h = self.inner(x)
        for _ in range(sum(seen.tolist()) if self.listed else int(seen.sum())):
            h = h.sin()
        return {"loss": h.square().mean()}


@pytest.mark.parametrize("listed", [False, True])
def test_what_fakes_are_written_into_is_known_no_longer(listed: bool) -> None:
    torch.manual_seed(0)
    model, x = Written(listed), torch.randn(6, 8)
    graph = trace_model(model, model.forward, (x,), {})
    assert graph.source == "fake"
    assert sum(operation.name == "aten.sin.default" for operation in graph.operations) == 6


class Named(nn.Module):
    """Finds experts by a name that a number is written into."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleDict({f"expert_{k}": nn.Linear(8, 8) for k in range(3)})

    def forward(self, x: torch.Tensor) -> Any:
        for k in (x.mean(0)[:2] > 0).long().unbind():
            x = self.experts[f"expert_{k}"](x)
        return {"loss": x.square().mean()}


def test_numbers_are_written_into_names() -> None:
    torch.manual_seed(0)
    model, x = Named(), torch.randn(6, 8)
    graph = trace_model(model, model.forward, (x,), {})
    assert graph.source == "fake"


class Converted(nn.Module):
    """Converts a module within its forward, after that has been used."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.inner, self.router, self.dtype = nn.Linear(8, 8), nn.Linear(8, 4), dtype

    def forward(self, x: torch.Tensor) -> Any:
        total = torch.zeros(())
        for _ in range(2):
            x = functional.gelu(self.inner(x))
            self.router = self.router.to(self.dtype)
            total = total + self.router(x.to(self.dtype)).square().mean()
        return {"loss": total.float()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("astray", [False, True])
def test_a_module_is_converted_within_the_forward(dtype: torch.dtype, astray: bool) -> None:
    torch.manual_seed(0)
    model, x = Converted(dtype), torch.randn(6, 8)
    kept = {name: (parameter, parameter.clone(), parameter.data_ptr()) for name, parameter in model.named_parameters()}
    router = model.router
    graph = trace_model(model, model.forward, (x,), {}, astray=astray)
    assert graph.source == ("real" if astray else "fake")
    assert model.router is router
    for name, parameter in model.named_parameters():
        before, copy, address = kept[name]
        assert parameter is before and parameter.dtype == torch.float32 and parameter.grad is None
        assert torch.equal(parameter, copy) and parameter.data_ptr() == address
    real = trace_model(model, model.forward, (x,), {}, astray=True)
    assert [operation.name for operation in graph.operations] == [operation.name for operation in real.operations]


def test_a_converted_module_with_gradients_has_them_again() -> None:
    model, x = Converted(torch.float64), torch.randn(6, 8)
    model.router.weight.grad = grad = torch.ones(4, 8)
    with untouched([model]):
        model(x)["loss"].backward()
        assert model.router.weight.dtype == torch.float64
    assert model.router.weight.grad is grad and torch.equal(grad, torch.ones(4, 8)) and model.router.weight.dtype == torch.float32


class Exported(nn.Module):
    """Looks into a mask of floats, unless that is fake."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> Any:
        h = self.inner(x)
        if asks_whether_fake(mask) or not torch.all(mask == 1):
            h = (h + mask[:, None]).sin()
        return {"loss": h.square().mean()}


def test_a_model_is_not_told_that_its_tensors_are_fake() -> None:
    model = Exported()
    graph = trace_model(model, model.forward, (torch.randn(6, 8), torch.ones(6)), {})
    assert graph.source == "fake"
    assert not any(operation.name == "aten.sin.default" for operation in graph.operations)


def test_only_fakes_of_traces_pass_for_real_and_only_meanwhile() -> None:
    own, convert = torch._subclasses.FakeTensor, nn.Module._apply
    traced, other = private.fake_mode().from_tensor(torch.ones(2)), torch._subclasses.FakeTensorMode().from_tensor(torch.ones(2))
    with passing_for_real():
        with passing_for_real():
            kept = torch._subclasses.FakeTensor
        assert not isinstance(traced, kept) and isinstance(other, kept) and not isinstance(torch.ones(2), kept)
        assert issubclass(own, kept) and not issubclass(torch.Tensor, kept)
        layer = nn.Linear(2, 2).to(torch.float64)
        assert layer.weight.dtype == torch.float64
    assert torch._subclasses.FakeTensor is own and nn.Module._apply is convert
    assert asks_whether_fake(traced)
