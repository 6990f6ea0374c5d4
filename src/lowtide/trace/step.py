"""Trace a step on fake tensors: no memory is used, and nothing of the model is left changed."""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch

from lowtide.errors import TraceError
from lowtide.graph import StepGraph
from lowtide.trace.costs import OpCost, executor_overheads, measure_costs
from lowtide.trace.describe import Signature
from lowtide.trace.fake import Faker, borrowed
from lowtide.trace.fake_tracer import Tracer
from lowtide.trace.loss import loss_of
from lowtide.trace.random_state import same_random


def find_modules(
    step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[torch.nn.Module]:
    """The modules that a callable can reach: itself, its arguments, what it is bound to, and the variables
    that its code names.
    """
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


def _run(step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], tracer: Tracer) -> None:
    """Run the step, and its backward unless it did so itself."""
    step_result = step(*args, **kwargs)
    if any(operation["phase"] == "backward" for operation in tracer.operations):
        return
    loss = loss_of(step_result)
    if loss is None:
        raise TraceError(
            f"the step returned {_described(step_result)}, in which there is no loss: return a scalar tensor "
            "that requires grad, or an output with .loss, or run backward in the step"
        )
    del step_result
    (loss.sum() if loss.dim() else loss).backward()


def _described(result: Any) -> str:
    if not isinstance(result, torch.Tensor):
        return type(result).__name__
    return (
        f"a tensor of shape {tuple(result.shape)} that "
        f"{'requires' if result.requires_grad else 'does not require'} grad"
    )


def with_costs(graph: StepGraph, tracer: Tracer, costs: dict[Signature, OpCost]) -> StepGraph:
    """The graph with each operation's seconds and scratch bytes filled in."""
    operations = tuple(
        replace(operation, seconds=costs[signature].seconds, scratch_bytes=costs[signature].scratch_bytes)
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


def trace_fake(
    step: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    modules: list[torch.nn.Module],
    *,
    costs: bool = True,
    cost_cache: dict[Signature, OpCost] | None = None,
    memory_limit_bytes: int | None = None,
) -> StepGraph:
    """The graph of a step that runs on fake tensors, its operations timed one at a time on made-up inputs; as
    of `lowtide.trace`.

    Args:
        cost_cache: costs already known, extended in place.
        memory_limit_bytes: operations that need more than this alone are estimated instead of timed.
    """
    root = modules[0] if modules else None
    tracer = _trace_fake(step, args, kwargs, modules, root)
    graph = tracer.graph(device=device_of(modules, args))
    if not costs:
        return graph
    known = {} if cost_cache is None else cost_cache
    return with_costs(
        graph,
        tracer,
        measure_costs(
            tracer.specs,
            cache=known,
            counts=Counter(tracer.signatures),
            memory_limit_bytes=memory_limit_bytes,
        ),
    )


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
        stack.enter_context(borrowed(modules, faker))
        with faker.mode:
            fake_args = faker.tree(args)
            fake_kwargs = faker.tree(kwargs)
            tracer = Tracer(root)
            try:
                with tracer.recording(), torch.enable_grad():
                    _run(step, fake_args, fake_kwargs, tracer)
            except TraceError:
                raise
            except Exception as error:
                tracer.closed = True
                raise TraceError(
                    f"the step cannot be traced on fake tensors ({type(error).__name__}: {error}): leave "
                    "fake=True out"
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
