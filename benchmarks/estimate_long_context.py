"""How near `lowtide.estimate` comes to published runs of long sequences, and whether it says what fits.

python -m benchmarks estimate_long_context

The runs stand in ``tests/estimate/published/runs_long_context.csv`` with their sources. Nothing is fitted to
them. Written are the result file, a report beside it and the table in docs/estimate.md.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.estimate_published import DOCS, PUBLISHED, settings
from lowtide.estimate import Config, configure, estimate
from lowtide.estimate.devices import Device, device
from lowtide.estimate.presets import PRESETS
from lowtide.estimate.suggest import suggest

TABLE = PUBLISHED / "runs_long_context.csv"
MEMORY_WITHIN, TIME_WITHIN = 0.10, 0.20
MAXIMA = (
    ("llama3-8b", 500_000, 1), ("llama3-8b", 3_700_000, 8), ("llama3-8b", 15_000_000, 32),
    ("llama3-8b", 5 << 20, 8), ("qwen3-8b", 1 << 20, 8), ("qwen3-4b", 32_768, 1), ("qwen3-4b", 131_072, 1),
)  # fmt: skip
"""Published longest sequences: model, tokens and H100s, for which `suggest` is asked."""


@dataclass(frozen=True)
class Run:
    """A published run.

    Attributes:
        name: its source, model, tokens and devices, and what of the means it has.
        device: the accelerator.
        config: what was run.
        ran: whether it ran; else it ran out of memory.
        memory_gib: what was printed of one device; ``None`` where nothing was.
        expandable: whether the source sets PyTorch's expandable segments.
        seconds: of a step; ``None`` where not printed.
        source, notes: where it is from, and what should be known.
    """

    name: str
    device: Device
    config: Config
    ran: bool
    memory_gib: float | None
    expandable: bool
    seconds: float | None
    source: str
    notes: str


def read() -> list[Run]:
    """All of them."""
    with open(TABLE, encoding="utf-8", newline="") as file:
        return [_run(row) for row in csv.DictReader(file)]


def _run(row: dict[str, str]) -> Run:
    given = settings(row["settings"])
    config = configure(_preset(row["model"]), **given)
    short = {"cp": "context parallel", "tiles": "tiles", "head_chunks": "slices of heads",
             "offload_activations": "activations on the host",
             "offload_weights": "weights on the host"}  # fmt: skip
    means = [word for name, word in short.items() if name in given]
    means += ["loss in pieces"] if config.loss_form.pieces else ["whole logits"]
    name = f"{row['run']}: {row['model']}, {config.seq:,} tokens on {row['gpus']} {row['device']}"
    return Run(
        f"{name} ({', '.join(means)})", device(row["device"]), config,
        row["outcome"] == "ran", float(row["memory_gib"]) if row["memory_gib"] else None,
        row["run"] != "TRL",
        float(row["seconds"]) if row["seconds"] else None, row["source"], row["notes"],
    )  # fmt: skip


def _preset(name: str) -> str:
    assert name in PRESETS, name
    return name


def scored(run: Run) -> dict[str, Any]:
    """What was published beside what is predicted."""
    found = estimate(replace(run.config, memory_bytes=run.device.memory_bytes), run.device)
    held = found.reserved_expandable_bytes if run.expandable else found.reserved_bytes
    row: dict[str, Any] = {
        "run": run.name, "source": run.source, "ran": run.ran, "predicted_gib": round(held / 2**30, 1),
        "said_to_fit": found.reserved_expandable_bytes <= run.device.memory_bytes,
    }  # fmt: skip
    if run.memory_gib is not None:
        row |= {"memory_gib": run.memory_gib, "memory_off": round(held / 2**30 / run.memory_gib - 1, 4)}
    assert found.time is not None
    row["predicted_seconds"] = round(found.time.total, 1)
    if run.seconds is not None:
        row |= {"seconds": run.seconds, "time_off": round(found.time.total / run.seconds - 1, 4)}
    return row | ({"notes": run.notes} if run.notes else {})


def summary(rows: Iterable[dict[str, Any]]) -> dict[str, int]:
    """How many are within the marks."""
    rows = list(rows)
    memory = [abs(row["memory_off"]) for row in rows if "memory_off" in row]
    time = [abs(row["time_off"]) for row in rows if "time_off" in row]
    return {
        "runs": len(rows),
        "fit_said_right": sum(row["said_to_fit"] == row["ran"] for row in rows),
        "with_memory": len(memory), "memory_within_10": sum(off <= MEMORY_WITHIN for off in memory),
        "with_time": len(time), "time_within_20": sum(off <= TIME_WITHIN for off in time),
    }  # fmt: skip


def suggested() -> list[dict[str, Any]]:
    """What `suggest` says to the published longest sequences, of one sequence a step."""
    found = []
    for model, seq, devices in MAXIMA:
        best = suggest(model, devices=devices, device=device("h100"), count=1, seq=seq, global_batch=1)
        one = best.best[0]
        found.append({
            "model": model, "tokens": seq, "devices": devices, "fits": best.fits,
            "gib": round(one.reserved_expandable_bytes / 2**30, 1), "seconds": round(one.time.total, 1),
            "flags": one.flags(),
        })  # fmt: skip
    return found


HEAD = ["run", "ran", "said to fit", "GiB", "predicted", "off", "seconds", "predicted", "off"]


def lines(rows: Iterable[dict[str, Any]]) -> list[list[str]]:
    """A row of the tables for each run; misses are bold."""

    def off(row: dict[str, Any], name: str, mark: float) -> str:
        if name not in row:
            return ""
        text = f"{100 * row[name]:+.0f} %".replace("-0 %", "0 %").replace("+0 %", "0 %")
        return text if abs(row[name]) <= mark else f"**{text}**"

    found = []
    for row in rows:
        fits = "yes" if row["said_to_fit"] else "no"
        found.append([
            row["run"], "yes" if row["ran"] else "no",
            fits if row["said_to_fit"] == row["ran"] else f"**{fits}**",
            f"{row['memory_gib']:g}" if "memory_gib" in row else "", f"{row['predicted_gib']:.1f}",
            off(row, "memory_off", MEMORY_WITHIN),
            f"{row['seconds']:g}" if "seconds" in row else "", f"{row['predicted_seconds']:.0f}",
            off(row, "time_off", TIME_WITHIN),
        ])  # fmt: skip
    return found


def told(found: dict[str, int]) -> str:
    """The summary in a sentence."""
    return (
        f"{found['fit_said_right']} of {found['runs']} are said right to fit or not, "
        f"{found['memory_within_10']} of {found['with_memory']} are within 10 % of memory, and "
        f"{found['time_within_20']} of {found['with_time']} within 20 % of time."
    )


def table(rows: Iterable[dict[str, Any]]) -> str:
    """The table, as Markdown."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (HEAD, ["---"] * len(HEAD), *lines(rows)))


