"""Every private PyTorch interface that the eager tracer and executor lean on, in one place.

`tests/run/test_private.py` checks each, so that a PyTorch release that moves one fails there, by name, and nowhere else.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any

import torch
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)

NodeKey = tuple[str, int]

_INPLACE_OR_VIEW = torch._C.DispatchKey.ADInplaceOrView
_CONJUGATE = torch._C.DispatchKey.Conjugate
_NEGATIVE = torch._C.DispatchKey.Negative


def in_backward() -> bool:
    """Whether the calling thread runs inside the autograd engine."""
    return torch._C._current_graph_task_id() != -1


def backward_node() -> str:
    """The name of the autograd node that runs on the calling thread, empty where none does."""
    node = torch._C._current_autograd_node()
    return "" if node is None else node.name()


def node_key() -> NodeKey | None:
    """What tells the autograd node that runs on the calling thread from the others, without holding it; ``None`` where none does."""
    node = torch._C._current_autograd_node()
    return None if node is None else _key_of(node)


def nodes_from_here(known: Container[NodeKey]) -> dict[NodeKey, tuple[NodeKey, ...]]:
    """The autograd nodes that can be reached from the one that runs, each with those that it hands gradients to.

    Args:
        known: nodes that are left out, with what lies behind them.
    """
    node = torch._C._current_autograd_node()
    found: dict[NodeKey, tuple[NodeKey, ...]] = {}
    ahead = [] if node is None else [node]
    while ahead:
        node = ahead.pop()
        key = _key_of(node)
        if key not in found and key not in known:
            following = [following for following, _ in node.next_functions if following is not None]
            found[key] = tuple(map(_key_of, following))
            ahead += following
    return found


def _key_of(node: Any) -> NodeKey:
    variable = getattr(node, "variable", None)  # nodes that accumulate leaves' gradients all have one number
    return ("leaf", id(variable)) if variable is not None else (node.name(), node._sequence_nr())


def only_engine_holds(args: tuple[Any, ...]) -> bool:
    """Whether nobody but the autograd engine, which asks for an operation, holds its first argument; for use in a mode, with what it was given."""
    return isinstance(args[0], torch.Tensor) and _holders(args) == engine_holds()


def _holders(args: tuple[Any, ...]) -> tuple[int, int, int]:
    """How many references there are to an operation's first argument, to its storage, and to its Python object."""
    tensor = args[0]
    return tensor._use_count(), storage_use_count(tensor.untyped_storage()), sys.getrefcount(tensor)


@cache
def engine_holds() -> tuple[int, int, int]:
    """What `_holders` are, in a mode, of a gradient that the engine alone holds as it adds another to it; found out by watching it once."""
    found = (-1, -1, -1)

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
            nonlocal found
            if func is torch.ops.aten.add.Tensor:
                found = _holders(args)
            return func(*args, **(kwargs or {}))

    with without_modes(), torch.inference_mode(False), torch.enable_grad(), Counting():
        leaf = torch.ones(2, requires_grad=True)
        torch.autograd.grad([2 * leaf, 3 * leaf], leaf, [torch.ones(2), torch.ones(2)])
    return found


def storage_key(tensor: torch.Tensor) -> int:
    """The address of the tensor's storage object: unique while the storage lives, reused after."""
    return tensor.untyped_storage()._cdata


