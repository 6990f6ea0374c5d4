"""A step that is profiled and leaves no trace: one of lowtide's own, in place of the user's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lowtide.errors import TraceError
from lowtide.graph import StepGraph
from lowtide.run.profile.profiler import Profiler
from lowtide.trace.tracer import Tracer
from lowtide.trace.untouched import untouched, without_history


def profile_aside(
    modules: list[torch.nn.Module],
    device: torch.device,
    step: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    loss_of: Callable[[Tracer, Any], torch.Tensor | None],
    verify: bool = True,
    governor: Callable[[Any], Any] = lambda live: None,
) -> tuple[Profiler, StepGraph]:
    """Profile a step that is no training step: gradients, buffers, module attributes and random states are
    restored afterwards.

    Args:
        modules: the modules that the step may change; the forward of the first can be planned.
        device, verify, governor: as of `Profiler`.
        step, args, kwargs: the forward.
        loss_of: the loss in the forward's result; ``None`` where it has run its own backward.
    """
    with untouched(modules) as gradients, torch.enable_grad():
        first = modules[0] if modules else None
        profiler = Profiler(first, device, verify=verify, gradients=gradients, governor=governor)
        given, named = without_history((args, kwargs))
        result = profiler.run(step, given, named)
        try:
            loss = loss_of(profiler.tracer, result)
            if loss is not None:
                del result
                loss.backward()
                if profiler.tracer.saved and not any(e[0] == "unpack" for e in profiler.tracer.events):
                    raise TraceError(
                        "the loss does not depend on the model: its backward did not reach the model at all. "
                        "A loss_fn is given the model's output and has to compute the loss from that"
                    )
            return profiler, profiler.graph()
        finally:
            profiler.close()
