"""A budget for the steps of a pipeline: one plan for all micro-batches that a rank has in flight.

A step is one call of the schedule's ``step``: the forwards and backwards of all micro-batches through all of
this rank's stages, in the schedule's order, with what is received, sent and held in between. It is profiled
and planned for as one, so each micro-batch has decisions of its own (arXiv 2205.05198, appendix C), and
stages share what the rank has.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from lowtide.errors import PlanError
from lowtide.private import distributed
from lowtide.run.forwards import Forwards, left_alone
from lowtide.run.limit.entry import Entry, How, Planned
from lowtide.run.limit.key import Inputs
from lowtide.run.limit.limiter import Limiter
from lowtide.run.limit.step import PlannedStep, ProfiledStep
from lowtide.run.record.recorder import Recorder
from lowtide.run.watch import meter_gathered, weakly


def group_of(schedule: Any) -> Any:
    """The process group of a pipeline's stages."""
    return distributed.stages_of(schedule)[0].group or torch.distributed.group.WORLD


def module_of(schedule: Any) -> torch.nn.Module:
    """One module of the modules of this rank's stages: stage 2 has its module as ``stage2``."""
    module = torch.nn.Module()
    for stage in distributed.stages_of(schedule):
        module.add_module(f"stage{stage.stage_index}", stage.submod)
    return module


class PipelineLimiter(Limiter):
    """Replaces ``schedule.step``: profiles the first step, and runs later ones under its plan.

    Args:
        schedule: of ``torch.distributed.pipelining``.
        model: the module that holds the stages' (`module_of`).
        rest, settings: as of `Limiter`.
    """

    compiles = False

    def __init__(self, schedule: Any, model: torch.nn.Module, *rest: Any, **settings: Any) -> None:
        self.schedule, self._schedule_step = schedule, schedule.step
        super().__init__(model, *rest, **settings)
        stages = distributed.stages_of(schedule)
        self.forwards = Forwards(stages, "forward_one_chunk")
        self._inferences = Forwards([s for s in stages if hasattr(s, distributed.INFERS)], distributed.INFERS)
        self._governed_ended = weakly(self._on_governed_end)
        self._losses: list[Any] | None = None

    def __call__(self, *args: Any, losses: list[Any] | None = None, **kwargs: Any) -> Any:
        """In the place of the schedule's ``step``. What is in ``losses`` is an earlier step's."""
        if self.is_off():
            return self._schedule_step(*args, losses=losses, **kwargs)
        self._losses = losses
        for stage in distributed.stages_of(self.schedule):
            distributed.forget_last_step(stage)  # what is left of it counts in no step
        try:
            return self.limited(args, kwargs)
        finally:
            self._losses = None

    @property
    def own_step(self) -> Callable[..., Any]:
        """The schedule's own step."""
        return self._run_schedule

    def _run_schedule(self, *args: Any, **kwargs: Any) -> Any:
        return self._schedule_step(*args, losses=self._losses, **kwargs)

    def _begin_profiled(self, entry: Entry, inputs: Inputs) -> ProfiledStep:
        self._begin_schedule(entry, inputs)
        return super()._begin_profiled(entry, inputs)

    def _begin_planned(self, entry: Entry, how: How, inputs: Inputs, co_limited: bool) -> PlannedStep:
        self._begin_schedule(entry, inputs)
        return super()._begin_planned(entry, how, inputs, co_limited)

    def _begin_schedule(self, entry: Entry, inputs: Inputs) -> None:
        """Make what the schedule holds from now on. To work out shapes it may run a forward and a backward of
        each stage.
        """

        def make(*args: Any, **kwargs: Any) -> None:
            distributed.make_buffers(self.schedule, self._schedule_step, args, kwargs)

        if not distributed.has_begun(self.schedule):
            with meter_gathered(self.model):
                self._run_governed(make, self._inferences, entry, inputs)
        self._note_buffers(entry)

    def _note_buffers(self, entry: Entry) -> None:
        """Before a step of the entry is written down, the schedule's buffers are all that is known to be
        there besides the model and what the step is given.
        """
        if not entry.listened:
            entry.facts.outside_bytes = distributed.buffer_bytes(self.schedule)

    def _run_next(self, entry: Entry, inputs: Inputs) -> Any:
        if distributed.trains(self.schedule):
            return super()._run_next(entry, inputs)
        self._note_buffers(entry)
        return self._run_governed(self.own_step, self.forwards, entry, inputs)

    def _run_governed(self, call: Callable[..., Any], forwards: Any, entry: Entry, inputs: Inputs) -> Any:
        """Run what is no step of training: the governor alone holds it to the budget."""
        governor, ended = partial(self._governor, entry, inputs), self._governed_ended
        claimed = self.maker.claimed_bytes
        step = PipelineStep(forwards, entry, How.GOVERN, inputs, "never", ended, governor, claimed)
        with self.inside():
            return step.run(call)

    def _on_governed_end(self, step: PlannedStep) -> None:
        self._measured_bytes = step.measured_bytes
        self._warn_above(step.governor)

    def _planned_step(self, *given: Any) -> PlannedStep:
        assert self.forwards is not None
        return PipelineStep(self.forwards, *given)

    def prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Planned:
        """Refused: a step of a pipeline is one of all its ranks.

        Raises:
            PlanError: always.
        """
        raise PlanError(
            "a pipeline is planned from its first schedule.step(), in which all ranks take part: run a "
            "step, and do not call prepare()"
        )

    def install(self) -> None:
        """Take the place of the schedule's step."""
        self.schedule.step = self

    def uninstall(self) -> None:
        """Give the schedule its own step back."""
        assert self.forwards is not None
        self.forwards.remove()
        self._inferences.remove()
        if self.schedule.__dict__.get("step") is self:
            del self.schedule.step


class PipelineStep(PlannedStep):
    """A step of a pipeline under a plan: the schedule runs its forwards. The step has ended when the schedule
    returns.

    Args:
        forwards: the step's.
        given: what `PlannedStep` takes.
    """

    def __init__(self, forwards: Forwards, *given: Any) -> None:
        super().__init__(*given)
        self._chunks = forwards

    def _run_within(self, recorder: Recorder, call: Callable[[], Any], inputs: Inputs) -> tuple[Any, float]:
        seconds = [0.0]

        @contextmanager
        def recording() -> Iterator[None]:
            begin = time.perf_counter()
            self._follow_next(recorder, inputs)
            with recorder.forward(), left_alone(inputs.members.compiled):
                inside = time.perf_counter()
                yield
                outside = time.perf_counter()
            seconds[0] += inside - begin + time.perf_counter() - outside

        begin = time.perf_counter()
        with self._chunks.within(recording):
            result = call()
        return result, time.perf_counter() - begin - seconds[0]

    def forward_ends(self, outputs: Iterable[torch.Tensor]) -> None:
        """The schedule has returned: the step is over."""
        self.ends()
        self.cores.clear()
        super().ends_backward()

    def ends_backward(self) -> None:
        """A backward of a micro-batch has ended, and the schedule runs others."""
