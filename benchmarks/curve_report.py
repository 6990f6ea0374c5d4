"""What `budget_curve` found: scores, the tables of benchmarks/results/budget_curve.md, and the picture and
short table of docs/compiled.md.

Four scores, of lowtide's compiled points against the rivals' (plain, checkpointed, selective, the knob; eager
and compiled):

1. *matched*: for a rival point there is one of ours with no more peak (0.5 %) and no more time (3 %).
2. *ratio*: our extra time over the least of the rivals' at that peak or less, geometric mean over our points.
   Extra times count as at least half a per cent of the step, which is what the stopwatch can tell apart; a
   point whose rivals take no more than that, or that no rival reaches, has no ratio.
3. *lowest*: the smallest peak reached, against the rivals' and against lowtide eager's.
4. *promised*: measured peak in 97 to 100 % of a budget that binds, predicted peak within 1 %, predicted extra
   time within 15 % of it or 2 % of the step; and peaks that fall as budgets fall.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS

DOCS = RESULTS.parent.parent / "docs"
PICTURE, PAGE = DOCS / "budget_curve.png", DOCS / "compiled.md"
BEGIN, END = "<!-- curve -->\n", "<!-- end of curve -->"
PEAK_NOISE, TIME_NOISE, LEAST_EXTRA = 0.005, 0.03, 0.005
Row = dict[str, Any]


def extra(row: Row) -> float:
    """Time over the plain compiled step's, of it: the median of the rounds' differences."""
    pairs = list(zip(row["seconds"], row["plain_seconds"], strict=True))
    return statistics.median(a - b for a, b in pairs) / statistics.median(b for _, b in pairs)


def uncertainty(row: Row) -> float:
    """Half the width of the 95 % interval of `extra`, which is that of a median: between two of its rounds,
    wherever their times come from.
    """
    differences = sorted(a - b for a, b in zip(row["seconds"], row["plain_seconds"], strict=True))
    count = len(differences)
    low = max(0, int(count / 2 - 0.98 * math.sqrt(count)))
    width = differences[count - 1 - low] - differences[low]
    return width / 2 / statistics.median(row["plain_seconds"])


def processor_extra(row: Row) -> float | None:
    """As `extra`, in the processor's time: what other processes took meanwhile is not in it."""
    if "cpu_seconds" not in row:
        return None
    return extra({"seconds": row["cpu_seconds"], "plain_seconds": row["plain_cpu_seconds"]})


def front(rows: Iterable[Row]) -> list[Row]:
    """The rows that no other one beats in peak and time at once, from the smallest peak up."""
    found: list[Row] = []
    for row in sorted(rows, key=lambda row: (row["peak_bytes"], extra(row))):
        if not found or extra(row) < extra(found[-1]):
            found.append(row)
    return found


def scores(rows: Sequence[Row]) -> dict[str, Any]:
    """The four scores, for each model with compiled points of lowtide's and over all."""
    timed = [row for row in rows if row.get("seconds") and not row.get("error")]
    models = {row["model"]: None for row in timed if row["name"] == "lowtide" and row["compiled"]}
    by_model = {model: _scores_of([row for row in timed if row["model"] == model]) for model in models}
    ratios = [ratio for found in by_model.values() for ratio in found["ratios"]]
    return {
        "matched": sum(found["matched"] for found in by_model.values()),
        "rival_points": sum(found["rival_points"] for found in by_model.values()),
        "ratio": _geometric_mean(ratios),
        "lowest": sum(found["lowest_holds"] for found in by_model.values()),
        "promised": sum(found["promised"] for found in by_model.values()),
        "binding": sum(found["binding"] for found in by_model.values()),
        "models": by_model,
    }


def _scores_of(rows: Sequence[Row]) -> dict[str, Any]:
    mine = [row for row in rows if row["name"] == "lowtide" and row["compiled"]]
    eager = [row for row in rows if row["name"] == "lowtide" and not row["compiled"]]
    rivals = [row for row in rows if row["name"] != "lowtide"]
    plain = next(row for row in rows if row["engine"] == "compiled plain")
    unmatched = [
        rival["engine"]
        for rival in rivals
        if not any(
            row["above_parameters_bytes"] <= (1 + PEAK_NOISE) * rival["above_parameters_bytes"]
            and 1 + extra(row) <= (1 + TIME_NOISE) * (1 + extra(rival))
            for row in mine
        )
    ]
    ratios = []
    for row in mine:
        reach = [extra(rival) for rival in rivals if rival["peak_bytes"] <= row["peak_bytes"]]
        if reach and min(reach) > LEAST_EXTRA:
            ratios.append(max(extra(row), LEAST_EXTRA) / min(reach))
    kept = [promise(row) for row in mine if row["budget_bytes"] and row["budget_bytes"] < plain["peak_bytes"]]
    by_budget = sorted((row for row in mine if row["budget_bytes"]), key=lambda row: row["budget_bytes"])
    lowest = [min((row["peak_bytes"] for row in which), default=None) for which in (mine, rivals, eager)]
    others = [peak for peak in lowest[1:] if peak is not None]
    return {
        "rival_points": len(rivals),
        "matched": len(rivals) - len(unmatched),
        "unmatched": unmatched,
        "ratio": _geometric_mean(ratios),
        "ratios": ratios,
        "lowest_bytes": dict(zip(("lowtide compiled", "rivals", "lowtide eager"), lowest, strict=True)),
        "lowest_holds": lowest[0] is not None and lowest[0] < min(others),
        "binding": len(kept),
        "promised": sum(all(found.values()) for found in kept),
        "shares": sum(
            map(share_predicted, (r for r in mine if 0 < (r["budget_bytes"] or 0) < plain["peak_bytes"]))
        ),
        "kept": {name: sum(found[name] for found in kept) for name in (kept[0] if kept else ())},
        "monotone": all(low["peak_bytes"] <= high["peak_bytes"] for low, high in pairwise(by_budget)),
    }


