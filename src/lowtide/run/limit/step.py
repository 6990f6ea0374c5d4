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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Protocol
from weakref import WeakSet

from lowtide import budget as budgets
from lowtide.run.forwards import Forwards, left_alone
from lowtide.run.limit import machine
from lowtide.run.limit.calls import govern
from lowtide.run.limit.entry import Entry
from lowtide.run.limit.entry_states import Action
from lowtide.run.limit.key import Inputs, StepKey
from lowtide.run.messages import Overruns, warn
from lowtide.run.profile.profiler import Profiler
from lowtide.run.record.engine import engine
from lowtide.run.record.handles import unseen_by_checkpoint
from lowtide.run.record.recorder import Recorder
from lowtide.run.record.special import Verify
from lowtide.run.record.tape import Tape
from lowtide.run.transfers import TransferEngine, lay_out
from lowtide.run.watch import StepWatch
from lowtide.store.stores import Stores
from lowtide.trace.results import tensors_returned
from lowtide.words import count_text


class Sharing(Protocol):
    """A limited model that takes part in a step of another one: its limiter.

    Attributes:
        shared: whether its steps are known to be shared; what a shared step takes is not its own.
    """

    shared: bool


class _LatestSteps(threading.local):
    """The latest limited steps of a thread, as long as anybody holds them."""

    def __init__(self) -> None:
        self.steps: WeakSet[ProfiledStep | PlannedStep] = WeakSet()


_latest_steps = cache(_LatestSteps)


def steps_of_others(inputs: Inputs) -> list[ProfiledStep | PlannedStep]:
    """The steps of other limited models, on this thread, whose backward is still to come."""
    model = inputs.members.modules[0]
    return [step for step in _latest_steps().steps if step.model() is not model and step.is_pending()]


class ProfiledStep:
    """A step that is run in little memory and written down.

    Args:
        entry: of the step.
        inputs: of the step.
        verify: as of `Profiler`.
        on_end: called with the step once a backward of it has ended. Autograd's graph holds the step, so
            ``on_end`` must not hold the model.
        forwards: as of `Profiler`.
        governor: makes what holds the budget, from where live bytes are read and the bytes that are there.

    Attributes:
        resident_bytes: what was there before the step (`Inputs.resident_bytes`).
        model: refers weakly to the limited model.
        profiler: writes the step down.
        others: other limited models that take part in the step.
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
    ) -> None:
        self.entry, self._inputs, self._on_end = entry, inputs, on_end
        self.resident_bytes = inputs.resident_bytes()
        self.others: WeakSet[Sharing] = WeakSet()
        self.later_keys: list[StepKey] = []
        model, device = inputs.members.modules[0], inputs.members.device
        self.model = weakref.ref(model)
        self.profiler = Profiler(
            model,
            device,
            verify=verify,
            on_end=self._profile_ends,
            forwards=forwards,
            governor=lambda live: governor(live, self.resident_bytes),
        )

    def run(self, forward: Callable[..., Any]) -> Any:
        """Run the model's own forward, and write it down."""
        _latest_steps().steps.add(self)
        inputs, self._inputs = self._inputs, None
        assert inputs is not None, "a step runs once"
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

    def is_abandoned(self) -> bool:
        """Whether no backward came through its first forward, and one through another: that was a step of its
        own, or steps are so.
        """
        return self._has_ended and not self.profiler.watch.backwards

    def reaches_backward(self) -> bool:
        """Whether a backward has begun, or can."""
        return self.profiler.watch.reaches_backward()

    def is_needed(self) -> bool:
        """Whether a backward of the step has ended, and autograd still holds some of what it saved: its
        caller kept the graph (``retain_graph=True``). What only an unused output needed goes with that
        output, and does not count.
        """
        return self._has_ended and self.profiler.tracer.unreleased > 0

    def finish(self) -> None:
        """End a step whose thread begins another one; if its backward has ended, hand its profile on."""
        if self._has_ended:
            self.profiler.ends()
        else:
            self.profiler.close()

    def discard(self) -> None:
        """End the step, and do not hand its profile on."""
        self.profiler.close()

    def _profile_ends(self, _: Profiler) -> None:
        self._on_end(self)

    @property
    def _has_ended(self) -> bool:
        """Whether a backward of the step has ended, and its profile was not handed on yet."""
        profiler = self.profiler
        return profiler.watch.backwards + profiler.early > 0 and not profiler.ended


