"""What `make gpu` measured on a card, for docs/results.md and the README.

The rows of one card lie in ``benchmarks/results/gpu_h100.json``, each with the commit that it is of.
"""

from __future__ import annotations

from typing import Any

from benchmarks.gpu.rows import AS_PER_BLOCK
from benchmarks.tables import load, mib, percent, table

Rows = dict[tuple[str, str], dict[str, Any]]

_ORDER = ("plain", "per block", AS_PER_BLOCK, "80 %", "60 %", "min")
_MODELS = ("GPT, eager", "Llama, eager", "GPT, compiled", "Llama, compiled")


def _rows() -> tuple[dict[str, Any], Rows] | None:
    found = load("gpu_h100")
    if not found:
        return None
    rows = {(row["part"], row["row"]): row for row in found["rows"] if row["state"] == "done"}
    return found["about"], rows


def _steps(rows: Rows) -> str:
    """Training steps of every model, side by side."""
    head = ["model", "step", "budget", "predicted", "requested", "reserved", "ms", "extra", "forecast"]
    lines = [
        [
            model,
            name,
            mib(row["budget_bytes"]) if "budget_bytes" in row else "",
            mib(row["predicted_peak_bytes"]) if "predicted_peak_bytes" in row else "",
            mib(row["requested_bytes"]),
            mib(row["reserved_bytes"]),
            f"{1e3 * row['seconds']:.1f}",
            percent(row["extra"]) if "extra" in row else "",
            percent(row["predicted_extra"]) if "predicted_extra" in row else "",
        ]
        for model in _MODELS
        for name in _ORDER
        if (row := rows.get((model, name)))
    ]
    return table(head, lines)


def _moved(rows: Rows) -> str:
    """A long sequence whose saved values wait in main memory."""
    row = rows["offload", "long sequence"]
    named = {
        "lowtide": "lowtide, all in main memory",
        "mixed": "lowtide, moved and recomputed",
        "save_on_cpu": "`save_on_cpu`",
    }
    lines = [
        [
            named.get(one["contender"], one["contender"]),
            mib(one["peak_bytes"]),
            mib(one["moved_bytes"]) if "moved_bytes" in one else "",
            f"{1e3 * one['seconds']:.1f}",
            percent(one["extra"]),
            percent(one["predicted_extra"]) if "predicted_extra" in one else "",
        ]
        for one in row["contenders"]
    ]
    return table(["one sequence of 16,384 tokens", "peak", "moved", "ms", "extra", "forecast"], lines)


def section() -> list[str]:
    """Paragraphs for docs/results.md; none where no card was measured."""
    found = _rows()
    if found is None:
        return []
    about, rows = found
    return [
        "",
        f"## On one {about['gpu']}",
        "",
        f"{about['date']}, torch {about['torch']}, CUDA {about['cuda']}, Python {about['python']}, "
        f"lowtide {about['lowtide']}, commits {about['commit']}; ten minutes of `make gpu`, so some rows are "
        "missing.",
        "",
        "Models of 6 layers, 2,048 features and about 340 million parameters in bfloat16 with flash "
        "attention, on 32,768 tokens; MiB. *Requested* and *reserved* are the process's by PyTorch's "
        "allocator; steps are paired with the plain step of the same engine. *As per block* is a budget of "
        "what checkpointing per block takes. Flash attention's backward does not repeat its own bits; with "
        "deterministic algorithms the gradients of GPT (dropout included) and Llama at 60 % and at the "
        "smallest budget are the plain step's bit by bit.",
        "",
        _steps(rows),
        "",
        _moved(rows),
        "",
        "Steps of GPT with other attentions on fewer tokens requested 6.2 MiB (0.2 %) more than "
        "predicted, which is above the budget in two of four; what plain steps differ by there was seen in "
        "one repetition.",
        "",
        "All rows, misses included: [the card's page](../benchmarks/results/gpu_h100.md).",
    ]


def versus_checkpointing() -> list[list[str]]:
    """The README's rows of steps at the peak of checkpointing; none where no card was measured."""
    found = _rows()
    if found is None:
        return []
    about, rows = found
    card = about["gpu"].removeprefix("NVIDIA ").split()[0]
    plain, per_block = rows["GPT, compiled", "plain"], rows["GPT, compiled", "per block"]
    moved = {one["contender"]: one for one in rows["offload", "long sequence"]["contenders"]}
    return [
        [
            f"GPT of 340 M, one sequence of 16,384 tokens, {card}",
            mib(moved["plain"]["peak_bytes"]),
            mib(moved["per block"]["peak_bytes"]),
            percent(moved["per block"]["extra"]),
            "not run",
            f"**{percent(moved['mixed']['extra'])}**",
        ],
        [
            f"GPT of 340 M, 32,768 tokens, compiled, {card}",
            mib(plain["requested_bytes"]),
            mib(per_block["requested_bytes"]),
            percent(per_block["extra"]),
            f"**{percent(rows['GPT, compiled', AS_PER_BLOCK]['extra'])}**",
            "not run",
        ],
    ]


def brief() -> str:
    """A line for the README; empty where no card was measured."""
    found = _rows()
    if found is None:
        return ""
    about, rows = found
    exact = [row for (part, _), row in rows.items() if part.endswith(", eager") and "budget_bytes" in row]
    hits = sum(abs(row["requested_bytes"] - row["predicted_peak_bytes"]) < 1 << 20 for row in exact)
    same = [row["same_gradients"] for (part, _), row in rows.items() if part.startswith("deterministic")]
    return (
        f"Card: {about['gpu']}, {about['date']}, torch {about['torch']}, lowtide {about['lowtide']}, in "
        f"bfloat16. In [its report](benchmarks/results/gpu_h100.md) the predicted peak is within 1 MiB of "
        "the most bytes that the process requested from PyTorch's allocator, in "
        f"{hits} of {len(exact)} eager steps with a budget. With PyTorch's deterministic "
        f"algorithms, gradients are bitwise the plain step's in {sum(same)} of {len(same)} steps."
    )
