"""The flow of a compiled step: capture its graphs, profile it, choose the cuts, compile.

A graph that is a whole step, its loss included, needs no profile: what stands beside it is known when it is
captured, so it is planned for, cut and compiled at once (`lowtide.compiled.alone`). Of any other step the
first one runs every graph call by call under the cut that takes the least memory, and is recorded
(`lowtide.compiled.profile`). When its backward has ended the cuts of all its calls are chosen together
(`lowtide.compiled.choose`), and from the next step on each call runs its graph compiled so.
"""

from __future__ import annotations

import functools
import gc
import operator
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from lowtide.compiled.alone import Partitioner, Report
from lowtide.compiled.capture import Graph, Run, Sizes, try_cuts
from lowtide.compiled.choose import Chosen, choice_of, search_within
from lowtide.compiled.joint import Key
from lowtide.compiled.profile import Recording, Timeline
from lowtide.errors import BudgetError, PlanError
from lowtide.meter import measurable, storages
from lowtide.plan.data import Offload, Plan, in_one_line
from lowtide.private import captured, tree_leaves
from lowtide.progress import working
from lowtide.run.messages import Once
from lowtide.traced import wishes_of

Shapes = tuple[tuple[int, ...], ...]
"""Of the tensors that a step is given."""

UNCOMPILED = (
    "PyTorch compiled nothing of this forward, which runs eagerly, so no budget is held (it compiles none of "
    "the recurrent layers, and nothing under TORCH_COMPILE_DISABLE; TORCH_LOGS=graph_breaks says why): use "
    "lowtide.limit_memory(model, budget)"
)
_LIMIT_HIT = (
    "PyTorch has compiled this forward as often as torch._dynamo.config.recompile_limit allows: what it has "
    "to compile anew runs eagerly from now on, and no budget is held for that. Sizes or arguments that "
    "differ from step to step are the usual cause (TORCH_LOGS=recompiles names them): leave dynamic=False "
    "out, pad to fewer sizes, or raise that limit before the first step"
)


@dataclass
class _Turn:
    """How one call of a planned step runs: its graph, and the storages that its cut stores."""

    graph: Graph
    sizes: Sizes
    stored: frozenset[Key] | None

    def serves(self, graph: Graph, sizes: Sizes) -> bool:
        """Whether a call is the one that was planned for, or a smaller one."""
        return graph is self.graph and all(map(operator.le, sizes, self.sizes))


@dataclass
class _Known:
    """A step that was recorded.

    Attributes:
        timeline: what was taken down.
        sizes: of its calls.
        gradients: bytes of parameters' gradients that there were at its end.
    """

    timeline: Timeline
    sizes: list[Sizes]
    gradients: int


class _Begun:
    """Hangs on a forward's result: says when its backward begins, and is gone when that never will."""

    def __init__(self, on_begin: Callable[[], None]) -> None:
        self.begun = False
        self._on_begin = on_begin

    def __call__(self, _: Any) -> None:
        if not self.begun:
            self.begun = True
            self._on_begin()


