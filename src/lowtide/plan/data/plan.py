"""The plan: a decision for every saved value, with what it is predicted to cost and how good it can be at
best. Pure data.
"""

from __future__ import annotations

import html
import json
import re
import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from lowtide.budget import format_bytes
from lowtide.errors import PlanError
from lowtide.graph import GAP_OP
from lowtide.plan.data.decisions import (
    Compress,
    Decision,
    Move,
    decision_from_json,
    form_and_tier,
)
from lowtide.words import added_text, count_text, seconds_text

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
        plain_peak_bytes, predicted_peak_bytes: the most live bytes at any moment, of the plain step and under
            this plan.
        plain_seconds: forecast of the plain step's time, from operations timed alone, before any step ran
            under the plan. On a CPU it does not hold what other ranks let this one wait.
        predicted_extra_seconds: forecast of what the plan adds to it; these two chose the plan.
        calibrated_plain_seconds, calibrated_extra_seconds: the same as steps under the plan were timed;
            ``None`` before enough were.
        bound_extra_seconds: no schedule with the same operations within the budget can add less (given the
            traced costs).
        bound_peak_bytes: no schedule with the same operations can have a smaller peak.
        peak_module, peak_operation: where the predicted peak is.
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
        slab_bytes: of the slab that fetched and gathered values come back into; it is held for the whole step
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

    @cached_property
    def changes_nothing(self) -> bool:
        """Whether the step runs as it would without this plan: what is evicted without being unpacked later
        costs nothing.
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
        """The same plan with the times that steps were measured to take, beside its forecast."""
        return replace(self, calibrated_plain_seconds=plain_seconds, calibrated_extra_seconds=extra_seconds)

    def __str__(self) -> str:
        """A table per module, with what the plan costs and how good it is; no wider than the terminal."""
        return render(self, shutil.get_terminal_size((0, 0)).columns or None)

    def _repr_html_(self) -> str:
        """For a notebook: the same text."""
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


def render(plan: Plan, width: int | None = None) -> str:
    """The text of ``print(plan)``: head lines and a table per module; in lines of at most ``width``
    characters, where words are not longer.
    """
    lines = [f"plan by policy {plan.policy!r} for step graph {plan.graph}"]
    budget = f", budget {format_bytes(plan.budget_bytes)}" if plan.budget_bytes is not None else ""
    share = 100 * plan.predicted_peak_bytes / plan.plain_peak_bytes if plan.plain_peak_bytes else 100.0
    lines.append(
        f"peak   {format_bytes(plan.plain_peak_bytes)} plain -> {format_bytes(plan.predicted_peak_bytes)} "
        f"({share:.1f} %){budget}"
    )
    if plan.bound_peak_bytes:
        lines.append(
            f"       no schedule of these operations goes below {format_bytes(plan.bound_peak_bytes)}"
        )
    lines.append(f"time   {_times(plan.plain_seconds, plan.predicted_extra_seconds)}, forecast")
    if plan.calibrated_plain_seconds is not None and plan.calibrated_extra_seconds is not None:
        lines.append(
            f"       {_times(plan.calibrated_plain_seconds, plan.calibrated_extra_seconds)}, calibrated by "
            "steps"
        )
    if plan.moves and not plan.bound_peak_bytes:
        lines.append("bound  none is stated for this policy's moves: policy 'mixed' states one")
    else:
        won = f"at most {100 * plan.gap:.2f} % of the step could be won by a better plan"
        lines.append(f"bound  {added_text(plan.bound_extra_seconds)}: {won}")
    if plan.moves:
        lines.append(
            f"moves  {count_text(len(plan.moves), 'value')}, "
            f"{format_bytes(sum(m.bytes for m in plan.moves))} -> "
            f"{_places(plan)}; {seconds_text(plan.transfer_seconds)} of the time is waiting for them and "
            "encoding"
        )
        where = (
            f"into a slab of {format_bytes(plan.slab_bytes)}, allocated once"
            if plan.slab_bytes
            else "each into memory of its own"
        )
        lines.append(f"       they come back {where}")
    if plan.peak_operation:
        lines.append(f"peak is {place_in_words(plan.peak_operation, plan.peak_module)}")
    lines += [f"note: {note}" for note in plan.notes]
    if width is not None:
        lines = [part for line in lines for part in textwrap.wrap(line, width, subsequent_indent=" " * 7)]
    if plan.modules:
        lines += ["", *table(plan.modules, width)]
    return "\n".join(lines)


def _times(plain_seconds: float, extra_seconds: float) -> str:
    percent = 100 * extra_seconds / plain_seconds if plain_seconds else 0.0
    return f"{seconds_text(plain_seconds)} plain {added_text(extra_seconds)} ({percent:+.2f} %)"


def _places(plan: Plan) -> str:
    places: dict[str, int] = {}
    for move in plan.moves:
        first, then = form_and_tier(move.decision)
        names = (
            [f"codec {first.codec}"]
            if isinstance(first, Compress)
            else [f"1/{first.size} over {first.group}"]
            if first
            else []
        )
        name = ", then ".join([*names, *([then.tier] if then else [])])
        places[name] = places.get(name, 0) + move.encoded_bytes
    return ", ".join(f"{format_bytes(bytes_)} ({name})" for name, bytes_ in places.items())


_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


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


def module_in_words(module: str) -> str:
    """A module in words. What no submodule runs, a loss outside among it, is the model itself."""
    return f"module {module!r}" if module else "the model itself"


def place_in_words(operation: str, module: str) -> str:
    """Where something is: in which operation, of which module.

    >>> place_in_words("aten.mm.default", "head"), place_in_words("outside", "")
    ("at aten.mm.default in module 'head'", 'outside the compiled graphs')
    """
    return (
        "outside the compiled graphs"
        if operation == GAP_OP
        else f"at {operation} in {module_in_words(module)}"
    )


def fold(rows: Sequence[ModuleRow]) -> list[ModuleRow]:
    """Rows with equal bytes and replays whose names differ in one number only become one: ``h.0-11.attn``,
    ``stages.1.blocks.0-5.norm``. Rows of one kind of layer stand together, where the model has it first.

    Of folded rows, bytes, operations and seconds are sums.
    """
    place: dict[str, int] = {}  # of alike rows of the members of a list
    for row in rows:
        place.setdefault(_of_any_member(row.module), len(place))
    left, folded = list(rows), list[tuple[int, ModuleRow]]()
    for position in range(max((len(_NUMBER.findall(row.module)) for row in rows), default=0)):
        groups: dict[tuple[str, int, int, int], list[tuple[int, ModuleRow]]] = {}
        for row in left:
            number, pattern = _without(row.module, position)
            key = (pattern, row.saved_bytes, row.kept_bytes, row.replayed_operations)
            groups.setdefault(key, []).append((number, row))
        left = [members[0][1] for members in groups.values() if len(members) == 1]
        for (pattern, *_), members in groups.items():
            if len(members) > 1:
                name = pattern.replace("#", ranges(sorted(number for number, _ in members)), 1)
                of_first = place[_of_any_member(members[0][1].module)]
                folded.append((of_first, _total(name, [row for _, row in members])))
    folded += [(place[_of_any_member(row.module)], row) for row in left]
    order = {row.module: at for at, row in enumerate(rows)}
    first = {id(row): order.get(row.module, -1) for _, row in folded}
    return [row for _, row in sorted(folded, key=lambda one: (one[0], first[id(one[1])]))]


def by_members(module: str) -> tuple[str, tuple[int, ...]]:
    """A module's name with ``#`` for the members of lists that it lies in, and their numbers. A last number
    counts only where it is the only one: ``mlp.0`` and ``mlp.2`` of a layer are two things.

    >>> by_members("stages.1.blocks.5.mlp.2")
    ('stages.#.blocks.#.mlp.2', (1, 5))
    """
    found = list(_NUMBER.finditer(module))
    found = found[:1] + [match for match in found[1:] if match.end() < len(module)]
    kind = module
    for match in reversed(found):
        kind = kind[: match.start()] + "#" + kind[match.end() :]
    return kind, tuple(int(match.group()) for match in found)


def _without(module: str, position: int) -> tuple[int, str]:
    """A number in a module's name, and the name with ``#`` in its place; -1 and the name where it has none
    there. Past the first, only a number with something behind it: ``mlp.0`` and ``mlp.2`` are two things.
    """
    found = list(_NUMBER.finditer(module))[position : position + 1]
    if not found or (position and found[0].end() == len(module)):
        return -1, module
    return int(found[0].group()), module[: found[0].start()] + "#" + module[found[0].end() :]


def _of_any_member(module: str) -> str:
    """A module's name with ``#`` for the last number that has something behind it."""
    found = [match for match in _NUMBER.finditer(module) if match.end() < len(module)]
    return module[: found[-1].start()] + "#" + module[found[-1].end() :] if found else module


