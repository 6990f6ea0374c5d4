"""The plan: a decision for every saved value, with what it is predicted to cost and how good it can be at best. Pure data."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, NamedTuple, Protocol

from lowtide.errors import PlanError
from lowtide.graph import StepGraph

PLAN_FORMAT = 2


@dataclass(frozen=True, slots=True)
class Keep:
    """The value stays on the device from forward to backward."""

    kind: Literal["keep"] = "keep"


@dataclass(frozen=True, slots=True)
class Recompute:
    """The value is given up in forward and its recorded operations run again when backward asks."""

    kind: Literal["recompute"] = "recompute"


@dataclass(frozen=True, slots=True)
class Offload:
    """The value's bytes wait in another tier.

    Attributes:
        tier: ``host`` or ``disk``.
        path: the folder for the disk tier's file; empty for the system's folder for temporary files.
    """

    tier: str = "host"
    path: str = ""
    kind: Literal["offload"] = "offload"

    def __post_init__(self) -> None:
        if self.tier not in ("host", "disk"):
            raise PlanError(f"Offload({self.tier!r}): there is no such tier, give 'host' or 'disk'")
        if self.path and self.tier == "host":
            raise PlanError(f"Offload('host', path={self.path!r}): the host tier has no path; leave it out, or give 'disk'")


@dataclass(frozen=True, slots=True)
class Compress:
    """The value waits in fewer bytes.

    Attributes:
        codec: a codec's name, see `lowtide.store.codec`.
    """

    codec: str
    kind: Literal["compress"] = "compress"


@dataclass(frozen=True, slots=True)
class Shard:
    """Each rank of a group that holds the same value keeps its part, and the parts are gathered ahead of need: ZeRO-R's P_a.

    Attributes:
        group: the name under which the stores know the process group.
        size: how many ranks it has.
    """

    group: str
    size: int
    kind: Literal["shard"] = "shard"

    def __post_init__(self) -> None:
        if self.size < 1:
            raise PlanError(f"Shard({self.group!r}, size={self.size}): give the number of ranks, 1 or more")


@dataclass(frozen=True, slots=True)
class Chain:
    """One decision after another: shard-then-offload is P_a+cpu, compress-then-offload moves fewer bytes."""

    first: Shard | Compress
    then: Offload
    kind: Literal["chain"] = "chain"


Decision = Keep | Recompute | Offload | Compress | Shard | Chain
Moving = Offload | Compress | Shard | Chain
_DECISIONS: dict[str, Any] = {"keep": Keep, "recompute": Recompute, "offload": Offload, "compress": Compress, "shard": Shard}


def stages(decision: Moving) -> tuple[Shard | Compress | None, Offload | None]:
    """What happens to the value on the device, and the tier that the result goes to."""
    if isinstance(decision, Chain):
        return decision.first, decision.then
    return (None, decision) if isinstance(decision, Offload) else (decision, None)


def _decision_to_json(decision: Decision) -> Any:
    if isinstance(decision, Chain):
        return {"kind": "chain", "first": asdict(decision.first), "then": asdict(decision.then)}
    return decision.kind if isinstance(decision, Keep | Recompute) else asdict(decision)


def _decision_from_json(data: Any) -> Any:
    if isinstance(data, str):
        return _DECISIONS[data]()
    if data["kind"] == "chain":
        return Chain(_decision_from_json(data["first"]), _decision_from_json(data["then"]))
    return _DECISIONS[data["kind"]](**data)


@dataclass(frozen=True, slots=True)
class Move:
    """A value that leaves its place between forward and backward.

    Attributes:
        value: its id.
        decision: where it goes.
        bytes: of its storage.
        encoded_bytes: the most bytes that it takes after compressing or sharding; `bytes` without either.
        fetched: its place in the order in which backward is predicted to ask for the moved values, from 0; -1 when nobody asks.
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


@dataclass(frozen=True, slots=True)
class Place:
    """Where in the plan's slab a kept value is written.

    Attributes:
        step: which operation of `Plan.program` writes it.
        output: which of that operation's results it is.
        bytes: of its storage.
        start: the first of them in the slab.
    """

    step: int
    output: int
    bytes: int
    start: int


