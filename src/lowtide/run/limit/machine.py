"""The state machine of cached plans: what follows from what happened.

`TABLE` decides an entry's next state, and what follows; `Table.transition` looks it up. Each function
`on_...` takes one piece of evidence (`on_called`, `on_profiled`, `on_ended`): it works out the facts, has the
table decide, and writes down what the evidence says. The other functions write down what changes no state. No
other file assigns an entry's fields. How a step is profiled is not decided here: `Limiter` may profile one of
lowtide's own in place of the user's.

```text
 NEW --> STALE --> PLANNED --> VARYING   a step was profiled; a plan was made; two steps ran other operations
 STALE --> REFUSED                       no plan fits
 REFUSED, PLANNED, VARYING --> STALE     another budget or optimizer; or a planned step took more
 PLANNED, VARYING --> DOUBTED            a step ran operations that the plan does not have
 DOUBTED --> STALE, PLANNED, VARYING     profiled again: a longer step than the one planned for, or a shorter
```
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from enum import Enum, auto
from typing import Literal, NamedTuple, Protocol

import torch

from lowtide import budget as budgets
from lowtide.graph import StepGraph
from lowtide.run import hidden_costs
from lowtide.run.limit.entry import Entry, Planned, State
from lowtide.run.record.directors import Directors, PlanDirector
from lowtide.transitions import Row, Table

_LONGER = 0.1  # a step with a larger share of operations that its plan lacks is profiled
_MOST_RESERVE = 1 / 4  # of the budget


class Evidence(Enum):
    """What happened to an entry."""

    CALLED = auto()
    """A step of it begins."""
    PEERS = auto()
    """The ranks that share its plan have told what their steps showed."""
    PROFILED = auto()
    """A step was profiled."""
    PLAN_MADE = auto()
    PLAN_REFUSED = auto()
    """No plan fits."""
    BETTER_FOUND = auto()
    """A search that went on has found a better plan."""
    ENDED = auto()
    """A backward of a planned step has ended."""
    RETAINED = auto()
    """Backward ran through it again, more often than through the profiled one."""
    REMOVED = auto()
    """The limit was removed, or the entry made room for another."""


Fact = Literal[
    "graph known",  # the entry has a step graph: its own, or a sibling's
    "other budget",  # the budget or optimizer is another one than no plan was found for
    "outdated",  # the plan was made for another budget, optimizer or margin
    "peer profiles",  # a rank that shares the plan profiles its next step
    "peer outdated",  # a rank that shares the plan has an outdated one
    "unverified",  # the step's operations ran once, in a program that was never seen to reproduce
    "shorter",  # the step has no more operations than the one that is planned for
    "margin",  # earlier steps took more than predicted, and the plan was to leave that free
    "current plan",  # the plan in force is for this step graph, budget and optimizer
    "planned",  # there is a plan in force
    "borrowed",  # the entry's step graph is a sibling's
    "above",  # the step took more than its budget
    "replaced",  # the step ran under an earlier plan than the one in force
    "second derivatives",  # a backward ran with create_graph=True, and none of the profiled step did
    "accepted",  # the step took no more than was accepted, since no plan leaves that much free
    "more backwards",  # more backwards ran through the step than through the profiled one
    "late buffer",  # what the step took more may be a collective's buffer that a thread held for longer
    "unrecorded",  # the step's operations were not recorded, since nothing had to be recomputed
    "departed",  # the step ran other operations than the plan has
    "longer",  # the step ran many operations that the plan does not have
    "tried",  # the step, the first after the profiled one, evicted on demand, since steps may differ
    "differs",  # the step can evict on demand, and ran other operations than the one before, or took more
    "differed",  # two steps were seen to differ in what they ran
    "same budget",  # the plan in force was made for this budget and optimizer
    "profiles left",  # few steps were profiled so far
]


class Action(Enum):
    """What follows. Why a step took more than its budget is said by `WHY` (`step.py`)."""

    NOTHING = auto()
    PROFILE = auto()
    """Run the step in little memory, and write it down."""
    PLAN = auto()
    """Make a plan from the step graph."""
    RUN = auto()
    """Run the step under the plan."""
    RAISE = auto()
    """Raise the refusal."""
    ACCEPT = auto()
    """Warn that the plan stays, and run the step under it."""
    CLOSE = auto()
    """End what goes on for it."""
    DOUBT = auto()
    """Note that steps may run other operations."""
    LEAVE_MARGIN = auto()
    """Leave what the step took more free by the next plan."""
    LEAVE_RESERVE = auto()
    """Leave it free in steps that vary."""
    WAIT = auto()
    """Take no margin for this step, unless the same comes again."""
    TAKE_BACK = auto()
    """Leave nothing free for this step: only a kept graph made it take more."""


_S, _E, _A = State, Evidence, Action

TABLE: Table[State, Evidence, Fact, Action] = Table(
    (
        Row((_S.NEW,), _E.CALLED, ("graph known",), _S.STALE, _A.PLAN),
        Row((_S.REFUSED,), _E.CALLED, ("other budget",), _S.STALE, _A.PLAN),
        Row((_S.NEW, _S.REFUSED, _S.DOUBTED), _E.CALLED, (), None, _A.PROFILE),
        Row((_S.STALE,), _E.CALLED, (), None, _A.PLAN),
        Row((_S.PLANNED, _S.VARYING), _E.CALLED, ("outdated",), _S.STALE, _A.PLAN),
        Row((_S.PLANNED, _S.VARYING), _E.CALLED, (), None, _A.RUN),
        Row((_S.STALE, _S.PLANNED), _E.PEERS, ("peer profiles",), _S.DOUBTED, _A.NOTHING),
        Row((_S.PLANNED,), _E.PEERS, ("peer outdated",), _S.STALE, _A.NOTHING),
        Row((_S.GONE,), _E.PROFILED, (), None, _A.NOTHING),
        Row((), _E.PROFILED, ("unverified",), None, _A.PROFILE),
        Row((), _E.PROFILED, ("planned", "shorter", "differed"), _S.VARYING, _A.NOTHING),
        Row((), _E.PROFILED, ("planned", "shorter"), _S.PLANNED, _A.NOTHING),
        Row((), _E.PROFILED, (), _S.STALE, _A.PLAN),
        Row((_S.STALE,), _E.PLAN_MADE, ("differed",), _S.VARYING, _A.RUN),
        Row((_S.STALE,), _E.PLAN_MADE, (), _S.PLANNED, _A.RUN),
        Row((_S.STALE,), _E.PLAN_REFUSED, ("differed", "same budget"), _S.VARYING, _A.RUN),
        Row((_S.STALE,), _E.PLAN_REFUSED, ("margin", "current plan"), _S.PLANNED, _A.ACCEPT),
        Row((_S.STALE,), _E.PLAN_REFUSED, ("margin",), None, _A.PLAN),
        Row((_S.STALE,), _E.PLAN_REFUSED, ("planned",), None, _A.RAISE),
        Row((_S.STALE,), _E.PLAN_REFUSED, ("borrowed",), _S.NEW, _A.RAISE),
        Row((_S.STALE,), _E.PLAN_REFUSED, (), _S.REFUSED, _A.RAISE),
        Row((_S.PLANNED,), _E.BETTER_FOUND, (), None, _A.RUN),
        Row((_S.GONE,), _E.ENDED, (), None, _A.NOTHING),
        Row((), _E.ENDED, ("replaced",), None, _A.NOTHING),
        Row((), _E.ENDED, ("above", "second derivatives"), None, _A.NOTHING),
        Row((), _E.ENDED, ("above", "accepted"), None, _A.NOTHING),
        Row((), _E.ENDED, ("above", "unrecorded", "profiles left"), _S.DOUBTED, _A.DOUBT),
        Row((_S.PLANNED,), _E.ENDED, ("above", "differs"), _S.VARYING, _A.NOTHING),
        Row((), _E.ENDED, ("longer", "profiles left"), _S.DOUBTED, _A.DOUBT),
        Row((_S.VARYING,), _E.ENDED, ("above",), None, _A.LEAVE_RESERVE),
        Row((), _E.ENDED, ("above", "departed", "profiles left"), _S.DOUBTED, _A.DOUBT),
        Row((), _E.ENDED, ("above", "more backwards"), None, _A.NOTHING),
        Row((), _E.ENDED, ("above", "late buffer"), None, _A.WAIT),
        Row((), _E.ENDED, ("above",), None, _A.LEAVE_MARGIN),
        Row((_S.PLANNED,), _E.ENDED, ("tried", "departed", "profiles left"), _S.DOUBTED, _A.NOTHING),
        Row((_S.PLANNED,), _E.ENDED, ("differs",), _S.VARYING, _A.NOTHING),
        Row((), _E.RETAINED, (), None, _A.TAKE_BACK),
        Row((), _E.REMOVED, (), _S.GONE, _A.CLOSE),
    ),
    nothing=Action.NOTHING,
)


def _take(entry: Entry, evidence: Evidence, facts: dict[Fact, bool]) -> Action:
    """Move the entry to its next state. Where steps vary from here on, they have a reserve in place of a
    margin, and no use for a better plan.
    """
    before = entry.state
    entry.state, action = TABLE.transition(before, evidence, [fact for fact, true in facts.items() if true])
    if entry.state is State.VARYING and before is not State.VARYING:
        assert entry.planned is not None and entry.planned_for is not None
        entry.planned.stop()
        entry.room.margin_bytes, entry.planned_for = 0, (entry.planned_for[0], 0)
    return action


def borrow(entry: Entry, sibling: Entry) -> None:
    """A new entry begins from what is known of a sibling, whose steps found no gradients."""
    assert sibling.graph is not None
    entry.graph = hidden_costs.with_earlier_gradients(sibling.graph)
    entry.room, entry.traits = replace(sibling.room), replace(sibling.traits)


def on_called(entry: Entry, version: int, backward_unseen: bool = False) -> Action:
    """A step begins.

    Args:
        entry: of the step.
        version: of budget and optimizer, now.
        backward_unseen: its backward runs where no operation is intercepted.
    """
    entry.seen.backward_unseen |= backward_unseen
    facts: dict[Fact, bool] = {
        "graph known": entry.graph is not None,
        "other budget": entry.refused_at != version,
        "outdated": is_outdated(entry, version),
    }
    action = _take(entry, Evidence.CALLED, facts)
    entry.seen.steps += action is Action.RUN
    return action


def is_outdated(entry: Entry, version: int) -> bool:
    """Whether the plan was made for another budget, optimizer or margin."""
    margin = entry.room.margin_bytes if entry.state is not State.VARYING else 0
    return entry.planned is not None and entry.planned_for != (version, margin)


def on_peers(entry: Entry, profiles: bool, outdated: bool, margin_bytes: int) -> Action:
    """The ranks that share the plan have told whether any of them profiles its next step or has an outdated
    plan, and the largest margin.
    """
    if profiles or outdated:
        entry.room.margin_bytes = margin_bytes
    return _take(entry, Evidence.PEERS, {"peer profiles": profiles, "peer outdated": outdated})


def note_taken(entry: Entry, taken_bytes: int) -> None:
    """A profiled step of the user's took so much; it is held against the budget once that is known."""
    entry.seen.unwarned_bytes = max(entry.seen.unwarned_bytes, taken_bytes)


