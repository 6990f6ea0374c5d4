"""`trace`: a callable that ends in a loss -> the StepGraph of one step of it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch

from lowtide.errors import TraceError
from lowtide.graph import StepGraph
from lowtide.trace.chance import same_random
from lowtide.trace.costs import OpCost, executor_overheads, measure_costs
from lowtide.trace.describe import Signature, tensors_inside
from lowtide.trace.eager import Tracer
from lowtide.trace.fake import Faker, borrowed
from lowtide.trace.leaks import nothing_outside
from lowtide.trace.outputs import history
from lowtide.trace.real import trace_real


def find_modules(step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.nn.Module]:
    """The modules that a callable can reach: itself, its arguments, what it is bound to, and the variables that its code names."""
    found: list[torch.nn.Module] = []

    def add(item: Any) -> None:
        if isinstance(item, torch.nn.Module) and not any(item is known for known in found):
            found.append(item)

    add(step)
    for item in [*args, *kwargs.values()]:
        add(item)
    function: Any = step
    while isinstance(function, functools.partial):
        for item in [*function.args, *function.keywords.values()]:
            add(item)
        function = function.func
        add(function)
    add(getattr(function, "__self__", None))
    function = getattr(function, "__func__", function)
    if inspect.isfunction(function):
        variables = inspect.getclosurevars(function)
        for item in [*variables.nonlocals.values(), *variables.globals.values()]:
            add(item)
            if inspect.isfunction(item):
                inner = inspect.getclosurevars(item)
                for deeper in [*inner.nonlocals.values(), *inner.globals.values()]:
                    add(deeper)
    return found


def loss_of(result: Any) -> torch.Tensor | None:
    """The loss in what a step returned: a scalar tensor with a history, an output's ``loss``, or the first such in a tuple or mapping."""
    if isinstance(result, torch.Tensor):
        return result if result.numel() == 1 and result.requires_grad else None
    loss = getattr(result, "loss", None)
    if loss is None and isinstance(result, dict):
        loss = result.get("loss")
    if isinstance(loss, torch.Tensor):
        return loss_of(loss)
    if isinstance(result, (tuple, list)):
        for item in result:
            found = loss_of(item)
            if found is not None:
                return found
    return None


def model_loss_of(result: Any) -> torch.Tensor | None:
    """The loss in what a model returned: as `loss_of`, but of several outputs only one from which backward reaches all that the others do.

    A scale that a model returns beside its features, or one of two terms that its caller adds, is no loss, though it is a scalar with a history.
    """
    if not isinstance(result, (tuple, list)) or isinstance(getattr(result, "loss", None), torch.Tensor):
        return loss_of(result)
    outputs = [tensor for tensor in tensors_inside(result) if tensor.requires_grad]
    return next((loss for item in result if (loss := loss_of(item)) is not None and _covers(loss, outputs)), None)


def _covers(loss: torch.Tensor, outputs: list[torch.Tensor]) -> bool:
    """Whether backward from ``loss`` reaches all parameters behind ``outputs``, and runs through those of one element."""
    inside = history(loss)
    if any(tensor.numel() == 1 and tensor.grad_fn not in inside for tensor in outputs if tensor.grad_fn is not None):
        return False
    left, seen = [tensor.grad_fn for tensor in outputs], set(inside)
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        if hasattr(node, "variable"):  # it adds up the gradient of a leaf
            return False
        seen.add(node)
        left += [following for following, _ in node.next_functions]
    return True


def _run(step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], tracer: Tracer) -> None:
    """Run the step, and its backward unless it did so itself."""
    step_result = step(*args, **kwargs)
    if any(operation["phase"] == "backward" for operation in tracer.operations):
        return
    loss = loss_of(step_result)
    if loss is None:
        raise TraceError(
            f"the step returned {_described(step_result)}, in which there is no loss: return a scalar tensor that requires grad, or an output "
            "with .loss, or run backward in the step"
        )
    tracer.outputs.hold(step_result, loss)
    del step_result
    tracer.outputs.let_go()
    (loss.sum() if loss.dim() else loss).backward()


def _described(result: Any) -> str:
    if not isinstance(result, torch.Tensor):
        return type(result).__name__
    return f"a tensor of shape {tuple(result.shape)} that {'requires' if result.requires_grad else 'does not require'} grad"


