"""The dispatcher: keys, kernels, schemas, modes, and objects in a thread's state. And autograd's engine above
it: what runs now, what is called when it ends, code below it, and the hooks of modules and optimizers.

Seen in PyTorch 2.11 to 2.13. ``Fake`` is a key that PyTorch keeps for uses outside it; `lowtide.interception`
has its kernel there.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch
from torch._ops import OpOverload as OpOverload
from torch._ops import OpOverloadPacket as OpOverloadPacket
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

INPLACE_OR_VIEW = torch._C.DispatchKey.ADInplaceOrView
"""The key below autograd's, where views are tracked and version counters move."""

_CONJUGATE = torch._C.DispatchKey.Conjugate
_NEGATIVE = torch._C.DispatchKey.Negative
_DISPATCH = torch._C.DispatchKey.Python
_MODES = torch._C._TorchDispatchModeKey
_PROXY, _FAKE, _FUNCTIONAL = _MODES.PROXY, _MODES.FAKE, _MODES.FUNCTIONAL

# ---- keys of a thread ----------------------------------------------------------------------------

dispatch_key: Any = torch._C._dispatch_key_parse
"""A key by its name. The functions below take a name, too, but look it up for a microsecond and a half."""

include_key = torch._C._dispatch_tls_set_dispatch_key_included
"""Let a key in for this thread, or no longer: the key, and a truth value."""

is_key_included = torch._C._dispatch_tls_is_dispatch_key_included
"""Whether a key is let in for this thread."""

exclude_key = torch._C._dispatch_tls_set_dispatch_key_excluded
"""Keep a key out for this thread, let in or not, or no longer: the key, and a truth value."""

is_key_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
"""Whether a key is kept out for this thread."""

thread_object = torch._C._get_obj_in_tls
"""An object of the thread's state, by its name; autograd's threads have those of who called backward."""

has_thread_object = torch._C._is_key_in_tls
"""Whether the thread's state has an object of that name."""


_OF_THREAD = threading.local()


class _TakenOut:
    """Takes an object out of the thread's state when the thread ends: PyTorch lets go of it after Python has
    let go of the thread, and where the process ends meanwhile it aborts. PyTorch before 2.13 cannot take it
    out.
    """

    def __init__(self, name: str) -> None:
        self._name, self._remove = name, getattr(torch._C, "_remove_obj_from_tls", None)

    def __del__(self) -> None:
        if self._remove is not None:
            self._remove(self._name)


def set_thread_object(name: str, value: object) -> None:
    """Put an object into the thread's state, under a name, for as long as the thread lives. PyTorch 2.11 does
    not count the reference that it takes.
    """
    setattr(_OF_THREAD, name, _TakenOut(name))
    before = sys.getrefcount(value)
    torch._C._stash_obj_in_tls(name, value)
    if sys.getrefcount(value) == before:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))


keys_below: Any = torch._C._dispatch_keyset_full_after
"""All keys from below one on, given by its name; to be met with an operation's own."""


def redispatch(func: Any, keys: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an overload's kernel at the first of the keys."""
    return func._handle.redispatch_boxed(keys, *args, **kwargs)


# ---- operations ----------------------------------------------------------------------------------

schema_of: Any = attrgetter("_schema")
"""An overload's schema."""


def similar_overloads(func: Any) -> list[Any]:
    """The overloads of an operation, this one first."""
    packet = func.overloadpacket
    return [getattr(packet, name) for name in (func._overloadname, *packet.overloads())]


has_kernel_at = torch._C._dispatch_has_kernel_for_dispatch_key
"""Whether there is a kernel of an operation at a dispatch key, both by their names."""

all_operation_names = torch._C._dispatch_get_all_op_names
"""Every overload that there is by now, as ``aten::add.Tensor``."""


def defined_operations() -> tuple[int, set[str]]:
    """What grows where Python defines operations: how many higher-order operators there are, and the names
    that `torch.library` has defined.
    """
    return len(torch._ops._higher_order_ops), set(torch.library._defs)


all_schemas = torch._C._jit_get_all_schemas
"""The schemas of every overload that there is by now."""


def kernel_library(namespace: str) -> Any:
    """What registers kernels for operations of a namespace (``_``: of all) for as long as it is held."""
    return torch._C._dispatch_library("IMPL", namespace, "", __file__, 1)


def let_higher_order_operators_pass(key: str) -> None:
    """Let higher-order operators (`torch.cond`) pass ``key``, where they have no kernel."""
    for operator in torch._ops._higher_order_ops.values():
        operator.non_fallthrough_keys = operator.non_fallthrough_keys.remove(key)


def call(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Call an operation with lazy conjugation and negation on, as in a plain step.

    Inside a dispatch mode both are off, and operations that take conjugate views of their own
    (``linalg_pinv`` of complex numbers) give wrong results there.
    """
    excluded, exclude = (
        torch._C._dispatch_tls_is_dispatch_key_excluded,
        torch._C._dispatch_tls_set_dispatch_key_excluded,
    )
    conjugate, negative = excluded(_CONJUGATE), excluded(_NEGATIVE)
    if not (conjugate or negative):
        return func(*args, **kwargs)
    exclude(_CONJUGATE, False)
    exclude(_NEGATIVE, False)
    try:
        return func(*args, **kwargs)
    finally:
        exclude(_CONJUGATE, conjugate)
        exclude(_NEGATIVE, negative)


# ---- modes and subclasses ------------------------------------------------------------------------


mode_stack = _get_current_dispatch_mode_stack
"""The dispatch modes that are active on this thread, outermost first."""

without_dispatch_modes = _disable_current_modes
"""A context: no dispatch mode sees the operations in the block."""

no_torch_function: Any = torch._C._disabled_torch_function_impl
"""A subclass's ``__torch_function__`` that leaves everything to PyTorch, without a trip through Python."""


without_torch_function = torch._C.DisableTorchFunctionSubclass
"""A context: calls in the block take tensor subclasses for plain tensors: no ``__torch_function__`` is asked.
"""

without_torch_functions = torch._C.DisableTorchFunction
"""As `without_torch_function`, and no mode for such functions is asked either (`torch.device` is one)."""


def answers_itself(tensor: torch.Tensor) -> bool:
    """Whether the tensor's type answers every operation itself (``__torch_dispatch__``)."""
    return torch._C._dispatch_keys(tensor).has(_DISPATCH)


def is_transformed(fakes: bool = True) -> bool:
    """Whether this thread runs code that is being transformed: by torch.func, or by a trace for the compiler
    or an export.

    Args:
        fakes: whether fake tensors alone are such a trace.
    """
    if torch._C._functorch.peek_interpreter_stack() is not None:  # type: ignore[attr-defined]
        return True
    mode = torch._C._get_dispatch_mode
    return mode(_PROXY) is not None or (fakes and mode(_FAKE) is not None) or mode(_FUNCTIONAL) is not None


# ---- autograd ------------------------------------------------------------------------------------

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
    """A context in which autograd holds what ``pack`` makes of a tensor that it saves, and has ``unpack``
    give the tensor back.
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
