"""The handles of limits: what users hold and ask.

`LimitHandle` is what every limit shows, whichever engine holds it; `Handle` is that of `limit_memory`,
`lowtide.compiled.compiled_handle` has that of compiled models.
"""

from __future__ import annotations

import functools
import html
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lowtide import budget as budgets
from lowtide import private
from lowtide.errors import PlanError, expect, shorten
from lowtide.extension import Extension
from lowtide.graph import StepGraph
from lowtide.interception import drop_idle_key
from lowtide.plan.data import Plan
from lowtide.run.limit.limiter import Limiter
from lowtide.run.messages import limit_line
from lowtide.trace.results import tensors_inside

if TYPE_CHECKING:
    from lowtide.report import Report
    from lowtide.report.tradeoff import Point


class LimitHandle(ABC):
    """What the handle of every limit shows.

    Attributes:
        model: the limited model.
    """

    model: torch.nn.Module
    _curve: tuple[StepGraph, tuple[Point, ...]] | None = None  # of the graph that was reported on last

    @property
    @abstractmethod
    def plan(self) -> Plan | None:
        """The plan that is shown, or ``None`` before there is one."""

    @property
    @abstractmethod
    def graph(self) -> StepGraph | None:
        """The step graph that `plan` was made for."""

    @property
    @abstractmethod
    def measured_peak_bytes(self) -> int | None:
        """What the latest step that ended took at its peak, counted as `Plan.predicted_peak_bytes` is;
        ``None`` before, and where that cannot be measured: without a running peak, or where several limited
        models take part in one step."""

    @property
    @abstractmethod
    def optimizer_bytes(self) -> int:
        """What of `StepGraph.resident_bytes` is the optimizer's state."""

    @abstractmethod
    def prepare(self, *args: Any, **kwargs: Any) -> Plan:
        """Plan for a step with these arguments now."""

    @abstractmethod
    def _is_removed(self) -> bool:
        """Whether the limit was removed, or replaced by a later one."""

    @abstractmethod
    def _given_budget(self) -> str | int | None:
        """The budget as it was given."""

    @property
    @abstractmethod
    def plans(self) -> list[Plan]:
        """The plans so far, one for each kind of step, in the order in which they were seen."""

    def __repr__(self) -> str:
        if self._is_removed():
            return f"<lowtide.Handle of {type(self.model).__name__}: removed, or replaced by a later limit>"
        return limit_line(self.model, self._given_budget(), len(self.plans), self.plan)

    def _check_in_force(self) -> None:
        """Check that the limit is still in force.

        Raises:
            PlanError: it was removed or replaced.
        """
        if self._is_removed():
            raise PlanError(
                "this handle's limit was removed, or replaced by another one: lowtide.handle_of(model) "
                "returns the current handle"
            )

    def _repr_html_(self) -> str:
        """For a notebook: the line that ``repr`` has, and the plan's table."""
        plan = self.plan
        shown = "" if plan is None else plan._repr_html_()
        return f"<p><code>{html.escape(repr(self))}</code></p>{shown}"

    def report(self, path: str | Path = "lowtide.html", title: str = "") -> Path:
        """Write a report of the latest step and its plan to a file. In a notebook use `make_report()`.

        Args:
            path: ``.html`` for a page, ``.png``, ``.pdf`` or ``.svg`` for a picture, ``.pickle`` for
                PyTorch's memory viewer.
            title: which step it is; empty for the model's class.

        Returns:
            The file's path.

        Raises:
            LowtideError: no step has ended yet, or the file cannot be written.

        Example:
            >>> handle.report("page.html")  # doctest: +SKIP
        """
        from lowtide.report import save_report  # what draws is needed by few runs

        return save_report(self.make_report(title), path)

    def make_report(self, title: str = "", **more: Any) -> Report:
        """The report of the latest step and its plan, as data.

        Args:
            title: which step it is; empty for the model's class.
            more: measurements and other arguments of `lowtide.report.make_report`.

        Raises:
            PlanError: no step has ended yet.
        """
        from lowtide.report import Measured, make_report
        from lowtide.report.tradeoff import tradeoff

        plan, graph = self.plan, self.graph
        if plan is None or graph is None:
            raise PlanError(
                "there is no plan to report on yet: run a step, or call prepare(...) with its arguments"
                if plan is None
                else "this step's compiled code and its plan come from PyTorch's cache on disk, which has no "
                "step graph to report on: call set_budget(...) with another budget, or set "
                "TORCHINDUCTOR_FORCE_DISABLE_CACHES=1 and run again"
            )
        more.setdefault("measured_planned", Measured(self.measured_peak_bytes))
        if more.get("points") is None:  # they take seconds to plan for, and are of the graph alone
            if self._curve is None or self._curve[0] is not graph:
                self._curve = graph, tradeoff(graph)
            more["points"] = self._curve[1]
        return make_report(
            graph,
            plan,
            title=title or f"{type(self.model).__name__}, one training step",
            optimizer_bytes=self.optimizer_bytes,
            **more,
        )

    def prepare_all(self, steps: Iterable[Mapping[str, Any] | Sequence[Any] | Any]) -> list[Plan]:
        """Make plans for steps of several shapes, the largest first: a plan also serves smaller steps.

        Args:
            steps: for each step its keyword arguments (a mapping), its arguments (a tuple or list), or its
                only argument.

        Raises:
            BudgetError: no plan fits.
            PlanError: ``steps`` holds no steps.
        """
        several = isinstance(steps, Iterable) and not isinstance(steps, str)
        expect(several, "prepare_all(steps=)", steps, "a list of steps' arguments, [x, (x, y)]")
        calls = [
            ((), dict(step))
            if isinstance(step, Mapping)
            else (tuple(step) if isinstance(step, (tuple, list)) else (step,), {})
            for step in steps
        ]
        calls.sort(key=lambda call: -sum(t.numel() for t in tensors_inside(call)))
        return [self.prepare(*args, **kwargs) for args, kwargs in calls]


