"""The flow of a compiled step: capture its graphs, profile it, choose the cuts, compile.

A graph that is a whole step, its loss included, needs no profile: what there is beside it is known when it is
captured (`lowtide.compiled.planning`), so its cut is chosen and compiled at once. Of any other kind of step
the first one is recorded (`lowtide.compiled.timeline`): it runs every graph call by call, under the cut that
takes the least memory. When its backward has ended it is planned for as a whole step is, all its calls
together (`Flow._plan`), and from the next step on each call runs its graph compiled so. Which of both a model
is shows only in its first forward: so a recording begins before it, and is dropped where one graph was all.
"""

from __future__ import annotations

import gc
import operator
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from lowtide.compiled.capture import CapturedGraph, PartGraph, Run, Sizes, with_room_for_frames
from lowtide.compiled.choose_cuts import Asked, Chosen, CutSearch, try_cuts
from lowtide.compiled.dynamic import Numbers
from lowtide.compiled.moving import Way
from lowtide.compiled.planning import Beside, Found, RecordedStep, WholeStep, plan_step
from lowtide.compiled.shelf import open_shelf
from lowtide.compiled.timeline import Recording
from lowtide.errors import BudgetError, PlanError
from lowtide.extensions.scopes.marked_regions import wishes_of
from lowtide.graph import StepGraph
from lowtide.meter import measurable, storages
from lowtide.plan.data import Plan, in_one_line
from lowtide.private import captured, tree_leaves
from lowtide.progress import working
from lowtide.run.messages import Once

UNCOMPILED = (
    "PyTorch compiled no part of this forward, which runs eagerly, so no budget is held (it compiles "
    "no recurrent layers, and nothing with TORCH_COMPILE_DISABLE; TORCH_LOGS=graph_breaks shows the "
    "reason): use lowtide.limit_memory(model, budget)"
)
"""The warning of a limit on a compiled model of whose forward PyTorch compiles nothing."""

RECOMPILE_LIMIT = (
    "PyTorch has compiled this forward as often as torch._dynamo.config.recompile_limit allows: new "
    "graphs run eagerly from now on, and no budget is held for them. The usual cause are sizes or "
    "arguments that differ from step to step (TORCH_LOGS=recompiles names them): leave dynamic=False "
    "out, pad to fewer sizes, or raise that limit before the first step"
)
"""The warning of a forward that has reached Dynamo's recompile limit."""


Shapes = tuple[tuple[int, ...], ...]
"""Of the tensors that a step is given."""


@dataclass
class _Turn:
    """How one call of a planned step runs: its graph, and how that is cut."""

    graph: PartGraph
    sizes: Sizes
    way: Way

    def serves(self, graph: PartGraph, sizes: Sizes) -> bool:
        """Whether a call is the one that was planned for, or a smaller one."""
        return graph is self.graph and all(map(operator.le, sizes, self.sizes))


@dataclass
class _StepPlan:
    """A recorded step with its plan.

    Attributes:
        step: the step.
        found: how its calls are cut.
        turns: how they run.
    """

    step: RecordedStep
    found: Found
    turns: list[_Turn]


@dataclass
class _Known:
    """What is known of steps.

    Attributes:
        whole_steps: the plans of graphs that are a whole step.
        step_graphs: the step graphs that these were made for, by `Plan.graph`.
        held: structure of a graph -> sizes up to which its largest plan within the budget holds;
            `search_range` reads it, and adds to it.
        planned: the plans of recorded steps, by their first graph.
        wanted: whether the next step is to be recorded, whatever it is given.
        missed: the shapes of the inputs of steps that ran other calls than any plan; the next step that is
            given such shapes is recorded.
        largest: bytes of what recorded steps were given.
        forwards: of the last recorded step.
        several: whether backward began more often in a step than the last recorded step had forwards.
    """

    whole_steps: list[Plan] = field(default_factory=list)
    step_graphs: dict[str, StepGraph] = field(default_factory=dict)
    held: dict[str, Numbers] = field(default_factory=dict)
    planned: dict[PartGraph, _StepPlan] = field(default_factory=dict)
    wanted: bool = True
    missed: set[Shapes] = field(default_factory=set)
    largest: int = 0
    forwards: int = 0
    several: bool = False


