"""Autograd's engine: what runs now, what is called when it ends, and code below it; and the hooks that
modules and optimizers hold.

Seen in PyTorch 2.11 to 2.13.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lowtide.private.dispatch import INPLACE_OR_VIEW

set_grad_enabled = torch._C._set_grad_enabled
"""`torch.set_grad_enabled` as a plain function: no context manager is made."""

below_autograd = torch._C._AutoDispatchBelowAutograd
"""A context: operations in the block have no history, though gradients may be on."""


def in_backward() -> bool:
    """Whether the calling thread runs inside the autograd engine."""
    return torch._C._current_graph_task_id() != -1


def in_custom_backward() -> bool:
    """Whether the calling thread runs the backward of a custom function."""
    return isinstance(torch._C._current_autograd_node(), torch.autograd.function.BackwardCFunction)


def node_key() -> Any:
    """A key of the autograd node that runs on the calling thread, which does not hold it; ``None`` where no
    node runs.
    """
    node: Any = torch._C._current_autograd_node()
    if node is None:
        return None
    kind: Any = type(node)  # a custom function may have set `ctx.name`, which hides the node's own
    if hasattr(kind, "variable"):  # nodes that accumulate leaves' gradients all have one number
        return ("leaf", id(node.variable))
    return (kind.name(node), kind._sequence_nr(node))


def torch_checkpoint() -> Callable[..., Any] | None:
    """The pack hook of the innermost non-reentrant ``torch.utils.checkpoint`` around this code, of which each
    call has its own; ``None`` outside of all.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)  # type: ignore[attr-defined]
    if hooks is None or getattr(hooks[0], "__module__", "") != "torch.utils.checkpoint":
        return None
    return hooks[0]


def saving(pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]) -> Any:
    """A context in which autograd holds what ``pack`` makes of a tensor that it saves, and has ``unpack`` give
    the tensor back.
    """
    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def at_backward_end(callback: Callable[[], None]) -> None:
    """Call ``callback`` when the backward that runs on this thread has ended; an error that it raises leaves
    that backward.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)  # type: ignore[attr-defined]


@contextmanager
def replaying() -> Iterator[None]:
    """Run recorded operations as they were recorded: below autograd and its view tracking (no history), and
    below autocast (no second cast).

    Grad mode may be set in the block and is put back after it: kernels look at it (oneDNN's LSTM makes its
    workspace only with gradients on), and below autograd it does nothing else.
    """
    before = torch.is_grad_enabled()
    try:
        with torch._C._DisableAutocast(), torch._C._AutoDispatchBelowAutograd():
            # Autograd alone is not enough: with gradients on, the key below it makes views that lose their
            # conjugate bit.
            excluded = torch._C._dispatch_tls_is_dispatch_key_excluded(INPLACE_OR_VIEW)
            torch._C._dispatch_tls_set_dispatch_key_excluded(INPLACE_OR_VIEW, True)
            try:
                yield
            finally:
                torch._C._dispatch_tls_set_dispatch_key_excluded(INPLACE_OR_VIEW, excluded)
    finally:
        torch._C._set_grad_enabled(before)


def forward_pre_hooks(module: torch.nn.Module) -> list[Any]:
    """What runs before a module's forward, in that order."""
    return list(module._forward_pre_hooks.values())


def load_pre_hooks(optimizer: torch.optim.Optimizer) -> list[Any]:
    """What an optimizer asks before it loads a state dict."""
    return list(optimizer._optimizer_load_state_dict_pre_hooks.values())


def load_post_hooks(optimizer: torch.optim.Optimizer) -> list[Any]:
    """What an optimizer calls when it has loaded a state dict."""
    return list(optimizer._optimizer_load_state_dict_post_hooks.values())


_REPLICATE = "_replicate_for_data_parallel"


def replicate_by(module: torch.nn.Module, replicate: Callable[[], torch.nn.Module] | None) -> None:
    """What `torch.nn.DataParallel` calls, on several devices, to copy a module; ``None`` is PyTorch's own."""
    module.__dict__.pop(_REPLICATE, None)
    if replicate is not None:
        module.__dict__[_REPLICATE] = replicate
