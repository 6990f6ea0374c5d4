"""Modules and optimizers keep their hooks where `lowtide.private.hooks` looks."""

from __future__ import annotations

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
