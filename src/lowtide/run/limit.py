"""`limit_memory`: a model whose training step stays within a budget."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch

from lowtide import budget as budgets
from lowtide import private
from lowtide.errors import BudgetError, LowtideError, PlanError, TraceError
from lowtide.graph import StepGraph
from lowtide.meter import resident_bytes
from lowtide.plan import make
from lowtide.plan.plan import Plan
from lowtide.plan.simulate import plain
from lowtide.run.compiled import left_alone
from lowtide.run.direct import PlanDirector
from lowtide.run.key import StepKey, step_key
from lowtide.run.notice import Notice
from lowtide.run.record import Recorder, Verify
from lowtide.run.resident import optimizer_need
from lowtide.run.scope import small_executor
from lowtide.trace.costs import OpCost
from lowtide.trace.limited import trace_model

Policy = str | Callable[..., Plan]


class LowtideWarning(UserWarning):
    """Something that a user should know and that stops nothing: an operation that does not reproduce, a plan made again."""


@dataclass
class Planned:
    """A plan and how far it has been trusted.

    Attributes:
        graph: what it was made for.
        plan: the decisions.
        verified: whether a step has run under it with every replay compared.
        steps: how many steps have run under it.
        departed: operations of the latest step that the plan did not know.
    """

    graph: StepGraph
    plan: Plan
    verified: bool = False
    steps: int = 0
    departed: int = 0


class Limiter:
    """Stands in for ``model.forward``: plans at the first step of each kind, and runs every training step under its plan.

    It is the instance's ``forward`` attribute, so hooks, wrappers and ``state_dict`` see the model that they know. It can be copied and
    pickled with the model; plans are not copied, the copy plans for itself.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        budget: str | int | None,
        policy: Policy | None,
        loss_fn: Callable[[Any], torch.Tensor] | None,
        optimizer: torch.optim.Optimizer | None,
        verify: Verify,
    ) -> None:
        self.model = model
        self.budget = budget
        self.policy = policy
        self.loss_fn = loss_fn
        self.optimizer = optimizer
        self.verify: Verify = verify
        self.original = model.__dict__.get("forward")
        self._fresh()

    def _fresh(self) -> None:
        self.plans: dict[StepKey, Planned] = {}
        self.latest: Planned | None = None
        self.costs: dict[Any, OpCost] = {}
        self.kept: dict[str, str] = {}
        self.lock = threading.RLock()
        self.local = threading.local()

    def __getstate__(self) -> dict[str, Any]:
        names = ("model", "budget", "policy", "loss_fn", "verify", "original")
        return {name: self.__dict__[name] for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.optimizer = None
        self._fresh()

    def __deepcopy__(self, memo: dict[int, Any]) -> Limiter:
        import copy

        twin = Limiter.__new__(Limiter)
        memo[id(self)] = twin
        state = {name: copy.deepcopy(item, memo) if name in ("model", "original") else item for name, item in self.__getstate__().items()}
        twin.__setstate__(state)
        return twin

    @property
    def __signature__(self) -> Any:
        import inspect

        return inspect.signature(self.forward)

    @property
    def forward(self) -> Callable[..., Any]:
        """The model's own forward."""
        return self.original if self.original is not None else type(self.model).forward.__get__(self.model)

    # ---- a step -----------------------------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or torch.is_inference_mode_enabled() or getattr(self.local, "inside", False):
            return self.forward(*args, **kwargs)
        if not any(parameter.requires_grad for parameter in self.model.parameters()) or _watched():
            return self.forward(*args, **kwargs)
        planned = self._planned(args, kwargs)
        if not planned.plan.replayed:
            planned.steps += 1
            return self.forward(*args, **kwargs)
        director = PlanDirector(planned.plan)
        verifying = self.verify != "never" and not planned.verified
        recorder = Recorder(director, verify=verifying, check=self.verify == "always")
        with ExitStack() as stack:
            stack.enter_context(self._inside())
            stack.enter_context(recorder.recording())
            stack.enter_context(left_alone(self.model, recorder))
            result = self.forward(*args, **kwargs)
        planned.steps += 1
        planned.departed = director.departed
        if verifying:
            planned.verified = True
            if recorder.findings.kept:
                self._replan(planned, recorder.findings.kept)
        return result

    def _inside(self) -> ExitStack:
        stack = ExitStack()
        self.local.inside = True
        stack.callback(setattr, self.local, "inside", False)
        return stack

    # ---- planning ---------------------------------------------------------------------------------------------------------------

    def _planned(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Planned:
        key = step_key(self.model, args, kwargs)
        found = self.plans.get(key)
        if found is None:
            with self.lock:
                found = self.plans.get(key)
                if found is None:
                    if self.plans:
                        warnings.warn(f"lowtide plans again: {key.difference(next(reversed(self.plans)))}", LowtideWarning, stacklevel=4)
                    found = self.plans[key] = self._make(args, kwargs)
        self.latest = found
        return found

    def _make(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Planned:
        with Notice("lowtide") as notice, self._inside():
            notice.say("tracing one step")
            graph = self._trace(args, kwargs)
            notice.say(f"planning {len(graph.operations):,} operations")
            return Planned(graph, self._solve(graph))

    def _solve(self, graph: StepGraph) -> Plan:
        limit = None if self.budget is None else budgets.parse(self.budget, plain(graph).peak_bytes)
        self._check_optimizer(limit)
        return make(graph, budget=limit, policy=self.policy or "optimal")

    def _trace(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepGraph:
        graph = trace_model(self.model, self.forward, args, kwargs, loss_fn=self.loss_fn, cost_cache=self.costs, small=small_executor)
        return self._with_resident(graph)

    def _with_resident(self, graph: StepGraph) -> StepGraph:
        """Count everything of the model's and the optimizer's, used by this step or not."""
        own = resident_bytes(self.model)
        seen = sum(s.bytes for s in graph.storages if s.kind in ("parameter", "buffer", "gradient"))
        state = optimizer_need(self.optimizer).state_bytes if self.optimizer is not None else 0
        return replace(graph, resident_bytes=graph.resident_bytes + max(0, own - seen) + state)

    def _check_optimizer(self, limit: int | None) -> None:
        """Refuse a budget that the optimizer's own step cannot meet."""
        if self.optimizer is None or limit is None:
            return
        need = optimizer_need(self.optimizer)
        standing = resident_bytes(self.model) + need.state_bytes + need.missing_gradient_bytes
        if standing + need.step_bytes > limit:
            least = standing + need.step_bytes
            raise BudgetError(
                f"the budget of {budgets.format_bytes(limit)} does not hold optimizer.step(): parameters, gradients and the state of "
                f"{type(self.optimizer).__name__} take {budgets.format_bytes(standing)} and its update {budgets.format_bytes(need.step_bytes)} "
                f"more. The smallest budget is {budgets.format_bytes(least)} ({least} bytes); an optimizer made with fused=True needs less.",
                least,
            )

    def _replan(self, planned: Planned, kept: dict[str, str]) -> None:
        """Operations were found that do not reproduce: say so once, keep what they write, and solve again."""
        new = {name: reason for name, reason in kept.items() if name not in self.kept}
        self.kept.update(new)
        for name, reason in new.items():
            warnings.warn(f"lowtide keeps the results of {name}: {reason}", LowtideWarning, stacklevel=5)
        operations = tuple(
            replace(operation, replayable=False, reason=kept[operation.name]) if operation.name in kept else operation
            for operation in planned.graph.operations
        )
        planned.graph = replace(planned.graph, operations=operations)
        planned.plan = self._solve(planned.graph)
        planned.verified = False


class Handle:
    """What `limit_memory` returns.

    Attributes:
        model: the limited model.
    """

    def __init__(self, limiter: Limiter) -> None:
        self._limiter = limiter
        self.model = limiter.model

    @property
    def plan(self) -> Plan | None:
        """The plan of the latest step, or ``None`` before the first."""
        latest = self._limiter.latest
        return latest.plan if latest is not None else None

    @property
    def graph(self) -> StepGraph | None:
        """The step graph that `plan` was made for."""
        latest = self._limiter.latest
        return latest.graph if latest is not None else None

    @property
    def plans(self) -> dict[StepKey, Plan]:
        """Every plan so far, by what the step looked like."""
        return {key: planned.plan for key, planned in self._limiter.plans.items()}

    @property
    def kept(self) -> dict[str, str]:
        """Operations whose results are kept because they do not reproduce, with the reason."""
        return dict(self._limiter.kept)

    def prepare(self, *args: Any, **kwargs: Any) -> Plan:
        """Plan for a step with these arguments now, without running it.

        Raises:
            BudgetError: no plan fits.
        """
        return self._limiter._planned(args, kwargs).plan

    def remove(self) -> None:
        """Give the model its own forward back. Steps that are under way finish under their plan."""
        if self.model.__dict__.get("forward") is self._limiter:
            if self._limiter.original is None:
                del self.model.__dict__["forward"]
            else:
                self.model.__dict__["forward"] = self._limiter.original


def limit_memory(
    model: torch.nn.Module,
    budget: str | int | None = None,
    *,
    policy: Policy | None = None,
    loss_fn: Callable[[Any], torch.Tensor] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    verify: Verify = "first",
) -> Handle:
    """Make the training steps of ``model`` fit a budget, at the least extra time, with bitwise the same gradients.

    The first step with inputs of a new kind is traced on fake tensors, its operations are timed one at a time, and a plan is made; steps
    then run under it. Other kinds (another shape, evaluation, gradients that are there or not) get plans of their own.

    Args:
        model: any module; its forward is replaced on the instance until ``handle.remove()``.
        budget: bytes, or text such as ``"600MiB"`` or ``"60%"`` of the plain step's peak. ``None`` needs a policy that does without.
        policy: a policy or its name; ``None`` is ``optimal``.
        loss_fn: from the model's output to the loss, for a model that does not return its loss. It is used to plan, not to train.
        optimizer: its state and its step count against the budget, too.
        verify: ``first`` compares every replay of the first step, ``always`` also checks digests in every step, ``never`` trusts.

    Raises:
        BudgetError: the budget is malformed; at the first step, when no plan fits, with the smallest budget that does.
        PlanError: an argument that cannot be.

    Example:
        >>> import torch, lowtide
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 1))
        >>> handle = lowtide.limit_memory(model, budget="90%", loss_fn=torch.sum)
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
        raise BudgetError("limit_memory needs a budget (bytes, '600MiB' or '60%'), or a policy that works without one, such as 'full'")
    if budget is not None:
        budgets.parse(budget, 1 << 60)
    if isinstance(model.__dict__.get("forward"), Limiter):
        raise PlanError("this model is limited already: call remove() on its handle first")
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        model = model.module
    limiter = Limiter(model, budget=budget, policy=policy, loss_fn=loss_fn, optimizer=optimizer, verify=verify)
    model.__dict__["forward"] = limiter
    return Handle(limiter)


def _watched() -> bool:
    """Whether a trace or another limited model around this one already governs what runs here."""
    return any(isinstance(mode, Recorder) or type(mode).__name__ == "Tracer" for mode in private.dispatch_modes())


__all__ = ["Handle", "Limiter", "LowtideError", "LowtideWarning", "Planned", "TraceError", "limit_memory"]
