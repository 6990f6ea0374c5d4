"""From a step of a user's script to its step graph, and to the plan that `limit_memory` would make of it.

A model with its arguments is traced on fake tensors where that is possible: nothing is computed, so a model
on the meta device needs no memory. Else it runs once. A step that a script runs itself runs as it is, with
the limit on its model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lowtide import budget as budgets
from lowtide import private
from lowtide.errors import BudgetError, TraceError
from lowtide.estimate.devices import DEVICES
from lowtide.estimate.devices import device as find_device
from lowtide.graph import StepGraph
from lowtide.limits import Face, limit_memory
from lowtide.meter.resident import model_device
from lowtide.plan import check_seconds
from lowtide.plan.data import Plan, in_one_line
from lowtide.progress import Work, working
from lowtide.run.limit.checks import check_given, refuse_several_devices
from lowtide.run.limit.entry import Entry, Facts, Kind
from lowtide.run.limit.handle import Handle, handle_of
from lowtide.run.limit.key import Inputs, Members
from lowtide.run.limit.limiter import Limiter
from lowtide.run.transforms import unused_bytes
from lowtide.steps.given import Given
from lowtide.steps.target import ScriptError, ScriptFailed, Target, of_the_user
from lowtide.trace.fake import trace_fake
from lowtide.trace.results import loss_of, loss_to_plan_for
from lowtide.trace.untouched import Gradients
from lowtide.train.options import check_file, check_host_budget, check_policy, check_tiles, require
from lowtide.train.part import raised_note
from lowtide.train.planning import (
    adamw_bytes,
    budget_on,
    costs_on,
    most_held,
    no_optimizer,
    policy_on,
    price_note,
    reserve_note,
)


@dataclass(frozen=True)
class ScriptOptions:
    """A step of a script to plan.

    Attributes:
        script: as `lowtide.steps.target.Target.of` takes it.
        budget, raise_budget, policy, host_budget, tiles, plan_seconds, json: as of
            `lowtide.train.planning.PlanOptions`.
        device: an accelerator that need not be there (`lowtide.estimate.devices`), whose times and workspaces
            the plan counts; ``None`` for the device of the model.
    """

    script: str
    budget: str | None = "60%"
    raise_budget: bool = False
    policy: str | None = None
    host_budget: str | None = None
    tiles: Literal["auto"] | None = None
    plan_seconds: float | None = None
    device: str | None = None
    json: Path | None = None

    def __post_init__(self) -> None:
        check_policy(self.policy)
        check_given(self.budget, self.policy, "a plan")
        check_seconds(self.plan_seconds, self.policy, "--plan-seconds")
        check_file("json", self.json)
        check_host_budget(self.host_budget, self.policy, self.device or "")
        check_tiles(self.tiles, self.budget, compiled=False)
        require(
            self.device is None or self.device.lower() in DEVICES,
            "device",
            self.device,
            "the script says where its model is: leave this out, or name a card to price the step for "
            f"({', '.join(DEVICES)})",
        )


def trace_and_plan_script(options: ScriptOptions) -> tuple[StepGraph | None, Plan]:
    """The step of a script, and the plan that `limit_memory` makes of it; no graph where none is known of a
    compiled model.

    Raises:
        LowtideError: the script has no such step, or no plan meets the budget.
        ScriptFailed: the script raised.
    """
    target = Target.of(options.script)
    with target.running() as function, working("planning", "planned") as work:
        work.say(f"calling {target}")
        with of_the_user(str(target)):
            returned = function()
        given = Given.of(returned, str(target))
        del returned
        refuse_several_devices(given.model)
        graph, made = _Planning(options, given, work).run()
        work.done(in_one_line(made))
    return graph, made


class _Planning:
    """Plans one step.

    Args:
        options: of the plan.
        given: the step.
        work: is told what takes long.
    """

    def __init__(self, options: ScriptOptions, given: Given, work: Work) -> None:
        self.options, self.given, self.work = options, given, work
        self.card = find_device(options.device) if options.device else None
        self.settings = {
            "policy": options.policy,
            "host_budget": options.host_budget,
            "tiles": options.tiles,
            "plan_seconds": options.plan_seconds,
        }
        self.unwritten: list[Tensor] = []
        model = given.model
        self.model = model.module if isinstance(model, torch.nn.parallel.DistributedDataParallel) else model

    def run(self) -> tuple[StepGraph | None, Plan]:
        """The step graph and the plan."""
        given, compiled = self.given, any(map(private.is_compiled, self.model.modules()))
        tensors = (*self.model.parameters(), *self.model.buffers(), *given.tensors())
        on_meta = any(tensor.is_meta for tensor in tensors)
        virtual = on_meta or self.card is not None
        if given.step is not None or compiled:
            what = "a step that the script runs itself" if given.step is not None else "a compiled model"
            if virtual:
                raise ScriptError(
                    f"{what} runs as it is, on the device that it is on: for the meta device, and for "
                    "--device, return (model, args) of a model that is not compiled"
                )
            graph, plan = self._run()
            return graph, self._with_notes(graph, plan, "the step ran here, as it is")
        if on_meta:
            given, self.unwritten = _off_meta(given)
            self.given = given
        elif self.card is not None and model_device(self.model).type != "cpu":
            raise ScriptError(
                f"--device {self.options.device}: leave the model on the CPU, or make it on the meta device"
            )
        try:
            graph, plan = self._trace()
        except TraceError as error:
            if virtual:
                raise _of_fakes(error, self.options.device) from None
            cause = error.__cause__
            why = str(error) if cause is None else f"{type(cause).__name__}: {cause}".splitlines()[0]
        else:
            return graph, self._with_notes(graph, plan, "")
        graph, plan = self._run()
        return graph, self._with_notes(
            graph, plan, f"the step ran here once, since it cannot be traced on fake tensors ({why})"
        )

    def _trace(self) -> tuple[StepGraph, Plan]:
        """The step on fake tensors, and its plan."""
        model, args, kwargs = self.model, self.given.args, self.given.kwargs
        device, budget = model_device(model), self.options.budget
        if (limited := handle_of(model)) is not None:  # by the script; this limit is in its place
            limited.remove()
        if self.card is not None:
            state = adamw_bytes(model) if self.given.optimizer is None else 0
            budget = budget_on(self.card, budget, state)
        face = Face(None)
        policy = policy_on(self.card, self.options.policy, self.options.host_budget, device)
        extensions = face.moving(model, policy, None)
        if self.given.optimizer is not None:
            extensions.append(face.counting(model, self.given.optimizer))
        settings = {"policy": policy, "plan_seconds": self.options.plan_seconds, "progress": None}
        tiles: list[Any] = face.tiling(self.options.tiles)
        extensions += tiles
        limiter = Limiter(model, None, "first", face, extensions, budget=budget, **settings)  # not installed
        limiter.extend(budget)
        limiter.turn_off_checkpointing()
        inputs, own = Inputs(model, args, kwargs, False, limiter.extensions), Members(model).resident_bytes()

        def step(*args: Any, **kwargs: Any) -> Tensor:
            return loss_to_plan_for(model(*args, **kwargs), None)

        self.work.say("tracing one step")
        costs = costs_on(self.card)

        def traced() -> Entry:
            graph = trace_fake(step, args, kwargs, [model], device.type, costs, self.unwritten)
            unused = unused_bytes(model, graph, own)
            if self.card is not None:
                graph = replace(graph, resident_bytes=graph.resident_bytes + self.card.workspaces_bytes)
            return Entry(inputs.key, Kind(), graph=graph, facts=Facts(unused_bytes=unused))

        entry = tiles[0].choose(traced) if tiles else traced()

        def planned(budget: str | int | None) -> tuple[StepGraph, Plan]:
            if budget is not None:
                limiter.maker.set_budget(budget)
            return limiter.maker.make(entry, budget)

        return self._within(planned, budget)

    def _run(self) -> tuple[StepGraph | None, Plan]:
        """The step, which runs under a limit, and its plan."""
        given = self.given
        handle: Any = limit_memory(
            given.model, self.options.budget, optimizer=given.optimizer, **_present(self.settings)
        )
        self.work.say("running one step")

        def planned(budget: str | int | None) -> tuple[StepGraph | None, Plan]:
            if budget != self.options.budget and budget is not None:
                handle.set_budget(budget)
            with of_the_user("the step"):
                if given.step is None:
                    handle.prepare(*given.args, **given.kwargs)
                else:
                    self._step(handle, given.step)
            return handle.graph, handle.plan

        try:
            return self._within(planned, self.options.budget)
        finally:
            handle.remove()

    def _step(self, handle: Handle, step: Callable[[], Any]) -> None:
        """Run a step of the script; backward where it has not.

        Raises:
            TraceError: the step has no backward through the model.
        """
        gradients = Gradients([self.model])
        try:
            result = step()
            if handle.plan is None and (loss := loss_of(result)) is not None:
                loss.backward()
        except BudgetError:
            gradients.restore()  # the next one is a first step, too
            raise
        if handle.plan is None:
            raise TraceError(
                "the step has run no backward through the model, and returned no loss: run backward in it, "
                "or return the loss"
            )

    def _within(self, planned: Callable[[Any], tuple[Any, Plan]], budget: str | None) -> tuple[Any, Plan]:
        """The plan within a budget, or within the smallest that works where the budget may be raised."""
        try:
            return planned(budget)
        except BudgetError as error:
            if not self.options.raise_budget or error.smallest_bytes is None:
                raise
            refusal, smallest = error, budgets.with_slack(error.smallest_bytes)
        graph, plan = planned(smallest)
        note = raised_note(self.options.budget, refusal, plan.budget_bytes)
        return graph, replace(plan, notes=(*plan.notes, note))

    def _with_notes(self, graph: StepGraph | None, plan: Plan, how: str) -> Plan:
        """The plan with what else is worth knowing."""
        notes = [how] if how else []
        optimizer = self.given.optimizer
        if graph is not None:
            notes.append(most_held(graph, plan, self.card))
            notes += reserve_note(graph, plan, self.card)
        if self.card is not None:
            notes.append(price_note(self.card))
        if optimizer is None:
            notes.append(no_optimizer(self.model))
        else:
            notes.append(f"{type(optimizer).__name__} is counted: its state, and its own step")
        return replace(plan, notes=(*plan.notes, *notes))


def _present(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings that are given: a compiled model's limit knows no others."""
    return {name: value for name, value in settings.items() if value is not None}


