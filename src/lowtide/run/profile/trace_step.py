"""`trace`: a callable that ends in a loss -> the StepGraph of one step of it, run for real or on fake
tensors.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from lowtide.errors import TraceError, expect, shorten
from lowtide.graph import StepGraph
from lowtide.run.profile.aside import profile_aside
from lowtide.run.transforms import with_overhead
from lowtide.trace.costs.timing import measure_costs
from lowtide.trace.fake import trace_fake
from lowtide.trace.tracer import Tracer


def trace(
    step: Callable[..., Any],
    *args: Any,
    model: torch.nn.Module | None = None,
    fake: bool = False,
    costs: bool = True,
    **kwargs: Any,
) -> StepGraph:
    """Record one step of a callable that ends in a loss.

    The step runs once for real. On a CPU it takes less memory than the plain step: what autograd saves is
    evicted, where an operation that replays plainly wrote it. On a GPU nothing is evicted. Gradients,
    buffers, module attributes and random state stay as they are. Backward is run for the callable unless it
    runs it itself.

    Args:
        step: called as ``step(*args, **kwargs)``; returns a scalar loss, an output with ``.loss``, or
            ``None`` after its own backward.
        model: the module whose parameters the step uses, when it cannot be found from the callable's own
            variables.
        fake: run it on fake tensors instead, for a model or a device that is not here. The values of integer
            and boolean tensors of up to 8 MiB are known (token ids, positions, masks, lengths). Models that
            branch on values that come from floating-point numbers cannot be traced so.
        costs: have each operation's seconds in the graph. Without it every operation takes 0 seconds, and two
            traces are equal.

    Raises:
        TraceError: the step cannot be called, has no loss, or (with ``fake=True``) uses values that fake
            tensors do not have.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 1))
        >>> graph = trace(lambda x: model(x).sum(), torch.randn(4, 8), costs=False)
        >>> [operation.name for operation in graph.operations if operation.phase == "forward"]
        ['aten.addmm.default', 'aten.gelu.default', 'aten.addmm.default', 'aten.sum.default',
         'aten.ones_like.default']
    """
    if not callable(step):
        raise TraceError(
            f"trace takes a function that runs one step, not {type(step).__name__}: lowtide.trace(step, "
            "*args)"
        )
    module = model is None or isinstance(model, torch.nn.Module)
    expect(module, "trace(model=)", model, "a torch.nn.Module, or None", TraceError)
    modules = [model] if model is not None else find_modules(step, args, kwargs)
    device = device_of(modules, args)
    try:
        if fake:
            measured = measure_costs if costs else lambda specs: {}
            graph = trace_fake(step, args, kwargs, modules, device, measured)
        else:
            _, graph = profile_aside(modules, device, step, args, kwargs, Tracer.loss_of)
    except Exception as error:
        shorten(error)
        raise
    if costs:
        return with_overhead(graph)
    free = {"seconds": 0.0, "scratch_bytes": 0, "blocks": ()}
    return graph.with_operations(lambda op: replace(op, **free), plain_seconds=0.0)


def find_modules(
    step: Callable[..., Any], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
) -> list[torch.nn.Module]:
    """The modules that a callable can reach (`reached_by`)."""
    reached = reached_by(step, args, kwargs or {})
    return list(dict.fromkeys(item for item in reached if isinstance(item, torch.nn.Module)))


def reached_by(
    step: Callable[..., Any], args: Iterable[Any] = (), kwargs: Mapping[str, Any] | None = None
) -> list[Any]:
    """What a callable can reach: itself, its arguments, what it is bound to with the attributes of that, and
    the variables that its code names.
    """
    reached = [step, *args, *(kwargs or {}).values()]
    function: Any = step
    while isinstance(function, functools.partial):
        reached += [*function.args, *function.keywords.values(), function.func]
        function = function.func
    owner = getattr(function, "__self__", None if inspect.isfunction(function) else function)
    reached += [owner, *getattr(owner, "__dict__", {}).values()]
    for item in _variables(getattr(function, "__func__", function)):
        reached += [item, *_variables(item)]
    return reached


def _variables(function: Any) -> list[Any]:
    """The values of the nonlocal and global names in a function's code."""
    if not inspect.isfunction(function):
        return []
    variables = inspect.getclosurevars(function)
    return [*variables.nonlocals.values(), *variables.globals.values()]


def device_of(modules: list[torch.nn.Module], args: tuple[Any, ...]) -> torch.device:
    """The device of the first tensor of the modules or the arguments.

    Raises:
        TraceError: there are tensors on several devices of this type.
    """
    own = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    found = dict.fromkeys(item.device for item in (*own, *args) if isinstance(item, torch.Tensor))
    kind = next((device.type for device in found), "cpu")
    alike = [str(device) for device in found if device.type == kind]
    if len(alike) > 1:
        raise TraceError(
            f"the step has tensors on {' and '.join(alike)}, and a step graph is of one device's memory: run "
            "it on one device, or name the model that is on one, lowtide.trace(step, model=model)"
        )
    return torch.device(alike[0] if alike else "cpu")