def versioned_alias(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor on the same storage that shares the version counter and has no autograd history; works inside a dispatch mode.

    ``detach`` below autograd makes an alias with a version counter of its own, which later in-place writes would not move. Letting the
    ADInplaceOrView key in for the one call gives an alias that shares the counter.
    """
    excluded = torch._C._dispatch_tls_is_dispatch_key_excluded(_INPLACE_OR_VIEW)
    if not excluded:
        return unseen_alias(tensor)
    torch._C._dispatch_tls_set_dispatch_key_excluded(_INPLACE_OR_VIEW, False)
    try:
        return unseen_alias(tensor)
    finally:
        torch._C._dispatch_tls_set_dispatch_key_excluded(_INPLACE_OR_VIEW, True)


def unseen_alias(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor.detach()`` that no dispatch mode sees, which saves a trip through Python."""
    with torch._C._DisableTorchDispatch():
        return tensor.detach()


def version_witness(tensor: torch.Tensor) -> torch.Tensor:
    """An empty tensor that shares the version counter of ``tensor`` but not its bytes.

    Setting ``.data`` swaps the storage and leaves the counter, so the witness tells of in-place writes without keeping anything alive.
    """
    with torch._C._DisableTorchDispatch():
        witness = tensor.detach()
        witness.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return witness


def call(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call an operation with lazy conjugation and negation on, as in a plain step.

    Inside a dispatch mode both are off, and operations that take conjugate views of their own (``linalg_pinv`` of complex numbers) give
    wrong results there.
    """
    excluded, exclude = torch._C._dispatch_tls_is_dispatch_key_excluded, torch._C._dispatch_tls_set_dispatch_key_excluded
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


def suggested_memory_format(tensor: torch.Tensor) -> torch.memory_format:
    """The format that kernels take a tensor to have, by its strides: channels-last or, where they do not say so, contiguous."""
    return suggest_memory_format(tensor)


@contextmanager
def replaying() -> Iterator[None]:
    """Run recorded operations as they were recorded: below autograd and its view tracking (no history), and below autocast (no second cast).

    Grad mode may be set in the block and is put back after it: kernels look at it (oneDNN's LSTM makes its workspace only with gradients
    on), and below autograd it does nothing else.
    """
    before = torch.is_grad_enabled()
    try:
        with torch._C._DisableAutocast(), torch._C._AutoDispatchBelowAutograd():
            # Autograd alone is not enough: with gradients on, the key below it makes views that lose their conjugate bit.
            excluded = torch._C._dispatch_tls_is_dispatch_key_excluded(_INPLACE_OR_VIEW)
            torch._C._dispatch_tls_set_dispatch_key_excluded(_INPLACE_OR_VIEW, True)
            try:
                yield
            finally:
                torch._C._dispatch_tls_set_dispatch_key_excluded(_INPLACE_OR_VIEW, excluded)
    finally:
        torch._C._set_grad_enabled(before)


def has_kernel(func: Any, device: str) -> bool:
    """Whether an overload has a kernel of its own for a kind of device: one that is made of other operations does not count."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), device.upper())


def storage_use_count(storage: torch.UntypedStorage) -> int:
    """How many references hold the storage, the Python object included."""
    return torch._C._storage_Use_Count(storage._cdata)


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether calling the module runs code that `torch.compile` made: a dispatch mode around it would end that for good."""
    if getattr(module, "_compiled_call_impl", None) is not None:
        return True
    dynamo = sys.modules.get("torch._dynamo.eval_frame")  # importing it takes seconds
    return dynamo is not None and isinstance(module, dynamo.OptimizedModule)


def compiled_call(module: torch.nn.Module) -> str:
    """Name of the instance attribute that a call of a compiled module goes through."""
    return "_compiled_call_impl" if getattr(module, "_compiled_call_impl", None) is not None else "forward"


@contextmanager
def out_of_dynamo() -> Iterator[bool]:
    """Python code in the block is not compiled, whatever is outside; says whether it would have been.

    What a compiled call calls back (hooks on saved tensors, for one) would otherwise be compiled itself. A compiled call in the block runs
    compiled.
    """
    if "torch._dynamo.eval_frame" not in sys.modules:
        yield False
        return
    set_eval_frame = torch._C._dynamo.eval_frame.set_eval_frame  # type: ignore[attr-defined]
    before = set_eval_frame(None)
    try:
        yield before not in (None, False)
    finally:
        set_eval_frame(before)


def keep_dynamo_out() -> None:
    """From now on dynamo compiles nothing of lowtide: neither the hooks that a compiled call calls back, nor what they call."""
    rules = sys.modules.get("torch._dynamo.trace_rules")
    if rules is not None and not any(str(folder).rstrip("/").endswith("/lowtide") for folder in rules.SKIP_DIRS):
        rules.add("lowtide")


def skipped_by_dynamo(function: Any) -> Any:
    """Dynamo does not look into ``function`` when it traces a call of it, but breaks its graph there."""
    function._torchdynamo_disable = True
    function._torchdynamo_disable_msg = "lowtide runs it"
    return function


def dispatch_modes() -> list[TorchDispatchMode]:
    """The dispatch modes that are active on this thread, outermost first."""
    return _get_current_dispatch_mode_stack()


def modes_deep() -> int:
    """How many dispatch modes are active on this thread."""
    return torch._C._len_torch_dispatch_stack()


def top_mode() -> TorchDispatchMode | None:
    """The innermost dispatch mode of this thread."""
    count = torch._C._len_torch_dispatch_stack()
    return torch._C._get_dispatch_stack_at(count - 1) if count else None  # type: ignore[return-value]


def leave_top() -> int:
    """Take the innermost dispatch mode off the stack; returns how many are left."""
    _pop_mode()
    return torch._C._len_torch_dispatch_stack()


def leave_mode(mode: TorchDispatchMode) -> list[TorchDispatchMode]:
    """Take ``mode`` and everything above it off the stack; returns what was taken, for `enter_modes`."""
    taken: list[TorchDispatchMode] = []
    while dispatch_modes():
        top = _pop_mode()
        taken.append(top)  # pyright: ignore
        if top is mode:
            break
    return taken


def enter_modes(taken: list[TorchDispatchMode]) -> None:
    """Put back what `leave_mode` took."""
    for mode in reversed(taken):
        _push_mode(mode)


def at_backward_end(callback: Callable[[], None]) -> None:
    """Call ``callback`` when the backward that runs on this thread has ended; an error that it raises leaves that backward."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)  # type: ignore[attr-defined]


def fake_mode() -> FakeTensorMode:
    """A fake tensor mode that takes real tensors as constants, and whose tensors refuse to give an address.

    By default a fake tensor's ``data_ptr()`` is 0 and code that writes there ends the process.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    mode._allow_unsafe_data_ptr_access = False
    mode._lowtide_traces = True  # type: ignore[attr-defined]
    return mode


def is_fake_of(item: object, mode: FakeTensorMode) -> bool:
    """Whether ``item`` is a fake tensor that ``mode`` made. Its type alone is asked: some objects do something when asked for more."""
    return issubclass(type(item), FakeTensor) and item.fake_mode is mode  # type: ignore[attr-defined]


def is_traced(item: object) -> bool:
    """Whether ``item`` is a fake tensor of a mode that `fake_mode` made."""
    return issubclass(type(item), FakeTensor) and hasattr(item.fake_mode, "_lowtide_traces")  # type: ignore[attr-defined]


def set_fake_data(tensor: torch.Tensor, data: torch.Tensor) -> None:
    """``tensor.data = data`` for fake tensors, which keep their device elsewhere."""
    tensor.data = data
    tensor.fake_device = data.fake_device  # type: ignore[attr-defined]


class _ToldOtherwise(type(FakeTensor)):
    """Asked for instances, its class knows all fake tensors but those that are traced."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, FakeTensor) and not is_traced(instance)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, FakeTensor)


class _Untold(FakeTensor, metaclass=_ToldOtherwise):
    """What stands for the class of fake tensors while a trace runs. Who imports it then may go on using it."""


@contextmanager
def fakes_untold() -> Iterator[None]:
    """For everybody but PyTorch itself, no tensor that is traced is of ``torch._subclasses.FakeTensor``."""

    def asked(name: str) -> Any:
        if name != "FakeTensor":
            raise AttributeError(f"module {package.__name__!r} has no attribute {name!r}")
        own = sys._getframe(1).f_globals.get("__name__", "").partition(".")[0] == "torch"
        return FakeTensor if own else _Untold

    package = torch._subclasses
    package.__getattr__ = asked  # type: ignore[method-assign]
    del package.FakeTensor
    try:
        yield
    finally:
        package.FakeTensor = FakeTensor  # type: ignore[misc]
        del package.__getattr__


@contextmanager
def fake_errors_untold() -> Iterator[None]:
    """What fake tensors cannot follow is an answer here, not a failure to be logged with its stack."""
    logger = logging.getLogger(FakeTensorMode.__module__)
    before = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = before


def without_fake_mode() -> AbstractContextManager[object]:
    """Operations in the block see no fake tensor mode, whatever is active outside."""
    return unset_fake_temporarily()


def own_backend() -> str:
    """The name of the device type that is kept for backends outside PyTorch."""
    return torch._C._get_privateuse1_backend_name()


def wait_for_collective(tensor: torch.Tensor) -> torch.Tensor:
    """The result of a functional collective, once it is there. On fake tensors nothing runs, and the fake wait would make a copy."""
    if isinstance(tensor, FakeTensor):
        return tensor
    return torch.ops._c10d_functional.wait_tensor(tensor)


def is_given_up(tensor: torch.Tensor) -> bool:
    """Whether a recomputing scope around this code brings ``tensor`` back for anyone who saves it, so that saving it costs nothing."""
    return any(mode.gives_up(tensor) for mode in dispatch_modes() if hasattr(mode, "gives_up"))  # type: ignore[attr-defined]


def without_modes() -> AbstractContextManager[object]:
    """Operations in the block are seen by no dispatch mode: neither recorded nor made fake."""
    return _disable_current_modes()
