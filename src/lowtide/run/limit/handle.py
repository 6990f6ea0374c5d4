"""`limit_memory`: a model whose training step stays within a budget."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lowtide import budget as budgets
from lowtide import private
from lowtide.errors import BudgetError, PlanError
from lowtide.graph import StepGraph
from lowtide.interception import settle
from lowtide.meter.resident import innermost
from lowtide.plan.data import Plan
from lowtide.run.limit.arguments import check_optimizer
from lowtide.run.limit.key import StepKey
from lowtide.run.limit.limiter import Limiter
from lowtide.run.limit.shown import Shown
from lowtide.run.messages import limit_line


def _of_engine(member: Callable[..., Any]) -> Callable[..., Any]:
    """The compiled engine's member of that name, where that engine holds the limit."""

    @functools.wraps(member)
    def found(self: Handle, *args: Any, **kwargs: Any) -> Any:
        compiled = self._limiter.around.handle
        if compiled is None:
            return member(self, *args, **kwargs)
        theirs = getattr(compiled, member.__name__)
        return theirs(*args, **kwargs) if inspect.ismethod(theirs) else theirs

    return found


class Handle(Shown):
    """What `limit_memory` returns: the one handle of a limit.

    Attributes:
        model: the limited model.
    """

    def __init__(self, limiter: Limiter) -> None:
        self._limiter = limiter
        self.model = limiter.model
        limiter.handle = self

    def __repr__(self) -> str:
        if self._limiter.removed and self.model.__dict__.get("forward") is not self._limiter:
            return f"<lowtide.Handle of {type(self.model).__name__}: removed, or replaced by a later limit>"
        return limit_line(self.model, self._limiter.planner.budget, len(self.plans), self.plan)

    @property
    @_of_engine
    def plan(self) -> Plan | None:
        """The plan of the latest step, or ``None`` before the first has ended. Its
        `Plan.predicted_extra_seconds` stay the forecast that chose it; its `Plan.calibrated_extra_seconds`
        follow the steps that are timed: the first ones, and every fourth of the others."""
        latest = self._limiter.kinds.latest
        return latest.calibrated() if latest is not None else None

    @property
    @_of_engine
    def budget_bytes(self) -> int | None:
        """The budget in bytes, one for all kinds of steps: of ``"60%"``, ``"min"`` or ``"auto"`` the most
        that any kind was planned for since it was given; ``None`` before, and without a budget. A kind's own
        is its `Plan.budget_bytes`."""
        planner = self._limiter.planner
        planned = (kind.planned for kind in self._limiter.kinds.known.values())
        in_force = (one.plan.budget_bytes for one in planned if one and one.wanted[0] == planner.changes)
        return budgets.one_for_all(planner.budget, in_force)

    @property
    @_of_engine
    def measured_peak_bytes(self) -> int | None:
        """What the latest step that ended took at its peak, counted as `Plan.predicted_peak_bytes` is;
        ``None`` before, and where a running peak cannot be measured."""
        return self._limiter.measured_bytes

    @property
    @_of_engine
    def graph(self) -> StepGraph | None:
        """The step graph that `plan` was made for."""
        latest = self._limiter.kinds.latest
        return latest.graph if latest is not None else None

    @property
    @_of_engine
    def optimizer_bytes(self) -> int:
        """What of `StepGraph.resident_bytes` is the optimizer's state."""
        return self._limiter.planner.optimizer_bytes

    @property
    @_of_engine
    def plans(self) -> dict[StepKey, Plan]:
        """The plans so far, by kind of step. A plan serves smaller steps of the same kind, too."""
        known = self._limiter.kinds.known
        return {key: kind.planned.calibrated() for key, kind in known.items() if kind.planned is not None}

    @property
    @_of_engine
    def plannings(self) -> int:
        """How many plans were searched for so far."""
        return self._limiter.planner.solved

    @property
    @_of_engine
    def kept(self) -> dict[str, str]:
        """Operations whose results are kept because they do not reproduce, with the reason."""
        return dict(self._limiter.planner.kept)

    @_of_engine
    def prepare(self, *args: Any, **kwargs: Any) -> Plan:
        """Plan for a step with these arguments now: one runs, and gradients, buffers and random states are
        put back.

        Raises:
            BudgetError: no plan fits.
            PlanError: the limit was removed or replaced.
        """
        return self._in_force().prepare(args, kwargs).calibrated()

    def set_budget(self, budget: str | int) -> None:
        """Another budget from the next step on; what was learned about steps stays.

        Raises:
            BudgetError: the budget is malformed; at the next step, when no plan fits.
            PlanError: the limit was removed or replaced.
        """
        budgets.check(budget)
        limiter = self._in_force()
        with limiter.kinds.lock:
            limiter.planner.set_budget(budget)
        if limiter.around.handle is not None:
            limiter.around.handle.set_budget(budget)

    def set_optimizer(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Count this optimizer's state and step from the next step on, in place of the one counted so far:
        the optimizer may be made after the limit. What was learned about steps stays.

        Args:
            optimizer: of the model's parameters, or what a trainer has wrapped around it; ``None`` counts
                none.

        Raises:
            PlanError: it holds none of the model's parameters, or the limit was removed or replaced.
            BudgetError: at the next step, when no plan fits.

        Example:
            >>> handle = lowtide.limit_memory(model, "6GiB")  # doctest: +SKIP
            >>> handle.set_optimizer(torch.optim.AdamW(model.parameters()))  # doctest: +SKIP
        """
        limiter = self._in_force()
        check_optimizer(self.model, optimizer)
        with limiter.kinds.lock:
            limiter.planner.set_optimizer(None if optimizer is None else innermost(optimizer))
        if limiter.around.handle is not None:
            limiter.around.handle.set_optimizer(optimizer)

    def remove(self) -> None:
        """Give the model its own forward back. Steps that are under way finish under their plan."""
        limiter = self._limiter
        limiter.engagement.end()
        if limiter.removed:
            return
        limiter.removed = True
        limiter.kinds.stop()
        private.replicate_by(self.model, None)
        if self.model.__dict__.get("forward") is limiter:
            if limiter.original is None:
                del self.model.__dict__["forward"]
            else:
                self.model.__dict__["forward"] = limiter.original
        if limiter.own_stores:
            limiter.stores.close()
        settle()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The model without its limit for the length of the block, to compare with; plans stay.

        Raises:
            PlanError: the limit was removed or replaced.
        """
        limiter = self._in_force()
        limiter.removed = True
        try:
            with limiter.engagement.paused():
                yield
        finally:
            limiter.removed = False

    def _in_force(self) -> Limiter:
        """The limiter, which is still in force.

        Raises:
            PlanError: it was removed or replaced.
        """
        if self._limiter.removed:
            raise PlanError(
                "this handle's limit was removed, or replaced by another call of limit_memory: ask "
                "lowtide.handle_of(model) for the one in force"
            )
        return self._limiter


def check_given(budget: str | int | None, policy: Any, what: str = "limit_memory") -> None:
    """Check that there is a well-written budget, or a policy that needs none.

    Raises:
        BudgetError: there is neither.
    """
    if budget is None and policy is None:
        raise BudgetError(
            f"{what} needs a budget (bytes, '600MiB' or '60%'), or a policy that works without one, such as "
            "'full'"
        )
    if budget is not None:
        budgets.check(budget)


def count_reduced(handle: Handle, reduced_bytes: int) -> None:
    """Count what gradients are copied into while ranks add them up, beside the optimizer's state: it is there
    after backward, when the optimizer's own step may be the peak.

    Args:
        handle: of a limit that knows its optimizer; nothing is planned yet.
        reduced_bytes: the most there is of that at once.
    """
    handle._limiter.planner.reduced_bytes = reduced_bytes


def handle_of(model: torch.nn.Module) -> Handle | None:
    """The handle of a limited model, the same object that `limit_memory` returned, or ``None`` if it has no
    limit.

    It is found through wrappers that others put around the model's forward, as accelerate does for mixed
    precision.

    Raises:
        PlanError: ``model`` is no module.
    """
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
    return None if forward is None or forward.removed else forward.handle or Handle(forward)
