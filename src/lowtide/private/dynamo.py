"""Dynamo: what is compiled, and what must not be. Importing it takes seconds, so it is imported only by calls
that need it.

Seen in PyTorch 2.11 to 2.13.
"""

from __future__ import annotations

import inspect
import pkgutil
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from importlib.util import find_spec
from types import MethodType
from typing import Any, NamedTuple, cast

import torch


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether calling the module runs code that `torch.compile` made."""
    return bool(compiled_among((module,)))


def compiled_among(modules: Iterable[torch.nn.Module]) -> list[torch.nn.Module]:
    """The modules whose calls run code that `torch.compile` made."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")  # importing it takes seconds
    returned: Any = () if dynamo is None else dynamo.OptimizedModule
    found = list[torch.nn.Module]()
    for module in modules:  # all of a model's, in every step
        if module.__dict__.get("_compiled_call_impl") is not None or isinstance(module, returned):
            found.append(module)
    return found


class Compiling(NamedTuple):
    """What compiles a call: the backend's name, Inductor's settings, and whether graph breaks are errors."""

    backend: str
    options: dict[str, Any]
    fullgraph: bool


def _compiling(callback: Any) -> Compiling:
    backend, whole = callback, False
    while (inner := getattr(backend, "_torchdynamo_orig_backend", None)) is not None:
        whole |= bool(getattr(backend, "_one_graph", False))
        backend = inner
    name = getattr(backend, "compiler_name", getattr(backend, "__name__", type(backend).__name__))
    return Compiling(name, dict(getattr(backend, "config", {})), whole)


def compile_settings(module: Any) -> tuple[torch.nn.Module, str, dict[str, Any], dict[str, Any]]:
    """What `torch.compile` compiled, and with what: the backend's name, Inductor's settings, and its other
    arguments. The module is what it returned, or one whose ``compile()`` was called.
    """
    if (call := module.__dict__.get("_compiled_call_impl")) is None:
        model, context = module._orig_mod, module.dynamo_ctx
    else:
        model, context = module, inspect.getclosurevars(call).nonlocals["self"]
    found = _compiling(context.callback)
    how = {"dynamic": context._dynamic, "fullgraph": context.fullgraph}
    return model, found.backend, found.options, how


def uncompiled(module: torch.nn.Module) -> torch.nn.Module:
    """The module that `torch.compile` wrapped, or ``module``; what ``module.compile()`` did is taken off."""
    if is_compiled(module) and "_orig_mod" in module._modules:
        module = cast(torch.nn.Module, module._orig_mod)
    if is_compiled(module):
        module._compiled_call_impl = None
    return module


def compile_in_place(modules: Iterable[torch.nn.Module], **how: Any) -> None:
    """``module.compile(**how)`` of several modules, which share what is compiled. By itself that compiles
    nothing where the module is of a class of `torch.nn`: Dynamo passes over those files. Of what
    `torch.compile` returned its ``forward`` is compiled anew.
    """
    from torch._dynamo import external_utils, trace_rules  # importing Dynamo takes seconds

    context: Any = torch.compile(torch.nn.Module(), **how).dynamo_ctx
    for module in modules:
        place = compiled_call(module)
        inner: Any = module._orig_mod if place == "forward" else module
        call = inner._call_impl
        if isinstance(inner.forward, MethodType) and trace_rules.check(inner.forward):
            call = external_utils.wrap_inline(call)
        module.__dict__[place] = context(call)


def compile_forward(forward: Callable[..., Any], **how: Any) -> Callable[..., Any]:
    """``torch.compile(forward, **how)``, where Dynamo passes over the file that it is in, too."""
    from torch._dynamo import external_utils, trace_rules  # importing Dynamo takes seconds

    if not isinstance(forward, MethodType) or trace_rules.check(forward):
        forward = external_utils.wrap_inline(forward)
    return torch.compile(forward, **how)


def counted_apart() -> dict[str, Any]:
    """Arguments of `torch.compile` by which what is compiled for one backend does not count against Dynamo's
    recompile limit of another; none where PyTorch has no such argument (before 2.13).
    """
    return {"isolate_recompiles": True} if _isolates() else {}


