"""Turn the result files into docs/results.md and the table in the README.

python -m benchmarks report
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS

ROOT = RESULTS.parent.parent
START, END = "<!-- results -->", "<!-- end of results -->"
COLUMNS = (
    "*Per block* is `torch.utils.checkpoint` (non-reentrant) on every block, and times with a sign are what "
    "is added to the plain step. *lowtide* gets the peak of *per block* as its budget and recomputes as "
    "that does; *with the disk* it may move values there, too (`policies.mixed`). *Ratio of extra*: the "
    "added time in the column before over that of *per block*. *Budget 100 %*: what lowtide adds where all "
    "of the plain step fits. *Smallest / per block*: the smallest budget that lowtide can meet over the "
    "peak of *per block*. It *holds* when the peak is at or below that of *per block*, the added time at "
    "most half of it, and a budget of 100 % costs under 3 %; the last column is the same with the disk. The "
    "C library keeps the pages of freed memory, but not in rows with a star, which are of an earlier run."
)


def _load(name: str) -> dict[str, Any] | None:
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def _mib(count: int) -> str:
    return f"{count / 2**20:,.1f}"


def _percent(share: float, digits: int = 1) -> str:
    return f"{100 * share:+.{digits}f} %"


def _where(found: dict[str, Any]) -> str:
    machine = found["machine"]
    return (
        f"{machine['date']}, {machine['processor']}, {machine['cores']} cores, torch {machine['torch']}, "
        f"Python {machine['python']}, lowtide {machine['lowtide']}"
    )


def versus(found: dict[str, Any]) -> str:
    """The table against per-block checkpointing."""
    rows = [
        [
            row["model"] + ("" if row.get("pages_kept") else " *"),
            f"{row['plain_seconds']:.2f}",
            _mib(row["plain_peak_bytes"]),
            _mib(row["rival_peak_bytes"]),
            _percent(row["rival_extra"]),
            _mib(row["planned_peak_bytes"]),
            f"**{_percent(row['planned_extra'])}**",
            f"{row['planned_over_rival']:.2f}",
            f"**{_percent(row['mixed_extra'])}**" if "mixed_extra" in row else "not run",
            f"{row['mixed_over_rival']:.2f}" if "mixed_extra" in row else "",
            _percent(row["full_budget_extra"]),
            f"{row['smallest_over_rival']:.2f}",
            _yes(row["planned_holds"] and row["full_budget_holds"]),
            _yes(row["mixed_holds"] and row["full_budget_holds"]) if "mixed_extra" in row else "",
        ]
        for row in found["rows"]
    ]
    head = [
        "model",
        "plain s",
        "plain MiB",
        "per block MiB",
        "per block time",
        "lowtide MiB",
        "lowtide time",
        "ratio of extra",
    ]
    head += ["with the disk", "ratio of extra", "budget 100 %", "smallest / per block"]
    return _table([*head, "holds", "with the disk"], rows)


def _yes(holds: bool) -> str:
    return "yes" if holds else "**no**"


def accuracy(found: dict[str, Any]) -> str:
    """The table of predictions."""
    rows = [
        [
            row["model"],
            row["budget"],
            _mib(row["budget_bytes"]),
            _mib(row["predicted_peak_bytes"]),
            _mib(row["measured_peak_bytes"]),
            _percent(row["peak_error"], 2),
            f"{row['plain_seconds']:.3f}",
            _percent(row["forecast_plain_error"]) if "forecast_plain_error" in row else "not run",
            f"{1000 * row['measured_extra_seconds']:.0f}",
            f"{1000 * row['forecast_extra_seconds']:.0f}" if "forecast_extra_seconds" in row else "not run",
            _percent(row["forecast_off_of_step"]) if "forecast_off_of_step" in row else "not run",
            f"{1000 * row['calibrated_extra_seconds']:.0f}",
            _percent(row["calibrated_off_of_step"]),
            f"{100 * row['gap']:.2f} %",
            _yes(
                row["within_budget"]
                and row["peak_holds"]
                and row.get("forecast_holds", True)
                and row["calibrated_holds"]
            ),
        ]
        for row in found["rows"]
    ]
    head = [
        "model",
        "budget",
        "budget MiB",
        "predicted MiB",
        "measured MiB",
        "error",
        "plain s",
        "forecast off",
        "measured extra ms",
    ]
    return _table(
        [*head, "forecast ms", "off, of the step", "calibrated ms", "off, of the step", "gap", "holds"], rows
    )


def planning(found: dict[str, Any]) -> str:
    """The table of planning times."""
    rows = [
        [
            row["model"],
            row["budget"],
            f"{row['plain_step_seconds']:.1f}",
            f"{row['first_step_seconds']:.1f}",
            f"{row['solve_seconds']:.2f}",
            f"{row['carried_seconds']:.2f}" if row["carried_seconds"] is not None else "searched",
            f"{100 * row['gap']:.2f} %",
            _percent(row["extra"]),
            "yes" if row["holds"] else "**no**",
        ]
        for row in found["rows"]
    ]
    head = [
        "model",
        "budget",
        "plain step s",
        "first step s",
        "planning s",
        "known before s",
        "gap, of the step",
        "predicted extra",
        "holds",
    ]
    return _table(head, rows)


def disk(found: dict[str, Any]) -> str:
    """The table of a large step in half of its memory."""
    rows = [
        [
            row["contender"],
            _mib(row["peak_bytes"]),
            f"{row['seconds']:.2f}",
            _percent(row["extra"]),
            _percent(row["predicted_extra"]),
            _percent(row["prediction_error"]),
            f"{_mib(row['written_bytes'])} / {_mib(row['read_bytes'])}",
            str(row["replayed"]),
            "yes" if row["holds"] else "**no**",
        ]
        for row in found["rows"]
    ]
    head = [
        "",
        "peak MiB",
        "s",
        "extra",
        "predicted",
        "off, of the step",
        "MiB written / read",
        "replayed",
        "holds",
    ]
    return _table(head, rows)


def mixes(found: dict[str, Any]) -> str:
    """The table of mixes over links of every speed."""
    rows = [
        [
            f"{row['share']:.0%}",
            f"{row['bytes_per_second'] / 1e6:,.0f}",
            _percent(row["extra"]),
            _percent(row["extra_by_recomputing"]),
            f"{100 * row['gap']:.2f} %",
            str(row["moves"]),
            str(row["replayed"]),
            f"{row['planning_seconds']:.1f}",
            "yes" if row["holds"] else "**no**",
        ]
        for row in found["rows"]
    ]
    head = [
        "budget",
        "link MB/s",
        "extra",
        "by recomputing alone",
        "gap, of the step",
        "moves",
        "replayed",
        "planned in s",
        "holds",
    ]
    return _table(head, rows)


def codecs(found: dict[str, Any]) -> str:
    """The table of codecs: bytes, speed, gradients and losses."""
    rows = []
    for row in found["rows"]:
        apart = sorted(row["over_plain"].values())
        losses = f"**{_percent(sum(apart) / len(apart), 2)}**" + (
            f" ({_percent(apart[0], 2)} to {_percent(apart[-1], 2)})" if len(apart) > 1 else ""
        )
        if row["codec"] == "none":
            rows.append(["none, a millionth off", *[""] * 6, losses, str(len(apart)), ""])
            continue
        by_chance = row["gradient_deviation"] / found["draws"] ** 0.5
        rows.append(
            [
                row["codec"],
                f"{_mib(row['encoded_bytes'])} of {_mib(row['moved_bytes'])} "
                f"({row['encoded_bytes'] / row['moved_bytes']:.3f})",
                f"{_mib(row['all_saved_bytes_after'])} of {_mib(row['all_saved_bytes'])}",
                f"{row['encode_bytes_per_second'] / 1e6:,.0f} / {row['decode_bytes_per_second'] / 1e6:,.0f}",
                f"{100 * row['gradient_bias']:.3f} %",
                f"{100 * by_chance:.3f} %",
                f"{100 * row['gradient_deviation']:.2f} %",
                losses,
                str(len(apart)),
                "yes" if row["holds"] else "**no**",
            ]
        )
    head = [
        "codec",
        "MiB compressed",
        "all saved MiB",
        "MB/s in / out",
        "gradient bias",
        "by chance",
        "deviation",
    ]
    return _table([*head, f"loss after {found['steps']} steps", "seeds", "holds"], rows)


def packings(found: dict[str, Any]) -> str:
    """The table of perfect packings: one line for each share of coinciding cuts."""
    rows = []
    for share in sorted({row["share"] for row in found["rows"]}):
        mine = [row for row in found["rows"] if row["share"] == share]
        solved = [row for row in mine if row["holds"]]
        missed = [f"{row['buffers']} ({_percent(row['over_bound'], 2)})" for row in mine if not row["holds"]]
        seconds = sorted(row["seconds"] for row in solved)
        rows.append(
            [
                f"{share:.0%}",
                f"{len(solved)} of {len(mine)}",
                f"{seconds[len(seconds) // 2]:.2f}" if seconds else "",
                f"{seconds[-1]:.2f}" if seconds else "",
                ", ".join(missed) or "none",
            ]
        )
    return _table(
        ["coinciding cuts", "at capacity", "median s", "slowest s", "missed: buffers (over capacity)"], rows
    )


def layouts() -> list[str]:
    """What is known of static layouts."""
    parts: list[str] = []
    traces, hard, public = _load("layout_traces"), _load("layout_packings"), _load("layout_public")
    if traces:
        rows = traces["rows"]
        above = [
            [r["name"], str(r["buffers"]), _percent(r["over_bound"], 3), f"{r['seconds']:.1f}"]
            for r in rows
            if r["over_bound"] > 0
        ]
        text = (
            f"Of {len(rows)} traced steps of the test families (plain, and `full`) "
            f"{sum(r['holds'] for r in rows)} are within 0.5 % of the bound and "
            f"{sum(r['over_bound'] == 0 for r in rows)} meet it exactly, in at most {traces['seconds']:g} s "
            "each on one core. Above it:"
        )
        parts += [
            "",
            "## Static layouts",
            "",
            _where(traces),
            "",
            text,
            "",
            _table(["step", "buffers", "over the bound", "s"], above),
        ]
    if hard:
        text = (
            f"Perfect packings of {min(r['buffers'] for r in hard['rows'])} to "
            f"{max(r['buffers'] for r in hard['rows'])} buffers, a square of 1024 x 1024 cut by guillotine; "
            "the more cuts in time coincide, the more buffers begin at one moment and the harder the "
            f"search. At most {hard['seconds']:g} s each on one core."
        )
        parts += ["", "### Hard packings", "", _where(hard), "", text, "", packings(hard)]
    if public:
        rows = public["rows"]
        text = (
            "Published instances (MiniMalloc, ASPLOS 2023), none of them part of this project: "
            f"{sum(r['holds'] for r in rows)} of {len(rows)} are laid out within their capacity, in at most "
            f"{public['seconds']:g} s each on one core. *Load*: the most bytes alive at one moment, of the "
            "capacity."
        )
        cells = [
            [
                r["name"],
                str(r["buffers"]),
                f"{r['bound_share']:.1%}",
                "yes" if r["holds"] else _percent(r["over_capacity"], 2),
                f"{r['seconds']:.2f}",
                r["source"],
            ]
            for r in rows
        ]
        head = ["instance", "buffers", "load", "at capacity", "s", "found by"]
        parts += ["", "### Published packings", "", _where(public), "", text, "", _table(head, cells)]
    return parts


def layers() -> list[str]:
    """What a layer of the 22B model and long sequences take, on every kind of device that they have been run
    on.
    """
    parts: list[str] = []
    for device in ("cuda", "cpu"):
        found = _load(f"layer_times_{device}")
        if found:
            rows = [
                [
                    row["layer"],
                    f"{1000 * row['forward_seconds']:.1f}",
                    f"{1000 * row['backward_seconds']:.1f}",
                    _percent(row["extra"]),
                    _percent(row["published_extra"], 0) if row["published_extra"] is not None else "",
                    _mib(row["peak_bytes"]),
                ]
                for row in found["rows"]
            ]
            shape = found["shape"]
            text = (
                f"A rank's share ({found['ranks']} ranks, collectives left out) of one layer with "
                f"{shape['width']} features and {shape['heads']} heads, {shape['batch']} x "
                f"{shape['sequence']} tokens, on {device}. *Published*: arXiv 2205.05198, table 4, the 22B "
                "model on eight A100s; what recomputing costs depends on the device and the shape."
            )
            table = _table(["layer", "forward ms", "backward ms", "extra", "published", "peak MiB"], rows)
            parts += ["", f"## A layer recomputed, {device}", "", _where(found), "", text, "", table]
        found = _load(f"long_sequence_{device}")
        if found:
            rows = [
                [
                    f"{row['tokens']:,}",
                    row["contender"],
                    _mib(row["peak_bytes"]),
                    f"{row['seconds']:.3f}",
                    _percent(row["extra"]),
                    _percent(row["predicted_extra"]) if row["predicted_extra"] is not None else "",
                    _yes(row["link_suffices"]) if row["link_suffices"] is not None else "",
                    f"{_mib(row['moved_bytes'])} in {_mib(row['reserved_bytes'])}"
                    if row["moved_bytes"] is not None
                    else "",
                    _yes(row["holds"]) if row["moved_bytes"] is not None else "",
                ]
                for row in found["rows"]
            ]
            text = (
                f"{found['layers']} layers of {found['width']} features on {device}; lowtide's saved values "
                "wait on the next tier. It *holds* when the gradients are the plain step's bit by bit, the "
                "peak is the plan's within 1 %, the slab is as large as the plan says, and, where the link "
                "suffices by the plan's prediction, the step takes at most 5 % longer than the plain one."
            )
            head = [
                "tokens",
                "",
                "peak MiB",
                "s",
                "extra",
                "predicted",
                "link suffices",
                "MiB moved, in a slab of",
                "holds",
            ]
            parts += ["", f"## Long sequences, {device}", "", _where(found), "", text, "", _table(head, rows)]
    return parts


def stores() -> list[str]:
    """What is known of moving values."""
    parts: list[str] = []
    found = _load("disk_tier")
    if found:
        text = (
            f"A step with a plain peak of {found['rows'][0]['peak_bytes'] / 2**30:.2f} GiB in half of it, "
            f"with the disk as the next tier ({found['link']['write_bytes_per_second'] / 1e6:,.0f} MB/s out, "
            f"{found['link']['read_bytes_per_second'] / 1e6:,.0f} MB/s in), in turn, medians of the "
            "differences. It *holds* when the peak is within the budget, the bytes written and read are the "
            "plan's, the gradients the plain step's bit by bit, and the predicted time of the step within "
            "15 %."
        )
        parts += ["", "## A large step in half of its memory", "", _where(found), "", text, "", disk(found)]
    found = _load("mixes")
    if found:
        text = (
            f"Plans of `policies.mixed` for {found['rows'][0]['model']}, over links of given speeds: "
            "predicted extra time and its gap to the bound. It *holds* at a gap of at most 1 % of the step."
        )
        parts += ["", "## Recompute and move together", "", _where(found), "", text, "", mixes(found)]
    found = _load("codecs")
    if found:
        text = (
            "A small GPT. Bytes are of what the policy compresses, and of all that autograd saves. A "
            "bounded codec is used where backward is linear in the value and its gentler form (`int8` for "
            "`int4`) elsewhere; *everywhere* is the user's `everywhere=True`. The gradient's bias is that "
            f"of the mean of {found['draws']} draws, *by chance* what a codec without bias shows. Losses are "
            "compared with the plain training's: the mean, the least and the largest difference over the "
            "seeds. The first row is two plain trainings that begin a millionth apart in one parameter: "
            "nearer than that no codec can be told from none. It *holds* where the mean is within 1 %."
        )
        parts += ["", "## Codecs", "", _where(found), "", text, "", codecs(found)]
    return parts + layouts()


def main() -> None:
    """Write docs/results.md, and the README's part between its marks."""
    parts = [
        "# Results",
        "",
        "Made by `python -m benchmarks report` from the files in `benchmarks/results`. Misses stand beside "
        "hits.",
    ]
    found = _load("versus_checkpoint")
    brief = ""
    if found:
        text = f"Same process, in turn, medians of the differences. {COLUMNS}"
        parts += ["", "## Against checkpointing every block", "", _where(found), "", text, "", versus(found)]
        brief = (
            "At the peak of `torch.utils.checkpoint` on every block "
            f"({_where(found)}):\n\n{versus(found)}\n\n{COLUMNS}"
        )
    found = _load("accuracy")
    if found:
        held = found["held"]
        text = (
            f"Of {held['of']} rows the measured peak is within the budget in {held['within_budget']}, the "
            f"predicted peak within 1 % of the measured one in {held['peak_holds']}. Of the extra time, the "
            "forecast before any step is within 15 % of the measured one or 2 % of the step in "
            f"{held.get('forecast_holds', 'rows that were not run')}, and what steps calibrated in "
            f"{held['calibrated_holds']}; the forecast of the plain step is within 15 % in "
            f"{held.get('forecast_plain_holds', 'rows that were not run')}. The C library keeps the pages of "
            "freed memory: else a plain step spends up to a fifth of its time on getting them back from the "
            "system, and what a plan saves of that hides what it costs."
        )
        parts += ["", "## Predicted against measured", "", _where(found), "", text, "", accuracy(found)]
        brief += f"\n\nPredictions, six models at four budgets each: {text[0].lower()}{text[1:]}"
    found = _load("planning_time")
    if found:
        text = (
            "The first step is looked at while it runs, and planned for at its end. Planning is solving and "
            "bounding; *known before*: from the decisions that an earlier run kept. What the first plan of a "
            "process imports and measures once, whatever it is for, comes on top: "
            f"{found['first_of_process_seconds']:.1f} s for a tiny model."
        )
        parts += ["", "## Planning", "", _where(found), "", text, "", planning(found)]
    parts += stores()
    parts += layers()
    found = _load("parallel_memory")
    if found:
        most = max(abs(row["layer_bytes"] / row["formula_bytes"] - 1) for row in found["rows"])
        ranks = ", ".join(str(t) for t in sorted({row["t"] for row in found["rows"]}))
        stages = ", ".join(str(p) for p in sorted({row["p"] for row in found["pipeline"]}))
        text = (
            f"On real processes at t = {ranks} a layer holds what table 2 of arXiv 2205.05198 says, within "
            f"{100 * most:.3f} %; the whole table, plans for shared models, and pipelines of {stages} "
            "stages: [memory per rank](../benchmarks/results/parallel_memory.md)."
        )
        parts += ["", "## Memory per rank", "", _where(found), "", text]
    if _load("budget_curve"):
        text = "See [peak against time](../benchmarks/results/budget_curve.md), eager and compiled."
        parts += ["", "## The curve of budgets", "", text]
    found = _load("op_sweep")
    if found:
        parts += [
            "",
            "## Every operation of PyTorch's database",
            "",
            "See [the sweep](../benchmarks/results/op_sweep.md).",
        ]
    (ROOT / "docs" / "results.md").write_text("\n".join(parts) + "\n")
    readme: Path = ROOT / "README.md"
    text = readme.read_text()
    before, rest = text.split(START, 1)
    after = rest.split(END, 1)[1] if END in rest else rest
    readme.write_text(
        f"{before}{START}\n{brief}\n\nAll tables: [docs/results.md](docs/results.md).\n{END}{after}"
    )
    print("wrote docs/results.md and the README's results")


if __name__ == "__main__":
    main()
