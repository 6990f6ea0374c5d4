"""Trace a whole step on fake tensors: no memory is used, and nothing of the model is left changed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch

from lowtide.errors import TraceError
from lowtide.graph import StepGraph
from lowtide.trace.costs.measure import measure_costs
from lowtide.trace.costs.specs import OpCost, OpSpec, Signature
from lowtide.trace.fake.tensors import Faker, borrowed
from lowtide.trace.fake.tracer import FakeTracer
from lowtide.trace.results import loss_in
from lowtide.trace.untouched import Gradients, same_random


def trace_fake(
    step: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    modules: list[torch.nn.Module],
    device: str,
    *,
    costs: bool = True,
    memory_limit_bytes: int | None = None,
    price: Callable[[OpSpec], OpCost] | None = None,
) -> StepGraph:
    """The graph of a step that runs on fake tensors, its operations timed one at a time on made-up inputs; as
    of `lowtide.trace`.

    Args:
        step: called as ``step(*args, **kwargs)``; returns its loss, or runs backward itself.
        args, kwargs: real tensors, of which only the shapes matter.
        modules: whose parameters, buffers and tensor attributes are fakes meanwhile; the first names them.
        device: whose memory the graph is about.
        costs: have each operation's seconds and scratch in the graph.
        memory_limit_bytes: operations that need more than this alone are estimated instead of timed.
        price: says what an operation costs, on a device that is not there; nothing is timed then.

    Raises:
        TraceError: the step has no loss, or uses values that fake tensors do not have.
    """
    faker = Faker()
    with ExitStack() as stack:
        stack.enter_context(same_random())
        stack.enter_context(borrowed(modules, faker))
        stack.enter_context(faker.mode)
        fake_args, fake_kwargs = faker.tree((args, kwargs))
        tracer = FakeTracer(modules[0] if modules else None, device)
        try:
            with tracer.recording(), torch.enable_grad():
                gradients = Gradients(modules)
                result = step(*fake_args, **fake_kwargs)
                if not tracer.ran_own_backward(result, gradients):
                    loss = loss_in(result)
                    del result
                    loss.backward()
                    del loss
        except TraceError:
            raise
        except Exception as error:
            raise TraceError(
                f"the step cannot be traced on fake tensors ({type(error).__name__}: {error}): leave "
                "fake=True out"
            ) from error
        finally:
            tracer.closed = True
        del fake_args, fake_kwargs
    graph = tracer.graph()
    if not costs:
        return graph
    if price is not None:
        return with_costs(graph, tracer, {key: price(spec) for key, spec in tracer.specs.items()})
    return with_costs(graph, tracer, measure_costs(tracer.specs, memory_limit_bytes=memory_limit_bytes))


def with_costs(graph: StepGraph, tracer: FakeTracer, costs: dict[Signature, OpCost]) -> StepGraph:
    """The graph with each operation's seconds and scratch bytes filled in."""
    operations = tuple(
        replace(operation, seconds=costs[signature].seconds, scratch_bytes=costs[signature].scratch_bytes)
        for operation, signature in zip(graph.operations, tracer.signatures, strict=True)
    )
    return replace(
        graph, operations=operations, plain_seconds=sum(operation.seconds for operation in operations)
    )
