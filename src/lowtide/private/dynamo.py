"""Dynamo: what is compiled, and what must not be. Importing it takes seconds, so nothing here does.

Seen in PyTorch 2.11 to 2.13.
"""

from __future__ import annotations

import inspect
import pkgutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, NamedTuple

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


def compiling_of(callback: Any) -> Compiling:
    """What a callback of Dynamo's compiles with."""
    backend, whole = callback, False
    while (inner := getattr(backend, "_torchdynamo_orig_backend", None)) is not None:
        whole |= bool(getattr(backend, "_one_graph", False))
        backend = inner
    name = getattr(backend, "compiler_name", getattr(backend, "__name__", type(backend).__name__))
    return Compiling(name, dict(getattr(backend, "config", {})), whole)


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
        yield None if before in (None, False) else compiling_of(before)
    finally:
        set_eval_frame(before)


TRACED = {
    "lowtide": ("models", "parallel", "extensions", "errors", "private", "trace"),
    "lowtide.extensions": ("scopes",),
    "lowtide.extensions.scopes": ("marked_regions",),
    "lowtide.private": ("distributed", "fake"),
    "lowtide.trace": ("modules",),
}
"""Parts of packages that Dynamo may trace. Layers need errors and private, and of that these two files. The
hooks of ``lowtide.trace.modules`` do nothing while Dynamo traces; a hook that it skips breaks the graph.
"""


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
        "a limited model is compiled by itself within its budget, and a tiled module runs outside of "
        "compiled graphs; remove() of the handle takes the limit or the tiles off"
    )
    frames: Any = torch._C._dynamo.eval_frame  # type: ignore[attr-defined]
    leave = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.DEFAULT)
    for one in (function, inspect.unwrap(out_of_dynamo)):
        frames.set_code_exec_strategy(one.__code__, leave)
    return function
