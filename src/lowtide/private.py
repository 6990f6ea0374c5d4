"""Every private PyTorch interface that the eager tracer and executor lean on, in one place; interception has
its own in `lowtide.interception`.

`tests/run/test_private.py` checks each, so that a PyTorch release that moves one fails there, by name, and
nowhere else.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from lowtide.interception import interceptors, unseen

_INPLACE_OR_VIEW = torch._C.DispatchKey.ADInplaceOrView
_CONJUGATE = torch._C.DispatchKey.Conjugate
_NEGATIVE = torch._C.DispatchKey.Negative


def in_backward() -> bool:
    """Whether the calling thread runs inside the autograd engine."""
    return torch._C._current_graph_task_id() != -1


def node_key() -> Any:
    """What tells the autograd node that runs on the calling thread from the others, without holding it;
    ``None`` where none does.
    """
    node = torch._C._current_autograd_node()
    if node is None:
        return None
    variable = getattr(node, "variable", None)  # nodes that accumulate leaves' gradients all have one number
    return ("leaf", id(variable)) if variable is not None else (node.name(), node._sequence_nr())


def answers_itself(tensor: torch.Tensor) -> bool:
    """Whether the tensor's type answers every operation itself (``__torch_dispatch__``)."""
    return torch._C._dispatch_keys(tensor).has(torch._C.DispatchKey.Python)


def transformed() -> bool:
    """Whether this thread runs code that is being transformed: by torch.func, or by a trace for the compiler
    or an export.
    """
    if torch._C._functorch.peek_interpreter_stack() is not None:  # type: ignore[attr-defined]
        return True
    keys = torch._C._TorchDispatchModeKey
    return any(
        torch._C._get_dispatch_mode(key) is not None for key in (keys.PROXY, keys.FAKE, keys.FUNCTIONAL)
    )


def storage_key(tensor: torch.Tensor) -> int:
    """The address of the tensor's storage object: unique while the storage lives, reused after. No Python
    object is made for it.
    """
    return torch._C._storage_address(tensor)  # type: ignore[attr-defined]


def in_torch_checkpoint() -> bool:
    """Whether what autograd saves here goes to ``torch.utils.checkpoint``, of the kind that is not
    reentrant.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)  # type: ignore[attr-defined]
    return hooks is not None and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"


def versioned_alias(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor on the same storage that shares the version counter and has no autograd history; works below
    autograd, too.

    ``detach`` below autograd makes an alias with a version counter of its own, which later in-place writes
    would not move. Letting the ADInplaceOrView key in for the one call gives an alias that shares the
    counter.
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


def borrowed_storage(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """Another storage object over the same bytes, which does not keep them: whoever uses it has to keep
    ``storage``, too.
    """
    return torch._C._construct_storage_from_data_pointer(storage.data_ptr(), storage.device, storage.nbytes())  # type: ignore[return-value]


def version_witness(tensor: torch.Tensor) -> torch.Tensor:
    """An empty tensor that shares the version counter of ``tensor`` but not its bytes.

    Setting ``.data`` swaps the storage and leaves the counter, so the witness tells of in-place writes
    without keeping anything alive.
    """
    with unseen(), torch._C._DisableTorchDispatch():
        witness = tensor.detach()
        witness.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return witness


def call(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
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


def suggested_memory_format(tensor: torch.Tensor) -> torch.memory_format:
    """The format that kernels take a tensor to have, by its strides: channels-last or, where they do not say
    so, contiguous.
    """
    return suggest_memory_format(tensor)


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
            excluded = torch._C._dispatch_tls_is_dispatch_key_excluded(_INPLACE_OR_VIEW)
            torch._C._dispatch_tls_set_dispatch_key_excluded(_INPLACE_OR_VIEW, True)
            try:
                yield
            finally:
                torch._C._dispatch_tls_set_dispatch_key_excluded(_INPLACE_OR_VIEW, excluded)
    finally:
        torch._C._set_grad_enabled(before)


def has_kernel(func: Any, device: str) -> bool:
    """Whether an overload has a kernel of its own for a kind of device: one that is made of other operations
    does not count.
    """
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), device.upper())


def storage_use_count(storage: torch.UntypedStorage) -> int:
    """How many references hold the storage, the Python object included."""
    return torch._C._storage_Use_Count(storage._cdata)


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether calling the module runs code that `torch.compile` made."""
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

    What a compiled call calls back (hooks on saved tensors, for one) would otherwise be compiled itself. A
    compiled call in the block runs compiled.
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
    """From now on dynamo compiles nothing of lowtide: neither the hooks that a compiled call calls back, nor
    what they call.
    """
    rules = sys.modules.get("torch._dynamo.trace_rules")
    if rules is not None and not any(
        str(folder).rstrip("/").endswith("/lowtide") for folder in rules.SKIP_DIRS
    ):
        rules.add("lowtide")