def chosen(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the documents show: runs with a number, what did not fit, and what is said wrong."""
    return [
        row
        for row in rows
        if "memory_off" in row or "time_off" in row or not row["ran"] or not row["said_to_fit"]
    ]


def main() -> None:
    """Score, print and write."""
    from benchmarks.common import RESULTS, save

    rows = [scored(run) for run in read()]
    found, asked = summary(rows), suggested()
    save("estimate_long_context", rows, summary=found, suggested=asked)
    text = DOCS.read_text(encoding="utf-8")
    start, end = "<!-- long context -->", "<!-- end of long context -->"
    before, rest = text.split(start, 1)
    block = f"{told(found)}\n\n{table(chosen(rows))}"
    DOCS.write_text(f"{before}{start}\n{block}\n{end}{rest.split(end, 1)[1]}", encoding="utf-8")
    notes = [f"- {row['run']}: {row['notes']} ({row['source']})" for row in rows if "notes" in row]
    answers = [
        f"- {one['model']}, {one['tokens']:,} tokens on {one['devices']}: "
        f"{'fits' if one['fits'] else 'does not fit'}, {one['gib']} GiB, {one['seconds']:.0f} s: "
        f"`{one['flags']}`"
        for one in asked
    ]
    report = "\n".join((
        "# Published runs of long sequences", "", told(found),
        "Misses are bold. GiB: published, beside what PyTorch is predicted to reserve, with expandable",
        "segments but for TRL's runs. ALST's are of the whole device, with the driver's context.",
        "", table(rows), "",
        "What `lowtide suggest --for any` answers on H100s, for one sequence a step:", "",
        *answers, "", "Notes and sources:", "", *notes, "",
    ))  # fmt: skip
    (RESULTS / "estimate_long_context.md").write_text(report, encoding="utf-8")
    print(report)


if __name__ == "__main__":
    main()
