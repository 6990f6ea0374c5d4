"""`limit_memory`: a model whose training step stays within a budget."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lowtide import budget as budgets
from lowtide import private
from lowtide.errors import BudgetError, PlanError
from lowtide.graph import StepGraph
from lowtide.meter.resident import innermost
from lowtide.plan.data import Plan
from lowtide.run.limit.arguments import refuse_other_kinds, refuse_sharded
from lowtide.run.limit.engagement import Engagement
from lowtide.run.limit.key import StepKey
from lowtide.run.limit.limiter import Limiter
from lowtide.run.limit.messages import limit_line, warn
from lowtide.run.limit.planning import Policy
from lowtide.run.record.verify import Verify
from lowtide.store.stores import Stores
from lowtide.trace.results import tensors_inside

if TYPE_CHECKING:
    from lowtide.report import Report


class Handle:
    """What `limit_memory` returns.

    Attributes:
        model: the limited model.
    """

    def __init__(self, limiter: Limiter) -> None:
        self._limiter = limiter
        self.model = limiter.model

    def __repr__(self) -> str:
        return limit_line(self.model, self._limiter.budget, len(self.plans), self.plan)

    @property
    def plan(self) -> Plan | None:
        """The plan of the latest step, or ``None`` before the first has ended. Its
        `Plan.predicted_extra_seconds` stay the forecast that chose it; its `Plan.calibrated_extra_seconds`
        follow the steps that are timed: the first ones, and every fourth of the others."""
        latest = self._limiter.latest
        return latest.calibrated() if latest is not None and latest.plan is not None else None

    @property
    def measured_peak_bytes(self) -> int | None:
        """What the latest step that ended took at its peak, counted as `Plan.predicted_peak_bytes` is;
        ``None`` before, and where a running peak cannot be measured."""
        return self._limiter.measured_bytes

    @property
    def graph(self) -> StepGraph | None:
        """The step graph that `plan` was made for."""
        latest = self._limiter.latest
        return latest.graph if latest is not None else None

    def report(self, path: str | Path, title: str = "") -> None:
        """Show the latest step and its plan in a file.

        Args:
            path: ``.html`` for a page, ``.png``, ``.pdf`` or ``.svg`` for a picture, ``.pickle`` for
                PyTorch's memory viewer, ``.json`` for the data.
            title: which step it is; empty for the model's class.

        Raises:
            LowtideError: no step has ended yet, or the file cannot be written.

        Example:
            >>> handle.report("page.html")  # doctest: +SKIP
        """
        from lowtide.report import save_report  # what draws is needed by few runs

        save_report(self.make_report(title), path)

    def make_report(self, title: str = "", **more: Any) -> Report:
        """What `report` shows of the latest step and its plan, as data.

        Args:
            title: which step it is; empty for the model's class.
            more: what was measured, and what `lowtide.report.make_report` takes beside.

        Raises:
            PlanError: no step has ended yet.
        """
        from lowtide.report import Measured, make_report

        plan, graph = self.plan, self.graph
        if plan is None or graph is None:
            raise PlanError(
                "there is no plan to report on yet: run a step, or call prepare(...) with its arguments"
            )
        planner = self._limiter.planner
        graph = replace(graph, resident_bytes=graph.resident_bytes - planner.moved_bytes)
        more.setdefault("measured_planned", Measured(self.measured_peak_bytes))
        return make_report(
            graph,
            plan,
            title=title or f"{type(self.model).__name__}, one training step",
            optimizer_bytes=planner.optimizer_bytes,
            **more,
        )

    @property
    def plans(self) -> dict[StepKey, Plan]:
        """Every plan so far, by what the step looked like. A plan serves smaller steps of the same kind,
        too.
        """
        return {key: kind.calibrated() for key, kind in self._limiter.kinds.items() if kind.plan is not None}

    @property
    def plannings(self) -> int:
        """How many plans were searched for so far."""
        return self._limiter.planner.solved

    @property
    def kept(self) -> dict[str, str]:
        """Operations whose results are kept because they do not reproduce, with the reason."""
        return dict(self._limiter.planner.kept)

    def prepare(self, *args: Any, **kwargs: Any) -> Plan:
        """Plan for a step with these arguments now: one runs, and gradients, buffers and random states are
        put back.

        Raises:
            BudgetError: no plan fits.
            PlanError: the limit was removed or replaced.
        """
        return self._in_force().prepare(args, kwargs).calibrated()

    def prepare_all(self, steps: Iterable[Mapping[str, Any] | Sequence[Any] | Any]) -> list[Plan]:
        """Plan for steps of several shapes, the largest first: a plan serves smaller steps, too.

        Args:
            steps: of each step, its keyword arguments (a mapping), its arguments (a tuple or list), or its
                only argument.

        Raises:
            BudgetError: no plan fits.
        """
        calls = [
            ((), dict(step))
            if isinstance(step, Mapping)
            else (tuple(step) if isinstance(step, (tuple, list)) else (step,), {})
            for step in steps
        ]
        calls.sort(key=lambda call: -sum(t.numel() for t in tensors_inside(call)))
        return [self.prepare(*args, **kwargs) for args, kwargs in calls]

    def set_budget(self, budget: str | int) -> None:
        """Another budget from the next step on; what was learned about steps stays.

        Raises:
            BudgetError: the budget is malformed; at the next step, when no plan fits.
            PlanError: the limit was removed or replaced.
        """
        _check(budget)
        self._in_force().set_budget(budget)

    def remove(self) -> None:
        """Give the model its own forward back. Steps that are under way finish under their plan."""
        limiter = self._limiter
        if limiter.engagement is not None:
            limiter.engagement.end()
        if limiter.removed:
            return
        limiter.removed = True
        if self.model.__dict__.get("forward") is limiter:
            if limiter.original is None:
                del self.model.__dict__["forward"]
            else:
                self.model.__dict__["forward"] = limiter.original
        if limiter.own_stores:
            limiter.stores.retire()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The model without its limit for the length of the block, to compare with; plans stay.

        Raises:
            PlanError: the limit was removed or replaced.
        """
        limiter = self._in_force()
        if limiter.engagement is not None:
            limiter.engagement.end()
        limiter.removed = True
        try:
            yield
        finally:
            limiter.removed = False

    def _in_force(self) -> Limiter:
        """What governs the model's steps.

        Raises:
            PlanError: it does not any more.
        """
        if self._limiter.removed:
            raise PlanError(
                "this handle's limit was removed, or replaced by another call of limit_memory: ask "
                "lowtide.handle_of(model) for the one in force"
            )
        return self._limiter


