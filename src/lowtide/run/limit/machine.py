"""What becomes of a cached plan: each function takes one thing that happened, and assigns what follows.

In: an entry (`entry.py`), and what happened. Out: what to do next. A function `on_...` works out the facts,
has `TABLE` decide (`entry_states.py`), and writes down what the evidence says. The other functions write down
what changes no state. No other file assigns a field of the records in `entry.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from lowtide import budget as budgets
from lowtide.graph import StepGraph
from lowtide.run import transforms
from lowtide.run.limit.entry import Entry, Planned
from lowtide.run.limit.entry_states import TABLE, Action, EntryRow, Evidence, Fact, State
from lowtide.run.limit.key import StepKey
from lowtide.run.watch import StepWatch

_LONGER = 0.1  # a step with a larger share of operations that its plan lacks is profiled
_MOST_RESERVE = 1 / 4  # of the budget


def _advance(entry: Entry, evidence: Evidence, facts: dict[Fact, bool] | None = None) -> EntryRow:
    """Move the entry to its next state, by the row of the table that fits."""
    row = TABLE.row(entry.state, evidence, [fact for fact, true in (facts or {}).items() if true])
    if row.then is not None:
        entry.state = row.then
    if row.action is Action.VARY:
        assert entry.planned is not None and entry.planned_for is not None
        entry.beside.margin_bytes, entry.planned_for = 0, (entry.planned_for[0], 0)
    return row


def borrow(entry: Entry, sibling: Entry) -> None:
    """A new entry begins with the step graph and the records of a sibling: before the sibling's steps no
    gradients exist, or others.
    """
    entry.profiled, entry.borrowed = sibling.profiled, True
    entry.beside, entry.traits = replace(sibling.beside), replace(sibling.traits)
    entry.forward_spans, entry.later_keys = sibling.forward_spans, sibling.later_keys


# ---- a step begins -------------------------------------------------------------------------------


def on_called(
    entry: Entry, version: int, shared: bool = False, backward_unseen: bool = False, prepared: bool = False
) -> Action:
    """A step begins, or is prepared for.

    Args:
        entry: of the step.
        version: of budget and optimizer, now.
        shared: other limited models take part in it.
        backward_unseen: its backward runs where no operation is intercepted.
        prepared: it is prepared for, by a step of lowtide's own.
    """
    entry.seen.backward_unseen |= backward_unseen
    facts: dict[Fact, bool] = {
        "prepared": prepared,
        "graph known": entry.profiled is not None,
        "other budget": entry.refused_at != version,
        "outdated": entry.is_outdated(version),
        "shared": shared,
        "backward unseen": entry.seen.backward_unseen,
    }
    return _advance(entry, Evidence.CALLED, facts).action


def on_no_loss(entry: Entry, shared: bool) -> Action:
    """A step of lowtide's own, in place of the user's, had no loss that could be found or made up.

    Args:
        entry: of the step.
        shared: other limited models take part in the user's step.
    """
    return _advance(entry, Evidence.NO_LOSS, {"shared": shared}).action


def on_peers(entry: Entry, profiles: bool, outdated: bool, margin_bytes: int) -> Action:
    """The ranks that share the plan have told whether any of them profiles its next step or has an outdated
    plan, and the largest margin.
    """
    if profiles or outdated:
        entry.beside.margin_bytes = margin_bytes
    return _advance(entry, Evidence.PEERS, {"peer profiles": profiles, "peer outdated": outdated}).action


# ---- a step was profiled -------------------------------------------------------------------------


def note_peak(entry: Entry, taken_bytes: int) -> None:
    """A profiled step of the user's took so many bytes; `pop_peak` gives the most, once a budget is known."""
    entry.seen.unwarned_bytes = max(entry.seen.unwarned_bytes, taken_bytes)


def pop_peak(entry: Entry) -> int:
    """The most bytes that `note_peak` noted since the last call of this function, or 0."""
    taken, entry.seen.unwarned_bytes = entry.seen.unwarned_bytes, 0
    return taken


def note_outside(entry: Entry, outside_bytes: int) -> None:
    """A profiled step used so many bytes that were there before, and are neither the model's nor given."""
    entry.outside_bytes = max(0, outside_bytes)


