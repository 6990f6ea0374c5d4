"""What a compiled step would take, without compiling a kernel or running it."""

from __future__ import annotations

from typing import Any

import torch

from lowtide.compiled.backend import FREES_AT_ONCE, compile_graph
from lowtide.compiled.partitioner import Partitioner, Report
from lowtide.errors import BudgetError, PlanError
from lowtide.meter import resident_bytes
from lowtide.meter.cuda import workspace_bytes
from lowtide.plan.data import Plan
from lowtide.private import inductor


class _Enough(Exception):
    """The graph is planned; nobody runs it."""


def forecast(model: torch.nn.Module, budget: str | int, *args: Any, backend: str = "inductor") -> Plan:
    """Trace a step, plan it and predict what the backend would allocate; then stop.

    Parameters and inputs are not read, so uninitialised ones do.

    Args:
        model: whose call returns the loss.
        budget: as of `lowtide.compile`.
        args: of the call.
        backend: ``inductor`` or ``aot_eager``.

    Raises:
        BudgetError: no plan fits.
        PlanError: the model does not compile as one graph, or no gradient is asked for.
    """
    report = Report()
    # what a cache hands out nobody plans
    options = {**FREES_AT_ONCE, **inductor.UNCACHED} if backend == "inductor" else None
    place = next((one.device for one in model.parameters()), torch.device("cpu"))
    standing = resident_bytes(model) + workspace_bytes(place)
    partitioner = Partitioner(budget, lambda: standing, options, report)

    def planning(module: Any, inputs: Any) -> Any:
        return compile_graph(module, inputs, options, partitioner, _stop)

    compiled = torch.compile(model, backend=planning, fullgraph=True)
    try:
        compiled(*args)
    except inductor.BackendCompilerFailed as error:
        inner = error.inner_exception
        if isinstance(inner, BudgetError):
            raise inner from None
        if not isinstance(inner, _Enough):
            raise
    except inductor.Unsupported as error:
        said = str(error).strip().splitlines()[0]
        raise PlanError(
            f"{type(model).__name__} does not compile as one graph ({said}): plan it without compiling, or "
            "run it under lowtide.compile, which takes graph breaks"
        ) from error
    if not report.planned:
        raise PlanError(f"{type(model).__name__} asks for no gradient: there is nothing to plan")
    return report.planned[0]


def _stop(*args: Any, **kwargs: Any) -> Any:
    raise _Enough