def _total(name: str, rows: Sequence[ModuleRow]) -> ModuleRow:
    return ModuleRow(
        name,
        sum(row.saved_bytes for row in rows),
        sum(row.kept_bytes for row in rows),
        sum(row.replayed_operations for row in rows),
        sum(row.extra_seconds for row in rows),
    )


def ranges(numbers: list[int]) -> str:
    """Rising numbers as people write them.

    >>> ranges([0, 1, 2, 5])
    '0-2,5'
    """
    parts: list[list[int]] = []
    for n in numbers:
        if parts and n == parts[-1][1] + 1:
            parts[-1][1] = n
        else:
            parts.append([n, n])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def table(modules: Sequence[ModuleRow], width: int | None = None) -> list[str]:
    """The lines of the table of ``modules``, with their total."""
    cells = [("module", "saved by autograd", "kept", "replayed", "extra")]
    cells += [
        (
            r.module or "(the model itself)",
            format_bytes(r.saved_bytes),
            format_bytes(r.kept_bytes),
            str(r.replayed_operations),
            seconds_text(r.extra_seconds),
        )
        for r in with_total(modules)
    ]
    return in_columns(cells, width)


def with_total(modules: Sequence[ModuleRow]) -> list[ModuleRow]:
    """The rows of a table, alike ones as one, and their total."""
    rows = fold(modules)
    return [*rows, _total("total", rows)]


def in_columns(cells: Sequence[tuple[str, ...]], width: int | None = None) -> list[str]:
    """The lines of a table: heads, rows and a total. Where they are longer than ``width``, names have lines
    of their own above their numbers.
    """
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        [
            row[0].ljust(widths[0]),
            "  ".join(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True)),
        ]
        for row in cells
    ]
    long = 2 + sum(map(len, lines[0]))
    if width is None or long <= width:
        lines = [["  ".join(line)] for line in lines]
    else:
        lines = [[name.rstrip(), f"    {numbers}"] for name, numbers in lines]
    rule = "-" * max(len(line[-1]) for line in lines)
    return [*lines[0], rule, *(part for line in lines[1:-1] for part in line), rule, *lines[-1]]