def skipped_by_dynamo(function: Any) -> Any:
    """Dynamo does not look into ``function`` when it traces a call of it, but breaks its graph there."""
    function._torchdynamo_disable = True
    function._torchdynamo_disable_msg = "lowtide runs it"
    return function


def at_backward_end(callback: Callable[[], None]) -> None:
    """Call ``callback`` when the backward that runs on this thread has ended; an error that it raises leaves
    that backward.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)  # type: ignore[attr-defined]


def fake_mode() -> FakeTensorMode:
    """A fake tensor mode that takes real tensors as constants, and whose tensors refuse to give an address.

    By default a fake tensor's ``data_ptr()`` is 0 and code that writes there ends the process.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    mode._allow_unsafe_data_ptr_access = False
    return mode


def is_fake_of(item: object, mode: FakeTensorMode) -> bool:
    """Whether ``item`` is a fake tensor that ``mode`` made. Its type alone is asked: some objects do
    something when asked for more.
    """
    return issubclass(type(item), FakeTensor) and item.fake_mode is mode  # type: ignore[attr-defined]


def without_fake_mode() -> AbstractContextManager[object]:
    """Operations in the block see no fake tensor mode, whatever is active outside."""
    return unset_fake_temporarily()


def wait_for_collective(tensor: torch.Tensor) -> torch.Tensor:
    """The result of a functional collective, once it is there. On fake tensors nothing runs, and the fake
    wait would make a copy.
    """
    if isinstance(tensor, FakeTensor):
        return tensor
    return torch.ops._c10d_functional.wait_tensor(tensor)


def is_given_up(tensor: torch.Tensor) -> bool:
    """Whether a recomputing scope around this code brings ``tensor`` back for anyone who saves it, so that
    saving it costs nothing.
    """
    return any(one.gives_up(tensor) for one in watchers() if hasattr(one, "gives_up"))


def watchers() -> list[Any]:
    """Who sees this thread's operations: the interceptors, then the dispatch modes (a trace on fake tensors
    is one), outermost first.
    """
    return [*interceptors(), *_get_current_dispatch_mode_stack()]


def is_fake_mode_active() -> bool:
    """Whether operations of this thread make fake tensors."""
    return any(isinstance(mode, FakeTensorMode) for mode in _get_current_dispatch_mode_stack())


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no content to look at."""
    return isinstance(tensor, FakeTensor)


def assert_on_device(condition: torch.Tensor, message: str) -> None:
    """Raise where a tensor of one boolean is false: on a GPU without waiting for it, as a failed device-side
    assertion.
    """
    torch._assert_async(condition, message)  # pyright: ignore


def without_torch_function() -> AbstractContextManager[object]:
    """Calls in the block take tensor subclasses for plain tensors: no ``__torch_function__`` is asked."""
    return torch._C.DisableTorchFunctionSubclass()


def without_modes() -> AbstractContextManager[object]:
    """Operations in the block are seen by nobody: neither recorded nor made fake."""
    stack = ExitStack()
    stack.enter_context(_disable_current_modes())
    stack.enter_context(unseen())  # pyright: ignore
    return stack


def in_custom_backward() -> bool:
    """Whether the calling thread runs the backward of a custom function."""
    return isinstance(torch._C._current_autograd_node(), torch.autograd.function.BackwardCFunction)


def version(tensor: torch.Tensor) -> int:
    """How often the tensor was written in place; tensors made in inference mode do not count that."""
    return 0 if tensor.is_inference() else tensor._version


def carried(tensor: torch.Tensor) -> torch.Tensor:
    """What an unpack hook returns for autograd to hand out ``tensor`` itself, with its type and attributes.

    For tensors that require grad: of these autograd hands out a detached copy of what the hook returns, a
    plain tensor without attributes. A subclass that answers ``detach`` is asked for the copy.
    """
    return _Carrier(tensor)


class _Carrier(torch.Tensor):
    """Answers ``detach`` with another tensor."""

    carries: torch.Tensor

    @staticmethod
    def __new__(cls, tensor: torch.Tensor) -> _Carrier:
        made = torch.Tensor._make_wrapper_subclass(  # pyright: ignore
            cls, tensor.shape, dtype=tensor.dtype, device=tensor.device
        )
        made.carries = tensor
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> torch.Tensor:
        return args[0].carries