class PlannedStep(StepWatch):
    """A step that runs under a plan, and the watch over it.

    A step of several forwards has a recorder for each, and its part of the plan's program.

    Args:
        entry: of the step.
        inputs: of the step; the plan may be for larger inputs.
        stores: hold values that the plan moves.
        verify: as of `lowtide.limit_memory`.
        shared: other limited models take part in the step, so that its peak is that of all of them.
        evicts: no extension rules out that the step evicts by itself (`lowtide.extension.Extension.evicts`).
        on_end: called with the step each time that a backward of it has ended. Autograd's graph holds the
            step, so ``on_end`` must not hold the model.

    Attributes:
        model: refers weakly to the limited model.
        others: other limited models that took part in the step after its forward.
        planned: the plan that the step runs under.
        recorder: records the step; ``None`` where it runs as it is.
        governor: holds its budget, or ``None``.
        gathered: keys of storages that have bytes only while other ranks' parts of weights are gathered.
        measured_bytes: the step's peak, resident bytes included; ``None`` where that is not known.
        added_bytes: what the step added to its entry's margin.
        can_evict: whether it may evict on demand, and can: it has a budget, its peak is measured and its
            own, nothing moves, no other rank has to evict the same, and there is a C++ recorder.
        tried: whether it evicts on demand to see whether steps differ, though it has a plan.
        ran: how many operations the forward ran, without and with gradients; ``None`` where the step is not
            recorded.
    """

    def __init__(
        self,
        entry: Entry,
        inputs: Inputs,
        stores: Stores,
        verify: Verify,
        on_end: Callable[[Any], None],
        shared: bool = False,
        evicts: bool = True,
        forms: Any = None,
        claimed_bytes: int = 0,
    ) -> None:
        assert entry.planned is not None
        # another backward may come when the outputs are gone: the next step closes this one
        several = entry.traits.backwards > 1
        if entry.planned.plan.moves:
            lay_out(entry.planned.plan, stores, inputs.members.device)  # resident before the step
        super().__init__(on_end, inputs.members.device, (lambda: None) if several else None)
        self.entry, self.planned, self.shared = entry, entry.planned, shared
        self.model = weakref.ref(inputs.members.modules[0])
        self.others: WeakSet[Sharing] = WeakSet()
        self.recorder: Recorder | None = None
        self.governor: Any = None
        self._forwards = 0
        self.gathered: set[Any] = set()
        self._passes = self._first = self._times = False
        self._mover: TransferEngine | None = None
        self.added_bytes = 0
        self._inputs, self._stores, self._verify, self._forms = inputs, stores, verify, forms
        self.resident_bytes = inputs.resident_bytes() + entry.outside_bytes + claimed_bytes
        self._smaller, self._several = inputs.key != entry.planned.key, several
        self.can_evict = evicts and self._may_evict()
        self.tried = self._on_demand = False
        self.ran: tuple[int, int] | None = None
        self._warned: tuple[str, int] | None = None

    def takes_another(self) -> bool:
        """Whether a forward that begins now is one of this step: its backward is to come, and it was planned
        for as the user runs it.
        """
        return self.is_pending() and not (self.shared or self.others or self.entry.seen.backward_unseen)

    def is_abandoned(self) -> bool:
        """Never: each forward has a backward of its own, or takes part in the step's."""
        return False

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
        peak, planned = self.peak_bytes, self.planned
        if peak is None or self.shared or self.others:
            return None  # the peak is that of all models together
        return self.resident_bytes + planned.plan.slab_bytes + peak

    def shown(self) -> machine.Ended:
        """What the step has shown by now, when a backward of it has ended."""
        return machine.Ended(
            self.planned,
            self.measured_bytes,
            recorded=self.recorder is not None,
            departed=self.departed,
            extra=self.extra,
            ran=self.ran,
            resized=self._resized,
            backwards=self.backwards,
            makes_graph=self.makes_graph,
            can_evict=self.can_evict,
            tried=self.tried,
            added_bytes=self.added_bytes,
        )

    @property
    def extra(self) -> int:
        """How many operations the step's forwards ran that the plan does not have."""
        if self._on_demand:
            return max(0, sum(self.ran or ()) - len(self.planned.plan.program))
        return 0

    @property
    def departed(self) -> bool:
        """Whether the step ran other operations than the one that was planned for."""
        if self._on_demand:
            return self.ran is not None and self.ran != self.entry.seen.profiled_ran
        return self.recorder is not None and self.recorder.core.departed

    @property
    def _resized(self) -> bool:
        """Whether the step took more or less than its plan predicts, since values decide sizes."""
        took, plan = self.measured_bytes, self.planned.plan
        over = self.backwards >= self.entry.traits.backwards
        foresees = over and not (self._on_demand or self._smaller or plan.changes_nothing)
        if took is None or not (foresees and self.planned.sized_by_values):
            return False
        return abs(took - plan.predicted_peak_bytes) > budgets.slack_bytes(plan.budget_bytes)

    def _may_evict(self) -> bool:
        """Whether the step has a budget, can tell when memory is short, and may run operations again by
        itself.
        """
        plan, seen = self.planned.plan, self.entry.seen
        held = plan.budget_bytes is not None and self.peak_bytes is not None and not plan.moves
        return held and not (self.shared or seen.backward_unseen)

    def run(self, action: Action, forward: Callable[..., Any]) -> Any:
        """Run the model's own forward under the plan.

        Args:
            action: how, as the state machine says (`machine.on_forward_begins`).
            forward: the model's own.
        """
        _latest_steps().steps.add(self)
        inputs, self._inputs = self._inputs, None
        assert inputs is not None, "a step runs once"
        self._on_demand, self.tried = action in (Action.EVICT, Action.TRY), action is Action.TRY
        self._passes = action is Action.PASS
        if not self._passes:
            self._begin_recording(inputs)
        result = self._run_forward(forward, inputs)
        machine.count_step(self.planned)
        return result

    def run_another(self, forward: Callable[..., Any], inputs: Inputs) -> Any:
        """Run another forward of the step, whose backward is to come. One that the plan does not have, or has
        for smaller inputs, evicts on demand, or all that it can.
        """
        self.forward_begins()
        return self._run_forward(forward, inputs)

    def _run_forward(self, forward: Callable[..., Any], inputs: Inputs) -> Any:
        if self._passes:
            with govern(), unseen_by_checkpoint():
                result = forward(*inputs.args, **inputs.kwargs)
        else:
            result = self._run_recorded(forward, inputs)
        self.forward_ends(tensors_returned(result))
        return result

    def _begin_recording(self, inputs: Inputs) -> None:
        """Make what the recorders of all forwards share."""
        planned, plan = self.planned, self.planned.plan
        self._first, self._times = planned.history.steps == 0, planned.times_next
        if self._times:
            machine.time_step(planned, self)
        if plan.moves:
            compares = self._first and self._verify != "never"
            self._mover = TransferEngine(plan, self._stores, compares, inputs.members.device)

    def _run_recorded(self, forward: Callable[..., Any], inputs: Inputs) -> Any:
        result, seconds = self._record(forward, inputs)
        if self._mover is not None and self._mover.notes and self._first:
            notes, self._first = self._mover.notes, False
            warn(
                f"codecs do not fit {count_text(len(notes), 'value')}, kept as they are on top of the "
                f"predicted peak ({notes[0]})"
            )
        self.recording_seconds += time.perf_counter() - inputs.begin - seconds
        return result

    def _record(self, forward: Callable[..., Any], inputs: Inputs) -> tuple[Any, float]:
        """Run a forward within the recorder: what it returns, and how long it took."""
        with self._recording(inputs):
            inside = time.perf_counter()
            result = forward(*inputs.args, **inputs.kwargs)
            seconds = time.perf_counter() - inside
        return result, seconds

    @contextmanager
    def _recording(self, inputs: Inputs) -> Iterator[None]:
        """What runs in the block is the step's next forward: it is recorded, under its part of the plan."""
        recorder = self.recorder = self.recorder or self._make_recorder(inputs)
        planned, number = self.planned, self._forwards
        self._forwards += 1
        if not self._on_demand and planned.has_forward(number, inputs.key):
            recorder.follow(*planned.programs[number], smaller=self._smaller or number > 0)
        else:
            recorder.follow(None)
        if not recorder.is_active:
            recorder.start()
        with recorder.forward(), left_alone(inputs.members.compiled):
            yield
        self.ran = recorder.ran

    def _make_recorder(self, inputs: Inputs) -> Recorder:
        """What records all forwards of the step, and holds its budget."""
        self.governor = self._make_governor(inputs)
        made = Recorder(
            tape=Tape(gathered=self.gathered),
            check=self._verify == "always",
            mover=self._mover,
            governor=self.governor,
        )
        self.follow(made.core, self._several)
        return made

    def _make_governor(self, inputs: Inputs) -> Any:
        """What holds the step's budget; ``None`` where it has none, or live bytes are not known."""
        limit = self.planned.plan.budget_bytes
        if limit is None or not self.is_measured or not self.can_evict:
            return None
        room = limit - self.resident_bytes
        return engine().Governor(self.live_source(), room, forms=self._forms)

    def close(self) -> None:
        """Stop measuring memory, and see no more operations."""
        if self.recorder is not None:
            self.recorder.stop()
        super().close()

    def ends_backward(self) -> None:
        """A backward has ended: where nothing is left that could be evicted, no more operations are seen."""
        if self.recorder is not None and not self.recorder.core.handles:
            self.recorder.stop()

    def overrun_text(self, overruns: Overruns, reason: str) -> str:
        """The warning after a backward of the step; empty where the step kept its budget, or where the same
        was said after an earlier backward of it.

        Args:
            overruns: of the limiter.
            reason: why the step took more, or what follows.
        """
        plan, took = self.planned.plan, self.measured_bytes
        limit = plan.budget_bytes
        if limit is None or took is None or took <= limit + budgets.slack_bytes(limit):
            return ""
        before, self._warned = self._warned, (reason, took)
        if before == self._warned:
            return ""
        same = before is not None and before[0] == reason
        return overruns.text(took, limit, plan.predicted_peak_bytes, reason, before is None, same)