def with_costs(graph: StepGraph, tracer: Tracer, costs: dict[Signature, OpCost]) -> StepGraph:
    """The graph with each operation's seconds and scratch bytes filled in."""
    operations = tuple(
        replace(operation, seconds=costs[signature].seconds, scratch_bytes=tracer.scratch.get(signature, costs[signature].scratch_bytes))
        for operation, signature in zip(graph.operations, tracer.signatures, strict=True)
    )
    overheads = executor_overheads(graph.device)
    forward = sum(1 for operation in operations if operation.phase == "forward")
    return replace(
        graph,
        operations=operations,
        plain_seconds=sum(operation.seconds for operation in operations),
        overhead_seconds=overheads.record_seconds * forward,
        replay_overhead_seconds=overheads.replay_seconds,
    )


def trace(
    step: Callable[..., Any],
    *args: Any,
    model: torch.nn.Module | None = None,
    real: bool = False,
    costs: bool = True,
    cost_cache: dict[Signature, OpCost] | None = None,
    memory_limit_bytes: int | None = None,
    **kwargs: Any,
) -> StepGraph:
    """Record one step of a callable that ends in a loss.

    The step runs once on fake tensors: no memory is used, and parameters, gradients, buffers, module attributes and random state stay as
    they are. Backward is run for the callable unless it runs it itself.

    Args:
        step: called as ``step(*args, **kwargs)``; returns a scalar loss, an output with ``.loss``, or ``None`` after its own backward.
        model: the module whose parameters the step uses, when it cannot be found from the callable's own variables.
        real: run the step for real instead, which any model allows; memory is then that of the plain step.
        costs: time each distinct operation on this machine. Without it every operation takes 0 seconds.
        cost_cache: costs already known, extended in place.
        memory_limit_bytes: operations that need more than this alone are estimated instead of timed.

    Raises:
        TraceError: the step cannot be called, has no loss, or uses values that fake tensors do not have (``real=True`` then works).

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 1))
        >>> graph = trace(lambda x: model(x).sum(), torch.randn(4, 8), costs=False)
        >>> [operation.name for operation in graph.operations if operation.phase == "forward"]
        ['aten.addmm.default', 'aten.gelu.default', 'aten.addmm.default', 'aten.sum.default', 'aten.ones_like.default']
    """
    if not callable(step):
        raise TraceError(f"trace takes a function that runs one step, not {type(step).__name__}: lowtide.trace(step, *args)")
    modules = [model] if model is not None else find_modules(step, args, kwargs)
    root = modules[0] if modules else None
    carry_out = _trace_real if real else _trace_fake
    tracer = carry_out(step, args, kwargs, modules, root)
    graph = tracer.graph(device=device_of(modules, args), source="real" if real else "fake")
    if not costs:
        return graph
    known = {} if cost_cache is None else cost_cache
    return with_costs(graph, tracer, measure_costs(tracer.specs, cache=known, memory_limit_bytes=memory_limit_bytes))


def _trace_real(
    step: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    modules: list[torch.nn.Module],
    root: torch.nn.Module | None,
) -> Tracer:
    return trace_real(lambda tracer: _run(step, args, kwargs, tracer), modules, root)


def _trace_fake(
    step: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    modules: list[torch.nn.Module],
    root: torch.nn.Module | None,
) -> Tracer:
    faker = Faker()
    with ExitStack() as stack:
        stack.enter_context(same_random())
        outside = stack.enter_context(nothing_outside(faker, modules, step, *args, *kwargs.values()))
        stack.enter_context(borrowed(modules, faker))
        with faker.mode:
            fake_args = faker.tree(args)
            fake_kwargs = faker.tree(kwargs)
            tracer = outside.tracer = Tracer(root, fake=True)
            try:
                with tracer.recording(), torch.enable_grad():
                    _run(step, fake_args, fake_kwargs, tracer)
            except TraceError:
                raise
            except Exception as error:
                tracer.closed = True
                raise TraceError(
                    f"the step cannot be traced on fake tensors ({type(error).__name__}: {error}): trace with real=True"
                ) from error
            del fake_args, fake_kwargs
            tracer.closed = True
    return tracer


def device_of(modules: list[torch.nn.Module], args: tuple[Any, ...]) -> str:
    for module in modules:
        for tensor in [*module.parameters(), *module.buffers()]:
            return tensor.device.type
    for item in args:
        if isinstance(item, torch.Tensor):
            return item.device.type
    return "cpu"
