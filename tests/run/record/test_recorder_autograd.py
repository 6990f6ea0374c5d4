"""Promises 1 and 2 around autograd: custom functions, retained graphs, double backward, accumulation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from function_model import N, batch, make
from torch import nn

import lowtide

# ---- custom functions ----------------------------------------------------------------------------


class SavesEverything(torch.autograd.Function):
    """Saves an input, an output and an intermediate, takes what is no tensor, returns what has no
    gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, factor: float, names: list[str]
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        middle = x.exp()
        out = middle * factor
        index = out.argmax(-1)
        ctx.save_for_backward(x, middle, out, index)
        ctx.mark_non_differentiable(index)
        ctx.factor = factor
        return out, index, len(names)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, *_: Any) -> tuple[torch.Tensor, None, None]:
        x, middle, out, index = ctx.saved_tensors
        chosen = torch.zeros_like(out).scatter_(1, index[:, None], 1.0)
        return grad * ctx.factor * middle + chosen * out.cos() * x, None, None


class MarksDirty(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x.mul_(2).sin_()
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (y,) = ctx.saved_tensors
        return 2 * grad * (1 - y * y).clamp_min(0).sqrt()


class Separate(torch.autograd.Function):
    """The newer style with setup_context, saving an attribute on ctx as well."""

    @staticmethod
    def forward(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x @ y.t(), x * y

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)
        ctx.sum_of_output = output[0].sum()

    @staticmethod
    def backward(ctx: Any, first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = ctx.saved_tensors
        return first @ y * 1.0 + second * y + ctx.sum_of_output * 0.001, first.t() @ x + second * x


class RunsAutogradInside(torch.autograd.Function):
    """As activation checkpointing does: a forward without, a backward with a graph of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        with torch.no_grad():
            return (x.exp() * x).sin()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            twin = x.detach().requires_grad_()
            return torch.autograd.grad((twin.exp() * twin).sin(), twin, grad)[0]


def with_saves(h: torch.Tensor) -> torch.Tensor:
    out, index, count = SavesEverything.apply(h * 1.5, 0.5, ["a", "b"])
    assert not index.requires_grad and count == 2
    return out * h + index[:, None].float().cos()


def with_dirty(h: torch.Tensor) -> torch.Tensor:
    return MarksDirty.apply(h * 0.3) + h.exp()


def with_setup_context(h: torch.Tensor) -> torch.Tensor:
    square, product = Separate.apply(h.exp(), h.cos())
    return square @ product + product


def with_inner_autograd(h: torch.Tensor) -> torch.Tensor:
    return RunsAutogradInside.apply(h.exp() * 0.2) * h


def with_torch_checkpoint(h: torch.Tensor) -> torch.Tensor:
    return torch.utils.checkpoint.checkpoint(lambda t: (t.exp() * t).sin().exp(), h, use_reentrant=False) * h


def with_reentrant_checkpoint(h: torch.Tensor) -> torch.Tensor:
    return torch.utils.checkpoint.checkpoint(lambda t: (t.exp() * t).sin().exp(), h, use_reentrant=True) * h


def with_scope_inside(h: torch.Tensor) -> torch.Tensor:
    with lowtide.checkpointing():
        y = (h.exp() * h).sin()
        with lowtide.checkpointing(policy="keep_all"):
            y = y.exp() * y
    return y * h


def with_grad_inside(h: torch.Tensor) -> torch.Tensor:
    """A gradient taken within forward, with a graph: energy models and physics."""
    with torch.enable_grad():
        position = h.exp()
        energy = (position.sin() * position).sum()
        (force,) = torch.autograd.grad(energy, position, create_graph=True)
    return force * position


def with_hooks(h: torch.Tensor) -> torch.Tensor:
    y = h.exp()
    y.register_hook(lambda g: g * 2)
    y.retain_grad()
    return y * y


CUSTOM = [
    with_saves, with_dirty, with_setup_context, with_inner_autograd, with_torch_checkpoint,
    with_reentrant_checkpoint, with_scope_inside,
    with_grad_inside, with_hooks,
]  # fmt: skip


@pytest.mark.parametrize("function", CUSTOM, ids=lambda f: f.__name__)
def test_custom_functions(twins: Any, function: Any) -> None:
    twins(make(function)).check(lambda m: m(batch()))


@pytest.mark.parametrize("function", CUSTOM, ids=lambda f: f.__name__)
def test_custom_functions_in_a_scope(same: Any, function: Any) -> None:
    model, grads = make(function), []
    for scoped in (False, True):
        model.zero_grad()
        with lowtide.checkpointing(policy=None if scoped else "keep_all"):
            loss = model(batch())
        loss.backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    assert all(map(same, *grads))


# ---- more than one backward ----------------------------------------------------------------------


def test_retained_graph_goes_backward_again(twins: Any) -> None:
    def run(model: nn.Module) -> torch.Tensor:
        loss = model(batch())
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        return loss  # a third time, by the twins

    twins(make(with_saves)).check(run)


def test_gradients_of_a_part_first_then_the_rest(twins: Any) -> None:
    def run(model: Any) -> torch.Tensor:
        x = batch().requires_grad_()
        loss = model(x)
        (grad,) = torch.autograd.grad(loss, x, retain_graph=True)
        return loss + grad.square().sum()  # no graph behind grad: a constant

    twins(make()).check(run)


def test_second_backward_without_retaining_raises_as_plain_does() -> None:
    model = make()
    lowtide.limit_memory(model, policy="full")
    for _ in range(2):
        loss = model(batch())
        loss.backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()


def test_double_backward(twins: Any) -> None:
    def penalty(model: nn.Module) -> torch.Tensor:
        x = batch().requires_grad_()
        loss = model(x)
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + grad.square().sum()

    pair = twins(make())
    for seed in range(3):
        pair.step(penalty, seed)


def test_double_backward_through_a_scope(same: Any) -> None:
    model, grads = make(), []
    for scoped in (False, True):
        model.zero_grad()
        x = batch().requires_grad_()
        with lowtide.checkpointing(policy=None if scoped else "keep_all"):
            loss = model(x)
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + grad.square().sum()).backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    assert all(map(same, *grads))


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(N, N), nn.GELU(), nn.Dropout(0.2), nn.Linear(N, N), nn.Tanh())
        self.heads = nn.ModuleList([nn.Linear(N, 1), nn.Linear(N, 2)])

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.trunk(x)
        return self.heads[0](h).square().sum(), self.heads[1](h).exp().sum()


@pytest.mark.parametrize("order", ["first", "second", "sum", "only second"])
def test_several_losses(twins: Any, order: str) -> None:
    def run(model: nn.Module) -> torch.Tensor:
        first, second = model(batch())
        if order == "first":
            first.backward(retain_graph=True)
            return second
        if order == "second":
            second.backward(retain_graph=True)
            return first
        return second if order == "only second" else first + 0.5 * second

    twins(TwoHeads()).check(run)


def test_losses_backward_together(twins: Any) -> None:
    def run(model: nn.Module) -> torch.Tensor:
        losses = model(batch())
        torch.autograd.backward(list(losses))
        return sum(losses).detach()

    pair = twins(TwoHeads())
    for seed in range(3):
        pair.step(run, seed, backward=False)


@pytest.mark.filterwarnings("ignore::lowtide.LowtideWarning")
def test_gradient_accumulation(twins: Any) -> None:
    pair = twins(TwoHeads(), loss_fn=sum)
    for round_ in range(2):
        for k in range(3):
            pair.step(lambda m, k=k: sum(m(batch(k))), seed=10 * round_ + k, clear=k == 0)
    assert len(pair.handle.plans) == 2  # without gradients and with


@pytest.mark.filterwarnings("ignore::lowtide.LowtideWarning")
def test_many_forwards_before_any_backward(twins: Any) -> None:
    pair = twins(TwoHeads(), loss_fn=sum)
    for seed in range(2):
        pair.step(lambda m: sum(sum(m(batch(k))) for k in range(3)), seed)


def test_backward_inputs_only(twins: Any, same: Any) -> None:
    pair = twins(make())
    found = []
    for model in (pair.plain, pair.limited):
        loss = model(batch())
        loss.backward(inputs=[model.last.weight])
        assert model.first.weight.grad is None
        found.append(model.last.weight.grad)
    assert same(*found)


def test_parameters_that_hook_their_gradients(twins: Any) -> None:
    """An optimizer inside backward, as low-memory training does it."""

    def run(model: nn.Module) -> torch.Tensor:
        return model(batch())

    def update(parameter: torch.Tensor) -> None:
        with torch.no_grad():
            parameter.sub_(parameter.grad, alpha=0.01)
        parameter.grad = None

    pair = twins(make())
    for model in (pair.plain, pair.limited):
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(update)
    for seed in range(3):
        pair.step(run, seed)


# ---- between forward and backward --------------------------------------------------------------


def test_optimizer_step_between_forward_and_backward_raises_as_plain_does() -> None:
    for limited in (False, True):
        model = make(with_saves)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        if limited:
            lowtide.limit_memory(model, policy="full")
        first, second = model(batch()), model(batch(4))
        first.backward()
        optimizer.step()
        with pytest.raises(RuntimeError, match=r"modified by an in-?place operation"):
            second.backward()