@dataclass
class _CurrentStep:
    """The step that runs.

    Attributes:
        shapes, bytes: of what it was given.
        recording: takes it down, while it is recorded: its calls run in the least memory.
        follows: its calls have run as they were planned for, by now; else they run in the least memory.
        turns: how its calls run, if it was planned for.
        sizes: of the calls that there were.
        forwards, backwards: how many of the model there were.
        last: of the latest forward.
    """

    shapes: Shapes = ()
    bytes: int = 0
    recording: Recording | None = None
    follows: bool = False
    turns: list[_Turn] = field(default_factory=list)
    sizes: list[Sizes] = field(default_factory=list)
    forwards: int = 1
    backwards: int = 0
    last: weakref.ref[_Begun] | None = None

    @property
    def waits(self) -> bool:
        """Whether the latest forward's result waits for its backward."""
        last = None if self.last is None else self.last()
        return last is not None and not last.begun


class _Begun:
    """Hangs on a forward's result: says when its backward begins, and is gone when that never will."""

    def __init__(self, on_begin: Callable[[], None]) -> None:
        self.begun = False
        self._on_begin = on_begin

    def __call__(self, _: Any) -> None:
        if not self.begun:
            self.begun = True
            self._on_begin()


@dataclass(frozen=True)
class Surroundings:
    """What there is beside a model's compiled graphs. It changes from step to step, so functions say it.

    Attributes:
        device: whose memory counts.
        resident: bytes that are resident when a step begins, its inputs apart.
        gradients: bytes of the parameters' gradients that there are now.
        after: the most live bytes when backward has ended; 0 where only what is resident is live then.
        in_parts: says whether no graph is a whole step, whatever it returns.
        in_words: the planner's refusal in a user's words.
    """

    device: torch.device
    resident: Callable[[], int]
    gradients: Callable[[], int]
    after: Callable[[], int]
    in_parts: Callable[[], bool]
    in_words: Callable[[BudgetError], BudgetError]


