"""The plan: a decision for every saved value, with what it is predicted to cost and how good it can be at
best. Pure data.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple, Protocol

from lowtide.errors import PlanError
from lowtide.graph import StepGraph
from lowtide.plan.closure import replay_set
from lowtide.plan.decisions import (
    Chain,
    Compress,
    Decision,
    Keep,
    Moving,
    Offload,
    Recompute,
    Shard,
    decision_from_json,
    decision_to_json,
    stages,
)
from lowtide.plan.explain import ModuleRow, render

PLAN_FORMAT = 3

__all__ = [
    "PLAN_FORMAT", "Chain", "Compress", "Decision", "HasValue", "Keep", "ModuleRow", "Move", "Moving",
    "Offload", "Plan",
    "ProgramStep", "Recompute", "Shard", "program_of", "stages",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Move:
    """A value that leaves its place between forward and backward.

    Attributes:
        value: its id.
        decision: where it goes.
        bytes: of its storage.
        encoded_bytes: the most bytes that it takes after compressing or sharding; `bytes` without either.
        fetched: its place in the order in which backward is predicted to ask for the moved values, from 0; -1
            when nobody asks.
        born, gone: half-open lifetime of what is stored, in events of the step.
        place: where in the plan's slab the value comes back to, -1 for memory of its own.
        arrival: where in the slab its encoded form arrives from a tier, likewise.
    """

    value: int
    decision: Moving
    bytes: int
    encoded_bytes: int
    fetched: int = -1
    born: int = 0
    gone: int = 0
    place: int = -1
    arrival: int = -1


class HasValue(Protocol):
    """Anything that names a value."""

    @property
    def value(self) -> int:
        """Its id."""
        ...


class ProgramStep(NamedTuple):
    """What an executor does at one operation of the forward.

    Attributes:
        name: the operation, by which the executor checks that it is where it believes to be.
        replayed: whether it may run again in backward, so that it is recorded.
        stored: for each value that it writes, whether that stays.
        moves: for each value that it writes, its place in `Plan.moves`, or -1; empty when none of them moves.
        claimed: whether a layer that could save what the result is made from is to save the result, since
            that comes back anyway.
    """

    name: str
    replayed: bool
    stored: tuple[bool, ...]
    moves: tuple[int, ...] = ()
    claimed: bool = False


def program_of(
    graph: StepGraph, stored: frozenset[int], moves: Sequence[HasValue] = ()
) -> tuple[ProgramStep, ...]:
    """The forward as an executor follows it: one step for each operation, in order.

    An operation may run again when something given up rests on it, also where this step's backward never
    asked for it.
    """
    number = {move.value: k for k, move in enumerate(moves)}
    stored = stored | number.keys()
    wanted = [tensor.value for tensor in graph.saved if tensor.droppable and tensor.value not in stored]
    producer = [-1 if value.producer is None else value.producer for value in graph.values]
    again = replay_set(
        wanted, producer, [operation.reads for operation in graph.operations], stored.__contains__
    )
    return tuple(
        ProgramStep(
            operation.name,
            operation.index in again,
            tuple(value in stored for value in operation.writes),
            tuple(number.get(value, -1) for value in operation.writes)
            if any(value in number for value in operation.writes)
            else (),
            operation.index in graph.claims and operation.index in again,
        )
        for operation in graph.operations
        if operation.phase == "forward"
    )


@dataclass(frozen=True)
class Plan:
    """What to do with every saved value of one step graph.

    Attributes:
        graph: fingerprint of the step graph that it was made for.
        policy: name of the policy that made it.
        budget_bytes: the budget it was made for, or ``None``.
        decisions: value id -> decision, for every droppable saved value.
        stored: ids of all values that an executor holds for backward or for replays: the kept saved values,
            and values that autograd does not save but replays start from.
        replayed: indices of the operations that run again in backward, in their forward order.
        plain_peak_bytes, predicted_peak_bytes: the most live bytes at any moment, of the plain step and under
            this plan.
        plain_seconds: forecast of the plain step's time, from operations timed alone, before any step ran
            under the plan.
        predicted_extra_seconds: forecast of what the plan adds to it; these two chose the plan.
        calibrated_plain_seconds, calibrated_extra_seconds: the same as steps under the plan were timed;
            ``None`` before enough were.
        bound_extra_seconds: no schedule with the same operations within the budget can add less (given the
            traced costs).
        bound_peak_bytes: no schedule with the same operations can have a smaller peak.
        peak_module, peak_operation: where the predicted peak stands.
        modules: the table that ``print(plan)`` shows.
        notes: anything worth telling.
        program: what an executor does at each operation of the forward.
        moves: the values that leave the device or change their form, in the order of the forward.
        device: what the budget is about.
        window_bytes: the most bytes that wait for their copy out at one time, and the most that are fetched
            ahead of need.
        transfer_seconds: what of `predicted_extra_seconds` is waiting for transfers, encoding and decoding,
            and `crowding_seconds`.
        crowding_seconds: by how much the operations that run beside transfers take longer.
        slab_bytes: of the slab that fetched and gathered values come back into; it stands for the whole step
            and is part of the predicted peak. 0 where each has memory of its own.
        loose_peak_bytes: the predicted peak without that slab.
    """

    graph: str
    policy: str
    budget_bytes: int | None
    decisions: dict[int, Decision]
    stored: frozenset[int]
    replayed: tuple[int, ...]
    plain_peak_bytes: int
    predicted_peak_bytes: int
    plain_seconds: float
    predicted_extra_seconds: float
    bound_extra_seconds: float = 0.0
    bound_peak_bytes: int = 0
    peak_module: str = ""
    peak_operation: str = ""
    modules: tuple[ModuleRow, ...] = ()
    notes: tuple[str, ...] = field(default=())
    program: tuple[ProgramStep, ...] = field(default=(), repr=False)
    moves: tuple[Move, ...] = field(default=(), repr=False)
    device: str = "cpu"
    window_bytes: int = 0
    transfer_seconds: float = 0.0
    crowding_seconds: float = 0.0
    slab_bytes: int = 0
    loose_peak_bytes: int = 0
    calibrated_plain_seconds: float | None = None
    calibrated_extra_seconds: float | None = None

    @property
    def changes_nothing(self) -> bool:
        """Whether the step runs as it would without this plan; what is given up and never asked for runs
        again nowhere, and is not there.
        """
        again = self.replayed or any(step.replayed for step in self.program)
        return not again and not self.moves

    @property
    def gap_seconds(self) -> float:
        """How much slower than the bound this plan is predicted to be: at most this many seconds could be won
        by a better plan.
        """
        return max(0.0, self.predicted_extra_seconds - self.bound_extra_seconds)

    @property
    def gap(self) -> float:
        """`gap_seconds` as a share of the plain step's time."""
        return self.gap_seconds / self.plain_seconds if self.plain_seconds else 0.0

    @property
    def predicted_extra(self) -> float:
        """The forecast extra time as a share of the plain step's."""
        return self.predicted_extra_seconds / self.plain_seconds if self.plain_seconds else 0.0

    @property
    def calibrated_extra(self) -> float | None:
        """The calibrated extra time as a share of the plain step's; ``None`` before enough steps were
        timed.
        """
        if self.calibrated_extra_seconds is None or not self.calibrated_plain_seconds:
            return None
        return self.calibrated_extra_seconds / self.calibrated_plain_seconds

    def calibrated(self, plain_seconds: float, extra_seconds: float) -> Plan:
        """The same plan with the times that steps were seen to take beside its forecast."""
        return replace(self, calibrated_plain_seconds=plain_seconds, calibrated_extra_seconds=extra_seconds)

    def __str__(self) -> str:
        """A table per module, with what the plan costs and how good it is."""
        return render(self)

    def to_json(self) -> str:
        """This plan as JSON text; `from_json` reads it back."""
        data = asdict(self)
        data["decisions"] = {str(k): decision_to_json(v) for k, v in self.decisions.items()}
        data["moves"] = [{**asdict(move), "decision": decision_to_json(move.decision)} for move in self.moves]
        data["stored"] = sorted(self.stored)
        return json.dumps({"format": PLAN_FORMAT, **data}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan that `to_json` wrote. Nothing in the text is executed.

        Raises:
            PlanError: the text is no plan, or one of another format.
        """
        try:
            data: dict[str, Any] = json.loads(text)
            version = data.pop("format")
            if version != PLAN_FORMAT:
                raise PlanError(
                    f"this plan has format {version!r}; this version of lowtide reads format {PLAN_FORMAT}: "
                    "make the plan again"
                )
            data["decisions"] = {int(k): decision_from_json(v) for k, v in data["decisions"].items()}
            data["moves"] = tuple(
                Move(**{**row, "decision": decision_from_json(row["decision"])})
                for row in data.get("moves", ())
            )
            data["stored"] = frozenset(data["stored"])
            data["replayed"] = tuple(data["replayed"])
            data["modules"] = tuple(ModuleRow(**row) for row in data["modules"])
            data["notes"] = tuple(data["notes"])
            data["program"] = tuple(
                ProgramStep(name, again, tuple(stored), tuple(moves), claimed)
                for name, again, stored, moves, claimed in data["program"]
            )
            return cls(**data)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise PlanError(
                f"this is no lowtide plan ({type(error).__name__}: {error}): make the plan again"
            ) from None
