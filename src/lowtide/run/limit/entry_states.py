"""The state machine of cached plans: what follows from what happened, and what users are told of it.

`TABLE` is all that is decided; `Table.row` looks it up. The functions of `machine.py` work out the facts, and
write down what follows. Who carries an action out:

| action | who |
|---|---|
| PROFILE, PROFILE_ASIDE, RUN, of a call | `Limiter._run_next`, `Limiter.prepare` |
| PROFILE, of a step that was profiled | the next call, since the state stays |
| PLAN, PLAN_SMALLEST, ACCEPT, RAISE | `Cache._plan` |
| PROFILE, RAISE, where there is no loss | `Limiter._profile_aside_first` |
| RUN, PASS, EVICT, TRY, of a forward that begins | `PlannedStep.run` |
| DISCARD | `Limiter._on_profile_end` |
| LEAVE_MARGIN, LEAVE_NOTHING, LEAVE_RESERVE, WAIT, DOUBT, IGNORE | `machine.on_ended` |
| VARY, wherever it comes | `machine._advance` |

```text
 NEW --> STALE --> PLANNED --> VARYING   a step was profiled; a plan was made; two steps differed
 STALE --> VARYING                       a plan was made, or the old one stays, and steps had differed before
 STALE --> REFUSED                       no plan fits
 REFUSED, PLANNED, VARYING --> STALE     another budget or optimizer; or a planned step took more
 STALE, PLANNED, VARYING --> DOUBTED     a step ran operations that the plan does not have, here or on a peer
 DOUBTED --> STALE, PLANNED, VARYING     profiled again: a longer step than the one planned for, or a shorter
 any --> GONE                            the limit was removed, or the entry made room for another
```

A row of FORWARD_BEGINS changes no state: it is looked up without the lock of the cache.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Literal

from lowtide.run.messages import OF_GRAPH
from lowtide.transitions import Row, Table


class State(Enum):
    """The state of an entry; the value says what its next step does."""

    NEW = "is profiled; where the entry has the step graph of a sibling, planned for"
    REFUSED = "is profiled; where another budget was given, planned for"
    DOUBTED = "is profiled, since a step ran other operations than the plan in force has"
    STALE = "waits for a plan"
    PLANNED = "runs under the plan"
    VARYING = "evicts when memory is short, since its steps differ in operations or in sizes"
    GONE = "is none: a step under way ends under the plan that it began with, and nothing follows"


class Evidence(Enum):
    """What happened to an entry."""

    CALLED = auto()
    """A step of the entry begins."""
    PEERS = auto()
    """The ranks that share the entry's plan have told what their steps showed."""
    NO_LOSS = auto()
    """A step of lowtide's own, in place of the user's, had no loss that could be found or made up."""
    PROFILE_ENDED = auto()
    """The backward of a profiled step of the user's has ended."""
    PROFILED = auto()
    """A step was profiled, and its step graph is known."""
    PLAN_MADE = auto()
    PLAN_REFUSED = auto()
    """No plan fits."""
    FORWARD_BEGINS = auto()
    """The forward of a planned step begins."""
    ENDED = auto()
    """A backward of a planned step has ended."""
    REMOVED = auto()
    """The limit was removed, or the entry made room for another."""


Fact = Literal[
    # of a call
    "graph known",  # the entry has begun with the step graph of a sibling
    "other budget",  # the budget or optimizer is not the one for which no plan was found
    "outdated",  # the plan in force was made for another budget, optimizer or margin
    "shared",  # other limited models take part in the step
    "backward unseen",  # the backward of the step runs where no operation is intercepted
    "prepared",  # no step of the user's begins: a plan is made ahead, from one of lowtide's own
    # of other ranks
    "peers wait",  # some ranks wait for a plan in this step, and the smallest budget that has one is known
    "peer profiles",  # one of the ranks profiles its next step
    "peer outdated",  # the plan of one of the ranks is outdated
    # of a profiled step
    "unverified",  # each operation ran once, and no step of the same program was verified
    "shorter",  # the step has no more operations than the one that is planned for
    # of a plan, made or refused
    "margin",  # the plan was to leave a margin free, since earlier steps took more than predicted
    "current plan",  # the plan in force is for this step graph, budget and optimizer
    "same budget",  # the plan in force was made for this budget and optimizer
    "planned",  # there is a plan in force
    "differed",  # two steps were seen to differ
    # of a planned step that begins
    "can evict",  # the step may evict on demand, and has what that takes
    "untried",  # no step has run since the first was profiled
    "may differ",  # steps may run other operations: one step did, or the forward reads values
    "unkeyed arguments",  # an argument has no part in the cache key: a number, or an object
    "changes nothing",  # the plan evicts nothing: the step fits as it is
    "unwatched",  # nobody asks whether the step departs from the plan: none did so far, or without a budget
    # of a planned step whose backward has ended, "it"
    "above",  # it took more than its budget
    "replaced",  # it ran under an earlier plan than the one in force
    "second derivatives",  # a backward ran with create_graph=True, and none of the profiled step did
    "accepted",  # it took no more than was accepted, since no plan leaves that much free
    "more backwards",  # more backwards ran through it than through the profiled one
    "late buffer",  # the bytes above may be a collective's buffer, which a thread held for longer
    "unrecorded",  # its operations were not recorded, since nothing had to be recomputed
    "departed",  # it ran other operations than the plan has
    "longer",  # it ran many operations that the plan does not have
    "tried",  # it, the first after the profiled one, evicted on demand, since steps may differ
    "differs",  # it can evict on demand, and took more, or differed in operations or in sizes
    "profiles left",  # few steps were profiled so far
]