@cache
def _isolates() -> bool:
    """Asked in each compiled step, and `inspect.signature` takes as long as an operation."""
    return "isolate_recompiles" in inspect.signature(torch.compile).parameters


def room_for_backends() -> AbstractContextManager[Any]:
    """A context: within it each backend has Dynamo's recompile limit to itself. By itself the limit counts
    what was compiled of one function for all backends together.
    """
    from torch._dynamo import config, eval_frame  # importing Dynamo takes seconds

    each, backends = config.recompile_limit, len(eval_frame.cached_backends)
    room: dict[str, Any] = {}
    if backends > 1 and not counted_apart():
        room["recompile_limit"] = each * backends
    if each * backends > config.accumulated_recompile_limit:
        room["accumulated_recompile_limit"] = each * backends
    return config.patch(**room) if room else nullcontext()


def recompile_limit_hits() -> int:
    """How often Dynamo has compiled nothing since its recompile limit was reached, in this process so far."""
    from torch._dynamo.utils import counters  # importing Dynamo takes seconds

    reasons = counters["unimplemented"]
    return sum(count for why, count in reasons.items() if why.startswith("Dynamo recompile limit exceeded"))


def compiled_call(module: torch.nn.Module) -> str:
    """Name of the instance attribute that a compiled call of a module goes through: ``forward`` of what
    `torch.compile` returned.
    """
    if module.__dict__.get("_compiled_call_impl") is None and is_compiled(module):
        return "forward"
    return "_compiled_call_impl"


@contextmanager
def out_of_dynamo() -> Iterator[Compiling | None]:
    """Python code in the block is not compiled, whatever is outside; says what would have compiled it.

    What a compiled call calls back (hooks on saved tensors, for one) would otherwise be compiled itself. A
    compiled call in the block runs compiled.
    """
    if "torch._dynamo.eval_frame" not in sys.modules:
        yield None
        return
    set_eval_frame = torch._C._dynamo.eval_frame.set_eval_frame  # type: ignore[attr-defined]
    before = set_eval_frame(None)
    try:
        yield None if before in (None, False) else _compiling(before)
    finally:
        set_eval_frame(before)


def uncut_by_ddp() -> AbstractContextManager[Any]:
    """A context: under DDP Dynamo does not cut a graph in one for each bucket of gradients."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return nullcontext()
    from torch._dynamo import config  # importing Dynamo takes seconds

    return config.patch(optimize_ddp=False)


TRACED = {
    "lowtide": ("models", "parallel", "marked_regions", "errors", "private"),
    "lowtide.private": ("distributed", "fake"),
}
"""Parts of packages that Dynamo may trace. Layers need errors and private, and of that these two files."""


def keep_dynamo_out() -> None:
    """From now on dynamo compiles nothing of lowtide but its models, its parallel layers and what stands in
    for marked regions: neither the hooks that a compiled call calls back, nor what they call.
    """
    rules = sys.modules.get("torch._dynamo.trace_rules")
    if rules is None or any(str(folder).rstrip("/").endswith("/lowtide/run") for folder in rules.SKIP_DIRS):
        return
    for package, kept in TRACED.items():
        spec = find_spec(package)
        for found in pkgutil.iter_modules(spec.submodule_search_locations if spec else ()):
            if found.name not in kept:
                rules.add(f"{package}.{found.name}")


def skipped_by_dynamo(function: Any) -> Any:
    """Dynamo does not look into ``function`` when it traces a call of it, but breaks its graph there; nor
    does it compile a call that reaches it uncompiled.
    """
    function._torchdynamo_disable = True
    function._torchdynamo_disable_msg = (
        "a limited model is compiled by itself within its budget; handle.remove() takes the limit off"
    )
    frames: Any = torch._C._dynamo.eval_frame  # type: ignore[attr-defined]
    leave = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.DEFAULT)
    for one in (function, inspect.unwrap(out_of_dynamo)):
        frames.set_code_exec_strategy(one.__code__, leave)
    return function
