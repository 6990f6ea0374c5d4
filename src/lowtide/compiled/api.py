"""`lowtide.compile`: `torch.compile` within a budget."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lowtide import budget as budgets
from lowtide.compiled.partitioner import Partitioner, Report
from lowtide.errors import BudgetError, PlanError
from lowtide.meter import resident_bytes
from lowtide.plan.data import Plan
from lowtide.private import inductor
from lowtide.run.limit.messages import warn
from lowtide.run.limit.optimizer_need import optimizer_need

BACKENDS = ("inductor", "aot_eager")
_HANDLE = "_lowtide_handle"


class CompiledHandle:
    """What governs a compiled model, see `lowtide.compile` and `lowtide.handle_of`.

    Attributes:
        model: the model that was compiled.
        compiled: the compiled module.
        budget: as it was given.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        compiled: Any,
        budget: str | int,
        backend: str,
        optimizer: torch.optim.Optimizer | None,
        options: dict[str, Any],
        how: dict[str, Any],
    ) -> None:
        self.model, self.compiled, self.budget = model, compiled, budget
        self._backend, self._optimizer, self._options, self._how = backend, optimizer, options, how
        self._report = Report()

    @property
    def plans(self) -> list[Plan]:
        """A plan for each graph that was compiled, in that order; none before the first step."""
        return [planned.plan for planned in self._report.planned]

    @property
    def plan(self) -> Plan | None:
        """The plan of the graph whose peak is the highest, or ``None`` before the first step."""
        return max(self.plans, key=lambda plan: plan.predicted_peak_bytes, default=None)

    @property
    def predicted_peak_bytes(self) -> int | None:
        """The most live bytes that is predicted for any graph, with what stands beside it."""
        return self.plan.predicted_peak_bytes if self.plan is not None else None

    @property
    def plain_peak_bytes(self) -> int | None:
        """The same as `torch.compile` would have it by itself."""
        return max((p.plain_peak_bytes for p in self._report.planned), default=None)

    @property
    def predicted_seconds(self) -> float | None:
        """Forecast of a step's time, from calls timed alone."""
        found = self.plans
        return sum(plan.plain_seconds + plan.predicted_extra_seconds for plan in found) if found else None

    @property
    def lower_bound_seconds(self) -> float | None:
        """No schedule of the same calls within the budget adds less to a step."""
        return sum(plan.bound_extra_seconds for plan in self.plans) if self.plans else None

    def set_budget(self, budget: str | int) -> None:
        """Another budget: the next step compiles anew.

        Raises:
            BudgetError: the budget is malformed; at the next step, when no plan fits.
        """
        _check(budget)
        self.budget = budget
        self._report = Report()
        self._install(self._backend_for())

    def remove(self) -> None:
        """From the next step on the model runs as `torch.compile` alone compiles it."""
        options = self._options if self._backend == "inductor" else {}
        plain = torch.compile(self.model, backend=self._backend, options=options or None, **self._how)
        self.compiled.__dict__["forward"] = plain.forward
        self.compiled.__dict__.pop(_HANDLE, None)

    def _standing(self) -> int:
        standing = resident_bytes(self.model, self._optimizer)
        if self._optimizer is not None:
            present = resident_bytes(self.model, self._optimizer) - resident_bytes(self.model)
            standing += max(0, optimizer_need(self._optimizer).state_bytes - present)
        return standing

    def _backend_for(self) -> Callable[..., Any]:
        """A backend of its own for each budget: compiled code is shared by what has the same backend."""
        if self._backend == "aot_eager":
            return inductor.aot_autograd(
                fw_compiler=inductor.boxed_nop,
                partition_fn=Partitioner(self.budget, self._standing, None, self._report),
                keep_inference_input_mutations=True,
            )
        partitioner = Partitioner(self.budget, self._standing, self._options, self._report)
        settings = {**self._options, "custom_partitioner_fn": partitioner}

        def backend(module: Any, inputs: Any) -> Any:
            return inductor.compile_with(module, inputs, settings)

        return backend

    def _tell_of_breaks(self, graphs: int) -> None:
        warn(
            f"this model was compiled as {graphs} graphs, each planned within {self.budget} by itself: what "
            "one keeps for its backward is not counted in the others, and a step may take more. Remove the "
            "graph breaks (fullgraph=True names the first), or use lowtide.limit_memory on the model itself"
        )

    def _install(self, backend: Callable[..., Any]) -> None:
        fresh = torch.compile(self.model, backend=backend, **self._how)
        run, planned = fresh.forward, self._report.planned  # type: ignore[union-attr]

        def forward(*args: Any, **kwargs: Any) -> Any:
            before = len(planned)
            try:
                result = run(*args, **kwargs)
            except inductor.BackendCompilerFailed as error:
                if isinstance(error.inner_exception, BudgetError):
                    raise error.inner_exception from None
                raise
            if len(planned) - before > 1:
                self._tell_of_breaks(len(planned) - before)
            return result

        self.compiled.__dict__["forward"] = forward
        self.compiled.__dict__[_HANDLE] = self


