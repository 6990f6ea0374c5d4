"""Trace a step by running it for real, for models that fake tensors cannot follow, and leave no trace of it in the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from lowtide.trace.chance import Chance, gpus_of, same_random
from lowtide.trace.eager import Tracer
from lowtide.trace.fake import Unchanged, borrowed

Packing = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]


@contextmanager
def untouched(modules: list[torch.nn.Module], chance: Chance | None = None) -> Iterator[None]:
    """Afterwards gradients, buffers, module attributes and random state are what they were."""
    parameters = {id(p): p for module in modules for p in module.parameters()}
    gradients = {key: p.grad for key, p in parameters.items()}
    accumulated = {key: grad.clone() for key, grad in gradients.items() if grad is not None}
    buffers = [(buffer, buffer.detach().clone()) for module in modules for buffer in module.buffers()]
    try:
        with same_random(gpus_of(modules), modules, chance), borrowed(modules, Unchanged()):
            yield
    finally:
        with torch.no_grad():
            for key, parameter in parameters.items():
                before = gradients[key]
                if before is None:
                    parameter.grad = None
                else:
                    before.copy_(accumulated[key])
                    parameter.grad = before
            for buffer, copy in buffers:
                if not _equal(buffer, copy):
                    buffer.copy_(copy)


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    try:
        return torch.equal(a, b)
    except RuntimeError:
        return False


def trace_real(
    run: Callable[[Tracer], None],
    modules: list[torch.nn.Module],
    root: torch.nn.Module | None,
    inner: Packing | None = None,
    below: Callable[[], Any] | None = None,
    chance: Chance | None = None,
) -> Tracer:
    """Run a step under a tracer.

    Args:
        run: runs forward and backward.
        modules: whose gradients and buffers to put back.
        root: names modules and parameters.
        inner: packing of an executor that keeps the step small meanwhile.
        below: makes a context to be entered before the tracer, for that executor's own mode.
        chance: what single numbers drawn at random are.
    """
    with ExitStack() as stack:
        stack.enter_context(untouched(modules, chance))
        if below is not None:
            stack.enter_context(below())
        tracer = Tracer(root, fake=False, inner=inner, chance=chance)
        with tracer.recording(), torch.enable_grad():
            run(tracer)
        tracer.closed = True
    return tracer
