"""Steps of several backwards, with scratch memory, or on other threads hold their budget, or it is said."""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from compare import SAID, SLACK_BYTES, TRIES, Limit, check, peak_of
from loops import data, mlp
from torch import nn

import lowtide

BUDGETS = ["100%", "60%"]


LOOKED = "from which lowtide plans, took"


@dataclass
class Stepped:
    """One limited step: the most live bytes, the budget, and what lowtide said."""

    peak_bytes: int
    budget_bytes: int
    messages: list[str]

    @property
    def excess_bytes(self) -> int:
        """Bytes above the budget, as far as they matter."""
        return max(0, self.peak_bytes - self.budget_bytes - SLACK_BYTES)

    @property
    def says(self) -> bool:
        """Whether lowtide said in this step that one was above its budget."""
        return any(SAID.search(message) or LOOKED in message for message in self.messages)


def stepped(
    model: nn.Module, step: Callable[[int], Any], share: float, steps: int = 5
) -> tuple[lowtide.Handle, list[Stepped]]:
    """Steps of a model within a share of what its plain steps take, or where that is refused within the
    smallest budget named.
    """
    budget = int(share * max(peak_of(functools.partial(step, number), [model])[0] for number in range(2)))
    for _ in range(TRIES):
        model.zero_grad()
        handle = lowtide.limit_memory(model, budget)
        found = []
        try:
            for number in range(steps):
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    peak, _ = peak_of(functools.partial(step, number), [model])
                texts = [str(w.message) for w in caught if issubclass(w.category, lowtide.LowtideWarning)]
                found.append(Stepped(peak, budget, texts))
            return handle, found
        except lowtide.BudgetError as error:
            handle.remove()
            assert error.smallest_bytes is not None and error.smallest_bytes > budget
            budget = error.smallest_bytes
    raise AssertionError("the smallest budgets that were named do not do")


def assert_held_or_said(found: list[Stepped]) -> None:
    """From the second step on each is within its budget, or lowtide has said that one was not: by the next
    step at the latest.
    """
    silent = {
        number: one.excess_bytes
        for number, one in enumerate(found)
        if number and one.excess_bytes and not any(other.says for other in found[: number + 2])
    }
    budget = found[0].budget_bytes
    assert not silent, f"bytes above the budget of {budget:,} that nothing was said about, by step: {silent}"


def penalized(model: nn.Module, number: int) -> None:
    """A gradient penalty, as WGAN-GP has it."""
    model.zero_grad()
    x = data(number, rows=512).requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    (slope.norm(dim=1) - 1).square().mean().backward()


def physics(model: nn.Module, number: int) -> None:
    """Second derivatives of the output by the input, as physics-informed networks have them."""
    model.zero_grad()
    x = data(number, rows=512).requires_grad_()
    u = model(x)
    (first,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first[:, 0].sum(), x, create_graph=True)
    (u[:, 0] + second[:, 0] - first[:, 1]).square().mean().backward()


def meta_learned(model: nn.Module, number: int) -> None:
    """One inner step, through which the outer loss is derived, as MAML has it."""
    model.zero_grad()
    weights = dict(model.named_parameters())
    inner = torch.func.functional_call(model, weights, (data(number, rows=512),)).square().mean()
    grads = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
    fast = {name: weight - 0.1 * grad for (name, weight), grad in zip(weights.items(), grads, strict=True)}
    torch.func.functional_call(model, fast, (data(number + 50, rows=512),)).square().mean().backward()


@pytest.mark.parametrize("step", [penalized, physics, meta_learned])
@pytest.mark.parametrize("share", [1.0, 0.7])
def test_graphs_of_gradients_stay_within_the_budget_or_it_is_said(
    step: Callable[[nn.Module, int], None], share: float
) -> None:
    torch.manual_seed(0)
    model = mlp(width=64, act=nn.Tanh)
    _, found = stepped(model, lambda number: step(model, number), share)
    assert_held_or_said(found)


@pytest.mark.parametrize("share", [1.0, 0.7])
def test_weights_that_were_computed_are_asked_for_no_gradient(share: float) -> None:
    """PyTorch warns of every one."""
    torch.manual_seed(0)
    model = mlp(width=64, act=nn.Tanh)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*is not a leaf")
        stepped(model, lambda number: meta_learned(model, number), share)


def test_steps_of_several_backwards_keep_to_the_smallest_budget_once_one_was_above_it() -> None:
    torch.manual_seed(0)
    model = mlp(width=64, act=nn.Tanh)
    handle = lowtide.limit_memory(model, "min")
    peaks = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(4):
            peaks.append(peak_of(lambda: physics(model, number), [model])[0])  # noqa: B023
            assert handle.plan is not None and handle.plan.budget_bytes is not None
            assert number < 2 or peaks[-1] <= handle.plan.budget_bytes + SLACK_BYTES
    assert not [one for one in caught if "retain_graph" in str(one.message)], "the first step had as many"


@pytest.mark.parametrize("step", [penalized, physics, meta_learned])
@pytest.mark.parametrize("budget", BUDGETS)
def test_graphs_of_gradients_are_the_plain_ones(step: Callable[[nn.Module, int], None], budget: str) -> None:
    def pattern(limit: Limit) -> Iterator[Any]:
        model = limit(mlp(width=64, act=nn.Tanh))
        for number in range(3):
            step(model, number)
            yield model

    check(pattern, budget)