def limit_memory(
    model: torch.nn.Module,
    budget: str | int | None = None,
    *,
    policy: Policy | None = None,
    loss_fn: Callable[[Any], torch.Tensor] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    verify: Verify = "first",
    stores: Stores | None = None,
    progress: bool | None = None,
) -> Handle:
    """Make the training steps of ``model`` fit a budget, at the least extra time, with bitwise the same
    gradients.

    The first step with inputs of a new kind is looked at while it runs: in about the memory that
    checkpointing every block takes, with every operation run twice, to see that it reproduces and how long it
    takes. When its backward has ended a plan is made, and later steps run under it. A plan for a larger step
    serves smaller ones; other kinds (evaluation, autocast, other parameters that train) get plans of their
    own. Called again for a limited model, it replaces the limit.

    Args:
        model: any module; its forward is replaced on the instance until ``handle.remove()``.
        budget: bytes, or text such as ``"600MiB"`` or ``"60%"`` of the plain step's peak (of the largest step
            planned so far), ``"min"`` for the smallest that works, or ``"auto"`` for what the device has,
            less a reserve. ``None`` needs a policy that does without.
        progress: whether a terminal is told what takes long; ``None`` goes by the environment
            (`lowtide.progress`).
        policy: a policy or its name; ``None`` is ``optimal``.
        loss_fn: from the model's output to the loss, for `Handle.prepare` of a model that does not return its
            loss. It is not used to train.
        optimizer: its state and its step count against the budget, too.
        stores: process groups to shard over and codecs of your own, for plans that move values; tiers open by
            themselves.
        verify: ``first`` compares every replay of the first step, ``always`` also checks digests in every
            step, ``never`` trusts.

    Raises:
        BudgetError: the budget is malformed; at the end of the first backward, when no plan fits, with the
            smallest budget that does.
        PlanError: an argument that cannot be.

    Example:
        >>> import torch, lowtide
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 1))
        >>> handle = lowtide.limit_memory(model, budget="100%", loss_fn=torch.sum)
        >>> model(torch.randn(4, 8)).sum().backward()
        >>> handle.plan.predicted_peak_bytes <= handle.plan.budget_bytes
        True
        >>> handle.remove()
    """
    if not isinstance(model, torch.nn.Module):
        raise PlanError(f"limit_memory takes a torch.nn.Module, not {type(model).__name__}")
    if verify not in ("first", "always", "never"):
        raise PlanError(f"verify={verify!r} is not known: use 'first', 'always' or 'never'")
    if budget is None and policy is None:
        raise BudgetError(
            "limit_memory needs a budget (bytes, '600MiB' or '60%'), or a policy that works without one, "
            "such as 'full'"
        )
    if budget is not None:
        _check(budget)
    refuse_other_kinds(model, policy, loss_fn, optimizer, stores)
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        model = model.module
    if private.is_compiled(model):
        raise PlanError(
            "this model is compiled as a whole, which limit_memory cannot look into: call "
            "lowtide.compile(model, budget) in place of torch.compile, or limit the model itself and compile "
            "its submodules (they stay compiled)"
        )
    before = handle_of(model)
    if before is not None:
        before.remove()
    refuse_sharded(model)
    optimizer = None if optimizer is None else innermost(optimizer)
    limiter = Limiter(
        model,
        budget=budget,
        policy=policy,
        loss_fn=loss_fn,
        optimizer=optimizer,
        verify=verify,
        stores=stores,
        progress=progress,
    )
    model.__dict__["forward"] = limiter
    limiter.engagement = Engagement(model, warn)
    return Handle(limiter)


def _check(budget: str | int) -> None:
    if not budgets.asks_for(budget):
        budgets.parse(budget, 1 << 60)


def handle_of(model: torch.nn.Module) -> Handle | None:
    """The handle of a limited model, or ``None`` if it has no limit.

    What others wrapped around the model's forward afterwards (accelerate does, for mixed precision) is seen
    through.
    """
    compiled = model.__dict__.get("_lowtide_handle")
    if compiled is not None:
        return compiled
    forward: Any = model.__dict__.get("forward")
    while forward is not None and not isinstance(forward, Limiter):
        forward = getattr(forward, "__func__", None) or getattr(forward, "__wrapped__", None)
    return None if forward is None or forward.removed else Handle(forward)