def on_profile_ended(entry: Entry, backward_unseen: bool, shared: bool) -> Action:
    """The backward of a profiled step of the user's has ended.

    Args:
        entry: of the step.
        backward_unseen: it ran where no operation is intercepted.
        shared: other limited models took part in the step.
    """
    entry.seen.backward_unseen |= backward_unseen
    return _advance(
        entry, Evidence.PROFILE_ENDED, {"backward unseen": backward_unseen, "shared": shared}
    ).action


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
    unused_bytes: int = 0,
    forward_spans: Sequence[tuple[int, int]] = (),
    later_keys: Sequence[StepKey] = (),
    ran: tuple[int, int] | None = None,
    nested: str = "",
) -> Action:
    """A step was profiled: the longest one is planned for. One that ran other operations than the step
    before shows that steps vary.

    Args:
        entry: of the step.
        graph: the step.
        verified: the step's operations were seen to reproduce, now or in a step of the same program.
        backwards, makes_graph, may_differ, checkpoints, forward_spans, later_keys, nested: of the step, as
            `Entry` names them.
        collectives_bytes: what collectives under way held beside other operations.
        unused_bytes: as of `BesidePlan`.
        ran: how many operations the step's forward ran, without and with gradients.
    """
    entry.seen.profiles += 1
    entry.traits.nested = entry.traits.nested or nested
    if entry.seen.ran is not None and ran is not None:
        entry.traits.differed |= entry.seen.can_evict and ran != entry.seen.ran
        entry.seen.ran = ran
    longest = entry.profiled is None or _length(graph, later_keys) > _length(entry.profiled, entry.later_keys)
    facts: dict[Fact, bool] = {
        "unverified": not verified,
        "planned": entry.planned is not None,
        "shorter": not longest,
        "differed": entry.traits.differed,
    }
    action = _advance(entry, Evidence.PROFILED, facts).action
    if action is not Action.PROFILE:
        entry.traits.backwards = max(entry.traits.backwards, backwards)
        entry.seen.may_differ |= may_differ
    if action is Action.PLAN:
        entry.profiled, entry.borrowed = graph, False
        entry.traits.checkpoints, entry.traits.makes_graph = checkpoints, makes_graph
        entry.beside.unused_bytes = unused_bytes
        entry.beside.hidden_bytes = collectives_bytes + transforms.checkpoint_bytes(graph, checkpoints)
        entry.forward_spans, entry.later_keys = tuple(forward_spans), tuple(later_keys)
        entry.seen.profiled_ran = ran
    return action


def _length(graph: StepGraph, later_keys: Sequence[StepKey]) -> tuple[int, int]:
    """By this one profiled step of an entry is longer than another: operations, and what its later forwards
    are given.
    """
    return len(graph.operations), sum(key.elements() for key in later_keys)


def set_graph(entry: Entry, graph: StepGraph) -> None:
    """The profiled step is replaced by what the ranks that share the model agreed on."""
    entry.profiled = graph


# ---- a plan --------------------------------------------------------------------------------------


def on_plan_made(entry: Entry, planned: Planned, version: int) -> Action:
    """A plan was made for this version of budget and optimizer; it leaves the margin free."""
    entry.planned, entry.planned_for = planned, (version, entry.beside.margin_bytes)
    entry.accepted_bytes, entry.refused_at = 0, None
    return _advance(entry, Evidence.PLAN_MADE, {"differed": entry.traits.differed}).action


def on_plan_refused(entry: Entry, version: int, peers_wait: bool = False) -> Action:
    """No plan that leaves the margin free fits this version of budget and optimizer.

    Args:
        entry: of the step.
        version: of budget and optimizer.
        peers_wait: other ranks wait for a plan in this step, and the smallest budget that has one is known.
    """
    planned = entry.planned
    current = planned is not None and entry.planned_for is not None and entry.planned_for[0] == version
    facts: dict[Fact, bool] = {
        "margin": entry.beside.margin_bytes > 0,
        "current plan": current and planned is not None and planned.profiled is entry.profiled,
        "planned": planned is not None,
        "differed": entry.traits.differed,
        "same budget": current,
        "peers wait": peers_wait,
    }
    action = _advance(entry, Evidence.PLAN_REFUSED, facts).action
    if action is Action.ACCEPT:
        assert planned is not None
        most = max(planned.plan.predicted_peak_bytes, planned.plan.budget_bytes or 0)
        entry.accepted_bytes = entry.beside.free_bytes + most
        entry.planned_for = (version, 0)
    elif action is Action.RAISE:
        entry.refused_at = version
    entry.beside.margin_bytes = 0  # whatever follows, no plan leaves it
    return action