def compile(
    model: torch.nn.Module,
    budget: str | int,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    backend: str = "inductor",
    mode: str | None = None,
    options: dict[str, Any] | None = None,
    **torch_compile_options: Any,
) -> Any:
    """`torch.compile` a model so that its training step fits a budget, at the least extra time.

    The first step compiles: the graph of forward and backward is planned as `lowtide.limit_memory` plans a
    step and cut where the plan says; what the backend would really allocate is predicted without compiling a
    kernel; then the step is compiled. Later steps run compiled code alone. Where the model fits the budget as
    it is, it is compiled as `torch.compile` would.

    Each graph is planned by itself: with graph breaks, what one graph keeps for its backward is not counted
    in the others, nor is a loss outside the model.

    Args:
        model: any module.
        budget: as of `lowtide.limit_memory`: bytes, ``"6GiB"``, ``"60%"`` of what `torch.compile` alone
            takes, ``"min"`` or ``"auto"``.
        optimizer: its state counts against the budget, too.
        backend: ``inductor`` or ``aot_eager``.
        mode, options, torch_compile_options: as of `torch.compile`.

    Returns:
        What `torch.compile` returns; `lowtide.handle_of` has its handle.

    Raises:
        BudgetError: the budget is malformed; at the first step, when no plan fits.
        PlanError: an argument that cannot be.

    Example:
        >>> import torch, lowtide
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 1))
        >>> compiled = lowtide.compile(model, "100%", backend="aot_eager")
        >>> compiled(torch.randn(4, 8)).sum().backward()
        >>> lowtide.handle_of(compiled).plan.changes_nothing
        True
    """
    if not isinstance(model, torch.nn.Module):
        raise PlanError(f"lowtide.compile takes a torch.nn.Module, not {type(model).__name__}")
    if backend not in BACKENDS:
        raise PlanError(f"lowtide.compile knows no backend {backend!r}: give one of {', '.join(BACKENDS)}")
    if backend != "inductor" and (mode or options):
        raise PlanError(f"mode and options are Inductor's, and the backend is {backend!r}: drop them")
    if mode is not None and options:
        raise PlanError("mode and options cannot be given together: give options alone")
    _check(budget)
    chosen = dict(options or {})
    if mode is not None and mode != "default":
        chosen = inductor.mode_options(mode)
    if chosen.get("triton.cudagraphs"):
        raise PlanError(
            "CUDA graphs keep a pool of memory of their own, which no budget is held for: use "
            "mode='max-autotune-no-cudagraphs' or none"
        )
    compiled = torch.compile(model, backend="aot_eager", **torch_compile_options)
    handle = CompiledHandle(model, compiled, budget, backend, optimizer, chosen, torch_compile_options)
    handle._install(handle._backend_for())
    return compiled


def compile_options(budget: str | int) -> dict[str, Any]:
    """Settings for ``torch.compile(model, options=...)`` that hold a budget.

    A graph is all that is known here: its inputs (parameters among them) and what it allocates count,
    gradients that stand before the step, an optimizer's state and other graphs do not.
    `lowtide.compile` knows more.

    Args:
        budget: as of `lowtide.compile`.

    Raises:
        BudgetError: the budget is malformed.

    Example:
        >>> import torch, lowtide
        >>> model = torch.compile(torch.nn.Linear(8, 8), options=lowtide.compile_options("6GiB"))
    """
    _check(budget)
    return {"custom_partitioner_fn": Partitioner(budget, options={})}


def _check(budget: str | int) -> None:
    if not budgets.asks_for(budget):
        budgets.parse(budget, 1 << 60)