def promise(row: Row) -> dict[str, bool]:
    """Whether a point of lowtide's under a budget that binds is what was promised."""
    took, said = extra(row), row["predicted_extra_seconds"] / statistics.median(row["plain_seconds"])
    return {
        "in_budget": 0.97 <= row["peak_bytes"] / row["budget_bytes"] <= 1,
        "peak_predicted": abs(row["predicted_peak_bytes"] / row["peak_bytes"] - 1) <= 0.01,
        "time_predicted": abs(said - took) <= max(0.15 * abs(took), 0.02),
    }


def share_predicted(row: Row) -> bool:
    """Whether the forecast holds as a share of the step: a machine that was busier or slower when it was made
    than when the steps ran has no part in that.
    """
    if not row.get("predicted_plain_seconds"):
        return False
    took, said = extra(row), row["predicted_extra_seconds"] / row["predicted_plain_seconds"]
    return abs(said - took) <= max(0.15 * abs(took), 0.02)


def _geometric_mean(values: Sequence[float]) -> float | None:
    return math.exp(statistics.fmean(map(math.log, values))) if values else None


def tables(found: dict[str, Any]) -> str:
    """Scores and points as text."""
    machine, total = found["machine"], found["scores"]
    lines = [
        "# Peak against time",
        "",
        f"Made by `python -m benchmarks budget_curve`, last: {machine['date']}, {machine['processor']}, "
        f"{machine['cores']} cores, {machine['threads']} threads, torch {machine['torch']}, Python "
        f"{machine['python']}, lowtide {machine['lowtide']}.",
        "",
        "Extra time is over the plain compiled step, paired by rounds, with the 95 % interval of its median, "
        "and the same in the processor's time; peaks are above the parameters, "
        "gradients included. *Matched*: rival points for which a compiled lowtide point has no more peak "
        "(0.5 %) and no more time (3 %). *Ratio*: our extra time over the best rival's at that peak or less, "
        "geometric mean. *Lowest*: the smallest peak of lowtide compiled / the rivals / lowtide eager. "
        "*Promised*: points under a binding budget whose measured peak is 97 to 100 % of it, predicted "
        "within 1 %, their time within 15 % or 2 % of the step; *as a share*: those whose time is so as part "
        "of the step's as it was forecast, too. Not matched is said by name.",
        "",
        "| model | matched | ratio | lowest MB | promised | as a share | peaks monotone | not matched |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for model, score in total["models"].items():
        lowest = " / ".join(_mb(peak) for peak in score["lowest_bytes"].values())
        cells = [
            model,
            f"{score['matched']} of {score['rival_points']}",
            "" if score["ratio"] is None else f"{score['ratio']:.2f}",
            lowest + ("" if score["lowest_holds"] else " **no**"),
            f"{score['promised']} of {score['binding']}",
            f"{score['shares']}",
            "yes" if score["monotone"] else "**no**",
            ", ".join(score["unmatched"]),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    models = list({row["model"]: None for row in found["rows"]})
    without = [model for model in models if model not in total["models"]]
    if without:
        lines += ["", f"Without compiled points of lowtide: {'; '.join(without)}."]
    lines += ["", "![Peak against extra time, a panel a model](../../docs/budget_curve.png)"]
    for model in models:
        head = [
            "engine",
            "MB above parameters",
            "extra",
            "of the processor",
            "rounds",
            "prepared in s",
            "budget MB",
            "predicted MB",
        ]
        points = [row for row in found["rows"] if row["model"] == model]
        measured = "; ".join(dict.fromkeys(row["measured"] for row in points))
        lines += [
            "",
            f"## {model}",
            "",
            f"Measured {measured}.",
            "",
            "| " + " | ".join([*head, "predicted extra", "of its step"]) + " |",
            "|---" * 10 + "|",
        ]
        for row in points:
            if row.get("error"):
                lines.append(f"| {row['engine']} | failed: {row['error'].replace('|', '/')} |" + " |" * 8)
            elif row.get("seconds"):
                plain = statistics.median(row["plain_seconds"])
                said, whole = row.get("predicted_extra_seconds"), row.get("predicted_plain_seconds")
                cells = [
                    row["engine"],
                    _mb(row["above_parameters_bytes"]),
                    f"{100 * extra(row):+.1f} ± {100 * uncertainty(row):.1f} %",
                    "" if (own := processor_extra(row)) is None else f"{100 * own:+.1f} %",
                    str(len(row["seconds"])),
                    f"{row['prepare_seconds']:.0f}",
                    _mb(row.get("budget_bytes")),
                    _mb(row.get("predicted_peak_bytes")),
                    "" if said is None else f"{100 * said / plain:+.1f} %",
                    f"{100 * said / whole:+.1f} %" if whole and said is not None else "",
                ]
                lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def short_table(rows: Sequence[Row]) -> str:
    """A line a model: the points of each kind that no other of the kind beats, by peak."""
    kinds: dict[str, Callable[[Row], bool]] = {
        "rivals, compiled": lambda row: row["name"] != "lowtide" and row["compiled"],
        "rivals, eager": lambda row: row["name"] != "lowtide" and not row["compiled"],
        "lowtide, eager": lambda row: row["name"] == "lowtide" and not row["compiled"],
        "lowtide, compiled": lambda row: row["name"] == "lowtide" and row["compiled"],
    }
    timed = [row for row in rows if row.get("seconds") and not row.get("error")]
    lines = ["| " + " | ".join(["model", *kinds]) + " |", "|---" * (1 + len(kinds)) + "|"]
    for model in {row["model"]: None for row in timed}:
        fronts = [front(row for row in timed if row["model"] == model and of(row)) for of in kinds.values()]
        cells = [
            ", ".join(f"{_mb(row['above_parameters_bytes'])} MB {100 * extra(row):+.1f} %" for row in points)
            for points in fronts
        ]
        lines.append("| " + " | ".join([model, *(cell or "not measured" for cell in cells)]) + " |")
    return "\n".join(lines) + "\n"


def _mb(count: int | None) -> str:
    return "" if count is None else f"{count / 1e6:,.1f}"


def draw(rows: Sequence[Row], path: Path) -> None:
    """A panel a model: all points, and the fronts of lowtide compiled and of all rivals."""
    from matplotlib import pyplot

    timed = [row for row in rows if row.get("seconds") and not row.get("error")]
    models = list({row["model"]: None for row in timed})
    across = min(3, len(models))
    down = -(-len(models) // across)
    figure, axes = pyplot.subplots(
        down, across, figsize=(5 * across, 4 * down), squeeze=False, layout="constrained"
    )
    marks = {"plain": "s", "checkpoint": "^", "selective": "v", "knob": ".", "lowtide": "o"}
    for panel, model in zip(axes.flat, models, strict=False):
        points = [row for row in timed if row["model"] == model]
        for compiled in (True, False):
            for name, mark in marks.items():
                some = [row for row in points if row["name"] == name and row["compiled"] == compiled]
                colour = ("tab:blue" if compiled else "tab:cyan") if name == "lowtide" else "tab:orange"
                panel.scatter(
                    [row["above_parameters_bytes"] / 1e6 for row in some],
                    [100 * extra(row) for row in some],
                    marker=mark,
                    facecolors=colour if compiled else "none",
                    edgecolors=colour,
                    label=f"{name}, {'compiled' if compiled else 'eager'}" if some else None,
                )
        for mine, colour in ((True, "tab:blue"), (False, "tab:orange")):
            best = front(
                row for row in points if (row["name"] == "lowtide") == mine and (row["compiled"] or not mine)
            )
            panel.step(
                [row["above_parameters_bytes"] / 1e6 for row in best],
                [100 * extra(row) for row in best],
                where="post",
                color=colour,
                linewidth=0.8,
            )
        panel.set(title=model, xlabel="peak above the parameters, MB", ylabel="extra time, %")
    for panel in axes.flat[len(models) :]:
        panel.set_visible(False)
    axes.flat[0].legend(fontsize="x-small")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def write_report() -> None:
    """Write the tables and the picture from the result file."""
    found = json.loads((RESULTS / "budget_curve.json").read_text())
    if any(row.get("seconds") for row in found["rows"]):
        (RESULTS / "budget_curve.md").write_text(tables(found))
        draw(found["rows"], PICTURE)
        text = PAGE.read_text()
        before, rest = text.split(BEGIN)
        PAGE.write_text(before + BEGIN + short_table(found["rows"]) + END + rest.split(END)[1])
        print("wrote benchmarks/results/budget_curve.json and .md, docs/budget_curve.png, docs/compiled.md")
