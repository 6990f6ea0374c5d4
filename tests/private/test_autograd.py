"""Autograd's engine does what `lowtide.private.dispatch` says."""

from __future__ import annotations

import importlib
import inspect
import threading
from typing import Any

import pytest
import torch

from lowtide import private
from lowtide.interception import Interceptor, proceed


def test_in_backward() -> None:
    seen: list[bool] = []
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(lambda g: seen.append(private.in_backward()))
    assert not private.in_backward()
    y.sum().backward()
    assert seen == [True] and not private.in_backward()


def test_in_backward_is_the_threads_own() -> None:

    seen: list[bool] = []

    def hook(grad: torch.Tensor) -> None:
        thread = threading.Thread(target=lambda: seen.append(private.in_backward()))
        thread.start()
        thread.join()

    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(hook)
    y.sum().backward()
    assert seen == [False]


def test_node_key_tells_whose_turn_it_is() -> None:
    class Turns(Interceptor):
        def __init__(self) -> None:
            self.nodes: set[Any] = set()

        def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            self.nodes.add(private.node_key())
            return proceed(func, args, kwargs)

    assert private.node_key() is None
    x = torch.ones(3, requires_grad=True)
    with Turns() as turns:
        (x.sin() * x.cos()).sum().backward()
    assert {key[0] for key in turns.nodes if key} >= {"SinBackward0", "CosBackward0", "MulBackward0"}


def test_at_backward_end() -> None:
    order: list[str] = []
    x = torch.ones(2, requires_grad=True)
    y = x * 2

    def hook(grad: torch.Tensor) -> None:
        order.append("begin")
        private.at_backward_end(lambda: order.append("end"))

    y.register_hook(hook)
    x.register_post_accumulate_grad_hook(lambda p: order.append("leaf"))
    y.sum().backward()
    assert order == ["begin", "leaf", "end"]


def test_at_backward_end_lets_errors_out() -> None:
    x = torch.ones(2, requires_grad=True)
    y = x * 2

    def fail() -> None:
        raise KeyError("out")

    y.register_hook(lambda g: private.at_backward_end(fail))
    with pytest.raises(KeyError, match="out"):
        y.sum().backward()


def test_replaying_is_below_autograd_and_autocast() -> None:
    x = torch.ones(4, 4, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (x @ x).dtype is torch.bfloat16
        with private.replaying():
            y = x @ x
            assert y.dtype is torch.float32 and not y.requires_grad
        assert (x @ x).dtype is torch.bfloat16 and (x @ x).requires_grad


def test_replaying_ends_with_an_error_too() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with pytest.raises(KeyError), private.replaying():
            raise KeyError
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.bfloat16 and torch.is_grad_enabled()


def test_set_grad_enabled() -> None:
    private.set_grad_enabled(False)
    try:
        assert not torch.is_grad_enabled()
    finally:
        private.set_grad_enabled(True)
    assert torch.is_grad_enabled()


def test_below_autograd_there_is_no_history() -> None:
    x = torch.ones(2, requires_grad=True)
    with private.below_autograd():
        y = x * 2
        assert torch.is_grad_enabled() and not y.requires_grad
    assert (x * 2).requires_grad


def test_torch_checkpoint() -> None:
    """And the name of the node that the other kind leaves, which `Profiler` goes by."""
    from torch.utils.checkpoint import checkpoint

    from lowtide.run.profile import profiler

    found: list[object] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        found.append(private.torch_checkpoint())
        return x.exp()

    x = torch.randn(3, requires_grad=True)
    function(x)
    for _ in range(2):
        checkpoint(function, x, use_reentrant=False)
    with torch.autograd.graph.save_on_cpu():
        function(x)
    none, first, second, elsewhere = found
    assert none is elsewhere is None and first is not None and second not in (None, first)
    assert checkpoint(function, x, use_reentrant=True).grad_fn.name() == profiler._REENTRANT


def test_forward_pre_hooks() -> None:
    module = torch.nn.Linear(2, 2)
    assert private.forward_pre_hooks(module) == []
    hook = lambda module, args: None  # noqa: E731
    handle = module.register_forward_pre_hook(hook)
    assert private.forward_pre_hooks(module) == [hook]
    handle.remove()
    assert private.forward_pre_hooks(module) == []


def test_hooks_around_loading_an_optimizer() -> None:
    optimizer = torch.optim.SGD([torch.ones(2, requires_grad=True)])
    before, after = (lambda optimizer, state: None), (lambda optimizer: None)
    optimizer.register_load_state_dict_pre_hook(before)
    optimizer.register_load_state_dict_post_hook(after)
    assert private.load_pre_hooks(optimizer) == [before] and private.load_post_hooks(optimizer) == [after]


def test_replicas_are_made_by_what_is_told() -> None:
    module, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    source = inspect.getsource(importlib.import_module("torch.nn.parallel.replicate"))
    assert "module._replicate_for_data_parallel()" in source
    private.replicate_by(module, lambda: other)
    assert module._replicate_for_data_parallel() is other
    private.replicate_by(module, None)
    assert module._replicate_for_data_parallel().__dict__.keys() >= module.__dict__.keys()


def test_what_autograd_holds_of_a_saved_tensor() -> None:
    x = torch.ones(3, requires_grad=True)
    with private.saving(lambda tensor: tensor + 1, lambda held: held):
        y = x * x
    y.sum().backward()
    assert x.grad is not None and x.grad.tolist() == [4.0, 4.0, 4.0]


def test_a_model_without_data_parallel_around_it_averages_no_gradients() -> None:
    assert not private.averages_gradients(torch.nn.Linear(2, 2))