def set_plan(entry: Entry, planned: Planned) -> None:
    """The plan is replaced by the one that the ranks that shard the model agreed on."""
    if entry.state is State.PLANNED:
        entry.planned = planned


# ---- a step runs under its plan ------------------------------------------------------------------


def on_forward_begins(entry: Entry, planned: Planned, can_evict: bool, unkeyed_arguments: bool) -> Action:
    """The forward of a planned step begins.

    Args:
        entry: of the step.
        planned: the plan that the step runs under.
        can_evict: as of `PlannedStep`.
        unkeyed_arguments: an argument has no part in the cache key: a number, or an object.
    """
    facts: dict[Fact, bool] = {
        "can evict": can_evict,
        "untried": entry.is_untried,
        "may differ": entry.seen.may_differ,
        "unkeyed arguments": unkeyed_arguments,
        "changes nothing": planned.plan.changes_nothing,
        "unwatched": planned.plan.budget_bytes is None or not entry.seen.may_differ,
    }
    entry.seen.steps += 1
    return _advance(entry, Evidence.FORWARD_BEGINS, facts).action


def count_step(planned: Planned) -> None:
    """The forward of a step has run under the plan."""
    planned.history.steps += 1


def time_step(planned: Planned, step: StepWatch) -> None:
    """This step is timed."""
    planned.history.timed = step


def note_time(planned: Planned) -> None:
    """Take down the time of the step that was timed, once it is known without waiting for the device."""
    history, watch = planned.history, planned.history.timed
    if watch is None or not watch.over():
        return
    history.timed = None
    seconds = watch.seconds()
    if seconds is not None:
        extra = watch.replay_seconds + watch.recording_seconds + planned.step_graph.overhead_seconds
        history.seconds.append((seconds, extra if watch.device.type == "cpu" else None))


# ---- a backward has ended ------------------------------------------------------------------------


class Ended(NamedTuple):
    """What a planned step has shown when a backward of it has ended.

    Attributes:
        planned: the plan that the step ran under.
        recorded: the step's operations were recorded.
        departed: the step ran other operations than the plan has.
        extra: how many operations the step ran that the plan does not have.
        ran: how many operations the forward ran, without and with gradients; ``None`` where that is unknown.
        resized: the step took more or less than its plan predicts, since values decide sizes.
        backwards: how many backwards through the step have ended.
        makes_graph: one of these was run with ``create_graph=True``.
        can_evict, tried: as of `PlannedStep`.
        measured_bytes: the step's peak so far, resident bytes included; ``None`` where that is not known.
        added_bytes: what earlier backwards of the step added to the margin (`Teaching.added_bytes`).
    """

    planned: Planned
    measured_bytes: int | None
    recorded: bool = False
    departed: bool = False
    extra: int = 0
    ran: tuple[int, int] | None = None
    resized: bool = False
    backwards: int = 1
    makes_graph: bool = False
    can_evict: bool = True
    tried: bool = False
    added_bytes: int = 0


class Teaching(NamedTuple):
    """What a step has taught when a backward of it has ended.

    Attributes:
        action: what follows.
        warning: what users are told where the step took more than its budget.
        added_bytes: what the step has added to the margin by now; the next backward of the step counts anew.
    """

    action: Action
    warning: str
    added_bytes: int


def on_ended(entry: Entry, ended: Ended) -> Teaching:
    """A backward of a planned step has ended."""
    seen = entry.seen
    facts = _facts_at_end(entry, ended)
    row = _advance(entry, Evidence.ENDED, facts)
    if row.action is Action.IGNORE:
        return Teaching(row.action, row.warning, ended.added_bytes)
    # of each step whose plan is in force it is written down what it ran; the rest is its action's
    seen.was_late, added = False, ended.added_bytes
    if row.action in _DONE_AT_END:
        added = _DONE_AT_END[row.action](entry, ended)
    seen.ran, seen.can_evict = ended.ran or seen.ran, ended.can_evict
    entry.traits.differed |= facts["differs"]
    seen.may_differ |= ended.extra > 0
    return Teaching(row.action, row.warning, added)


