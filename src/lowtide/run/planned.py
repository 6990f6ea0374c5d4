"""A plan of one kind of step, and what steps have taught of it."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from lowtide.graph import StepGraph
from lowtide.plan.moves import simulate_plan
from lowtide.plan.plan import Plan
from lowtide.run.outside import OutsideGradients
from lowtide.run.rehearse import Script
from lowtide.run.unseen import LossMemory
from lowtide.run.watch import Repeats, StepWatch

_PACE_STEPS = 9  # are timed under a plan before it settles, and make up its pace from then on, too
_PACE_EVERY = 4  # a settled plan times every so many steps: a machine does not stay as fast as it was
_PACE_STEPS_AT_LEAST = 2  # before their pace says anything


@dataclass
class Planned:
    """A plan and how far it has been trusted.

    Attributes:
        traced: the step as it was traced.
        claimed: the same step when layers save what they gathered, as far as a plan gathers it again; see `lowtide.run.claims`.
        graph: what the plan was made for: one of these, with what is known of its caller and its loss.
        plan: the decisions.
        holding: whether the caller is taken to hold the outputs until the step ends.
        held: whether it was seen to.
        loss: what a loss outside the model takes, once measured.
        loss_unknown: the loss lies outside and has not been measured.
        margin_bytes: by how much a step was seen to exceed its prediction.
        verified: whether a step has run under the plan with every replay compared.
        steps: how many steps have run under it.
        departed: operations of the latest step that the plan did not know.
        again: why it is to be made again before the next step, or empty.
        timed: watches the time of the latest step.
        seconds: of the latest steps that were timed under the plan as it is, and of recording and replaying in them where the host knows.
        script: what a step under the plan taught of the next ones.
        astray: a step showed other operations than the trace: it is to be traced again (`Limiter._traced_again`).
        renewed: it is from a trace of a later step, because that departed from the first one.
        outside: what the first step showed of a loss outside the model, until the trace is made to agree with it.
        repeats: whether backward of the first step ran again through what its forward saved.
    """

    traced: StepGraph
    graph: StepGraph
    plan: Plan
    holding: bool = True
    held: bool = False
    loss: LossMemory | None = None
    loss_unknown: bool = False
    margin_bytes: int = 0
    verified: bool = False
    steps: int = 0
    departed: int = 0
    again: str = ""
    timed: StepWatch | None = None
    seconds: deque[tuple[float, float | None]] = field(default_factory=lambda: deque(maxlen=_PACE_STEPS))
    script: Script | None = None
    claimed: StepGraph | None = None
    astray: bool = False
    renewed: bool = False
    outside: OutsideGradients | None = None
    repeats: Repeats = field(default_factory=Repeats)

    @property
    def settled(self) -> bool:
        """Whether enough steps were timed for a pace."""
        return len(self.seconds) == _PACE_STEPS

    def shows_outside(self) -> bool:
        """Whether a step has shown what the trace does not know of the loss outside."""
        return self.outside is not None and self.outside.seen

    def remedy(self, departed: bool) -> str:
        """What is done, or is to be done, about a step that took more than it may; whether it departed from its trace."""
        if departed:
            return "it departed from its trace, and lowtide traces the next one"
        if self.repeats.seen:
            return (
                "backward runs more than once through what one forward saved (retain_graph=True), where a plan is for one backward. "
                "Of several losses, add them up and run one backward; else give a smaller budget"
            )
        return "lowtide plans again with that much less"

    def wants_pace(self) -> bool:
        """Whether the coming step is to be timed."""
        return self.timed is None and (not self.settled or self.steps % _PACE_EVERY == 0)

    def paced(self) -> Plan:
        """The plan with the times of the steps that were timed: of whole steps, and of recording and replaying in them."""
        predicted = self.plan.plain_seconds + self.plan.predicted_extra_seconds
        if len(self.seconds) < _PACE_STEPS_AT_LEAST or not predicted:
            return self.plan
        whole = statistics.median(seconds for seconds, _ in self.seconds)
        replays = [again for _, again in self.seconds if again is not None]
        if replays:
            extra = min(whole, statistics.median(replays) + self.plan.crowding_seconds)  # which no clock of the executor sees
        else:
            extra = self.plan.predicted_extra_seconds * whole / predicted
        return self.plan.at_pace(whole - extra, extra)

    def room(self) -> Callable[[int], int]:
        """From a forward operation's position to the bytes that the budget leaves beside it."""
        if self.plan.budget_bytes is None:
            return lambda _: 1 << 62
        top = simulate_plan(self.graph, self.plan).top_bytes
        places = [at for at, event in enumerate(self.graph.events) if event.kind == "op"]
        forward = {op.index for op in self.graph.operations if op.phase == "forward"}
        taken = np.array([top[at] for at in places if self.graph.events[at].index in forward], dtype=np.int64)
        budget = self.plan.budget_bytes
        return lambda position: int(budget - taken[position]) if position < len(taken) else 0