class Action(Enum):
    """What follows."""

    NOTHING = auto()
    PROFILE = auto()
    """Run the step in little memory, and write it down."""
    PROFILE_ASIDE = auto()
    """Profile a step of lowtide's own, with the same arguments, before this one."""
    PLAN = auto()
    """Make a plan from the step graph."""
    PLAN_SMALLEST = auto()
    """Make a plan for the smallest budget that has one, and warn that this is not the user's budget."""
    RUN = auto()
    """Run the step under the plan."""
    EVICT = auto()
    """Run the step without the plan: evict what is cheapest to bring back when memory is short."""
    TRY = auto()
    """As EVICT, to see whether steps run other operations each time."""
    PASS = auto()
    """Run the step as it is, and record nothing."""
    RAISE = auto()
    """Raise the refusal."""
    ACCEPT = auto()
    """Warn that the plan stays, and run the step under it."""
    VARY = auto()
    """Run the step. From now on steps evict on demand: a reserve replaces the margin."""
    DISCARD = auto()
    """Plan nothing from the profiled step: some operations were not seen, or were other models'."""
    DOUBT = auto()
    """Note that steps may run other operations."""
    LEAVE_MARGIN = auto()
    """Have the next plan leave free what the step took above its prediction."""
    LEAVE_RESERVE = auto()
    """Have steps that vary leave free what this one took above its budget."""
    WAIT = auto()
    """Leave no margin because of this step, unless the next one takes more, too."""
    LEAVE_NOTHING = auto()
    """Leave no margin because of this step, and take back what an earlier backward of it added: only what its
    backward kept made it take more.
    """
    IGNORE = auto()
    """Learn nothing from the step."""


_GONE = "nothing follows, since its plan is given up: the limit is gone, or newer plans took its place"
_REPLACED = "later steps run under a newer plan than this one did"
_SECOND = (
    f"{OF_GRAPH}. Run such steps on a part of the batch, or give a budget of what they take; steps without "
    "it keep to their plan"
)
_ACCEPTED = "no plan leaves that much of it free, so the plan stays; only a larger budget would hold"
_UNRECORDED = (
    "nothing had to be recomputed in the step that was planned for, so its operations went unseen, and "
    "lowtide profiles the next one"
)
_VARYING = (
    "its steps run other operations each time, or values decide how large results are, so from now on they "
    "evict what is cheapest to bring back when memory is short, without a plan"
)
_DEPARTED = "it ran other operations than the step that was planned for, and lowtide profiles the next one"
_RESERVE = "later steps leave that much more free"
_RETAINED = (
    "backward runs more than once through what one forward saved (retain_graph=True), where a plan is for "
    "one backward. Of several losses, add them up and run one backward; else give a smaller budget"
)
_LATE = (
    "as much as a thread of the process group may have held for longer of what a collective moved. The plan "
    "stays; where the next step takes more, too, lowtide plans again"
)
_MARGIN = "lowtide plans again with that much less"

_S, _E, _A = State, Evidence, Action
UNPLANNED = (State.NEW, State.REFUSED, State.DOUBTED)
"""The states whose next step is profiled."""

EntryRow = Row[State, Evidence, Fact, Action]