def _of_engine(member: Callable[..., Any]) -> Callable[..., Any]:
    """Have the compiled engine's handle answer, by its member of the same name, where that engine holds the
    limit.
    """

    @functools.wraps(member)
    def found(self: Handle, *args: Any, **kwargs: Any) -> Any:
        compiled = self._limiter.compiled_handle
        if compiled is None:
            return member(self, *args, **kwargs)
        theirs = getattr(compiled, member.__name__)
        return theirs(*args, **kwargs) if inspect.ismethod(theirs) else theirs

    return found


class Handle(LimitHandle):
    """The handle of a limit, which `limit_memory` returns.

    Attributes:
        model: the limited model.
    """

    def __init__(self, limiter: Limiter) -> None:
        self._limiter = limiter
        self.model = limiter.model
        limiter.handle = self

    def _is_removed(self) -> bool:
        return self._limiter.removed

    def _given_budget(self) -> str | int | None:
        return self._limiter.maker.budget

    @property
    def extensions(self) -> tuple[Extension, ...]:
        """What the limit does beyond one device and recomputation."""
        return self._limiter.extensions

    @property
    @_of_engine
    def plan(self) -> Plan | None:
        """The plan of the latest step, or ``None`` before the first has ended.
        `Plan.predicted_extra_seconds` is the forecast that chose it. `Plan.calibrated_extra_seconds` follows
        measured steps: the first ones, and every fourth later one.
        """
        latest = self._limiter.book.latest
        return latest.calibrated() if latest is not None else None

    @property
    @_of_engine
    def budget_bytes(self) -> int | None:
        """The budget in bytes, to which every step is held; ``None`` without a budget. For ``"60%"``,
        ``"min"`` and ``"auto"`` it is ``None`` before the first step has ended. A larger step raises it. It
        falls only if you set another budget.
        """
        return self._limiter.maker.budget_bytes

    @property
    @_of_engine
    def measured_peak_bytes(self) -> int | None:
        return self._limiter.measured_bytes

    @property
    @_of_engine
    def graph(self) -> StepGraph | None:
        latest = self._limiter.book.latest
        return latest.step_graph if latest is not None else None

    @property
    @_of_engine
    def optimizer_bytes(self) -> int:
        return self._limiter.maker.claim.resident_bytes

    @property
    @_of_engine
    def plans(self) -> list[Plan]:
        """A list of plans, one for each kind of step so far, in their order; empty before the first step has
        ended. A plan also serves smaller steps of its kind.
        """
        known = list(self._limiter.book.known.values())  # a thread that trains may begin a step meanwhile
        return [entry.planned.calibrated() for entry in known if entry.planned is not None]

    @property
    @_of_engine
    def plannings(self) -> int:
        """How many searches for a plan have run."""
        return self._limiter.maker.solved

    @property
    @_of_engine
    def kept(self) -> dict[str, str]:
        """Operations whose results are kept because a second run gave other bytes, with the reason."""
        return dict(self._limiter.maker.findings)

    @_of_engine
    def prepare(self, *args: Any, **kwargs: Any) -> Plan:
        """Make a plan now: run one step with these arguments, then restore gradients, buffers and random
        states.

        Raises:
            BudgetError: no plan fits.
            PlanError: the limit was removed or replaced.
        """
        try:
            return self._in_force().prepare(args, kwargs).calibrated()
        except Exception as error:
            shorten(error)
            raise

    def set_budget(self, budget: str | int) -> None:
        """Set another budget from the next step on, without profiling known steps again.

        Raises:
            BudgetError: the budget is malformed; at the next step, no plan fits.
            PlanError: the limit was removed or replaced.
        """
        budgets.check(budget)
        limiter = self._in_force()
        limiter.extend(budget)  # which checks it
        with limiter.book.lock:
            limiter.maker.set_budget(budget)
        if limiter.compiled_handle is not None:
            limiter.compiled_handle.set_budget(budget)

    def set_optimizer(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Count this optimizer's state and step from the next step on, in place of the former optimizer.
        Use it if the optimizer is made after the limit.

        Args:
            optimizer: the model's optimizer, or a trainer's wrapper of it; ``None`` counts none.

        Raises:
            PlanError: it holds none of the model's parameters, or the limit was removed or replaced.
            BudgetError: at the next step, no plan fits.

        Example:
            >>> handle = lowtide.limit_memory(model, "6GiB")  # doctest: +SKIP
            >>> handle.set_optimizer(torch.optim.AdamW(model.parameters()))  # doctest: +SKIP
        """
        limiter = self._in_force()
        counted = () if optimizer is None else (limiter.face.counting(self.model, optimizer),)
        with limiter.book.lock:
            limiter.maker.extend(*counted, without="optimizer")
            limiter.maker.version += 1
        if limiter.compiled_handle is not None:
            limiter.compiled_handle.set_optimizer(optimizer)

    def remove(self) -> None:
        """Remove the limit: the model's own forward and its own gradient checkpointing are on again. Steps
        that have begun finish under their plan.
        """
        limiter = self._limiter
        limiter.engagement.end()
        if limiter.removed:
            return
        limiter.removed = True
        for extension in limiter.extensions:
            extension.close()
        limiter.uninstall()
        limiter.turn_on_checkpointing()
        drop_idle_key()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Run the model without its limit inside the block. The plans are kept.

        Raises:
            PlanError: the limit was removed or replaced.
        """
        limiter = self._in_force()
        limiter.paused = True
        limiter.turn_on_checkpointing()
        try:
            with limiter.engagement.paused():
                yield
        finally:
            limiter.paused = False
            limiter.turn_off_checkpointing()

    def _in_force(self) -> Limiter:
        """The limiter, which is still in force.

        Raises:
            PlanError: it was removed or replaced.
        """
        self._check_in_force()
        return self._limiter


def handle_of(model: torch.nn.Module) -> Handle | None:
    """The handle of a limited model, the same object that `limit_memory` returned, or ``None`` if it has no
    limit.

    It is also found through wrappers of the model's forward, such as accelerate's for mixed precision.

    Raises:
        PlanError: ``model`` is no module.
    """
    if private.is_schedule(model):
        step = model.__dict__.get("step")
        return (step.handle or Handle(step)) if isinstance(step, Limiter) and not step.removed else None
    if not isinstance(model, torch.nn.Module):
        raise PlanError(f"handle_of takes the limited module, not {type(model).__name__}")
    compiled = model.__dict__.get("_lowtide_handle")
    if compiled is not None:
        return compiled
    if private.is_compiled(model) and "_orig_mod" in model._modules:  # what torch.compile returned
        return handle_of(model._modules["_orig_mod"])  # type: ignore[arg-type]
    forward: Any = model.__dict__.get("forward")
    while forward is not None and not isinstance(forward, Limiter):
        forward = getattr(forward, "__func__", None) or getattr(forward, "__wrapped__", None)
    limiter = None if forward is None else forward.of(model)
    return None if limiter is None or limiter.removed else limiter.handle or Handle(limiter)
