"""What is known so far as one page of tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from benchmarks.gpu.parts import BUDGETS, OTHERWISE, PARTS, RECOMPUTING
from benchmarks.gpu.rows import AS_PER_BLOCK, Row
from benchmarks.tables import mib, percent, table, yes


def rendered(about: dict[str, Any], rows: list[Row]) -> str:
    """Markdown of all rows, and of what there is no row of.

    Args:
        about: of the card, the versions, the commit.
        rows: as `runner.Results` has them.
    """
    found = {(row["part"], row["row"]): row for row in rows}
    done = {key: row for key, row in found.items() if row["state"] == "done"}
    card = about.get("gpu", f"no card: {about['processor']}, {about['cores']} cores")
    cuda = f", CUDA {about['cuda']}" if "cuda" in about else ""
    text = [
        f"# {card}",
        f"{about['date']}; torch {about['torch']}{cuda}, Python {about['python']}, "
        f"lowtide {about['lowtide']}, commit {about['commit']}{', tiny models' if about['small'] else ''}; "
        f"{len(done)} of {sum(len(part.rows) for part in PARTS)} rows measured.",
    ]
    for title, section in _SECTIONS.items():
        if body := section(done):
            text += [f"## {title}", *body]
    rest = [
        f"- {part.name}, {row}: {_why(found.get((part.name, row)))}"
        for part in PARTS
        for row in part.rows
        if (part.name, row) not in done
    ]
    said = [f"- {row['part']}, {row['row']}: {text}" for row in rows for text in row.get("warnings", ())]
    for title, lines in (("Not measured", rest), ("Warnings", said)):
        if lines:
            text += [f"## {title}", "\n".join(lines)]
    return "\n\n".join(text) + "\n"


Done = dict[tuple[str, str], Row]


def _why(row: Row | None) -> str:
    return "not reached yet" if row is None else f"{row['state']}: {' '.join(row['error'].split())}"


def _of(done: Done, part: str) -> dict[str, Row]:
    return {row: found for (name, row), found in done.items() if name == part}


def _columns(rows: Iterable[tuple[str, Row]], columns: dict[str, Callable[[Row], str]], first: str) -> str:
    """A table without the columns that no row has anything for, such as times where there is no card."""
    rows = list(rows)
    cells = {title: [_cell(cell, row) for _, row in rows] for title, cell in columns.items()}
    filled = {title: column for title, column in cells.items() if any(column)}
    names = [name for name, _ in rows]
    return table([first, *filled], [list(line) for line in zip(names, *filled.values(), strict=True)])


def _cell(cell: Callable[[Row], str], row: Row) -> str:
    try:
        return cell(row)
    except KeyError:
        return ""


def _mib(key: str) -> Callable[[Row], str]:
    return lambda row: mib(row[key]) if row.get(key) is not None else ""


def _bits(row: Row) -> str:
    if row["same_gradients"]:
        return "yes"
    apart = f" ({row['plain_difference']:.1e})" if row.get("plain_difference") else ""
    repeats = "" if row["plain_repeats"] else f", plain steps neither{apart}"
    return f"**no**, {row['largest_difference']:.1e}{repeats}"


_READING_ORDER = ("plain", "per block", AS_PER_BLOCK, RECOMPUTING, "80 %", "60 %", "min", *OTHERWISE)

_TRAINING: dict[str, Callable[[Row], str]] = {
    "gradients as plain": _bits,
    "budget": _mib("budget_bytes"),
    "predicted": _mib("predicted_peak_bytes"),
    "measured": _mib("counted_bytes"),
    "first step": _mib("first_step_bytes"),
    "requested": _mib("requested_bytes"),
    "allocated": _mib("allocated_bytes"),
    "reserved": _mib("reserved_bytes"),
    "reserved, predicted": _mib("predicted_reserved_bytes"),
    "beside the model": _mib("beside_bytes"),
    "ms a step": lambda row: f"{1e3 * row['seconds']:.1f}",
    "more than plain": lambda row: percent(row["extra"]) if "extra" in row else "",
    "forecast": lambda row: percent(row["predicted_extra"]) if "predicted_extra" in row else "",
    "tokens a second": lambda row: f"{row['tokens_a_second']:,.0f}",
    "s to settle": lambda row: f"{row['settling_seconds']:.1f}",
}


def _training(done: Done) -> list[str]:
    text = []
    for part in PARTS:
        rows = _of(done, part.name)
        if rows and part.name.startswith(("GPT, ", "Llama, ")):
            ordered = sorted(rows.items(), key=lambda item: _READING_ORDER.index(item[0]))
            text.append(_columns(ordered, _TRAINING, part.name))
    note = (
        "Bytes in MiB. *Measured* is counted as a plan counts: the model, its inputs, and what the step "
        "adds. What was requested, allocated and reserved is the whole process's, and so is what is live "
        "beside the model."
    )
    return [note, *text] if text else []


def _recomputed(done: Done) -> list[str]:
    """Operations that made a value which could have been evicted, and that no plan runs again."""
    lines = []
    for part in PARTS:
        plans = [row for name, row in _of(done, part.name).items() if name in BUDGETS and "recomputed" in row]
        if not plans:
            continue
        again = {name for row in plans for name in row["recomputed"]}
        never = {
            name: counts
            for row in plans
            for name, counts in row["not_recomputed"].items()
            if name not in again
        }
        kept = {name: reason for row in plans for name, reason in row["kept"].items()}
        listed = ", ".join(
            f"`{name}` ({times} times, {mib(size)} MiB)" for name, (times, size) in never.items()
        )
        lines.append(f"- {part.name}, {len(plans)} plans: {listed or 'none'}")
        lines += [
            f"  - kept since it does not reproduce: `{name}`: {reason}" for name, reason in kept.items()
        ]
    return ["\n".join(lines)] if lines else []


def _exact(done: Done) -> list[str]:
    rows = _of(done, "deterministic, eager")
    columns: dict[str, Callable[[Row], str]] = {
        "gradients as plain": _bits,
        "plain repeats its own": lambda row: yes(row["plain_repeats"]),
        "operations run again": lambda row: str(row["replays"]),
        "kept": lambda row: ", ".join(f"`{name}`" for name in row["kept"]),
    }
    return [_columns(rows.items(), columns, "four steps")] if rows else []


def _kinds(done: Done) -> list[str]:
    rows = _of(done, "kinds of models")
    columns: dict[str, Callable[[Row], str]] = {
        "gradients as plain": _bits,
        "budget": _mib("budget_bytes"),
        "predicted": _mib("predicted_peak_bytes"),
        "requested": _mib("requested_bytes"),
        "of it from rows before": _mib("beside_bytes"),
        "reserved": _mib("reserved_bytes"),
        "reserved, predicted": _mib("predicted_reserved_bytes"),
        "plain, by the plan": _mib("plan_plain_bytes"),
        "operations run again": lambda row: str(row["replays"]),
        "kept": lambda row: ", ".join(f"`{name}`" for name in row["kept"]),
    }
    return [_columns(rows.items(), columns, "four steps, MiB")] if rows else []


def _expandable(done: Done) -> list[str]:
    rows = _of(done, "expandable segments")
    columns = {
        "predicted": _mib("predicted_peak_bytes"),
        "requested": _mib("requested_bytes"),
        "reserved": _mib("reserved_bytes"),
        "reserved, predicted": _mib("predicted_reserved_bytes"),
    }
    return [_columns(rows.items(), columns, "GPT, eager, MiB")] if rows else []


def _adamw(done: Done) -> list[str]:
    rows = _of(done, "AdamW")
    alone = [(name, row) for name, row in rows.items() if "state_bytes" in row]
    limited = [(name, row) for name, row in rows.items() if "budget_bytes" in row]
    need: dict[str, Callable[[Row], str]] = {
        "state predicted": _mib("predicted_state_bytes"),
        "state": _mib("state_bytes"),
        "scratch predicted": _mib("predicted_step_bytes"),
        "scratch": _mib("step_bytes"),
        "missing, bytes a parameter": lambda row: f"{_missing(row) / row['parameters']:+.2f}",
    }
    whole = {
        "budget": _mib("budget_bytes"),
        "predicted": _mib("predicted_peak_bytes"),
        "measured": _mib("counted_bytes"),
    }
    return [
        *([_columns(alone, need, "MiB")] if alone else []),
        *([_columns(limited, whole, "MiB, update included")] if limited else []),
    ]


def _missing(row: Row) -> int:
    """What AdamW takes beyond what was predicted."""
    predicted = row["predicted_state_bytes"] + row["predicted_step_bytes"]
    return row["state_bytes"] + row["step_bytes"] - predicted


def _offload(done: Done) -> list[str]:
    rows = _of(done, "offload").values()
    columns: dict[str, Callable[[Row], str]] = {
        "gradients as plain": lambda row: (
            yes(row["same_gradients"]) + ("" if row["plain_repeats"] else ", plain does not repeat")
        ),
        "predicted": _mib("predicted_peak_bytes"),
        "measured": _mib("peak_bytes"),
        "moved": _mib("moved_bytes"),
        "reserved in the tier": _mib("reserved_bytes"),
        "ms a step": lambda row: f"{1e3 * row['seconds']:.1f}",
        "more than plain": lambda row: percent(row["extra"]),
        "forecast": lambda row: percent(row["predicted_extra"]) if "predicted_extra" in row else "",
    }
    return [
        _columns(
            ((one["contender"], one) for one in row["contenders"]),
            columns,
            f"{row['tokens']:,} tokens, {row['tier']}{_speeds(row.get('bytes_per_second'))}",
        )
        for row in rows
    ]


def _layer(done: Done) -> list[str]:
    columns: dict[str, Callable[[Row], str]] = {
        "forward, ms": lambda row: f"{1e3 * row['forward_seconds']:.2f}",
        "backward, ms": lambda row: f"{1e3 * row['backward_seconds']:.2f}",
        "more than plain": lambda row: percent(row["extra"]),
        "published": lambda row: percent(row["published_extra"]) if row["published_extra"] else "",
        "kept from forward to backward": _mib("held_bytes"),
        "peak": _mib("peak_bytes"),
    }
    return [
        _columns(((one["layer"], one) for one in row["layers"]), columns, "one of eight ranks, MiB")
        for row in _of(done, "22B layer").values()
    ]


def _long_context(done: Done) -> list[str]:
    """The longest sequence of each way, and every length that ran."""
    columns: dict[str, Callable[[Row], str]] = {
        "allocated at most": _mib("peak_bytes"),
        "predicted": _mib("predicted_peak_bytes"),
        "moved": _mib("moved_bytes"),
        "tokens a second": lambda row: f"{row['tokens_a_second']:,.0f}",
    }
    return [
        _columns(
            ((f"{one['tokens']:,}", one) for one in row["lengths"]),
            columns,
            f"{way}: {row['longest_tokens']:,} tokens ({row['ended']})",
        )
        for way, row in _of(done, "long context").items()
    ]


def _host_optimizer(done: Done) -> list[str]:
    rows = _of(done, "optimizer on the host")
    if not rows:
        return []
    columns: dict[str, Callable[[Row], str]] = {
        "ms a step": lambda row: f"{1e3 * row['seconds']:.1f}",
        "of it forward and backward alone": lambda row: f"{1e3 * row['compute_seconds']:.1f}",
        "copies alone": lambda row: f"{1e3 * row['copy_seconds']:.1f}" if row["copy_seconds"] else "",
        "moved a step": _mib("moved_bytes"),
        "peak": _mib("peak_bytes"),
    }
    return [
        "Copies alone: the bytes that a step moves, one way after the other, at the measured speeds of the "
        "link. What overlaps is missing from the step.",
        _columns(rows.items(), columns, "AdamW, MiB"),
    ]


def _speeds(found: Mapping[str, float] | None) -> str:
    return f" at {found['write'] / 1e9:.1f} GB/s out, {found['read'] / 1e9:.1f} back" if found else ""


def _checks(done: Done) -> list[str]:
    lines = []
    if row := done.get(("doctor", "doctor")):
        lines += [
            f"- `lowtide doctor` ends with {row['exit_code']}",
            *(f"  - {line}" for line in row["marked"]),
        ]
    if row := done.get(("doctor", "C++ recorder")):
        lines.append(f"- the C++ recorder compiles: {yes(row['compiled'])}, {row['build_seconds']:.0f} s")
    if row := done.get(("tests", "tests/gpu")):
        lines.append(
            f"- tests/gpu: {row['passed']} passed, {len(row['failures'])} failed, {row['skipped']} skipped"
        )
        lines += [f"  - `{name}`: {why}" for name, why in row["failures"].items()]
    return ["\n".join(lines)] if lines else []


_SECTIONS: dict[str, Callable[[Done], list[str]]] = {
    "Checks": _checks,
    "Training steps": _training,
    "Operations that no plan recomputes": _recomputed,
    "With deterministic algorithms": _exact,
    "Kinds of models": _kinds,
    "AdamW": _adamw,
    "Offload": _offload,
    "A layer of the 22B model of arXiv 2205.05198": _layer,
    "The optimizer on the host": _host_optimizer,
    "One long sequence": _long_context,
    "Expandable segments": _expandable,
}