def pop_taken(entry: Entry) -> int:
    """The most that profiled steps took since this was asked, or 0."""
    taken, entry.seen.unwarned_bytes = entry.seen.unwarned_bytes, 0
    return taken


def find_rise(entry: Entry) -> int:
    """The most that live bytes rose between two looks, in any profiled step. A step is gone through when this
    is first asked: of most entries nobody asks.
    """
    room = entry.room
    profiled, room.profiled = room.profiled, ()
    room.rise_bytes = max([room.rise_bytes, *map(hidden_costs.rise_bytes, profiled)])
    return room.rise_bytes


def note_unseen_backward(entry: Entry) -> None:
    """Backward ran where no operation is intercepted: the profile is of no use."""
    entry.seen.backward_unseen = True


def on_profiled(
    entry: Entry,
    graph: StepGraph,
    *,
    verified: bool,
    backwards: int = 1,
    makes_graph: bool = False,
    may_differ: bool = False,
    checkpoints: int = 0,
    collectives_bytes: int = 0,
    forward_spans: Sequence[tuple[int, int]] = (),
    ran: tuple[int, int] | None = None,
) -> Action:
    """A step was profiled: the longest one is planned for. One that ran other operations than the step
    before shows that steps vary.

    Args:
        entry: of the step.
        graph: the step, with all of the model.
        verified: its operations were seen to reproduce, in this step or in one of the same program.
        backwards, makes_graph, may_differ, checkpoints, forward_spans: of the step, as `Entry` names them.
        collectives_bytes: what collectives under way held beside other operations.
        ran: how many operations its forward ran, without and with gradients.
    """
    entry.seen.profiles += 1
    if entry.seen.ran is not None and ran is not None:
        entry.traits.differed |= entry.seen.can_evict and ran != entry.seen.ran
        entry.seen.ran = ran
    longest = entry.graph is None or len(graph.operations) > len(entry.graph.operations)
    facts: dict[Fact, bool] = {
        "unverified": not verified,
        "planned": entry.planned is not None,
        "shorter": not longest,
        "differed": entry.traits.differed,
    }
    action = _take(entry, Evidence.PROFILED, facts)
    entry.room.profiled += (graph,)
    if action is not Action.PROFILE:
        entry.traits.backwards = max(entry.traits.backwards, backwards)
        entry.seen.may_differ |= may_differ
    if action is Action.PLAN:
        entry.graph, entry.traits.checkpoints, entry.traits.makes_graph = graph, checkpoints, makes_graph
        entry.room.unseen_bytes = collectives_bytes + hidden_costs.checkpoint_bytes(graph, checkpoints)
        entry.forward_spans = tuple(forward_spans)
        entry.seen.profiled_ran = ran
    return action


