"""Put measured figures into the documents: every figure between marks is made from a result file.

python -m benchmarks figures

A page says ``<!-- figure: NAME -->`` and ``<!-- end of figure -->``; what stands between them is
written here, by the function of that name. ``tests/docs/test_figures.py`` sees that it is what the result
files say.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS

DOCS = RESULTS.parent.parent / "docs"
MARKS = re.compile(r"(<!-- figure: (\w+) -->\n)(.*?)(<!-- end of figure -->)", re.DOTALL)


def load(name: str) -> dict[str, Any]:
    """A result file."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def where(found: dict[str, Any]) -> str:
    """On what machine, and from which file."""
    machine = found["machine"]
    return f"{machine['processor']}, {machine['cores']} cores, torch {machine['torch']}, {machine['date']}"


def table(head: list[str], rows: list[list[str]]) -> str:
    """A table of Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def mib(count: float) -> str:
    """Bytes as MiB."""
    return f"{count / 2**20:,.1f}"


def percent(share: float, digits: int = 1) -> str:
    """A share with its sign."""
    return f"{100 * share:+.{digits}f} %"


def _techniques(*names: str) -> str:
    found = load("techniques")
    rows = [row for row in found["rows"] if not names or row["technique"] in names]
    body = [
        [
            row["technique"],
            mib(row["peak_bytes"]),
            f"{100 * row['of_plain']:.0f} %",
            percent(row["extra"]),
            "yes" if row["same_gradients"] else "no",
        ]
        for row in rows
    ]
    head = ["", "peak MiB", "of plain", "extra time", "same gradients"]
    if found["machine"].get("quick"):  # too few rounds for times
        head, body = head[:3] + head[4:], [row[:3] + row[4:] for row in body]
    text = (
        f"{found['model']}; *optimal*, *offload* and *mixed* were given {found['budget'].rstrip('%')} % of "
        f"the plain peak; the loss in {found['loss_chunks']} chunks ({where(found)}; "
        "`python -m benchmarks techniques`)."
    )
    return f"{table(head, body)}\n\n{text}"


def which() -> str:
    """All techniques that one process has."""
    return _techniques()


def recompute() -> str:
    """Fixed rules beside PyTorch's checkpointing."""
    return _techniques("plain", "torch.utils.checkpoint on every block", "full", "sqrt", "selective")


def loss_in_pieces() -> str:
    """The loss in pieces beside the plain one and PyTorch's own."""
    found = load("chunked_loss")
    body = [
        [
            row["what"],
            row["way"],
            mib(row["peak_bytes"]),
            f"{100 * row['of_plain']:.0f} %",
            percent(row["extra"]),
            f"{row['gradients_differ_by']:.0e}" if row["gradients_differ_by"] else "0",
        ]
        for row in found["rows"]
    ]
    rounds = "three" if found["machine"].get("quick") else "five"
    head = ["", "loss", "peak MiB", "of plain", "extra time", "gradients differ by"]
    text = (
        f"{found['tokens']:,} tokens, width {found['width']}, vocabulary {found['vocabulary']:,}, float32: "
        f"the logits are {mib(found['logits_bytes'])} MiB. Peaks are above what is resident before the step; "
        f"times are the processor's, of {rounds} rounds; gradients differ by so much of the weight's largest "
        f"({where(found)}; `python -m benchmarks chunked_loss`)."
    )
    return f"{table(head, body)}\n\n{text}"


def tiles() -> str:
    """The smallest budgets with tiles and without."""
    found, body = load("tiles"), []
    for row in found["rows"]:
        for way in row["ways"]:
            above = mib(way["peak_bytes"] - row["own_bytes"])
            time = percent(way["beside_recomputation"])
            differs = f"{way['difference']:.0e}" if way["difference"] else "none"
            body.append([row["model"], way["way"], above, time, differs])
    head = ["step", "", "peak MiB", "time beside recomputation", "gradients differ by"]
    text = (
        "Peaks are measured, beyond parameters and gradients. *Tiles, the same budget* is given what "
        "recomputation needs at least. Gradients: the largest difference, of a parameter's largest gradient "
        f"({where(found)}; `python -m benchmarks tiles`)."
    )
    return f"{table(head, body)}\n\n{text}"


