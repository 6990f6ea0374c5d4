"""One step of a limited model: profiled, or under a plan.

In: an entry and the model's forward. Out: the forward's result; when a backward of the step has ended, what
the step took. A step owns all that it opened (watch, recorder, profiler). It is held by its thread until the
next step begins, and by autograd's graph.

How a step ends: backward reaches an output of the forward (`StepWatch.backward_begins`), which has autograd
call the watch when that backward is over. A planned step then tells its limiter (``on_end``). A profiled step
tells it once autograd has also released all saved tensors; where somebody keeps the graph, the thread's next
step ends the profiled one (`finish`). The watch of a step that no backward can reach any more closes itself.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch

from lowtide.budget import Asked
from lowtide.run.forwards import Forwards, left_alone
from lowtide.run.limit.calls import deciding
from lowtide.run.limit.entry import Entry, How
from lowtide.run.limit.key import Inputs, StepKey
from lowtide.run.profile.profiler import Profiler
from lowtide.run.record.handles import unseen_by_checkpoint
from lowtide.run.record.recorder import Recorder
from lowtide.run.record.special import Verify
from lowtide.run.record.tape import Tape
from lowtide.run.watch import StepWatch
from lowtide.trace.results import tensors_returned

if TYPE_CHECKING:
    from lowtide.run.mover import Mover


class _LatestSteps(threading.local):
    """The latest limited steps of a thread, as long as anybody holds them."""

    def __init__(self) -> None:
        self.steps: WeakSet[ProfiledStep | PlannedStep] = WeakSet()


_latest_steps = cache(_LatestSteps)


def steps_under_way(model: torch.nn.Module) -> list[ProfiledStep | PlannedStep]:
    """The steps of limited models, on this thread, whose backward is still to come; and those of ``model`` of
    which autograd holds what they saved.
    """
    steps = _latest_steps().steps
    return [step for step in steps if step.is_pending() or (step.model() is model and step.is_kept())]


class ProfiledStep:
    """A step that is written down, while a governor holds its budget.

    Args:
        entry: of the step.
        inputs: of the step.
        verify: as of `Profiler`.
        on_end: called with the step once a backward of it has ended. Autograd's graph holds the step, so
            ``on_end`` must not hold the model.
        forwards: as of `Profiler`.
        governor: makes what holds the budget, from where live bytes are read and the bytes that are there.
        claimed_bytes: what extensions have on the device.

    Attributes:
        own_bytes: what was there before the step of the model and its inputs (`Inputs.resident_bytes`).
        resident_bytes: the same, and what extensions have.
        model: refers weakly to the limited model.
        profiler: writes the step down.
        others: limiters of other models that take part in the step.
        later_keys: of each forward but the first, what would be its key.
    """

    def __init__(
        self,
        entry: Entry,
        inputs: Inputs,
        verify: bool,
        on_end: Callable[[Any], None],
        forwards: Forwards | None = None,
        governor: Callable[[Any, int], Any] = lambda live, resident: None,
        claimed_bytes: int = 0,
    ) -> None:
        self.entry, self._inputs, self._on_end = entry, inputs, on_end
        self.own_bytes = inputs.resident_bytes()
        self.resident_bytes = self.own_bytes + claimed_bytes
        self.others: WeakSet[Any] = WeakSet()
        self.later_keys: list[StepKey] = []
        model, device = inputs.members.modules[0], inputs.members.device
        self.model = weakref.ref(model)
        self.profiler = Profiler(
            model,
            device,
            verify=verify,
            on_end=self._profile_ends,
            forwards=forwards,
            governor=lambda live: governor(live, self.resident_bytes + entry.facts.outside_bytes),
        )
        self.governor = self.profiler.governor

    def run(self, forward: Callable[..., Any]) -> Any:
        """Run the model's own forward, and write it down."""
        _latest_steps().steps.add(self)
        inputs, self._inputs = self._inputs, None
        assert inputs is not None, "a step runs once"
        self.profiler.may_differ |= inputs.has_unkeyed_arguments
        return self.profiler.run(forward, inputs.args, inputs.kwargs)

    def run_another(self, forward: Callable[..., Any], inputs: Inputs) -> Any:
        """Run another forward of the step, whose backward is to come."""
        self.later_keys.append(inputs.key)
        return self.profiler.run_another(forward, inputs.args, inputs.kwargs)

    def is_pending(self) -> bool:
        """Whether the step's backward is still to come."""
        profiler, watch = self.profiler, self.profiler.watch
        return not (profiler.ended or watch.backwards or profiler.tracer.closed or watch.has_failed())

    def takes_another(self) -> bool:
        """Whether a forward that begins now is one of this step: no backward has come through any of it."""
        return self.is_pending() and not self.profiler.early

    @property
    def is_abandoned(self) -> bool:
        """Whether no backward came through its first forward, and one through another: that was a step of its
        own, or steps are so.
        """
        return self.has_ended and not self.profiler.watch.backwards

    def reaches_backward(self) -> bool:
        """Whether a backward has begun, or can."""
        return self.profiler.watch.reaches_backward()

    def is_kept(self) -> bool:
        """Whether autograd holds some of what it saved."""
        return self.profiler.core.handles > 0

    def is_needed(self) -> bool:
        """Whether a backward of the step has ended, and autograd still holds some of what it saved: its
        caller kept the graph (``retain_graph=True``). What only an unused output needed goes with that
        output, and does not count.
        """
        return self.has_ended and self.profiler.tracer.unreleased > 0

    def finish(self) -> None:
        """End a step whose thread begins another one; if its backward has ended, hand its profile on."""
        if self.has_ended:
            self.profiler.ends()
        else:
            self.profiler.close()

    @property
    def measured_bytes(self) -> int | None:
        """The step's peak, resident bytes included; ``None`` where that is not known, or not yet."""
        peak, joint = self.profiler.peak_bytes, self.governor is not None and self.governor.is_joint
        if peak is None or self.others or joint:
            return None
        return self.resident_bytes + self.profiler.tracer.outside_bytes + peak

    def discard(self) -> None:
        """End the step, and do not hand its profile on."""
        self.profiler.close()

    def _profile_ends(self, _: Profiler) -> None:
        self._on_end(self)

    @property
    def has_ended(self) -> bool:
        """Whether a backward of the step has ended, and its profile was not handed on yet."""
        profiler = self.profiler
        return profiler.watch.backwards + profiler.early > 0 and not profiler.ended