def agree(entry: Entry, graph: StepGraph) -> None:
    """The profiled step as the ranks that share the model agree on it."""
    entry.graph = graph


def on_plan_made(entry: Entry, planned: Planned, version: int) -> Action:
    """A plan was made for this version of budget and optimizer, less the margin."""
    if entry.planned is not None:
        entry.planned.stop()
    entry.planned, entry.planned_for = planned, (version, entry.room.margin_bytes)
    entry.accepted_bytes, entry.refused_at = 0, None
    return _take(entry, Evidence.PLAN_MADE, {"differed": entry.traits.differed})


def on_plan_refused(entry: Entry, version: int) -> Action:
    """No plan fits this version of budget and optimizer, less the margin. The next attempt leaves none."""
    planned = entry.planned
    current = planned is not None and entry.planned_for is not None and entry.planned_for[0] == version
    facts: dict[Fact, bool] = {
        "margin": entry.room.margin_bytes > 0,
        "current plan": current and planned is not None and planned.profiled is entry.graph,
        "planned": planned is not None,
        "borrowed": entry.seen.profiles == 0,
        "differed": entry.traits.differed,
        "same budget": current,
    }
    action = _take(entry, Evidence.PLAN_REFUSED, facts)
    if action is Action.ACCEPT:
        assert planned is not None
        most = max(planned.plan.predicted_peak_bytes, planned.plan.budget_bytes or 0)
        entry.accepted_bytes = entry.room.margin_bytes + entry.room.unseen_bytes + most
        entry.planned_for = (version, 0)
    elif action is Action.RAISE:
        entry.refused_at = version
    entry.room.margin_bytes = 0
    return action


