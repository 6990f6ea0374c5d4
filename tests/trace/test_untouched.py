"""A trace leaves everything as it was."""

from __future__ import annotations

import copy

import pytest
import torch
from small_step import N, batch, make, names
from torch import nn

import lowtide
from lowtide import TraceError
from lowtide.interception import interceptors


@pytest.mark.parametrize("fake", [False, True])
@pytest.mark.parametrize("with_gradients", [False, True])
def test_everything_is_as_before(fake: bool, with_gradients: bool) -> None:
    model = make()
    if with_gradients:
        model(batch()).backward()
    model.cache = torch.ones(3)
    expected = copy.deepcopy(model.state_dict())
    grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    identities = [(id(p), id(p.grad), p.data_ptr(), p._version) for p in model.parameters()]
    attributes = {m: dict(m.__dict__) for m in model.modules()}
    cache = model.cache
    state = torch.get_rng_state()
    lowtide.trace(model, batch(), fake=fake, costs=False)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(expected[k], v) for k, v in model.state_dict().items())
    for parameter, grad in zip(model.parameters(), grads, strict=True):
        assert (grad is None and parameter.grad is None) or torch.equal(grad, parameter.grad)
    assert [
        (id(p), id(p.grad), p.data_ptr(), p._version) for p in model.parameters()
    ] == identities or not fake
    assert [id(p) for p in model.parameters()] == [i[0] for i in identities]
    for module, before in attributes.items():
        for name, item in before.items():
            if fake or name not in ("cache", "_buffers"):
                assert module.__dict__[name] is item, name
    assert all(type(b) is torch.Tensor for b in model.buffers())
    assert model.cache is cache
    assert interceptors() == []


@pytest.mark.parametrize("fake", [False, True])
def test_everything_is_as_before_when_it_fails(fake: bool) -> None:
    model = make()
    state, expected = torch.get_rng_state(), copy.deepcopy(model.state_dict())
    hooks = len(torch.nn.modules.module._global_forward_pre_hooks)

    def step(x: torch.Tensor) -> torch.Tensor:
        model(x)
        raise KeyError("on the way")

    with pytest.raises((KeyError, TraceError), match="on the way"):
        lowtide.trace(step, batch(), fake=fake, costs=False)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(expected[k], v) for k, v in model.state_dict().items())
    assert all(type(p) is nn.Parameter and p.grad is None for p in model.parameters())
    assert len(torch.nn.modules.module._global_forward_pre_hooks) == hooks
    assert interceptors() == [] and torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    model(batch()).backward()


@pytest.mark.parametrize("own_backward", [False, True])
@pytest.mark.parametrize("with_gradients", [False, True])
def test_gradients_of_tensors_in_no_module_are_as_before(own_backward: bool, with_gradients: bool) -> None:
    class Weights:
        """No module, so nobody finds its tensors but who sees them used."""

        def __init__(self) -> None:
            self.seen_as_view = torch.randn(4 * N, N, requires_grad=True)
            self.table = {"last": torch.randn(4 * N, requires_grad=True)}
            self.all = [self.seen_as_view, *self.table.values()]

        def step(self, x: torch.Tensor) -> torch.Tensor | None:
            loss = ((x @ self.seen_as_view.t()).relu() @ self.table["last"]).square().mean()
            return loss.backward() if own_backward else loss

    weights = Weights()
    if with_gradients:
        for tensor in weights.all:
            tensor.grad = torch.ones_like(tensor)
    given = [tensor.grad for tensor in weights.all]
    graph = lowtide.trace(weights.step, batch(), costs=False)
    assert names(graph, "backward")
    for tensor, gradient in zip(weights.all, given, strict=True):
        assert tensor.grad is gradient
        assert gradient is None or torch.equal(gradient, torch.ones_like(tensor))


def test_timing_operations_changes_nothing_either() -> None:
    model = make()
    state, expected = torch.get_rng_state(), copy.deepcopy(model.state_dict())
    graph = lowtide.trace(model, batch())
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(expected[k], v) for k, v in model.state_dict().items())
    assert graph.plain_seconds > 0 and all(o.seconds > 0 for o in graph.operations)
