"""Code outside overwrites what a replay starts from, between forward and backward or within backward, in the
first step or later: the gradients are the plain step's, and its error is raised where it raises one.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_model import needs_meter
from torch import nn

import lowtide
from lowtide import private
from lowtide.interception import any_watched
from lowtide.meter import measure

N = 8
Change = Callable[[torch.Tensor], Any]


class Net(nn.Module):
    """Computes from a buffer, an attribute, its input and parameters, and saves none of the first two."""

    average: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.register_buffer("average", torch.rand(N, N))
        self.attribute = torch.rand(N, N)
        self.linear, self.out = nn.Linear(N, N), nn.Linear(N, N)
        self.scale, self.direction = nn.Parameter(torch.rand(N)), nn.Parameter(torch.rand(N, N))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.direction * (self.scale / self.direction.norm(dim=1))[:, None]
        h = self.linear(x) * self.average.exp() * self.attribute.exp() * (x * 3).sigmoid()
        return self.out(torch.tanh(h @ weight).sin()).square()


def through_data(tensor: torch.Tensor) -> None:
    tensor.data.mul_(0.5)


def all_at_once(tensor: torch.Tensor) -> None:
    torch._foreach_mul_([tensor.data], 0.5)  # pyright: ignore


def in_place(tensor: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.copy_(tensor * 0.5)


def other_data(tensor: torch.Tensor) -> None:
    tensor.data = tensor.data * 0.5


def other_storage(tensor: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.set_(tensor * 0.5)  # type: ignore[call-overload]


WHAT: dict[str, Callable[[Net, torch.Tensor], Any]] = {
    "buffer": lambda model, x: model.average,
    "attribute": lambda model, x: model.attribute,
    "input": lambda model, x: x,
    "weight": lambda model, x: model.linear.weight,
    "scale": lambda model, x: model.scale,
    "direction": lambda model, x: model.direction,
}


def trained(model: Net, what: str, change: Change, within: bool, first: int) -> list[Any]:
    """Each step's gradients, or the type of its error."""
    found: list[Any] = []
    noise = torch.Generator().manual_seed(1)
    for step in range(4):
        model.zero_grad()
        x = torch.rand(N, N, generator=noise)
        loss, target = model(x).sum(), WHAT[what](model, x)
        if step >= first:
            if within:
                loss.register_hook(lambda _, target=target: change(target))
            else:
                change(target)
        try:
            loss.backward()
            found.append([one.grad for one in model.parameters()])
        except RuntimeError as error:
            found.append(type(error))
    return found


@pytest.mark.parametrize("within", [False, True], ids=["between", "in_backward"])
@pytest.mark.parametrize("change", [through_data, all_at_once, in_place, other_data, other_storage])
@pytest.mark.parametrize("what", WHAT)
def test_gradients_are_the_plain_steps(
    what: str, change: Change, within: bool, everything: Any, same: Any
) -> None:
    for first in (0, 2):
        limited = Net()
        lowtide.limit_memory(limited, policy=everything)
        expected = trained(Net(), what, change, within, first)
        for plain, own in zip(expected, trained(limited, what, change, within, first), strict=True):
            if isinstance(plain, list):
                assert isinstance(own, list) and all(map(same, plain, own))
            else:
                assert plain is own is RuntimeError  # autograd's own


def test_nothing_is_watched_after_the_step(everything: Any) -> None:
    model = Net()
    handle = lowtide.limit_memory(model, policy=everything)
    trained(model, "buffer", through_data, within=True, first=2)
    handle.remove()  # with it goes the latest step
    gc.collect()
    any_watched()  # drops the tapes that are gone
    torch.zeros(1).zero_()  # the next operation that writes finds nothing watched
    # What an earlier test in this process left, such as a graph whose backward failed, may be watched still.
    assert private.is_key_included(private.dispatch_key("TESTING_ONLY_GenericMode")) == any_watched()