def on_better_found(entry: Entry, planned: Planned) -> Action:
    """A search that went on has found a better plan."""
    action = _take(entry, Evidence.BETTER_FOUND, {})
    if action is Action.RUN:
        entry.planned = planned
    return action


class EndedStep(Protocol):
    """What a planned step shows when a backward of it has ended; `PlannedStep` says what each is."""

    planned: Planned
    director: PlanDirector | Directors | None
    backwards: int
    makes_graph: bool
    margin_bytes: int
    can_evict: bool
    tried: bool
    ran: tuple[int, int] | None

    @property
    def extra(self) -> int: ...

    @property
    def departed(self) -> bool: ...

    @property
    def measured_bytes(self) -> int | None: ...


class Ending(NamedTuple):
    """What was true of a step whose backward has ended.

    Attributes:
        state: the entry's, before.
        facts: what was true.
        action: what follows.
    """

    state: State
    facts: frozenset[Fact]
    action: Action


def on_ended(entry: Entry, step: EndedStep) -> Ending:
    """A backward of a planned step has ended; what it took above its prediction is left free by the next
    plan, unless the reason is another.
    """
    seen = entry.seen
    facts, before = _facts_at_end(entry, step), entry.state
    if facts["more backwards"] and not facts["replaced"]:
        _DONE_AT_END[_take(entry, Evidence.RETAINED, {})](entry, step)
    action = _take(entry, Evidence.ENDED, facts)
    ending = Ending(before, frozenset(fact for fact, true in facts.items() if true), action)
    if facts["replaced"]:
        return ending
    seen.was_late = False
    if action in _DONE_AT_END:
        _DONE_AT_END[action](entry, step)
    seen.ran, seen.can_evict = step.ran or seen.ran, step.can_evict
    entry.traits.differed |= facts["differs"]
    seen.may_differ |= step.extra > 0
    return ending