class Flow:
    """The code and the plans of the steps that begin with no gradients, or of those that begin with some.

    Args:
        budget: as of `lowtide.limit_memory`.
        standing: bytes that stand when a step begins, its inputs apart.
        gradients: bytes of the parameters' gradients that stand now.
        options: Inductor's settings; ``None`` under ``aot_eager``.
        device: whose memory counts.
        in_words: the planner's refusal in a user's words.
        tiers: where saved values may wait.
        in_parts: says whether no graph is a whole step, whatever it returns.
        after: the most live bytes when backward has ended; 0 for what stands then.
        gradients_bytes: the gradients to plan for, where fewer stand when a step begins.

    Attributes:
        report: the plans of graphs that are a whole step.
        chosen: those of the other steps, by their first graph.
        graphs: the graphs that are parts of a step.
        mixed: whether a graph came after one that was taken for a whole step.
        codes: how many graphs were captured.
        ran_uncompiled: whether a forward that backward begins from has run without any.
    """

    def __init__(
        self,
        budget: str | int,
        standing: Callable[[], int],
        gradients: Callable[[], int],
        options: dict[str, Any] | None,
        device: torch.device,
        in_words: Callable[[BudgetError], BudgetError],
        tiers: tuple[Offload, ...],
        in_parts: Callable[[], bool],
        after: Callable[[], int],
        gradients_bytes: int = 0,
    ) -> None:
        self._after = after
        self._in_words, self._in_parts = in_words, in_parts
        self.budget, self.options, self.device, self.tiers = budget, options, device, tiers
        self.report = Report()
        self.chosen: dict[Graph, Chosen] = {}
        self.graphs: list[Graph] = []
        self.mixed = self.ran_uncompiled = False
        self.codes = 0
        self.gradients_bytes = gradients_bytes
        self._standing, self._gradients = standing, gradients
        self._known: dict[Graph, _Known] = {}
        self._turns: dict[Graph, list[_Turn]] = {}
        self._now: list[_Turn] = []  # the turns of the step that runs
        self._at = 0
        self._sizes: list[Sizes] = []  # of the calls of the step that is recorded
        self._wanted = True  # whether the next step is to be recorded, whatever it is given
        self._missed: set[Shapes] = set()  # of steps that went another way than any plan
        self._largest = 0  # bytes of what recorded steps were given
        self._given: tuple[Shapes, int] = ((), 0)  # to the step that runs
        self._recording: Recording | None = None
        self._last: weakref.ref[_Begun] | None = None
        self._forwards = self._planned_forwards = 0  # of a step
        self._backwards = 0
        self._several = False  # more forwards before a backward than any plan knows of
        self._warn_once = Once()

    # ---- what is known ---------------------------------------------------------------------------

    @property
    def plans(self) -> list[Plan]:
        """The plans that were made."""
        return self.report.planned + [step.plan for step in self.chosen.values()]

    @property
    def more_than_planned(self) -> bool:
        """Whether steps run more than the one graph that was planned for."""
        return self.mixed or (self._several and not self.graphs)

    def variants(self) -> list[int]:
        """In how many ways each graph is cut."""
        used: dict[Graph, set[frozenset[Key] | None]] = {}
        for turn in (turn for turns in self._turns.values() for turn in turns):
            used.setdefault(turn.graph, set()).add(turn.stored)
        return [len(ways) for ways in used.values()]

    def takes(self, gradients_bytes: int) -> bool:
        """Whether it holds its budget where so many bytes of gradients stand when a step begins. If so its
        plans are for that from now on: those of whole graphs where there is room; steps of several graphs
        are planned for again, since that compiles only what is cut in another way.

        Raises:
            BudgetError: no plan of a step of several graphs fits.
        """
        more = gradients_bytes - self.gradients_bytes
        if more <= 0:
            return True
        planned = self.report.planned
        open_sizes = any(self.report.held.values())  # which grow until there is no room left
        above = any(one.predicted_peak_bytes + more > (one.budget_bytes or 0) for one in planned)
        if not self.plans or open_sizes or above:
            return False
        for known in list(self._known.values()):
            self._plan(known, gradients_bytes)
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

    def backend(self, module: fx.GraphModule, inputs: Any) -> Any:
        """What Dynamo calls with each graph that it captures: compiles a graph that is a whole step, and
        keeps any other for the plan of its step.

        Raises:
            BudgetError: no plan of a graph that is a whole step fits.
            PlanError: values shall wait in tiers, and the graph is a part of a step.
        """
        self.codes += 1
        if not (self.graphs or self._in_parts()) and captured.is_whole_step(module):
            with self.unseen(), working("compiling", "compiled within the budget") as work:
                before = len(self.report.planned)
                try:
                    compiled = self._partitioner(module).compile(module, inputs)
                except BudgetError as error:
                    raise self._in_words(error) from None
                for plan in self.report.planned[before:]:
                    work.done(in_one_line(plan))
                return compiled
        if self.tiers:
            raise PlanError(
                "tiers are for a model that is one graph and returns its loss alone: leave tiers out, or "
                "compile the model together with its loss (fullgraph=True names graph breaks)"
            )
        with self.unseen():
            seen = captured.Captured(module, inputs)
            graph = Graph(seen, self.options, self._choose, lambda: self._recording, self.device)
        if graph.candidates is not None:  # else no part of a step
            self.graphs.append(graph)
            self.mixed |= bool(self.report.planned)
        return graph

    def _partitioner(self, module: fx.GraphModule) -> Partitioner:
        def standing() -> int:
            return self._standing() + max(0, self.gradients_bytes - self._gradients())

        wishes = wishes_of(module)
        rest = self.report, self.tiers, wishes, self._after()
        return Partitioner(self.budget, standing, self.options, *rest)

    def unseen(self) -> AbstractContextManager[None]:
        """A context: what is done in it, compiling for one, is no part of the step."""
        return nullcontext() if self._recording is None else self._recording.paused()

    # ---- a step ----------------------------------------------------------------------------------

    def begin(self, args: Any) -> None:
        """A forward of the model begins."""
        if not torch.is_grad_enabled():
            return
        last = None if self._last is None else self._last()
        waits = last is not None and not last.begun
        if waits and (self._recording is not None or 0 < self._at < len(self._now)):
            self._forwards += 1  # another one of the same step
            return
        self._backwards, self._forwards = 0, 1
        self.over()
        self._now, self._at = [], 0
        if self._wanted or self.graphs:
            self._given = shapes, bytes_ = self._describe(args)
            if self._wanted or shapes in self._missed or bytes_ > self._largest:
                self._record(bytes_, args)

    def over(self) -> None:
        """No forward of the step that is recorded, if one is, comes any more."""
        if self._recording is not None:
            self._end_recording(complete=self._recording.backwards > 0)

    def _describe(self, args: Any) -> tuple[Shapes, int]:
        """What a forward is given: shapes, and bytes on the device."""
        given = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
        here = (one.nbytes() for one in storages(given) if one.device.type == self.device.type)
        return tuple(tuple(one.shape) for one in given), sum(here)

    def end(self, result: Any, limit_hit: bool = False) -> None:
        """A forward of the model has ended; ``limit_hit``: Dynamo's recompile limit was reached in it."""
        if self._recording is not None:
            if self._recording.timeline.calls:
                gc.collect()  # what Dynamo leaves behind holds tensors that it traced with
            else:
                self.stop()
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
                if limit_hit:
                    self._warn_once(_LIMIT_HIT)
                self.ran_uncompiled = not (self.codes or limit_hit)
                begun = _Begun(self._backward_begins)
                leaf.grad_fn.register_prehook(begun)
                self._last = weakref.ref(begun)
                return

    def _backward_begins(self) -> None:
        self._backwards += 1
        if self._recording is None and self._backwards > max(self._planned_forwards, 1):
            self._several = self._wanted = True
        if captured.keeps_graph():
            self._warn_once(
                "retained",
                "backward(retain_graph=True) keeps all that the forwards stored until the graph goes: this "
                "budget is planned for steps whose backward runs once, and is not held in this one",
            )

    def _choose(self, graph: Graph, sizes: Sizes) -> Run:
        """What a call of a graph runs."""
        if graph.candidates is None or not torch.is_grad_enabled():
            return graph.smallest
        if self._recording is not None:
            self._sizes.append(sizes)
            return graph.smallest
        at, self._at = self._at, self._at + 1
        if at == 0:
            self._now = self._turns.get(graph, [])
        if at >= len(self._now) or not self._now[at].serves(graph, sizes):
            self._missed.add(self._given[0])
            self._now = []  # not what was planned for: the rest of the step runs in the least memory
            return graph.smallest
        return graph.run_as(self._now[at].stored)

    # ---- recording -------------------------------------------------------------------------------

    def _record(self, bytes_: int, args: Any) -> None:
        self._wanted = False
        if not measurable(self.device):
            self._warn_once(
                "unmeasured",
                f"memory on {self.device} cannot be measured while a step runs here (on a CPU that needs a "
                "C++ compiler), and without it the compiled graphs of a step cannot be planned together: "
                "this budget is not held",
            )
            return
        self._sizes = []
        gc.collect()  # garbage of before would be freed in between
        self._recording = Recording(
            str(self.device), self._standing() + bytes_, self._gradients, self._end_recording, args
        )

    def stop(self) -> Recording | None:
        """Record no longer: the step is over, or was left by an error."""
        recording, self._recording = self._recording, None
        if recording is not None:
            recording.close()
        return recording

    def _end_recording(self, complete: bool = True) -> None:
        """A recorded step is over."""
        recording = self.stop()
        if recording is None:
            return
        shapes, bytes_ = self._given
        self._missed.add(shapes)  # until it is planned for
        if not complete:
            return
        self._planned_forwards = self._forwards
        graphs = [call.graph for call in recording.timeline.calls]
        known = self._turns.get(graphs[0], [])
        if len(known) != len(graphs) or not all(map(_Turn.serves, known, graphs, self._sizes)):
            self._plan(_Known(recording.timeline, self._sizes, self._gradients()), self.gradients_bytes)
        self._missed.discard(shapes)
        self._largest = max(self._largest, bytes_)

    def _plan(self, known: _Known, gradients_bytes: int) -> None:
        """Choose the cuts of a recorded step where so many bytes of gradients stand when it begins.

        Raises:
            BudgetError: no plan is found that fits.
        """
        graphs = [call.graph for call in known.timeline.calls]
        first = graphs[0]
        timeline = known.timeline.adding_to(gradients_bytes, known.gradients).ending_with(self._after())
        candidates = list(map(Graph.candidates_at, graphs, known.sizes))
        choice = functools.partial(choice_of, timeline, candidates)
        before = [one.plan for one in self.chosen.values()]
        found = choice(self.budget).again(self.chosen[first]) if self._known.get(first) is known else None
        if found is None:
            with working("planning", "planned") as work:
                made: list[Chosen] = []
                search = search_within(lambda one: choice(one).search(), self.budget, before, made.append)
                try:
                    found = try_cuts(graphs, search, made)
                except BudgetError as error:
                    raise self._in_words(error) from None
                work.done(in_one_line(found.plan))
        self.chosen[first], self._known[first] = found, known
        cuts = [one.stored for one in found.cuts]
        self._turns[first] = list(map(_Turn, graphs, known.sizes, cuts))