TABLE: Table[State, Evidence, Fact, Action] = Table(
    (
        Row((_S.NEW,), _E.CALLED, ("graph known",), _S.STALE, _A.PLAN),
        Row((_S.REFUSED,), _E.CALLED, ("other budget",), _S.STALE, _A.PLAN),
        Row(UNPLANNED, _E.CALLED, ("shared",), None, _A.PROFILE_ASIDE),
        Row(UNPLANNED, _E.CALLED, ("backward unseen",), None, _A.PROFILE_ASIDE),
        Row(UNPLANNED, _E.CALLED, ("prepared",), None, _A.PROFILE_ASIDE),
        Row(UNPLANNED, _E.CALLED, (), None, _A.PROFILE),
        Row((_S.STALE,), _E.CALLED, (), None, _A.PLAN),
        Row((_S.PLANNED, _S.VARYING), _E.CALLED, ("outdated",), _S.STALE, _A.PLAN),
        Row((_S.PLANNED, _S.VARYING), _E.CALLED, (), None, _A.RUN),
        Row((), _E.NO_LOSS, ("shared",), None, _A.PROFILE),  # a teacher takes no part in backward
        Row((), _E.NO_LOSS, (), None, _A.RAISE),
        Row((_S.STALE, _S.PLANNED), _E.PEERS, ("peer profiles",), _S.DOUBTED, _A.NOTHING),
        Row((_S.PLANNED,), _E.PEERS, ("peer outdated",), _S.STALE, _A.NOTHING),
        Row((), _E.PROFILE_ENDED, ("backward unseen",), None, _A.DISCARD),
        Row((), _E.PROFILE_ENDED, ("shared",), None, _A.DISCARD),
        Row((_S.GONE,), _E.PROFILED, (), None, _A.NOTHING),
        Row((), _E.PROFILED, ("unverified",), None, _A.PROFILE),
        Row((), _E.PROFILED, ("planned", "shorter", "differed"), _S.VARYING, _A.VARY),
        Row((), _E.PROFILED, ("planned", "shorter"), _S.PLANNED, _A.NOTHING),
        Row((), _E.PROFILED, (), _S.STALE, _A.PLAN),
        Row((_S.STALE,), _E.PLAN_MADE, ("differed",), _S.VARYING, _A.VARY),
        Row((_S.STALE,), _E.PLAN_MADE, (), _S.PLANNED, _A.RUN),
        Row((_S.STALE,), _E.PLAN_REFUSED, ("differed", "same budget"), _S.VARYING, _A.VARY),
        Row((_S.STALE,), _E.PLAN_REFUSED, ("margin", "current plan"), _S.PLANNED, _A.ACCEPT),
        Row((_S.STALE,), _E.PLAN_REFUSED, ("margin",), None, _A.PLAN),
        Row((_S.STALE,), _E.PLAN_REFUSED, ("planned",), None, _A.RAISE),
        Row((_S.STALE,), _E.PLAN_REFUSED, ("peers wait",), None, _A.PLAN_SMALLEST),
        Row((_S.STALE,), _E.PLAN_REFUSED, (), _S.REFUSED, _A.RAISE),
        Row((_S.VARYING,), _E.FORWARD_BEGINS, ("can evict",), None, _A.EVICT),
        Row((_S.PLANNED,), _E.FORWARD_BEGINS, ("can evict", "untried", "may differ"), None, _A.TRY),
        Row((_S.PLANNED,), _E.FORWARD_BEGINS, ("can evict", "untried", "unkeyed arguments"), None, _A.TRY),
        Row((), _E.FORWARD_BEGINS, ("changes nothing", "unwatched"), None, _A.PASS),
        Row((), _E.FORWARD_BEGINS, (), None, _A.RUN),
        # what a row of the following says is told where the step took more than its budget
        Row((_S.GONE,), _E.ENDED, (), None, _A.IGNORE, _GONE),
        Row((), _E.ENDED, ("replaced",), None, _A.IGNORE, _REPLACED),
        Row((), _E.ENDED, ("above", "second derivatives"), None, _A.LEAVE_NOTHING, _SECOND),
        Row((), _E.ENDED, ("above", "accepted"), None, _A.NOTHING, _ACCEPTED),
        Row((), _E.ENDED, ("above", "unrecorded", "profiles left"), _S.DOUBTED, _A.DOUBT, _UNRECORDED),
        Row((_S.PLANNED,), _E.ENDED, ("above", "differs"), _S.VARYING, _A.VARY, _VARYING),
        Row((), _E.ENDED, ("longer", "profiles left"), _S.DOUBTED, _A.DOUBT, _DEPARTED),
        Row((_S.VARYING,), _E.ENDED, ("above",), None, _A.LEAVE_RESERVE, _RESERVE),
        Row((), _E.ENDED, ("above", "departed", "profiles left"), _S.DOUBTED, _A.DOUBT, _DEPARTED),
        Row((), _E.ENDED, ("above", "more backwards"), None, _A.LEAVE_NOTHING, _RETAINED),
        Row((), _E.ENDED, ("above", "late buffer"), None, _A.WAIT, _LATE),
        Row((), _E.ENDED, ("above",), None, _A.LEAVE_MARGIN, _MARGIN),
        Row((_S.PLANNED,), _E.ENDED, ("tried", "departed", "profiles left"), _S.DOUBTED, _A.NOTHING),
        Row((_S.PLANNED,), _E.ENDED, ("differs",), _S.VARYING, _A.VARY),
        Row((), _E.REMOVED, (), _S.GONE, _A.NOTHING),
    ),
    nothing=Action.NOTHING,
)