def _leave_margin(entry: Entry, step: EndedStep) -> None:
    plan, limit, took = step.planned.plan, step.planned.plan.budget_bytes, step.measured_bytes
    assert limit is not None and took is not None
    more = max(0, took - max(plan.predicted_peak_bytes, limit - budgets.slack_bytes(limit)))
    entry.room.margin_bytes += more - step.margin_bytes  # each backward of a step counts anew
    step.margin_bytes = more


def _take_back(entry: Entry, step: EndedStep) -> None:
    # another plan may have had to do without the margin meanwhile
    entry.room.margin_bytes = max(0, entry.room.margin_bytes - step.margin_bytes)
    step.margin_bytes = 0


def _leave_reserve(entry: Entry, step: EndedStep) -> None:
    room, limit, took = entry.room, step.planned.plan.budget_bytes, step.measured_bytes
    assert limit is not None and took is not None
    more = max(took - limit + budgets.slack_bytes(limit), room.reserve_bytes)
    # what else a process did meanwhile shall not make all later steps slow
    room.reserve_bytes = min(room.reserve_bytes + more, int(_MOST_RESERVE * limit))


def _wait(entry: Entry, step: EndedStep) -> None:
    entry.seen.was_late = True


def _doubt(entry: Entry, step: EndedStep) -> None:
    entry.seen.may_differ = True


_DONE_AT_END = {
    Action.LEAVE_MARGIN: _leave_margin,
    Action.TAKE_BACK: _take_back,
    Action.LEAVE_RESERVE: _leave_reserve,
    Action.WAIT: _wait,
    Action.DOUBT: _doubt,
}


def _facts_at_end(entry: Entry, step: EndedStep) -> dict[Fact, bool]:
    """What is true of a step when a backward of it has ended."""
    plan, took, seen = step.planned.plan, step.measured_bytes, entry.seen
    limit = plan.budget_bytes
    above = limit is not None and took is not None and took > limit + budgets.slack_bytes(limit)
    other_program = seen.ran is not None and step.ran is not None and step.ran != seen.ran
    # the first step of a model may be unlike all others, which its next profile shows
    differs = other_program or (above and seen.may_differ and seen.profiles > 1)
    late = above and not seen.was_late and took is not None and _may_be_late(step.planned, took)
    return {
        "above": above,
        "replaced": entry.planned is not step.planned,
        "second derivatives": step.makes_graph and not entry.traits.makes_graph,
        "accepted": (took or 0) <= entry.accepted_bytes,
        "more backwards": step.backwards > entry.traits.backwards,
        "late buffer": late,
        "unrecorded": plan.changes_nothing and step.director is None,
        "departed": step.departed,
        "tried": step.tried,
        "differs": step.can_evict and differs,
        "longer": step.extra > _LONGER * len(plan.program),
        "profiles left": entry.may_profile,
    }


def _may_be_late(planned: Planned, took: int) -> bool:
    """Whether a buffer of a collective accounts for what a step on a CPU took more than predicted: Gloo's
    threads let go of it when they run next, on a busy machine in whatever stands at its peak then.
    """
    graph, more = planned.graph, took - planned.plan.predicted_peak_bytes
    sizes = [graph.storages[value.storage].bytes for value in graph.values]
    moved = (
        sum(sizes[value] for value in (*op.reads, *op.writes)) + op.scratch_bytes
        for op in graph.operations
        if op.name.startswith("c10d.")
    )
    return torch.device(graph.device).type == "cpu" and more <= max(moved, default=0)


def on_removed(entry: Entry) -> None:
    """The limit was removed, or the entry has made room for another."""
    if _take(entry, Evidence.REMOVED, {}) is Action.CLOSE and entry.planned is not None:
        entry.planned.stop()
