"""What all handles of limits show, whichever engine holds the limit."""

from __future__ import annotations

import html
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lowtide.errors import PlanError, expect
from lowtide.graph import StepGraph
from lowtide.plan.data import Plan
from lowtide.trace.results import tensors_inside

if TYPE_CHECKING:
    from lowtide.report import Report
    from lowtide.report.tradeoff import Point


class Shown(ABC):
    """Reports, and plans for several steps, of a handle that knows its plan.

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
        """What the latest step took at its peak."""

    @property
    @abstractmethod
    def optimizer_bytes(self) -> int:
        """What of the step's standing bytes is the optimizer's state."""

    @abstractmethod
    def prepare(self, *args: Any, **kwargs: Any) -> Plan:
        """Plan for a step with these arguments now."""

    def _repr_html_(self) -> str:
        """For a notebook: the line that ``repr`` has, and the plan's table."""
        plan = self.plan
        shown = "" if plan is None else plan._repr_html_()
        return f"<p><code>{html.escape(repr(self))}</code></p>{shown}"

    def report(self, path: str | Path, title: str = "") -> Path:
        """Show the latest step and its plan in a file.

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
        """What `report` shows of the latest step and its plan, as data.

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
        """Plan for steps of several shapes, the largest first: a plan serves smaller steps, too.

        Args:
            steps: of each step, its keyword arguments (a mapping), its arguments (a tuple or list), or its
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
