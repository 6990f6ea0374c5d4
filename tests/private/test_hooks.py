"""Modules and optimizers keep their hooks where `lowtide.private.hooks` looks."""

from __future__ import annotations

import importlib
import inspect

import torch

from lowtide import private


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