def longest() -> str:
    """The longest sequence of a 4B model on one card, by forecast."""
    found, body = load("long_context_forecast"), []
    names = {
        "recomputing": "recomputation",
        "moves": "recomputation and moves",
        "tiles": "recomputation and tiles",
        "all": "recomputation, tiles and moves",
    }
    rows = {row["way"]: row for row in found["rows"]}
    for way, name in names.items():
        row = rows[way]
        at, aim = row["at_longest"], row.get("at_aim")
        shorter = f"{percent(aim['extra'])} with {row['aim_tokens']:,} tokens" if aim else ""
        moved = f"{at['moved_bytes'] / 2**30:,.0f}"
        body.append([name, f"{row['longest_tokens']:,}", percent(at["extra"]), moved, shorter])
    head = ["a plan may use", "longest sequence", "extra time", "GiB moved", "extra time, shorter"]
    row = rows["all"]
    text = (
        f"A Qwen3 of 4 billion parameters in bfloat16, {row['layers']} layers, one sequence. "
        f"{row['room_bytes'] / 2**30:,.1f} GiB of the card are for PyTorch's tensors, and the optimizer's "
        f"state is in main memory. Moves may take {row['host_budget_bytes'] >> 30} GiB of main memory. "
        "*Extra time* is over the same step on a card with enough memory. Nothing ran on a card: the steps "
        "are planned on fake tensors, without what kernels allocate for themselves "
        f"({where(found)}; `python -m benchmarks.long_context_forecast`)."
    )
    return f"{table(head, body)}\n\n{text}"


def scopes() -> str:
    """What recording costs where operations are tiny."""
    found = load("recorder")
    row = found["rows"][0]
    return (
        f"The worst case for any checkpointing: {row['blocks']} blocks of operations so small that nothing "
        f"but overhead counts. Plain {row['plain_ms']:.1f} ms, every block recomputed by lowtide "
        f"{row['full_ms']:.1f} ms, by `torch.utils.checkpoint` {row['checkpoint_ms']:.1f} ms "
        f"({where(found)}; `python -m benchmarks recorder`)."
    )


def planner() -> str:
    """Against checkpointing every block, at that peak."""
    found = load("versus_checkpoint")
    body = [
        [
            row["model"],
            mib(row["plain_peak_bytes"]),
            mib(row["rival_peak_bytes"]),
            percent(row["rival_extra"]),
            percent(row["planned_extra"]),
        ]
        for row in found["rows"]
    ]
    head = ["model", "plain MiB", "every block MiB", "every block", "lowtide at that peak"]
    text = (
        "*Every block* is `torch.utils.checkpoint`; lowtide got its peak as the budget. Times are extra "
        f"times over the plain step ({where(found)}; `python -m benchmarks versus_checkpoint`)."
    )
    return f"{table(head, body)}\n\n{text}"


def offload() -> str:
    """A large step in half of its memory."""
    found = load("disk_tier")
    body = [
        [row["contender"], mib(row["peak_bytes"]), percent(row["extra"]), mib(row["written_bytes"])]
        for row in found["rows"]
    ]
    link = found["link"]
    text = (
        f"One step in half of its memory, with a disk of {link['write_bytes_per_second'] / 1e6:,.0f} MB/s "
        f"out and {link['read_bytes_per_second'] / 1e6:,.0f} MB/s in ({where(found)}; "
        "`python -m benchmarks disk_tier`)."
    )
    return f"{table(['', 'peak MiB', 'extra time', 'MiB written'], body)}\n\n{text}"


def codecs() -> str:
    """Bytes and what they do to a training."""
    found = load("codecs")
    body = [
        [
            row["codec"],
            f"{100 * row['all_saved_bytes_after'] / row['all_saved_bytes']:.0f} %",
            percent(row["mean_over_plain"], 2),
        ]
        for row in found["rows"]
        if "all_saved_bytes" in row
    ]
    text = (
        f"A small GPT: the share of saved bytes that is left, and the loss after {found['steps']} steps over "
        f"the plain training's ({where(found)}; `python -m benchmarks codecs`)."
    )
    return f"{table(['codec', 'saved bytes left', 'loss'], body)}\n\n{text}"


def tensor_parallel() -> str:
    """What a layer holds on each rank."""
    found = load("parallel_memory")
    body = [
        [row["row"], str(row["t"]), f"{row['layer_bytes']:,}", f"{row['formula_bytes']:,}"]
        for row in found["rows"]
        if row["t"] in (1, 4)
    ]
    text = (
        "Bytes that one layer of a small GPT keeps for backward on the rank that keeps most, and what "
        f"table 2 of arXiv 2205.05198 says ({where(found)}; `python -m benchmarks parallel_memory`)."
    )
    return f"{table(['layer', 'ranks', 'measured', 'formula'], body)}\n\n{text}"


def pipelines() -> str:
    """The first stage within budgets."""
    found = load("parallel_memory")
    body = [
        [str(row["p"]), str(row["in_flight"]), row["budget"], mib(row["step_peak_bytes"])]
        for row in found["pipeline"]
        if row["rank"] == 0
    ]
    head = ["stages", "micro-batches in flight", "step", "MiB that a step adds"]
    return (
        f"{table(head, body)}\n\nThe first stage of a small GPT "
        f"({where(found)}; `python -m benchmarks parallel_memory`)."
    )


