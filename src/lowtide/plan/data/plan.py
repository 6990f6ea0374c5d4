"""The plan: a decision for every saved value, with what it is predicted to cost and how good it can be at
best. Pure data.
"""

from __future__ import annotations

import html
import json
import shutil
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from lowtide.errors import PlanError
from lowtide.plan.data.decisions import (
    Decision,
    ModuleRow,
    Move,
    decision_from_json,
)

_FORMAT = 5


class ProgramStep(NamedTuple):
    """What an executor does at one operation of the forward.

    Attributes:
        name: the operation, by which the executor checks that it is where it believes to be.
        replayed: whether it may run again in backward, so that it is recorded.
        stored: for each value that it writes, whether that stays.
        moves: for each value that it writes, its place in `Plan.moves`, or -1; empty when none of them moves.
    """

    name: str
    replayed: bool
    stored: tuple[bool, ...]
    moves: tuple[int, ...] = ()


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
        plain_peak_bytes, predicted_peak_bytes: the peak of the plain step and of the planned step.
        plain_seconds: forecast of the plain step's time, from operations timed alone. On a CPU it does not
            contain the time of waiting for other ranks.
        predicted_extra_seconds: forecast of the time that the plan adds. The planner chose by both forecasts.
        calibrated_plain_seconds, calibrated_extra_seconds: the same from measured steps; ``None`` before
            enough steps were measured.
        bound_extra_seconds: no schedule of the same operations within the budget can add less time, given
            the traced costs.
        bound_peak_bytes: no schedule of the same operations can have a smaller peak.
        peak_module, peak_operation: where the predicted peak is.
        modules: the table that ``print(plan)`` shows.
        notes: remarks on the plan.
        program: what the executor does at each operation of the forward.
        moves: the values that leave the device or are encoded, in the order of the forward.
        device: the device of the budget.
        window_bytes: the most bytes in transfer out at one time, and the most bytes that are fetched ahead.
        transfer_seconds: the part of `predicted_extra_seconds` for waiting for transfers, for encoding and
            decoding, and for `crowding_seconds`.
        crowding_seconds: the time by which transfers slow down the operations that run at the same time.
        slab_bytes: size of the slab into which moved values return. The predicted peak contains it. 0 if
            each value has memory of its own.
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

    @cached_property
    def changes_nothing(self) -> bool:
        """Whether the step runs as without this plan. An evicted tensor that backward never unpacks costs
        nothing.
        """
        again = self.replayed or any(step.replayed for step in self.program)
        return not again and not self.moves

    @property
    def gap_seconds(self) -> float:
        """The seconds that a better plan could save at most: the distance of the forecast from the bound."""
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
        """The same plan with the times that steps were measured to take, beside its forecast."""
        return replace(self, calibrated_plain_seconds=plain_seconds, calibrated_extra_seconds=extra_seconds)

    def __str__(self) -> str:
        """A table per module, with what the plan costs and how good it is; no wider than the terminal."""
        from lowtide.plan.data.text import render  # needed where a plan is printed

        return render(self, shutil.get_terminal_size((0, 0)).columns or None)

    def _repr_html_(self) -> str:
        """For a notebook: the same text."""
        from lowtide.plan.data.text import render

        return f"<pre>{html.escape(render(self))}</pre>"

    def to_json(self) -> str:
        """This plan as JSON text; `from_json` reads it back."""
        data = {"format": _FORMAT, **asdict(self), "stored": sorted(self.stored)}
        return json.dumps(data, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan that `to_json` wrote. Nothing in the text is executed.

        Raises:
            PlanError: the text is no plan, or one of another format.
        """
        try:
            data: dict[str, Any] = json.loads(text)
            version = data.pop("format")
            if version != _FORMAT:
                raise PlanError(
                    f"this plan has format {version!r}; this version of lowtide reads format {_FORMAT}: "
                    "make the plan again"
                )
            data["decisions"] = {int(k): decision_from_json(v) for k, v in data["decisions"].items()}
            data["moves"] = tuple(
                Move(**{**row, "decision": decision_from_json(row["decision"]), "shape": tuple(row["shape"])})
                for row in data.get("moves", ())
            )
            data["stored"] = frozenset(data["stored"])
            data["replayed"] = tuple(data["replayed"])
            data["modules"] = tuple(ModuleRow(**row) for row in data["modules"])
            data["notes"] = tuple(data["notes"])
            data["program"] = tuple(
                ProgramStep(name, again, tuple(stored), tuple(moves))
                for name, again, stored, moves in data["program"]
            )
            return cls(**data)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise PlanError(
                f"this is no lowtide plan ({type(error).__name__}: {error}): make the plan again"
            ) from None


def in_one_line(plan: Plan) -> str:
    """What a plan comes to: ``60 % of the memory, +12 % time``."""
    if plan.changes_nothing:
        return "the step fits as it is"
    memory = 100 * plan.predicted_peak_bytes / plan.plain_peak_bytes if plan.plain_peak_bytes else 100.0
    return f"{memory:.0f} % of the memory, {100 * plan.predicted_extra:+.0f} % time"
