"""The tables of stores, codecs and layouts in docs/results.md."""

from __future__ import annotations

from typing import Any

from benchmarks.tables import load, mib, percent, table, where


def disk(found: dict[str, Any]) -> str:
    """The table of a large step in half of its memory."""
    rows = [
        [
            row["contender"],
            mib(row["peak_bytes"]),
            f"{row['seconds']:.2f}",
            percent(row["extra"]),
            percent(row["predicted_extra"]),
            percent(row["prediction_error"]),
            f"{mib(row['written_bytes'])} / {mib(row['read_bytes'])}",
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
    return table(head, rows)


def mixes(found: dict[str, Any]) -> str:
    """The table of mixes over links of every speed."""
    rows = [
        [
            f"{row['share']:.0%}",
            f"{row['bytes_per_second'] / 1e6:,.0f}",
            percent(row["extra"]),
            percent(row["extra_by_recomputing"]),
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
    return table(head, rows)


def codecs(found: dict[str, Any]) -> str:
    """The table of codecs: bytes, speed, gradients and losses."""
    rows = []
    for row in found["rows"]:
        apart = sorted(row["over_plain"].values())
        losses = f"**{percent(sum(apart) / len(apart), 2)}**" + (
            f" ({percent(apart[0], 2)} to {percent(apart[-1], 2)})" if len(apart) > 1 else ""
        )
        if row["codec"] == "none":
            rows.append(["none, a millionth off", *[""] * 6, losses, str(len(apart)), ""])
            continue
        by_chance = row["gradient_deviation"] / found["draws"] ** 0.5
        rows.append(
            [
                row["codec"],
                f"{mib(row['encoded_bytes'])} of {mib(row['moved_bytes'])} "
                f"({row['encoded_bytes'] / row['moved_bytes']:.3f})",
                f"{mib(row['all_saved_bytes_after'])} of {mib(row['all_saved_bytes'])}",
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
    return table([*head, f"loss after {found['steps']} steps", "seeds", "holds"], rows)


def packings(found: dict[str, Any]) -> str:
    """The table of perfect packings: one line for each share of coinciding cuts."""
    rows = []
    for share in sorted({row["share"] for row in found["rows"]}):
        mine = [row for row in found["rows"] if row["share"] == share]
        solved = [row for row in mine if row["holds"]]
        missed = [f"{row['buffers']} ({percent(row['over_bound'], 2)})" for row in mine if not row["holds"]]
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
    return table(
        ["coinciding cuts", "at capacity", "median s", "slowest s", "missed: buffers (over capacity)"], rows
    )


def layouts() -> list[str]:
    """What is known of static layouts."""
    parts: list[str] = []
    traces, hard, public = load("layout_traces"), load("layout_packings"), load("layout_public")
    if traces:
        rows = traces["rows"]
        above = [
            [r["name"], str(r["buffers"]), percent(r["over_bound"], 3), f"{r['seconds']:.1f}"]
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
            where(traces),
            "",
            text,
            "",
            table(["step", "buffers", "over the bound", "s"], above),
        ]
    if hard:
        text = (
            f"Perfect packings of {min(r['buffers'] for r in hard['rows'])} to "
            f"{max(r['buffers'] for r in hard['rows'])} buffers, a square of 1024 x 1024 cut by guillotine; "
            "the more cuts in time coincide, the more buffers begin at one moment and the harder the "
            f"search. At most {hard['seconds']:g} s each on one core."
        )
        parts += ["", "### Hard packings", "", where(hard), "", text, "", packings(hard)]
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
                "yes" if r["holds"] else percent(r["over_capacity"], 2),
                f"{r['seconds']:.2f}",
                r["source"],
            ]
            for r in rows
        ]
        head = ["instance", "buffers", "load", "at capacity", "s", "found by"]
        parts += ["", "### Published packings", "", where(public), "", text, "", table(head, cells)]
    return parts


def stores() -> list[str]:
    """What is known of moving values."""
    parts: list[str] = []
    found = load("disk_tier")
    if found:
        text = (
            f"A step with a plain peak of {found['rows'][0]['peak_bytes'] / 2**30:.2f} GiB in half of it, "
            f"with the disk as the next tier ({found['link']['write_bytes_per_second'] / 1e6:,.0f} MB/s out, "
            f"{found['link']['read_bytes_per_second'] / 1e6:,.0f} MB/s in), in turn, medians of the "
            "differences. It *holds* when the peak is within the budget, the bytes written and read are the "
            "plan's, the gradients the plain step's bit by bit, and the predicted time of the step within "
            "15 %."
        )
        parts += ["", "## A large step in half of its memory", "", where(found), "", text, "", disk(found)]
    found = load("mixes")
    if found:
        text = (
            f"Plans of `policies.mixed` for {found['rows'][0]['model']}, over links of given speeds: "
            "predicted extra time and its gap to the bound. It *holds* at a gap of at most 1 % of the step."
        )
        parts += ["", "## Recompute and move together", "", where(found), "", text, "", mixes(found)]
    found = load("codecs")
    if found:
        text = (
            "A small GPT. Bytes are of what the policy compresses, and of all that autograd saves. The "
            f"gradient's bias is that of the mean of {found['draws']} draws, *by chance* what a codec "
            "without bias shows. Losses are compared with the plain training's: the mean, the least and the "
            "largest difference over the seeds. The first row is two plain trainings that begin a millionth "
            "apart in one parameter: nearer than that no codec can be told from none. It *holds* where the "
            "mean is within 1 %."
        )
        parts += ["", "## Codecs", "", where(found), "", text, "", codecs(found)]
    return parts + layouts()