@dataclass(frozen=True, slots=True)
class ModuleRow:
    """One line of a plan's table.

    Attributes:
        module: qualified module name.
        saved_bytes: bytes that autograd would keep there.
        kept_bytes: bytes that the plan keeps there, values kept only for replays included.
        replayed_operations: how many operations run again in backward.
        extra_seconds: time of those.
    """

    module: str
    saved_bytes: int
    kept_bytes: int
    replayed_operations: int
    extra_seconds: float


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
        claimed: whether a layer that could save what the result is made from is to save the result, since that comes back anyway.
    """

    name: str
    replayed: bool
    stored: tuple[bool, ...]
    moves: tuple[int, ...] = ()
    claimed: bool = False


def program_of(graph: StepGraph, stored: frozenset[int], moves: Sequence[HasValue] = ()) -> tuple[ProgramStep, ...]:
    """The forward as an executor follows it: one step for each operation, in order.

    An operation may run again when something given up rests on it, also where this step's backward never asked for it.
    """
    number = {move.value: k for k, move in enumerate(moves)}
    stored = stored | number.keys()
    again: set[int] = set()
    wanted = [tensor.value for tensor in graph.saved if tensor.droppable and tensor.value not in stored]
    while wanted:
        value = graph.values[wanted.pop()]
        producer = value.producer
        if producer is None or producer in again:
            continue
        again.add(producer)
        wanted.extend(read for read in graph.operations[producer].reads if read not in stored)
    return tuple(
        ProgramStep(
            operation.name,
            operation.index in again,
            tuple(value in stored for value in operation.writes),
            tuple(number.get(value, -1) for value in operation.writes) if any(value in number for value in operation.writes) else (),
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
        stored: ids of all values that an executor holds for backward or for replays: the kept saved values, and values that autograd does
            not save but replays start from.
        replayed: indices of the operations that run again in backward, in their forward order.
        plain_peak_bytes, predicted_peak_bytes: the most live bytes at any moment, of the plain step and under this plan.
        plain_seconds: time of the plain step.
        predicted_extra_seconds: what the plan adds to it.
        bound_extra_seconds: no schedule with the same operations within the budget can add less (given the traced costs).
        bound_peak_bytes: no schedule with the same operations can have a smaller peak.
        peak_module, peak_operation: where the predicted peak stands.
        modules: the table that ``print(plan)`` shows.
        notes: anything worth telling.
        program: what an executor does at each operation of the forward.
        moves: the values that leave the device or change their form, in the order of the forward.
        device: what the budget is about.
        window_bytes: the most bytes that wait for their copy out at one time, and the most that are fetched ahead of need.
        transfer_seconds: what of `predicted_extra_seconds` is waiting for transfers, encoding and decoding, and `crowding_seconds`.
        crowding_seconds: by how much the operations that run beside transfers take longer.
        slab_bytes: of the slab that fetched and gathered values come back into; it stands for the whole step and is part of the predicted peak.
            0 where each has memory of its own.
        loose_peak_bytes: the predicted peak without that slab.
        places: where in that slab kept values are written, of those that are (docs/stores.md, "Kept values in the slab").
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
    places: tuple[Place, ...] = field(default=(), repr=False)

    @property
    def changes_nothing(self) -> bool:
        """Whether the step runs as it would without this plan; what is given up and never asked for runs again nowhere, and is not there."""
        again = self.replayed or any(step.replayed for step in self.program)
        return not again and not self.moves and not self.places

    @property
    def gap_seconds(self) -> float:
        """How much slower than the bound this plan is predicted to be: at most this many seconds could be won by a better plan."""
        return max(0.0, self.predicted_extra_seconds - self.bound_extra_seconds)

    @property
    def gap(self) -> float:
        """`gap_seconds` as a share of the plain step's time."""
        return self.gap_seconds / self.plain_seconds if self.plain_seconds else 0.0

    def at_pace(self, plain_seconds: float, extra_seconds: float) -> Plan:
        """The same plan with the times that steps were seen to take; what its extra time is made of changes in proportion."""
        factor = extra_seconds / self.predicted_extra_seconds if self.predicted_extra_seconds else 1.0
        return replace(
            self,
            plain_seconds=plain_seconds,
            predicted_extra_seconds=extra_seconds,
            bound_extra_seconds=self.bound_extra_seconds * factor,
            modules=tuple(replace(row, extra_seconds=row.extra_seconds * factor) for row in self.modules),
        )

    def __str__(self) -> str:
        """A table per module, with what the plan costs and how good it is."""
        from lowtide.plan.explain import render

        return render(self)

    def to_json(self) -> str:
        """This plan as JSON text; `from_json` reads it back."""
        data = asdict(self)
        data["decisions"] = {str(k): _decision_to_json(v) for k, v in self.decisions.items()}
        data["moves"] = [{**asdict(move), "decision": _decision_to_json(move.decision)} for move in self.moves]
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
                    f"this plan has format {version!r}; this version of lowtide reads format {PLAN_FORMAT}: make the plan again"
                )
            data["decisions"] = {int(k): _decision_from_json(v) for k, v in data["decisions"].items()}
            data["moves"] = tuple(Move(**{**row, "decision": _decision_from_json(row["decision"])}) for row in data.get("moves", ()))
            data["places"] = tuple(Place(**row) for row in data.get("places", ()))
            data["stored"] = frozenset(data["stored"])
            data["replayed"] = tuple(data["replayed"])
            data["modules"] = tuple(ModuleRow(**row) for row in data["modules"])
            data["notes"] = tuple(data["notes"])
            data["program"] = tuple(
                ProgramStep(name, again, tuple(stored), tuple(moves), claimed) for name, again, stored, moves, claimed in data["program"]
            )
            return cls(**data)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise PlanError(f"this is no lowtide plan ({type(error).__name__}: {error}): make the plan again") from None