def _off_meta(given: Given) -> tuple[Given, list[Tensor]]:
    """The same step on the CPU, in memory that nobody writes to, which costs nothing; and the tensors there.
    Parameters stay the objects that an optimizer holds.
    """
    unwritten: list[Tensor] = []

    def empty(tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return tensor
        unwritten.append(torch.empty_like(tensor, device="cpu"))
        return unwritten[-1]

    for tensor in (*given.model.parameters(), *given.model.buffers()):
        if tensor.is_meta:
            there = torch.empty_like(tensor, device="cpu")
            unwritten.append(tensor)
            is_parameter = isinstance(tensor, nn.Parameter)
            torch.utils.swap_tensors(
                tensor, nn.Parameter(there, tensor.requires_grad) if is_parameter else there
            )
    for module in given.model.modules():
        for name, item in vars(module).items():
            if isinstance(item, Tensor):
                vars(module)[name] = empty(item)
    args, kwargs = private.tree_map_only(Tensor, empty, (given.args, given.kwargs))
    return replace(given, args=args, kwargs=kwargs), unwritten


def _of_fakes(error: TraceError, device: str | None) -> Exception:
    """What is raised where a step cannot be traced on fake tensors, and cannot run."""
    what = "a model on the meta device" if device is None else f"--device {device}"
    why = (
        f"{what} is planned on fake tensors, of which only integers and booleans have values, and none that "
        "is made on the meta device"
    )
    if error.__cause__ is None:
        return TraceError(f"{why}: {error}")
    error.__cause__.add_note(f"lowtide: {why}. Where the step asks for some, plan a model that can run here")
    return ScriptFailed(error.__cause__, on_fakes=True)
