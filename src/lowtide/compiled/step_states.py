"""The state machine of a step of compiled graphs: what follows from what happens in it.

`TABLE` is all that is decided; `Table.row` looks it up. `Flow` (`flow.py`) works out the facts, and does what
follows. A step that is one graph begins as any other: nothing is known of it before its graph is captured.

```text
 IDLE --> RECORDED --> IDLE           its backward has ended, and it is planned for; its forward has, and it
                                      is one graph, planned for when captured; or it was left
 IDLE --> RUNS --> IDLE               the next step begins
          RUNS --> STRAYED --> IDLE   it calls a graph that no plan has there
```
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Literal

from lowtide.transitions import Row, Table


class State(Enum):
    """How the step runs."""

    IDLE = "no step runs"
    RECORDED = "in the least memory, and taken down"
    RUNS = "as it was planned for; nothing is taken down"
    STRAYED = "in the least memory, as it ran other calls than any plan"


class Evidence(Enum):
    """What happened."""

    FORWARD_BEGINS = auto()
    STEP_BEGINS = auto()
    """A forward begins that is not another one of the same step."""
    GRAPH_CALLED = auto()
    """A compiled graph that has a backward is called."""
    FORWARD_ENDED = auto()
    BACKWARD_BEGINS = auto()
    BACKWARD_ENDED = auto()
    """A backward has ended, and every call of the step has had its own."""
    OVER = auto()
    """No forward of the step comes any more."""
    FAILED = auto()
    """An error left the step."""


Fact = Literal[
    "waits",  # the latest forward's result waits for its backward
    "unfinished",  # the plan has more calls than there were
    "wanted",  # a step like this one is to be recorded
    "unmeasurable",  # memory on this device cannot be measured, so no step is recorded
    "planned for",  # the call is the one that the plan has there, or a smaller one
    "uncalled",  # the step has called no graph
    "backward seen",  # the backward of a call has run
    "more backwards",  # there were more backwards than any step that is known had forwards
]


class Action(Enum):
    """What follows."""

    NOTHING = auto()
    GO_ON = auto()
    """Count another forward of the same step."""
    RECORD = auto()
    WARN = auto()
    """Run in the least memory, and say that the step cannot be recorded: its budget is not held."""
    RUN_PLANNED = auto()
    RUN_SMALLEST = auto()
    MISS = auto()
    """Run in the least memory, and record the next step like this one."""
    PLAN = auto()
    """Choose the cuts of the recorded step."""
    DROP = auto()
    """What was taken down of it is worth nothing."""
    DOUBT = auto()
    """As `DROP`, and record the next step like this one."""
    RECORD_NEXT = auto()
    """Record the next step, whatever it is given."""


_S, _E, _A = State, Evidence, Action

TABLE: Table[State, Evidence, Fact, Action] = Table(
    (
        Row((_S.RECORDED,), _E.FORWARD_BEGINS, ("waits",), None, _A.GO_ON),
        Row((_S.RUNS,), _E.FORWARD_BEGINS, ("waits", "unfinished"), None, _A.GO_ON),
        Row((_S.IDLE,), _E.STEP_BEGINS, ("unmeasurable",), _S.RUNS, _A.NOTHING),
        Row((_S.IDLE,), _E.STEP_BEGINS, ("wanted",), _S.RECORDED, _A.RECORD),
        Row((_S.IDLE,), _E.STEP_BEGINS, (), _S.RUNS, _A.NOTHING),
        Row((_S.RUNS,), _E.GRAPH_CALLED, ("planned for",), None, _A.RUN_PLANNED),
        Row((_S.RUNS,), _E.GRAPH_CALLED, ("unmeasurable",), _S.STRAYED, _A.WARN),
        Row((_S.RUNS,), _E.GRAPH_CALLED, (), _S.STRAYED, _A.MISS),
        Row((), _E.GRAPH_CALLED, (), None, _A.RUN_SMALLEST),
        Row((_S.RECORDED,), _E.FORWARD_ENDED, ("uncalled",), _S.IDLE, _A.DROP),
        Row((_S.IDLE, _S.RUNS, _S.STRAYED), _E.BACKWARD_BEGINS, ("more backwards",), None, _A.RECORD_NEXT),
        Row((_S.RECORDED,), _E.BACKWARD_ENDED, (), _S.IDLE, _A.PLAN),
        Row((_S.RECORDED,), _E.OVER, ("backward seen",), _S.IDLE, _A.PLAN),
        Row((_S.RECORDED,), _E.OVER, (), _S.IDLE, _A.DOUBT),
        Row((), _E.OVER, (), _S.IDLE, _A.NOTHING),
        Row((_S.RECORDED,), _E.FAILED, (), _S.IDLE, _A.DROP),
        Row((), _E.FAILED, (), _S.IDLE, _A.NOTHING),
    ),
    nothing=Action.NOTHING,
)
