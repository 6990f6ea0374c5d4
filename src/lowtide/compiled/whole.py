"""A budget for a whole step of several compiled graphs.

The first step runs every graph call by call under the cut that takes the least memory, and is recorded. When
its backward has ended it is planned for, and from the next step on each call runs its graph compiled as the
plan says.
"""

from __future__ import annotations

import functools
import gc
import operator
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from lowtide.compiled.correction import share_of_largest
from lowtide.compiled.joint import Key
from lowtide.compiled.recording import Recording, Timeline
from lowtide.compiled.regions import Region, Run, Sizes
from lowtide.compiled.timeline import StepPlan, as_before, plan_step
from lowtide.errors import BudgetError
from lowtide.meter import measurable, storages
from lowtide.private import captured, tree_leaves
from lowtide.run.messages import Once

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
    """What one call of a step runs."""

    region: Region
    sizes: Sizes
    stored: frozenset[Key] | None

    def serves(self, region: Region, sizes: Sizes) -> bool:
        """Whether a call is the one that was planned for, or a smaller one."""
        return region is self.region and all(map(operator.le, sizes, self.sizes))


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

    def __init__(self, told: Callable[[], None]) -> None:
        self.begun = False
        self._told = told

    def __call__(self, _: Any) -> None:
        if not self.begun:
            self.begun = True
            self._told()


class WholeStep:
    """Decides which form of a graph each call of a step runs.

    Args:
        budget: as of `lowtide.limit_memory`.
        standing: bytes that stand when a step begins, its inputs apart.
        gradients: bytes of the parameters' gradients that stand now.
        options: Inductor's settings; ``None`` under ``aot_eager``.
        device: whose memory counts.
        named: a refusal with names for what stands before the step.
        gradients_bytes: the gradients to plan for, where fewer stand when a step begins.

    Attributes:
        plans: by the first graph of a step.
        regions: the graphs.
        mixed: whether a graph came after one that was taken for a whole step.
        compiled: whether there is any graph, of the whole step or of a part.
        ran_uncompiled: whether a forward that backward begins from has run without any.
    """

    def __init__(
        self,
        budget: str | int,
        standing: Callable[[], int],
        gradients: Callable[[], int],
        options: dict[str, Any] | None,
        device: torch.device,
        named: Callable[[BudgetError], BudgetError],
        gradients_bytes: int = 0,
    ) -> None:
        self._named = named
        self.budget, self.options, self.device = budget, options, device
        self.plans: dict[Region, StepPlan] = {}
        self.regions: list[Region] = []
        self.mixed = self.compiled = self.ran_uncompiled = False
        self.gradients_bytes = gradients_bytes
        self._standing, self._gradients = standing, gradients
        self._known: dict[Region, _Known] = {}
        self._turns: dict[Region, list[_Turn]] = {}
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
        self._tell = Once()

    def backend(self, module: fx.GraphModule, inputs: Any) -> Region:
        """What compiles the graphs of the step."""
        with self.unseen():
            graph = captured.Captured(module, inputs)
            region = Region(graph, self.options, self._choose, lambda: self._recording)
        if region.menu is not None:
            self.regions.append(region)
        return region

    @property
    def more_than_planned(self) -> bool:
        """Whether steps have more to them than the one graph that was planned for."""
        return self.mixed or (self._several and not self.regions)

    def variants(self) -> list[int]:
        """In how many ways each graph is cut."""
        used: dict[Region, set[frozenset[Key] | None]] = {}
        for turn in (turn for turns in self._turns.values() for turn in turns):
            used.setdefault(turn.region, set()).add(turn.stored)
        return [len(ways) for ways in used.values()]

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
        if self._wanted or self.regions:
            self._given = shapes, bytes_ = self._described(args)
            if self._wanted or shapes in self._missed or bytes_ > self._largest:
                self._record(bytes_)

    def over(self) -> None:
        """No forward of the step that is recorded, if one is, comes any more."""
        if self._recording is not None:
            self._recorded(complete=self._recording.backwards > 0)

    def _described(self, args: Any) -> tuple[Shapes, int]:
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
                    self._tell(_LIMIT_HIT)
                self.ran_uncompiled = not (self.compiled or limit_hit)
                begun = _Begun(self._backward_begins)
                leaf.grad_fn.register_prehook(begun)
                self._last = weakref.ref(begun)
                return

    def _backward_begins(self) -> None:
        self._backwards += 1
        if self._recording is None and self._backwards > max(self._planned_forwards, 1):
            self._several = self._wanted = True
        if captured.keeps_graph():
            self._tell(
                "retained",
                "backward(retain_graph=True) keeps all that the forwards stored until the graph goes: this "
                "budget is planned for steps whose backward runs once, and is not held in this one",
            )

    def _choose(self, region: Region, sizes: Sizes) -> Run:
        """What a call of a graph runs."""
        if region.menu is None or not torch.is_grad_enabled():
            return region.smallest
        if self._recording is not None:
            self._sizes.append(sizes)
            return region.smallest
        at, self._at = self._at, self._at + 1
        if at == 0:
            self._now = self._turns.get(region, [])
        if at >= len(self._now) or not self._now[at].serves(region, sizes):
            self._missed.add(self._given[0])
            self._now = []  # not what was planned for: the rest of the step runs in the least memory
            return region.smallest
        return region.run_as(self._now[at].stored)

    # ---- recording -------------------------------------------------------------------------------

    def _record(self, inputs: int) -> None:
        self._wanted = False
        if not measurable(self.device):
            self._tell(
                "unmeasured",
                f"memory on {self.device} cannot be measured while a step runs here (on a CPU that needs a "
                "C++ compiler), and without it the compiled graphs of a step cannot be planned together: "
                "this budget is not held",
            )
            return
        self._sizes = []
        gc.collect()  # garbage of before would be freed in between
        self._recording = Recording(
            str(self.device), self._standing() + inputs, self._gradients, self._recorded
        )

    def stop(self) -> Recording | None:
        """Record no longer: the step is over, or was left by an error."""
        recording, self._recording = self._recording, None
        if recording is not None:
            recording.close()
        return recording

    def _recorded(self, complete: bool = True) -> None:
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

    def plan_for(self, gradients_bytes: int) -> None:
        """Plan the steps that were recorded for so many bytes of gradients that stand when they begin.

        Raises:
            BudgetError: no plan is found that fits.
        """
        for known in list(self._known.values()):
            self._plan(known, gradients_bytes)
        self.gradients_bytes = gradients_bytes

    def _plan(self, known: _Known, gradients_bytes: int) -> None:
        graphs = [call.graph for call in known.timeline.calls]
        first = graphs[0]
        timeline = known.timeline.adding_to(gradients_bytes, known.gradients)
        menus = list(map(Region.menu_at, graphs, known.sizes))
        before = [one.plan for one in self.plans.values()]
        found = as_before(self.plans[first], timeline, menus) if self._known.get(first) is known else None
        if found is None:
            plan = functools.partial(plan_step, timeline, menus)
            try:
                found = share_of_largest(plan, self.budget, before)
            except BudgetError as error:
                raise self._named(error) from None
        self.plans[first], self._known[first] = found, known
        chosen = [one.stored for one in found.chosen]
        self._turns[first] = list(map(_Turn, graphs, known.sizes, chosen))
