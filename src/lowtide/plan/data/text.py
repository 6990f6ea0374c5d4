"""A plan as text: head lines, and a table of its modules. Loaded when a plan is printed; `plan.py` imports it
then, and it does not import `plan.py`.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from lowtide.graph import GAP_OP
from lowtide.plan.data.decisions import Compress, ModuleRow, form_and_tier
from lowtide.words import NUMBER, added_text, count_text, format_bytes, module_in_words, seconds_text


def render(plan: Any, width: int | None = None) -> str:
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
        won = f"a better plan could save at most {100 * plan.gap:.2f} % of the step"
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


def _places(plan: Any) -> str:
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
    for position in range(max((len(NUMBER.findall(row.module)) for row in rows), default=0)):
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


def _without(module: str, position: int) -> tuple[int, str]:
    """A number in a module's name, and the name with ``#`` in its place; -1 and the name where it has none
    there. Past the first, only a number with something behind it: ``mlp.0`` and ``mlp.2`` are two things.
    """
    found = list(NUMBER.finditer(module))[position : position + 1]
    if not found or (position and found[0].end() == len(module)):
        return -1, module
    return int(found[0].group()), module[: found[0].start()] + "#" + module[found[0].end() :]


def _of_any_member(module: str) -> str:
    """A module's name with ``#`` for the last number that has something behind it."""
    found = [match for match in NUMBER.finditer(module) if match.end() < len(module)]
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
