"""`torch.compile`: with what something was compiled, and to compile it. Importing Dynamo takes seconds,
so that is done only by calls that need it.

Seen in PyTorch 2.11 to 2.13.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from types import MethodType
from typing import Any, cast

import torch

from lowtide.private.dynamo import compiled_call, compiling_of, is_compiled


def compile_settings(module: Any) -> tuple[torch.nn.Module, str, dict[str, Any], dict[str, Any]]:
    """What `torch.compile` compiled, and with what: the backend's name, Inductor's settings, and its other
    arguments. The module is what it returned, or one whose ``compile()`` was called.
    """
    if (call := module.__dict__.get("_compiled_call_impl")) is None:
        model, context = module._orig_mod, module.dynamo_ctx
    else:
        model, context = module, inspect.getclosurevars(call).nonlocals["self"]
    found = compiling_of(context.callback)
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


def uncut_by_ddp() -> AbstractContextManager[Any]:
    """A context: under DDP Dynamo does not cut a graph in one for each bucket of gradients."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return nullcontext()
    from torch._dynamo import config  # importing Dynamo takes seconds

    return config.patch(optimize_ddp=False)
