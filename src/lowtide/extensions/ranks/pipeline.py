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
from typing import Any

import torch

from lowtide.errors import PlanError
from lowtide.private import distributed
from lowtide.run.forwards import Forwards, left_alone
from lowtide.run.limit.entry import Entry, Planned
from lowtide.run.limit.key import Inputs
from lowtide.run.limit.limiter import Limiter
from lowtide.run.limit.step import PlannedStep, ProfiledStep
from lowtide.run.record.recorder import Recorder
from lowtide.run.watch import meter_gathered


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
        self.forwards = Forwards(distributed.stages_of(schedule), "forward_one_chunk")
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
        # what the schedule makes once is resident in later steps; to work out shapes it may run the stages
        with meter_gathered(self.model):
            distributed.make_buffers(self.schedule, self._schedule_step, inputs.args, inputs.kwargs)
        return super()._begin_profiled(entry, inputs)

    def _planned_step(self, *given: Any) -> PlannedStep:
        assert self.forwards is not None
        return PipelineStep(self.forwards, *given)

    def prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Planned:
        """Refused: a step of a pipeline is one of all its ranks.

        Raises:
            PlanError: always.
        """
        raise PlanError(
            "a pipeline is planned for from its first schedule.step(), in which all ranks take part: run "
            "that in place of prepare()"
        )

    def install(self) -> None:
        """Take the place of the schedule's step."""
        self.schedule.step = self

    def uninstall(self) -> None:
        """Give the schedule its own step back."""
        assert self.forwards is not None
        self.forwards.remove()
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