def host_optimizer() -> str:
    """Steps over a simulated link."""
    found = load("host_optimizer")
    shown = [
        row
        for row in found["rows"]
        if row["schedule"] != "pipelined" or row["host_fraction"] in (0.0, 0.3, 1.0)
    ]
    body = [
        [row["schedule"], f"{100 * row['host_fraction']:.0f} %", f"{row['seconds']:.3f}"] for row in shown
    ]
    ratios = [row["throughput_ratio"] for row in found["throughput"]]
    text = (
        "16.8 M parameters behind a simulated link with the ratios of arXiv 2101.06840. The update itself "
        f"runs at {min(ratios):.2f} to {max(ratios):.2f} of the speed of `torch.optim.AdamW(fused=True)` "
        f"({where(found)}; `python -m benchmarks host_optimizer`)."
    )
    return f"{table(['schedule', 'on the host', 's a step'], body)}\n\n{text}"


def report_page() -> str:
    """How large the report's page is, and how soon it stands."""
    found = load("report_page")
    body = [
        [
            row["model"],
            str(row["operations"]),
            f"{row['bytes'] / 1e6:.2f}",
            *(
                f"{row[key]:.2f}" if key in row else "not run"
                for key in ("open_seconds_390", "open_seconds_1440")
            ),
        ]
        for row in found["rows"]
    ]
    head = ["model", "operations", "MB", "s to open at 390 pixels", "at 1440 pixels"]
    return (
        f"{table(head, body)}\n\nHeadless Chromium {found['browser']}, until charts are drawn "
        f"({where(found)}; `python -m benchmarks report_page`)."
    )


def knob_peak() -> str:
    """The peak as PyTorch's knob goes down, beside budgets in bytes."""
    found = load("knob_peak")
    layers = sorted({row["layers"] for row in found["rows"]})
    ways = dict.fromkeys((row["way"], row["asked"]) for row in found["rows"])
    cells = {(row["layers"], row["way"], row["asked"]): row for row in found["rows"]}

    def shown(row: dict[str, Any]) -> str:
        if "refused" in row:
            return "refused"
        budget = f" of {mib(row['budget_bytes'])}" if "budget_bytes" in row else ""
        return f"{mib(row['peak_bytes'])}{budget}"

    body = [
        [
            f"`activation_memory_budget` {asked}"
            if way == "knob"
            else f'lowtide, `"{asked}"`'
            if isinstance(asked, str)
            else f"lowtide, {100 * asked:.0f} % of the knob's lowest peak",
            *(shown(cells[count, way, asked]) for count in layers),
        ]
        for way, asked in ways
    ]
    text = (
        f"MiB above the parameters; of lowtide's, beside its budget. {found['model']} ({where(found)}; "
        "`python -m benchmarks knob_peak`)."
    )
    return f"{table(['', *(f'{count} layers' for count in layers)], body)}\n\n{text}"


def context_parallel() -> str:
    """A ring beside an exchange of heads."""
    found = load("context_parallel")
    body = []
    for row in found["rows"]:
        ring, heads, share = row["ring"], row["all-to-all"], row["ring_over_all_to_all"]
        body.append(
            [
                f"{row['length']:,}",
                f"{row['heads']} and {row['key_heads']}",
                f"{mib(ring['sent_bytes'])} / {mib(heads['sent_bytes'])}",
                f"{mib(ring['saved_bytes'])} / {mib(heads['saved_bytes'])}",
                f"{share['median']:.2f} ({share['low']:.2f} to {share['high']:.2f})",
                row["auto"],
            ]
        )
    head = [
        "tokens", "heads of queries and keys", "MiB sent by a rank: ring / all-to-all", "MiB saved by a rank",
        "time of a ring as a part of all-to-all's", "`auto` chooses",
    ]  # fmt: skip
    text = (
        f"Llama of {found['layers']} layers {found['width']} wide, float32, {found['ranks']} processes over "
        "Gloo. Sent and saved: what attention exchanges and what autograd keeps in a step. Times: medians of "
        f"pairs with the quartiles, beside other work on the machine ({where(found)}; "
        "`python -m benchmarks context_parallel`)."
    )
    return f"{table(head, body)}\n\n{text}"


FIGURES: dict[str, Callable[[], str]] = {
    made.__name__: made
    for made in (
        which, recompute, scopes, planner, offload, codecs, tensor_parallel, pipelines, host_optimizer,
        loss_in_pieces, report_page, knob_peak, longest, tiles, context_parallel,
    )
}  # fmt: skip


def filled(text: str) -> str:
    """A page with its figures as the result files have them."""
    return MARKS.sub(lambda found: f"{found[1]}{FIGURES[found[2]]()}\n{found[4]}", text)


def pages() -> list[Path]:
    """The documents that show figures."""
    return [path for path in sorted(DOCS.rglob("*.md")) if MARKS.search(path.read_text())]


def main() -> None:
    """Write them."""
    for path in pages():
        path.write_text(filled(path.read_text()))
    print(f"figures on {len(pages())} pages")


if __name__ == "__main__":
    main()
