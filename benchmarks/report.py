"""Turn the result files into docs/results.md and the table in the README.

python -m benchmarks report
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks import report_gpu
from benchmarks.common import RESULTS
from benchmarks.report_stores import stores
from benchmarks.tables import load, mib, percent, table, where, yes

ROOT = RESULTS.parent.parent
START, END = "<!-- results -->", "<!-- end of results -->"
COLUMNS = (
    "*Per block* is `torch.utils.checkpoint` (non-reentrant) on every block. Times with a sign are extra "
    "times over the plain step. *lowtide* gets the peak of *per block* as its budget, and recomputes. *With "
    "the disk* it may also move values to the disk (`policies.mixed`). *Ratio of extra*: the extra time of "
    "the column before, divided by that of *per block*. *Budget 100 %*: lowtide's extra time with the plain "
    "peak as its budget. *Smallest / per block*: the smallest budget that works, divided by the peak of *per "
    "block*. A row *holds* if the peak is at most that of *per block*, the extra time is at most half of its "
    "extra time, and the extra time with a budget of 100 % is under 3 %. The last column is the same with "
    "the disk. The C library keeps the pages of freed memory, except in rows with a star, which are of an "
    "earlier run."
)


def versus(found: dict[str, Any]) -> str:
    """The table against per-block checkpointing."""
    rows = [
        [
            row["model"] + ("" if row.get("pages_kept") else " *"),
            f"{row['plain_seconds']:.2f}",
            mib(row["plain_peak_bytes"]),
            mib(row["rival_peak_bytes"]),
            percent(row["rival_extra"]),
            mib(row["planned_peak_bytes"]),
            f"**{percent(row['planned_extra'])}**",
            f"{row['planned_over_rival']:.2f}",
            f"**{percent(row['mixed_extra'])}**" if "mixed_extra" in row else "not run",
            f"{row['mixed_over_rival']:.2f}" if "mixed_extra" in row else "",
            percent(row["full_budget_extra"]),
            f"{row['smallest_over_rival']:.2f}",
            yes(row["planned_holds"] and row["full_budget_holds"]),
            yes(row["mixed_holds"] and row["full_budget_holds"]) if "mixed_extra" in row else "",
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
    return table([*head, "holds", "with the disk"], rows)


def sharded(rows: list[dict[str, Any]]) -> str:
    """What the table of sharded steps shows, in short."""
    ran, failed = [r for r in rows if "failure" not in r], [r for r in rows if "failure" in r]
    near = [r for r in ran if abs(r["measured_peak_bytes"] / r["predicted_peak_bytes"] - 1) <= 0.01]
    least = [r for r in ran if r["budget"] == "min"]
    lower = [r for r in least if r["measured_peak_bytes"] <= r["checkpoint_peak_bytes"]]
    timed = [r for r in ran if "extra" in r]
    share = [r for r in timed if r["budget"] == "70%"]
    rival = [r for r in timed if "larger" in r["way"]]  # the others' steps take as long to record as to run
    ways = "; ".join(dict.fromkeys(r["way"] for r in rows))
    count = {
        "same": sum(r["same"] for r in ran),
        "within": sum(r["within"] for r in ran),
        "gathers": sum(r["gathers"] == r["plain_gathers"] for r in ran),
        "gap": sum(r["gap"] <= 0.01 for r in share),
        "half": sum(r["extra"] <= r["checkpoint_extra"] / 2 for r in rival),
    }
    return (
        f"One limit on the root, families of models ({ways}); budgets are the peak of checkpointing "
        f"every block, 70 % and `min`. Of {len(ran)} rows losses and gradients of four steps are bitwise "
        f"those without a limit in {count['same']}, every rank is within the budget in {count['within']}, "
        f"the measured peak is within 1 % of the predicted one in {len(near)}, and there are as many "
        f"gathers as without a limit in {count['gathers']}. `min` is at or below checkpointing's peak in "
        f"{len(lower)} of {len(least)}. Of those that were timed, a better plan could win at most 1 % of the "
        f"step at 70 % in {count['gap']} of {len(share)}, and the extra time at checkpointing's peak is at "
        f"most half of checkpointing's in {count['half']} of {len(rival)}. {len(failed)} models did not run. "
        "[The table](../benchmarks/results/sharded.md)."
    )


IN_SHORT = (
    "The budget of each row is the peak of `torch.utils.checkpoint` on every block. Percentages are extra "
    'time over the plain step. The last column is `policy="mixed"`, which may also move values: to the disk '
    "on the CPU, to main memory on the GPU."
)


def versus_in_short(found: dict[str, Any]) -> str:
    """What the README shows of the comparisons with per-block checkpointing, on the CPU and on a card."""
    rows = [
        [
            f"{row['model']}, CPU",
            mib(row["plain_peak_bytes"]),
            mib(row["rival_peak_bytes"]),
            percent(row["rival_extra"]),
            f"**{percent(row['planned_extra'])}**",
            f"**{percent(row['mixed_extra'])}**" if "mixed_extra" in row else "not run",
        ]
        for row in found["rows"]
    ]
    head = ["step", "plain MiB", "budget MiB", "checkpointing", "lowtide", "lowtide, `mixed`"]
    return table(head, [*report_gpu.versus_checkpointing(), *rows])


def accuracy(found: dict[str, Any]) -> str:
    """The table of predictions."""
    rows = [
        [
            row["model"],
            row["budget"],
            mib(row["budget_bytes"]),
            mib(row["predicted_peak_bytes"]),
            mib(row["measured_peak_bytes"]),
            percent(row["peak_error"], 2),
            f"{row['plain_seconds']:.3f}",
            percent(row["forecast_plain_error"]),
            f"{1000 * row['measured_extra_seconds']:.0f}",
            f"{1000 * row['forecast_extra_seconds']:.0f}",
            percent(row["forecast_off_of_step"]),
            f"{1000 * row['calibrated_extra_seconds']:.0f}",
            percent(row["calibrated_off_of_step"]),
            f"{100 * row['gap']:.2f} %",
            yes(
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
    return table(
        [*head, "forecast ms", "off, of the step", "calibrated ms", "off, of the step", "gap", "holds"], rows
    )


def planning(found: dict[str, Any]) -> str:
    """The table of planning times."""
    rows = [
        [
            row["model"],
            row["budget"],
            f"{row['plain_step_seconds']:.1f}" if "plain_step_seconds" in row else "not run",
            f"{row['first_step_seconds']:.1f}" if "first_step_seconds" in row else "not run",
            f"{row['solve_seconds']:.2f}",
            f"{100 * row['gap']:.2f} %",
            percent(row["extra"]),
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
        "gap, of the step",
        "predicted extra",
        "holds",
    ]
    return table(head, rows)


def layers() -> list[str]:
    """What a layer of the 22B model and long sequences take, on every kind of device that they have been run
    on.
    """
    parts: list[str] = []
    for device in ("cuda", "cpu"):
        found = load(f"layer_times_{device}")
        if found:
            rows = [
                [
                    row["layer"],
                    f"{1000 * row['forward_seconds']:.1f}",
                    f"{1000 * row['backward_seconds']:.1f}",
                    percent(row["extra"]),
                    percent(row["published_extra"], 0) if row["published_extra"] is not None else "",
                    mib(row["peak_bytes"]),
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
            measured = table(["layer", "forward ms", "backward ms", "extra", "published", "peak MiB"], rows)
            parts += ["", f"## A layer recomputed, {device}", "", where(found), "", text, "", measured]
        found = load(f"long_sequence_{device}")
        if found:
            rows = [
                [
                    f"{row['tokens']:,}",
                    row["contender"],
                    mib(row["peak_bytes"]),
                    f"{row['seconds']:.3f}",
                    percent(row["extra"]),
                    percent(row["predicted_extra"]) if row.get("predicted_extra") is not None else "",
                    yes(row["link_suffices"]) if row.get("link_suffices") is not None else "",
                    f"{mib(row['moved_bytes'])} in {mib(row['reserved_bytes'])}"
                    if row.get("moved_bytes") is not None
                    else "",
                    yes(row["holds"]) if row.get("moved_bytes") is not None else "",
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
            parts += ["", f"## Long sequences, {device}", "", where(found), "", text, "", table(head, rows)]
    return parts


def compiling(found: dict[str, Any]) -> list[str]:
    """The part on what a budget adds to compiling, without its title."""
    whole = [row for row in found["rows"] if row["kind"] == "inductor"]
    planned = [row for row in found["rows"] if row["kind"] == "aot_eager"]
    rate = next((row for row in found["rows"] if row["kind"] == "100%"), None)
    parts = []
    if rate is not None:
        text = (
            f"A step at `100%` takes {percent(rate['more_of_step'], 2)} of a plain compiled one's time more, "
            f"the median of {rate['rounds']} paired rounds."
        )
        parts += [text, ""]
    if whole:
        rows = [
            [
                row["model"],
                row["budget"],
                *(
                    f"{row[who][f'{when}_seconds']:.1f}"
                    for when in ("cold", "warm")
                    for who in ("plain", "lowtide")
                ),
                f"{row['planning']:.1f}",
                *(f"{row.get(part, 0.0):.1f}" for part in ("lowering", "reading", "solving")),
                f"{row['cold_ratio']:.2f}",
                f"{row['warm_ratio']:.2f}",
            ]
            for row in whole
        ]
        head = ["model", "budget", "cold, plain s", "cold s", "warm, plain s", "warm s", "planning s"]
        head += ["lowering s", "reading s", "solving s", "cold, to plain", "warm, to plain"]
        parts += [table(head, rows), ""]
    if planned:
        rows = [
            [
                str(row["layers"]),
                str(row["operations"]),
                f"{row['planning']:.1f}",
                f"{row['solving']:.1f}" if "solving" in row else "",
                f"{100 * row['gap_of_step']:.2f} %",
            ]
            for row in planned
        ]
        head = ["layers", "values", "planning s", "solving s", "gap, of the step"]
        parts += [f"Planning for `aot_eager`, at {planned[0]['budget']}:", "", table(head, rows)]
    return parts


def _time_of(row: dict[str, Any], which: str) -> str:
    """The time of a row of steps that vary, and of one of their operations where that was measured."""
    if f"{which}time_ratio" not in row:
        return "not measured"
    operation = row.get(f"{which}operation_us")
    return f"{row[f'{which}time_ratio']:.2f}" + (f" ({operation} us)" if operation else "")


def varying(found: dict[str, Any]) -> str:
    """Steps whose program varies."""
    rows = [
        [
            row["kind"],
            row["budget"],
            str(row["steps"]),
            str(len(row["profiled"])),
            f"{len(row['above'])} (up to {percent(max(share for _, share in row['above']))})"
            if row["above"]
            else "0",
            str(len(row["not_said"])),
            str(row["other_gradients"]),
            _time_of(row, ""),
            _time_of(row, "large_"),
        ]
        for row in found["rows"]
    ]
    head = ["steps", "budget", "", "profiled", "above", "not warned of", "other gradients", "time"]
    head += ["of larger models"]
    return table(head, rows)


def main() -> None:
    """Write docs/results.md, and the README's part between its marks."""
    parts = [
        "# Results",
        "",
        "`python -m benchmarks report` makes this page from the files in `benchmarks/results`. Tables "
        "contain hits and misses. A table that names lowtide 0.3.0 was measured before one governor held "
        "every step, and has not been measured again.",
    ]
    found = load("versus_checkpoint")
    brief = ""
    if found:
        text = f"Same process, in turn, medians of the differences. {COLUMNS}"
        parts += ["", "## Against checkpointing every block", "", where(found), "", text, "", versus(found)]
        brief = f"{versus_in_short(found)}\n\n{IN_SHORT}\n\n- CPU: {where(found)}."
    found = load("accuracy")
    if found:
        held = found["held"]
        text = (
            f"Of {held['of']} rows, the measured peak is within the budget in {held['within_budget']}, and "
            f"the predicted peak is within 1 % of the measured peak in {held['peak_holds']}. The forecast of "
            "the extra time, made before any step, is within 15 % of the measured one, or within 2 % of the "
            f"step, in {held['forecast_holds']} rows. The calibrated extra time is in "
            f"{held['calibrated_holds']}. The forecast of the plain step is within 15 % in "
            f"{held['forecast_plain_holds']}. The C library keeps the pages of freed memory. Without this, a "
            "plain step spends up to a fifth of its time on getting pages from the system, which hides the "
            "cost of a plan."
        )
        parts += ["", "## Predicted against measured", "", where(found), "", text, "", accuracy(found)]
        brief += (
            f"\n- Predictions before any step, for six models at four budgets each ({where(found)}): the "
            f"predicted peak is within 1 % of the measured peak in {held['peak_holds']} of {held['of']} "
            "rows. The predicted extra time differs from the measured one by at most 15 %, or by at most 2 % "
            f"of the step's time, in {held['forecast_holds']} of {held['of']} rows."
        )
    if found and (other := load("accuracy_elsewhere")):  # saved under this name by hand
        held = other["held"]
        text = (
            f"On another machine ({where(other)}), {held['within_budget']} of "
            f"{held['of']} rows are within the budget, {held['peak_holds']} have the predicted peak, and "
            f"{held['forecast_holds']} the forecast extra time."
        )
        parts += ["", text]
    found = load("planning_time")
    if found:
        text = (
            "lowtide profiles the first step while it runs, and plans at its end. Planning is solving and "
            "bounding. The first plan of a process also imports modules and measures the machine: "
            f"{found['first_of_process_seconds']:.1f} s for a tiny model."
        )
        parts += ["", "## Planning", "", where(found), "", text, "", planning(found)]
    parts += report_gpu.section()
    if on_card := report_gpu.brief():
        brief += f"\n- {on_card}"
    parts += stores()
    parts += layers()
    found = load("parallel_memory")
    if found:
        most = max(abs(row["layer_bytes"] / row["formula_bytes"] - 1) for row in found["rows"])
        ranks = ", ".join(str(t) for t in sorted({row["t"] for row in found["rows"]}))
        stages = ", ".join(str(p) for p in sorted({row["p"] for row in found["pipeline"]}))
        text = (
            f"On real processes at t = {ranks} a layer holds what table 2 of arXiv 2205.05198 says, within "
            f"{100 * most:.3f} %; the whole table, plans for shared models, and pipelines of {stages} "
            "stages: [memory per rank](../benchmarks/results/parallel_memory.md)."
        )
        parts += ["", "## Memory per rank", "", where(found), "", text]
    if found := load("sharded"):
        parts += ["", "## Sharded steps", "", where(found), "", sharded(found["rows"])]
    if load("budget_curve"):
        text = "See [peak against time](../benchmarks/results/budget_curve.md), eager and compiled."
        parts += ["", "## The curve of budgets", "", text]
    found = load("compile_time")
    if found:
        text = (
            "Seconds until the second compiled step is done, in a process of its own: cold, and warm from "
            "the cache on disk. Planning is the part of the cold time in which a plan is made, and what it "
            "tries is compiled as it is tried; lowering is the part of it in which Inductor only says what "
            "it would allocate, reading the one in which what it generates is read. The budget is a share "
            "of the plain step's peak, or the same in bytes, for which that need not be known. GPT-2 and "
            "Llama 3 are those of transformers, called with labels; GPT-2's loss is a graph of its own, so "
            "its first step is recorded, in a warm process, too, which finds its plan on disk. A cold one "
            "starts the C++ compiler for the first time while it plans, a plain one later. The aim is 1.3 of "
            "plain."
        )
        parts += ["", "## Compiling under a budget", "", where(found), "", text, "", *compiling(found)]
    found = load("varying")
    if found:
        text = (
            "Five kinds of seeded steps whose program varies, on small models. *Profiled* are the steps that "
            "were recorded, *above* those that took more than the budget, with the most by which. *Time* is "
            "the steps' over that of the same steps with a plan prepared for every program (aim 1.05), "
            "in brackets how long one of their operations takes; once more for larger models."
        )
        parts += ["", "## Steps whose program varies", "", where(found), "", text, "", varying(found)]
    for name, title in (
        ("held", "Steps that differ, each held to its budget"),
        ("held_families", "The first step within a budget in bytes"),
    ):
        if found := load(name):
            text = f"See [the table](../benchmarks/results/{name}.md)."
            parts += ["", f"## {title}", "", where(found), "", text]
    found = load("op_sweep")
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
