"""What lowtide leans on of PyTorch's autograd engine; see `test_private.py`."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lowtide import private


def test_backward_nodes_have_names() -> None:
    names = []

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.append(private.backward_node())
            return func(*args, **(kwargs or {}))

    assert private.backward_node() == ""
    loss = torch.ones(3, requires_grad=True).max(0).values
    with Names():
        loss.backward()
    assert "MaxBackward0" in names


class Adds(TorchDispatchMode):
    """What is to be seen as autograd or anybody else adds two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.held: list[bool] = []
        self.keys: list[private.NodeKey | None] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.add.Tensor:
            self.held.append(private.only_engine_holds(args))
        self.keys.append(private.node_key())
        return func(*args, **(kwargs or {}))


def test_gradients_that_only_the_engine_holds() -> None:
    assert min(private.engine_holds()) > 0, "autograd adds gradients that meet in another way than it did"
    leaf = torch.ones(3, requires_grad=True)
    kept: list[torch.Tensor] = []
    for hook in (None, kept.append):
        h = 2 * leaf
        parts = h.sin(), h.cos()
        for part in parts:
            if hook is not None:
                part.grad_fn.register_hook(lambda inputs, _: kept.append(inputs[0]))  # type: ignore[union-attr]
        with Adds() as seen:
            (parts[0] + 2 * parts[1]).sum().backward()
        assert seen.held == [False, hook is None]  # the forward's own sum, and that of the gradients of h
    first, second = torch.ones(3), torch.ones(3)
    with Adds() as seen:
        first + second
        torch.ones(3) + torch.ones(3)
    assert seen.held == [False, False]


def test_keys_of_nodes() -> None:
    leaf, other = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    h = leaf * other
    loss = h.sin().exp().sum()
    found: list[Any] = []

    class Walks(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if private.backward_node().startswith("Exp"):
                found.append((private.node_key(), private.nodes_from_here(())))
            return func(*args, **(kwargs or {}))

    assert private.node_key() is None and private.nodes_from_here(()) == {}
    with Walks():
        loss.backward()
    here, nodes = found[0]
    assert sorted(name for name, _ in nodes) == ["ExpBackward0", "MulBackward0", "SinBackward0", "leaf", "leaf"]
    (sin,) = nodes[here]
    (product,) = nodes[sin]
    assert sin[0] == "SinBackward0" and set(nodes[product]) == {("leaf", id(leaf)), ("leaf", id(other))}
    assert nodes[("leaf", id(leaf))] == ()
    assert private.nodes_from_here({here}) == {}