class Flow:
    """The code and the plans of the steps that begin with no gradients, or of those that begin with some.

    Args:
        asked: of plans.
        options: Inductor's settings; ``None`` under ``aot_eager``.
        beside: what there is beside the graphs.
        gradients_bytes: the gradients to plan for, where there are fewer when a step begins.

    Attributes:
        graphs: the graphs that are parts of a step.
        mixed: whether a graph came after one that was taken for a whole step.
        codes: how many graphs were captured.
        ran_uncompiled: whether a forward that backward begins from has run without any.
    """

    def __init__(
        self,
        asked: Asked,
        options: dict[str, Any] | None,
        beside: Surroundings,
        gradients_bytes: int = 0,
    ) -> None:
        self.asked, self.options = asked, options
        self.device, self._beside = beside.device, beside
        self.graphs: list[PartGraph] = []
        self.mixed = self.ran_uncompiled = False
        self.codes = 0
        self.gradients_bytes = gradients_bytes
        self._known, self._step = _Known(), _CurrentStep()
        self._warn_once = Once()

    # ---- what is known ---------------------------------------------------------------------------

    @property
    def plans(self) -> list[Plan]:
        """The plans that were made."""
        return self._known.whole_steps + [one.found.plan for one in self._known.planned.values()]

    @property
    def step_graphs(self) -> dict[str, StepGraph]:
        """The step graphs that plans were made for in this process, by `Plan.graph`."""
        made = [chosen for one in self._known.planned.values() if (chosen := one.found.chosen) is not None]
        return self._known.step_graphs | {one.plan.graph: one.graph for one in made}

    @property
    def more_than_planned(self) -> bool:
        """Whether steps run more than the one graph that was planned for."""
        return self.mixed or (self._known.several and not self.graphs)

    def variants(self) -> list[int]:
        """In how many ways each graph is cut."""
        used: dict[PartGraph, set[Way]] = {}
        for turn in (turn for one in self._known.planned.values() for turn in one.turns):
            used.setdefault(turn.graph, set()).add(turn.way)
        return [len(ways) for ways in used.values()]

    def takes(self, gradients_bytes: int) -> bool:
        """Whether it holds its budget where a step begins with so many bytes of gradients. If so its
        plans are for that from now on: those of whole graphs where there is room; steps of several graphs
        are planned for again, since that compiles only what is cut in another way.

        Raises:
            BudgetError: no plan of a step of several graphs fits.
        """
        more = gradients_bytes - self.gradients_bytes
        if more <= 0:
            return True
        planned = self._known.whole_steps
        open_sizes = any(self._known.held.values())  # which grow until there is no room left
        above = any(one.predicted_peak_bytes + more > (one.budget_bytes or 0) for one in planned)
        if not self.plans or open_sizes or above:
            return False
        for one in list(self._known.planned.values()):
            now = replace(one.step, gradients_bytes=gradients_bytes, after_bytes=self._beside.after())
            self._plan_recorded(now, one.found.chosen)
        self.gradients_bytes = gradients_bytes
        planned[:] = [
            replace(
                plan,
                predicted_peak_bytes=plan.predicted_peak_bytes + more,
                plain_peak_bytes=plan.plain_peak_bytes + more,
                bound_peak_bytes=plan.bound_peak_bytes + more,
            )
            for plan in planned
        ]
        return True

    # ---- capturing -------------------------------------------------------------------------------

    @with_room_for_frames
    def backend(self, module: fx.GraphModule, inputs: Any) -> Any:
        """What Dynamo calls with each graph that it captures: compiles a graph that is a whole step, and
        keeps any other for the plan of its step.

        Raises:
            BudgetError: no plan of a graph that is a whole step fits.
            PlanError: values shall wait in tiers, and the graph is a part of a step.
        """
        self.codes += 1
        if not (self.graphs or self._beside.in_parts()) and captured.is_whole_step(module):
            with self.outside_step(), working("compiling", "compiled within the budget") as work:
                beside, known = self._beside, self._known
                resident = beside.resident() + max(0, self.gradients_bytes - beside.gradients())
                graph = CapturedGraph(captured.Captured(module, inputs), self.options, wishes_of(module))
                context = Beside(self.asked, self.options, resident, beside.after(), known.held)
                if (found := self._plan(WholeStep(graph, context))) is None:
                    return graph.run_plain()
                known.whole_steps.append(found.plan)
                if found.chosen is not None:
                    known.step_graphs[found.plan.graph] = found.chosen.graph
                work.done(in_one_line(found.plan))
                return graph.run_as(found.ways[0])
        if self.asked.tiers:
            raise PlanError(
                "tiers are for a model that is one graph and returns its loss alone: leave tiers out, or "
                "compile the model together with its loss (fullgraph=True names graph breaks)"
            )
        with self.outside_step():
            seen = captured.Captured(module, inputs)
            graph = PartGraph(seen, self.options, self._choose, lambda: self._step.recording, self.device)
        if graph.candidates is not None:  # else no part of a step
            self.graphs.append(graph)
            self.mixed |= bool(self._known.whole_steps)
        return graph

    def outside_step(self) -> AbstractContextManager[None]:
        """A context: what is done in it, compiling for one, is no part of the step."""
        recording = self._step.recording
        return nullcontext() if recording is None else recording.paused()

    # ---- a step ----------------------------------------------------------------------------------

    def begin(self, args: Any) -> None:
        """A forward of the model begins."""
        if not torch.is_grad_enabled():
            return
        step, known = self._step, self._known
        unfinished = step.follows and 0 < len(step.sizes) < len(step.turns)
        if step.waits and (step.recording is not None or unfinished):  # another one of the same step
            step.forwards += 1
            return
        self.over()
        self._step = step = _CurrentStep(last=step.last)
        if known.wanted or self.graphs:
            step.shapes, step.bytes = self._describe(args)
        wanted = known.wanted or step.shapes in known.missed or step.bytes > known.largest
        known.wanted &= not wanted
        step.follows = not (wanted and measurable(self.device))
        if not step.follows:
            gc.collect()  # garbage of before would be freed in between
            resident = self._beside.resident() + step.bytes
            step.recording = Recording(
                str(self.device), resident, self._beside.gradients, self._backward_ended, args
            )

    def _describe(self, args: Any) -> tuple[Shapes, int]:
        """What a forward is given: shapes, and bytes on the device."""
        given = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
        here = (one.nbytes() for one in storages(given) if one.device.type == self.device.type)
        return tuple(tuple(one.shape) for one in given), sum(here)

    def _choose(self, graph: PartGraph, sizes: Sizes) -> Run:
        """What a call of a graph runs."""
        if graph.candidates is None or not torch.is_grad_enabled():
            return graph.smallest
        step, at = self._step, len(self._step.sizes)
        step.sizes.append(sizes)
        if at == 0 and graph in self._known.planned:
            step.turns = self._known.planned[graph].turns
        turn = step.turns[at] if at < len(step.turns) else None
        if step.follows and turn is not None and turn.serves(graph, sizes):
            return graph.run_as(turn.way)
        strays, step.follows = step.follows, False
        if strays and measurable(self.device):
            self._known.missed.add(step.shapes)  # the next step like this one is recorded
        elif strays:
            self._warn_once(
                "unmeasured",
                f"the memory of a step on {self.device} cannot be measured here (on a CPU the meter "
                "needs a C++ compiler), and without it several compiled graphs of a step cannot be "
                "planned together: this budget is not held",
            )
        return graph.smallest

    def end(self, result: Any, limit_hit: bool = False) -> None:
        """A forward of the model has ended; ``limit_hit``: Dynamo's recompile limit was reached in it."""
        if self._step.recording is not None:
            gc.collect()  # what Dynamo leaves behind holds tensors that it traced with
        if not self._step.sizes:  # it has called no graph
            self._end_recording()
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
                if limit_hit:
                    self._warn_once(RECOMPILE_LIMIT)
                self.ran_uncompiled = not (self.codes or limit_hit)
                begun = _Begun(self._backward_begins)
                leaf.grad_fn.register_prehook(begun)
                self._step.last = weakref.ref(begun)
                return

    def _backward_begins(self) -> None:
        self._step.backwards += 1
        more = self._step.backwards > max(self._known.forwards, 1)
        if more and self._step.recording is None:
            self._known.several = self._known.wanted = True
        if captured.keeps_graph():
            self._warn_once(
                "retained",
                "backward(retain_graph=True) keeps all saved tensors until the graph is freed: the "
                "plan is for steps whose backward runs once, and the budget is not held in this step",
            )

    def _backward_ended(self) -> None:
        """A backward has ended, and every call of the recorded step has had its own."""
        self._finish()

    def over(self) -> None:
        """No forward of the step comes any more."""
        self._finish()
        self._step.follows = False

    def stop(self) -> None:
        """The step was left by an error, or is not to be planned for."""
        self._end_recording()
        self._step.follows = False

    def _end_recording(self) -> Recording | None:
        """Nothing is taken down of the step from here on."""
        recording, self._step.recording = self._step.recording, None
        if recording is not None:
            recording.close()
        return recording

    def _finish(self) -> None:
        """Plan for a recorded step that is over, where a backward of it has run.

        Raises:
            BudgetError: no plan of it is found that fits.
        """
        step, known = self._step, self._known
        if (recording := self._end_recording()) is None:
            return
        known.missed.add(step.shapes)  # until it is planned for
        if not recording.backwards:
            return
        known.forwards = step.forwards
        made, after = self._beside.gradients(), self._beside.after()
        found = RecordedStep(self.asked, recording.timeline, [*step.sizes], made, self.gradients_bytes, after)
        if not self._serves(found):
            self._plan_recorded(found)
        known.missed.discard(step.shapes)
        known.largest = max(known.largest, step.bytes)

    def _serves(self, step: RecordedStep) -> bool:
        """Whether there is a plan that serves a step."""
        planned = self._known.planned.get(step.graphs[0])
        turns = [] if planned is None else planned.turns
        return len(turns) == len(step.graphs) and all(map(_Turn.serves, turns, step.graphs, step.sizes))

    # ---- planning --------------------------------------------------------------------------------

    def _plan_recorded(self, step: RecordedStep, before: Chosen | None = None) -> None:
        """Choose the cuts of a recorded step: from its next call on it runs so.

        Raises:
            BudgetError: no plan is found that fits.
        """
        found = self._plan(step, None if before is None else step.choice().again(before))
        if found is not None:
            turns = list(map(_Turn, step.graphs, step.sizes, found.ways))
            self._known.planned[step.graphs[0]] = _StepPlan(step, found, turns)

    @with_room_for_frames
    def _plan(self, step: RecordedStep | WholeStep, chosen: Chosen | None = None) -> Found | None:
        """As `plan_step`."""
        shelf = open_shelf(self.options)
        return plan_step(step, self.options, self.plans, self._find, shelf, chosen)

    def _find(self, graphs: Sequence[CapturedGraph], search: CutSearch) -> Chosen:
        """What a search finds for calls of these graphs; what it tries is compiled."""
        with working("planning", "planned") as work:
            try:
                chosen = try_cuts(graphs, search)
            except BudgetError as error:
                raise self._beside.in_words(error) from None
            work.done(in_one_line(chosen.plan))
        return chosen
