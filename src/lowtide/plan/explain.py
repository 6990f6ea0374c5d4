"""A plan in words: what ``print(plan)`` shows. Repeated layers that do the same are folded into one row."""

from __future__ import annotations

import re

from lowtide.plan.plan import Compress, ModuleRow, Plan, stages


def format_bytes(number: float) -> str:
    """Bytes in binary units: ``1.50 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(number) < 1024:
            return f"{number:.0f} B" if unit == "B" else f"{number:.2f} {unit}"
        number /= 1024
    return f"{number:.2f} TiB"


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
        groups.setdefault((pattern, row.saved_bytes, row.kept_bytes, row.replayed_operations), []).append((number, row))
    folded: list[ModuleRow] = []
    for (pattern, *_), members in groups.items():
        name = pattern if members[0][0] < 0 else pattern.replace("#", _ranges(sorted(n for n, _ in members)), 1)
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


def render(plan: Plan) -> str:
    """The text of ``print(plan)``: head lines and a table per module."""
    lines = [f"plan by policy {plan.policy!r} for step graph {plan.graph}"]
    budget = f", budget {format_bytes(plan.budget_bytes)}" if plan.budget_bytes is not None else ""
    share = 100 * plan.predicted_peak_bytes / plan.plain_peak_bytes if plan.plain_peak_bytes else 100.0
    lines.append(f"peak   {format_bytes(plan.plain_peak_bytes)} plain -> {format_bytes(plan.predicted_peak_bytes)} ({share:.1f} %){budget}")
    if plan.bound_peak_bytes:
        lines.append(f"       no schedule of these operations goes below {format_bytes(plan.bound_peak_bytes)}")
    percent = 100 * plan.predicted_extra_seconds / plan.plain_seconds if plan.plain_seconds else 0.0
    lines.append(f"time   {format_seconds(plan.plain_seconds)} plain + {format_seconds(plan.predicted_extra_seconds)} ({percent:+.2f} %)")
    if plan.moves and not plan.bound_peak_bytes:
        lines.append("bound  none is stated for this policy's moves: policy 'mixed' states one")
    else:
        won = f"at most {100 * plan.gap:.2f} % of the step could be won by a better plan"
        lines.append(f"bound  + {format_seconds(plan.bound_extra_seconds)}: {won}")
    if plan.moves:
        lines.append(
            f"moves  {len(plan.moves)} values, {format_bytes(sum(m.bytes for m in plan.moves))} -> {_places(plan)}; "
            f"{format_seconds(plan.transfer_seconds)} of the time is waiting for them and encoding"
        )
        where = f"into a slab of {format_bytes(plan.slab_bytes)}, allocated once" if plan.slab_bytes else "each into memory of its own"
        lines.append(f"       they come back {where}")
    if plan.places:
        inside = sum(place.bytes for place in plan.places)
        lines.append(
            f"slab   {len(plan.places)} kept values, {format_bytes(inside)}, are written into {format_bytes(plan.slab_bytes)}, allocated once"
        )
    if plan.peak_operation:
        lines.append(f"peak stands at {plan.peak_operation} in module {plan.peak_module or 'root'!r}")
    lines += [f"note: {note}" for note in plan.notes]
    if plan.modules:
        lines += ["", *_table(plan)]
    return "\n".join(lines)


def _places(plan: Plan) -> str:
    places: dict[str, int] = {}
    for move in plan.moves:
        first, then = stages(move.decision)
        names = [f"codec {first.codec}"] if isinstance(first, Compress) else [f"1/{first.size} over {first.group}"] if first else []
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
    lines = ["  ".join(c.ljust(w) if k == 0 else c.rjust(w) for k, (c, w) in enumerate(zip(row, widths, strict=True))) for row in cells]
    rule = "-" * len(lines[0])
    return [lines[0], rule, *lines[1:-1], rule, lines[-1]]
