"""Plans and refusals in words: what ``print(plan)`` shows, and what is said of a budget that none meets."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lowtide.budget import (
    ACTIVATIONS,
    BUFFERS,
    GRADIENTS,
    INPUTS,
    LOSS,
    PARAMETERS,
    STANDING,
    format_bytes,
    too_small,
)
from lowtide.errors import BudgetError
from lowtide.plan.decisions import Compress, stages

if TYPE_CHECKING:
    from lowtide.plan.plan import Plan
    from lowtide.plan.simulate import Simulation, Simulator

_OF_THE_LOSS = re.compile(r"(log_softmax|nll_loss|cross_entropy|logsumexp)")
_KINDS = {"parameter": PARAMETERS, "buffer": BUFFERS, "gradient": GRADIENTS}


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


def refusal(sim: Simulator, least: Simulation, budget_bytes: int, policy: str = "") -> BudgetError:
    """The refusal of a budget by the plan that takes least.

    Args:
        sim: of the step.
        least: what the step takes under that plan.
        budget_bytes: what was asked for.
        policy: the policy that makes the plan, where another may need less.
    """
    detail = f"At its peak stands {at_peak(least)}."
    return too_small(budget_bytes, least.peak_bytes, parts_of(sim, least), policy=policy, detail=detail)


def parts_of(sim: Simulator, simulation: Simulation) -> dict[str, int]:
    """What stands at a simulated peak, in bytes by name; they add up to the peak."""
    graph, peak = sim.graph, simulation.peak_event
    found: dict[str, int] = dict.fromkeys((PARAMETERS, BUFFERS, GRADIENTS, STANDING, INPUTS), 0)
    for storage in graph.storages:
        if storage.kind in _KINDS:
            found[_KINDS[storage.kind]] += storage.bytes
        elif storage.kind == "input":
            found[INPUTS] += storage.bytes if sim.natural_end[storage.id] >= peak else 0
        elif (
            storage.kind == "backward"
            and sim.op_event[storage.producer or 0] <= peak
            and sim.free_event[storage.id] == sim.end
        ):
            found[GRADIENTS] += storage.bytes  # backward lets go of all but these
    stood = sum(storage.bytes for storage in graph.storages if storage.kind in _KINDS)
    found[STANDING] = max(0, graph.resident_bytes - stood)
    loss = sum(graph.storages[storage].bytes for storage in _loss_storages(sim, simulation))
    rest = max(0, simulation.peak_bytes - sum(found.values()))
    found[LOSS] = min(loss, rest)
    found[ACTIVATIONS] = rest - found[LOSS]
    return {name: count for name, count in found.items() if count}


def _loss_storages(sim: Simulator, simulation: Simulation) -> set[int]:
    """What the operations of a token loss read and write, of what their own step has at the peak."""
    graph, peak = sim.graph, simulation.peak_event
    found: set[int] = set()
    for op in graph.operations:
        if _OF_THE_LOSS.search(op.name):
            found.update(sim.storage_of[value] for value in (*op.reads, *op.writes))
    made = {
        storage
        for storage in found
        if (producer := graph.storages[storage].producer) is not None and sim.op_event[producer] <= peak
    }
    return {
        storage
        for storage in made
        if max(sim.natural_end[storage], simulation.held_until.get(storage, -1)) >= peak
    }


def at_peak(simulation: Simulation) -> str:
    """What runs at the peak, in words."""
    op = simulation.peak_operation
    if op is None:
        return "what stood before the step"
    how = "replayed " if simulation.peak_in_replay else ""
    return f"{how}operation {op.name} (number {op.index}, {op.phase}) in module {op.module or 'root'!r}"


def format_seconds(seconds: float) -> str:
    """Seconds in milliseconds below ten seconds: ``12.30 ms``."""
    return f"{seconds:.2f} s" if seconds >= 10 else f"{1000 * seconds:.2f} ms"


def fold(rows: tuple[ModuleRow, ...]) -> list[ModuleRow]:
    """Rows with equal bytes and replays whose names differ in one number only become one: ``h.0-11.attn``.

    Of folded rows, bytes, operations and seconds are sums.
    """
    groups: dict[tuple[str, int, int, int], list[tuple[int, ModuleRow]]] = {}
    for row in rows:
        match = re.search(r"(?<![^.])\d+(?![^.])", row.module)
        number = int(match.group()) if match else -1
        pattern = row.module[: match.start()] + "#" + row.module[match.end() :] if match else row.module
        groups.setdefault((pattern, row.saved_bytes, row.kept_bytes, row.replayed_operations), []).append(
            (number, row)
        )
    folded: list[ModuleRow] = []
    for (pattern, *_), members in groups.items():
        name = (
            pattern if members[0][0] < 0 else pattern.replace("#", _ranges(sorted(n for n, _ in members)), 1)
        )
        folded.append(
            ModuleRow(
                name,
                sum(r.saved_bytes for _, r in members),
                sum(r.kept_bytes for _, r in members),
                sum(r.replayed_operations for _, r in members),
                sum(r.extra_seconds for _, r in members),
            )
        )
    return folded


def _ranges(numbers: list[int]) -> str:
    parts: list[list[int]] = []
    for n in numbers:
        if parts and n == parts[-1][1] + 1:
            parts[-1][1] = n
        else:
            parts.append([n, n])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def in_one_line(plan: Plan) -> str:
    """What a plan comes to: ``60 % of the memory, +12 % time``."""
    if plan.changes_nothing:
        return "the step fits as it is"
    memory = 100 * plan.predicted_peak_bytes / plan.plain_peak_bytes if plan.plain_peak_bytes else 100.0
    return f"{memory:.0f} % of the memory, {100 * plan.predicted_extra:+.0f} % time"


def render(plan: Plan) -> str:
    """The text of ``print(plan)``: head lines and a table per module."""
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
        lines.append(f"bound  + {format_seconds(plan.bound_extra_seconds)}: {won}")
    if plan.moves:
        lines.append(
            f"moves  {len(plan.moves)} values, {format_bytes(sum(m.bytes for m in plan.moves))} -> "
            f"{_places(plan)}; {format_seconds(plan.transfer_seconds)} of the time is waiting for them and "
            "encoding"
        )
        where = (
            f"into a slab of {format_bytes(plan.slab_bytes)}, allocated once"
            if plan.slab_bytes
            else "each into memory of its own"
        )
        lines.append(f"       they come back {where}")
    if plan.peak_operation:
        lines.append(f"peak stands at {plan.peak_operation} in module {plan.peak_module or 'root'!r}")
    lines += [f"note: {note}" for note in plan.notes]
    if plan.modules:
        lines += ["", *_table(plan)]
    return "\n".join(lines)


def _times(plain_seconds: float, extra_seconds: float) -> str:
    percent = 100 * extra_seconds / plain_seconds if plain_seconds else 0.0
    return f"{format_seconds(plain_seconds)} plain + {format_seconds(extra_seconds)} ({percent:+.2f} %)"


def _places(plan: Plan) -> str:
    places: dict[str, int] = {}
    for move in plan.moves:
        first, then = stages(move.decision)
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


def _table(plan: Plan) -> list[str]:
    rows = fold(plan.modules)
    total = ModuleRow(
        "total",
        sum(r.saved_bytes for r in rows),
        sum(r.kept_bytes for r in rows),
        sum(r.replayed_operations for r in rows),
        sum(r.extra_seconds for r in rows),
    )
    cells = [("module", "saved by autograd", "kept", "replayed", "extra")]
    cells += [
        (
            r.module or "(root)",
            format_bytes(r.saved_bytes),
            format_bytes(r.kept_bytes),
            str(r.replayed_operations),
            format_seconds(r.extra_seconds),
        )
        for r in [*rows, total]
    ]
    widths = [max(len(row[k]) for row in cells) for k in range(5)]
    lines = [
        "  ".join(
            c.ljust(w) if k == 0 else c.rjust(w) for k, (c, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in cells
    ]
    rule = "-" * len(lines[0])
    return [lines[0], rule, *lines[1:-1], rule, lines[-1]]
