"""A plan's table: one row a module, alike modules folded into one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from lowtide.budget import format_bytes
from lowtide.graph import OUTSIDE
from lowtide.words import seconds_text

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
    """Where something stands: in which operation, of which module.

    >>> place_in_words("aten.mm.default", "head"), place_in_words("outside", "")
    ("at aten.mm.default in module 'head'", 'outside the compiled graphs')
    """
    return (
        "outside the compiled graphs"
        if operation == OUTSIDE
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
    """The lines of the table of ``modules``, with their total. Where they are longer than ``width``, names
    have lines of their own above their numbers.
    """
    rows = fold(modules)
    cells = [("module", "saved by autograd", "kept", "replayed", "extra")]
    cells += [
        (
            r.module or "(the model itself)",
            format_bytes(r.saved_bytes),
            format_bytes(r.kept_bytes),
            str(r.replayed_operations),
            seconds_text(r.extra_seconds),
        )
        for r in [*rows, _total("total", rows)]
    ]
    widths = [max(len(row[k]) for row in cells) for k in range(5)]
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