class Hungry(nn.Module):
    """Layers around an operation of an extension that takes much memory for itself while it runs."""

    def __init__(self, operation: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.one, self.two, self.operation = nn.Linear(16, 64), nn.Linear(64, 4), operation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.operation(self.one(x).tanh()).tanh()).square().mean()


@pytest.fixture(scope="module")
def python_operation() -> Callable[[torch.Tensor], torch.Tensor]:
    """An operation written in Python, opaque to the dispatcher, with scratch of 16 times its input, forward
    and backward.
    """

    @torch.library.custom_op("lowtide_strangers::hungry", mutates_args=())
    def hungry(x: torch.Tensor) -> torch.Tensor:
        return x * torch.ones(16, *x.shape).amax(0)

    hungry.register_fake(torch.empty_like)
    hungry.register_autograd(lambda ctx, grad: hungry(grad))
    return hungry


CPP = """
#include <torch/library.h>
#include <ATen/ATen.h>

at::Tensor hungry(const at::Tensor& x) {
  at::Tensor scratch = at::ones({16, x.numel()}, x.options());
  return x * scratch.amax(0).view_as(x);
}
at::Tensor hungry_meta(const at::Tensor& x) { return at::empty_like(x); }
TORCH_LIBRARY(lowtide_strangers_cpp, m) { m.def("hungry(Tensor x) -> Tensor"); }
TORCH_LIBRARY_IMPL(lowtide_strangers_cpp, CPU, m) { m.impl("hungry", &hungry); }
TORCH_LIBRARY_IMPL(lowtide_strangers_cpp, Meta, m) { m.impl("hungry", &hungry_meta); }
"""


@pytest.fixture(scope="module")
def cpp_operation() -> Callable[[torch.Tensor], torch.Tensor]:
    """The same, written in C++."""
    from torch.utils import cpp_extension

    cpp_extension.load_inline(
        "lowtide_strangers_cpp", CPP, is_python_module=False, no_implicit_headers=True, extra_cflags=["-O0"]
    )
    operation = torch.ops.lowtide_strangers_cpp.hungry
    torch.library.register_autograd("lowtide_strangers_cpp::hungry", lambda ctx, grad: operation(grad))
    return operation


@pytest.mark.parametrize("written", ["python", pytest.param("cpp", marks=pytest.mark.slow)])
@pytest.mark.parametrize("share", [1.0, 0.9])
def test_scratch_of_extensions_counts(written: str, share: float, request: pytest.FixtureRequest) -> None:
    torch.manual_seed(0)
    model = Hungry(request.getfixturevalue(f"{written}_operation"))

    def step(number: int) -> None:
        model.zero_grad()
        model(data(number, rows=512)).backward()

    handle, found = stepped(model, step, share)
    assert_held_or_said(found)
    assert handle.plan is not None
    assert found[-1].peak_bytes == pytest.approx(handle.plan.predicted_peak_bytes, rel=0.02, abs=SLACK_BYTES)


class Grows(nn.Module):
    """Takes more memory where it is told to, which no argument shows."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.extra, self.where = mlp(width=64), 0, "forward"

    def take(self, where: str) -> float:
        """Memory for a moment."""
        return torch.ones(self.extra // 4).sum().item() if self.extra and self.where == where else 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.net[:2](x)
        if h.requires_grad:
            h.register_hook(lambda grad: grad if self.take("backward") >= 0 else None)
        self.take("forward")
        return self.net[2:](h)


@pytest.mark.parametrize("grows_at", [2, 12])
@pytest.mark.parametrize("where", ["forward", "backward", "loss"])
def test_a_step_above_its_budget_is_said_though_the_plan_keeps_everything(where: str, grows_at: int) -> None:
    torch.manual_seed(0)
    model = Grows()

    def step(number: int) -> None:
        model.extra, model.where = (4_000_000 if number == grows_at else 0), where
        model.zero_grad()
        output = model(data(number, rows=512))
        model.take("loss")
        output.square().mean().backward()

    _, found = stepped(model, step, share=1.5, steps=grows_at + 2)
    assert found[grows_at].peak_bytes > 2 * found[grows_at].budget_bytes
    assert any(one.says for one in found[grows_at:]), "nothing was said"
    assert not any(one.says for one in found[:grows_at]), "said of steps that held"


@pytest.mark.parametrize("forward_too", [False, True], ids=["backward", "forward and backward"])
@pytest.mark.parametrize("share", [1.0, 0.7])
def test_another_thread(share: float, forward_too: bool) -> None:
    def in_thread(work: Callable[[], None]) -> None:
        failed: list[BaseException] = []

        def run() -> None:
            try:
                work()
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        if failed:
            raise failed[0]

    def step(model: nn.Module, number: int) -> None:
        model.zero_grad()
        x = data(number, rows=512)
        if forward_too:
            in_thread(lambda: model(x).square().mean().backward())
        else:
            loss = model(x).square().mean()
            in_thread(loss.backward)

    def pattern(limit: Limit) -> Iterator[Any]:
        model = limit(mlp(width=64))
        for number in range(3):
            step(model, number)
            yield model

    run = check(pattern, f"{share * 100:.0f}%")
    assert not [text for text in run.messages if "Run backward after each forward" in text], "it was run"
    torch.manual_seed(0)
    model = mlp(width=64)
    _, found = stepped(model, lambda number: step(model, number), share)
    assert_held_or_said(found)
    looks = [one for one in found if one.excess_bytes]
    assert all(LOOKED in " ".join(one.messages) for one in looks[1:])