class PlannedStep(StepWatch):
    """A step that follows its entry's plan, or that the governor alone holds; and the watch over it.

    A step of several forwards has one recorder, and each forward its part of the plan's program.

    Args:
        entry: of the step.
        how: it runs: `How.FOLLOW`, `How.GOVERN` or `How.PASS`.
        inputs: of the step; the plan may be for larger inputs.
        verify: as of `lowtide.limit_memory`.
        on_end: called with the step each time that a backward of it has ended. Autograd's graph holds the
            step, so ``on_end`` must not hold the model.
        governor: makes what holds the budget, from where live bytes are read and the bytes that are there.
        claimed_bytes: what extensions have on the device.
        co_limited: other limited models take part in the step, so that its peak is that of all of them.
        given: the budget that the step began with.

    Attributes:
        model: refers weakly to the limited model.
        others: limiters of other models that took part in the step after its forward.
        planned: the plan that the step follows, or ``None``.
        recorder: records the step; ``None`` where it runs as it is.
        governor: holds its budget, or ``None``.
        gathered: keys of storages that have bytes only while other ranks' parts of weights are gathered.
        first: whether it is the first under its plan.
        mover: what moves values of its forwards, where the plan does; an extension sets it.
        resident_bytes: what was there before the step.
        measured_bytes: the step's peak, resident bytes included; ``None`` where that is not known.
        told_bytes: the same when a backward of it had ended last.
        is_abandoned: never; each forward has a backward of its own, or takes part in the step's.
    """

    is_abandoned = False

    def __init__(
        self,
        entry: Entry,
        how: How,
        inputs: Inputs,
        verify: Verify,
        on_end: Callable[[Any], None],
        governor: Callable[[Any, int], Any],
        claimed_bytes: int = 0,
        co_limited: bool = False,
        given: Asked | None = None,
    ) -> None:
        planned = entry.planned if how is not How.GOVERN else None
        # another backward may come when the outputs are gone: the next step closes this one
        several = entry.facts.backwards > 1
        super().__init__(on_end, inputs.members.device, (lambda: None) if several else None)
        self.entry, self.planned, self.how, self.given = entry, planned, how, given
        self.co_limited = co_limited
        self.model = weakref.ref(inputs.members.modules[0])
        self.others: WeakSet[Any] = WeakSet()
        self.recorder: Recorder | None = None
        self.governor: Any = None
        self.gathered: set[Any] = set()
        self._make_governor: Callable[[Any, int], Any] | None = governor
        self._ran, self._departed = 0, False
        self.told_bytes: int | None = None
        self.first, self._times = planned is not None and planned.history.steps == 0, False
        self.mover: Mover | None = None
        self._inputs, self._verify = inputs, verify
        slab = 0 if planned is None else planned.plan.slab_bytes
        self.resident_bytes = inputs.resident_bytes() + entry.facts.outside_bytes + claimed_bytes + slab
        self._smaller = planned is not None and inputs.key != planned.key

    def takes_another(self) -> bool:
        """Whether a forward that begins now is one of this step: its backward is to come, and the user runs
        it so.
        """
        return self.is_pending() and not (self.co_limited or self.others or self.entry.facts.backward_unseen)

    def is_kept(self) -> bool:
        """Whether autograd holds some of what it saved."""
        return self.recorder is not None and self.recorder.core.handles > 0

    def discard(self) -> None:
        """End the step."""
        self.close()

    def finish(self) -> None:
        """End a step whose thread begins another one."""
        if not self.is_pending():
            self.close()

    @property
    def measured_bytes(self) -> int | None:
        """The step's peak so far, resident bytes included; ``None`` where that is not known."""
        peak, joint = self.peak_bytes, self.governor is not None and self.governor.is_joint
        if peak is None or self.co_limited or self.others or joint:
            return None  # the peak is that of several steps together
        return self.resident_bytes + peak

    @property
    def is_foreseen(self) -> bool:
        """Whether the step ran what its plan foresaw, by now."""
        if self.recorder is None:
            return True
        return self.planned is not None and not (self._departed or self.recorder.core.departed)

    def run(self, forward: Callable[..., Any]) -> Any:
        """Run the model's own forward.

        Args:
            forward: the model's own.
        """
        _latest_steps().steps.add(self)
        inputs, self._inputs = self._inputs, None
        assert inputs is not None, "a step runs once"
        if self.is_measured and self._make_governor is not None:
            self.governor = self._make_governor(self.live_source(), self.resident_bytes)
        self._make_governor = None  # it holds the inputs
        if self.how is not How.PASS:
            self._begin_recording()
        result = self._run_forward(forward, inputs)
        if self.planned is not None:
            self.planned.history.steps += 1
        return result

    def run_another(self, forward: Callable[..., Any], inputs: Inputs) -> Any:
        """Run another forward of the step, whose backward is to come. The governor alone holds one that the
        plan does not have: from then on the step is recorded.
        """
        self.forward_begins()
        planned = self.planned
        if self.recorder is None and not (planned is not None and planned.has_forward(self._ran, inputs.key)):
            self._begin_recording()
        return self._run_forward(forward, inputs)

    def _run_forward(self, forward: Callable[..., Any], inputs: Inputs) -> Any:
        recorder = self.recorder
        if recorder is None:
            self._ran += 1
            with deciding(), unseen_by_checkpoint():
                result = forward(*inputs.args, **inputs.kwargs)
        else:
            if not recorder.is_active:
                recorder.start()
            call = partial(forward, *inputs.args, **inputs.kwargs)
            result, seconds = self._run_within(recorder, call, inputs)
            self.recording_seconds += time.perf_counter() - inputs.begin - seconds
        self.forward_ends(tensors_returned(result))
        return result

    def _begin_recording(self) -> None:
        """Make the recorder of all forwards."""
        planned = self.planned
        if planned is not None:
            self._times = planned.history.times_next
            if self._times:
                planned.history.timed = self
        self.recorder = Recorder(
            tape=Tape(gathered=self.gathered),
            check=self._verify == "always",
            mover=self.mover,
            governor=self.governor,
        )
        self.follow(self.recorder.core)

    @property
    def compares(self) -> bool:
        """Whether what this step does for the first time is compared with the original."""
        return self.first and self._verify != "never"

    def _run_within(self, recorder: Recorder, call: Callable[[], Any], inputs: Inputs) -> tuple[Any, float]:
        """Run a forward within the recorder: what it returns, and how long it took by itself."""
        self._follow_next(recorder, inputs)
        compiled = inputs.members.compiled
        with recorder.forward(), left_alone(compiled) if compiled else nullcontext():
            begin = time.perf_counter()
            result = call()
            return result, time.perf_counter() - begin

    def _follow_next(self, recorder: Recorder, inputs: Inputs) -> None:
        """Have the next forward follow its part of the plan, if there is one."""
        planned, number = self.planned, self._ran
        self._ran += 1
        self._departed |= recorder.core.departed
        if planned is not None and planned.has_forward(number, inputs.key):
            another = number > 0 and bool(planned.later_keys)  # of the user's, perhaps a smaller one
            recorder.follow(*planned.programs[number], smaller=self._smaller or another)
        else:
            self._departed = True
            recorder.follow(None)

    def close(self) -> None:
        """Stop measuring memory, and see no more operations."""
        if self.recorder is not None:
            self.recorder.ends()
        elif self.makes_graph and self.peak_bytes is not None:
            self._on_end(self)  # backwards through that graph were not seen
        super().close()

    def ends_backward(self) -> None:
        """A backward has ended: where nothing is left that could be evicted, no more operations are seen."""
        if self.recorder is not None and not self.recorder.core.handles:
            self.recorder.ends()