@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize("change", [through_data, in_place])
def test_saved_tensors_are_read_as_a_plain_step_reads_them(
    place: int, change: Change, everything: Any, same: Any
) -> None:
    """What autograd saved and the program wrote to afterwards, past the version counter, shows what was
    written; what was computed from it before does not. Evicted tensors are no exception.
    """

    class Shows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.linear, self.out = nn.Linear(N, N), nn.Linear(N, N)
            self.shown: list[torch.Tensor] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.linear(x)
            t = h.tanh()
            u = self.out(t)
            v = u.sin()
            self.shown = [h, t, u, v]
            return v.square()

    def steps(model: Shows, first: int) -> list[Any]:
        found: list[Any] = []
        noise = torch.Generator().manual_seed(1)
        for step in range(4):
            model.zero_grad()
            loss = model(torch.rand(N, N, generator=noise)).sum()
            if step >= first:
                change(model.shown[place])
            try:
                loss.backward()
                found.append([one.grad for one in model.parameters()])
            except RuntimeError as error:
                found.append(type(error))
        return found

    for first in (0, 2):
        limited = Shows()
        lowtide.limit_memory(limited, policy=everything)
        for plain, own in zip(steps(Shows(), first), steps(limited, first), strict=True):
            if isinstance(plain, list):
                assert isinstance(own, list) and all(map(same, plain, own))
            else:
                assert plain is own is RuntimeError


def test_a_scope_starts_from_what_it_read(same: Any) -> None:
    gradients = []
    for around in (lambda call, x: call(x), lowtide.checkpoint):
        model, x = Net(), torch.rand(N, N, generator=torch.Generator().manual_seed(1))
        loss = around(model, x).sum()
        model.average.data.zero_()
        loss.backward()
        gradients.append([one.grad for one in model.parameters()])
    assert all(map(same, *gradients))


def test_two_forwards_of_a_model_that_moves_its_codebook(twins: Any) -> None:
    """As vector quantization does: each forward moves the table that it looked up from, through ``.data``."""

    class Codes(nn.Module):
        table: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(N, N)
            self.register_buffer("table", torch.rand(N, N))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.linear(x)
            y = (h * self.table.exp()).sin()
            self.table.data.lerp_(h.detach(), 0.1)
            return y.sum()

    x = torch.rand(N, N, generator=torch.Generator().manual_seed(1))
    twins(Codes()).check(lambda model: model(x) + model(x * 2))


class Reads(torch.autograd.Function):
    """A custom kernel (Triton): it asks for the address of what it reads, as numpy does."""

    pointers = False

    @classmethod
    def look(cls, *tensors: torch.Tensor) -> None:
        if cls.pointers:
            assert all(one.data_ptr() and one.detach().numpy() is not None for one in tensors)

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        Reads.look(x, weight)
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        Reads.look(x, weight)
        return gradient @ weight.T, x.T @ gradient


@needs_meter
def test_a_pointer_that_is_read_costs_nothing(everything: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that the program holds is an alias that asking for its address would copy."""

    class Kernels(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList(torch.rand(64, 64) / 64 for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for weight in self.weights:
                x = Reads.apply(x.sin(), weight * 1.5).tanh()  # type: ignore[union-attr]
            return x.sum()

    peaks = set()
    for pointers in (False, True):
        monkeypatch.setattr(Reads, "pointers", pointers)
        model, x = Kernels(), torch.rand(32, 64)
        addresses = [weight.data_ptr() for weight in model.weights]
        handle = lowtide.limit_memory(model, policy=everything)
        for _ in range(3):
            model.zero_grad()
            peak = measure(lambda: model(x).backward(), timeline=False).peak_bytes  # noqa: B023
        assert handle.plan is not None and handle.plan.replayed
        assert [weight.data_ptr() for weight in model.weights] == addresses
        peaks.add(peak)
    assert len(peaks) == 1