def _leave_margin(entry: Entry, ended: Ended) -> int:
    plan, limit, took = ended.planned.plan, ended.planned.plan.budget_bytes, ended.measured_bytes
    assert limit is not None and took is not None
    more = max(0, took - max(plan.predicted_peak_bytes, limit - budgets.slack_bytes(limit)))
    entry.beside.margin_bytes += more - ended.added_bytes  # each backward of a step counts anew
    return more


def _leave_nothing(entry: Entry, ended: Ended) -> int:
    # where a plan was refused meanwhile, the margin is gone, and what this step added to it, too
    entry.beside.margin_bytes = max(0, entry.beside.margin_bytes - ended.added_bytes)
    return 0


def _leave_reserve(entry: Entry, ended: Ended) -> int:
    beside, limit, took = entry.beside, ended.planned.plan.budget_bytes, ended.measured_bytes
    assert limit is not None and took is not None
    more = max(took - limit + budgets.slack_bytes(limit), beside.reserve_bytes)
    # what else a process did meanwhile shall not make all later steps slow
    beside.reserve_bytes = min(beside.reserve_bytes + more, int(_MOST_RESERVE * limit))
    return ended.added_bytes


def _wait(entry: Entry, ended: Ended) -> int:
    entry.seen.was_late = True
    return ended.added_bytes


def _doubt(entry: Entry, ended: Ended) -> int:
    entry.seen.may_differ = True
    return ended.added_bytes


# by the action what it writes down; returns what the step has added to the margin by now
_DONE_AT_END: dict[Action, Callable[[Entry, Ended], int]] = {
    Action.LEAVE_MARGIN: _leave_margin,
    Action.LEAVE_NOTHING: _leave_nothing,
    Action.LEAVE_RESERVE: _leave_reserve,
    Action.WAIT: _wait,
    Action.DOUBT: _doubt,
}


def _facts_at_end(entry: Entry, ended: Ended) -> dict[Fact, bool]:
    """What is true of a step when a backward of it has ended."""
    plan, took, seen = ended.planned.plan, ended.measured_bytes, entry.seen
    limit = plan.budget_bytes
    above = limit is not None and took is not None and took > limit + budgets.slack_bytes(limit)
    other_program = seen.ran is not None and ended.ran is not None and ended.ran != seen.ran
    # the first step of a model may be unlike all others, which its next profile shows
    differs = other_program or ended.resized or (above and seen.may_differ and seen.profiles > 1)
    late = above and not seen.was_late and took is not None and _may_be_late(ended.planned, took)
    return {
        "above": above,
        "replaced": entry.planned is not ended.planned,
        "second derivatives": ended.makes_graph and not entry.traits.makes_graph,
        "accepted": (took or 0) <= entry.accepted_bytes,
        "more backwards": ended.backwards > entry.traits.backwards,
        "late buffer": late,
        "unrecorded": plan.changes_nothing and not ended.recorded,
        "departed": ended.departed,
        "tried": ended.tried,
        "differs": ended.can_evict and differs,
        "longer": ended.extra > _LONGER * len(plan.program),
        "profiles left": entry.may_profile,
    }


def _may_be_late(planned: Planned, took: int) -> bool:
    """Whether a buffer of a collective accounts for what a step on a CPU took more than predicted: Gloo's
    threads let go of it when they run next, on a busy machine when the step is at its peak.
    """
    graph, more = planned.step_graph, took - planned.plan.predicted_peak_bytes
    sizes = [graph.storages[value.storage].bytes for value in graph.values]
    moved = (
        sum(sizes[value] for value in (*op.reads, *op.writes)) + op.scratch_bytes
        for op in graph.operations
        if op.name.startswith("c10d.")
    )
    return torch.device(graph.device).type == "cpu" and more <= max(moved, default=0)


def on_removed(entry: Entry) -> None:
    """The limit was removed, or the entry has made room for another."""
    _advance(entry, Evidence.REMOVED)
