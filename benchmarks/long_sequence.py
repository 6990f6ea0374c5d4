"""Long sequences: layers whose saved values wait on the next tier, against `save_on_cpu` and checkpointing per block.

python -m benchmarks long_sequence

On a GPU at 8k to 64k tokens in bfloat16, with pinned main memory as the next tier; on a CPU at 512 and 1k in float32, with the disk. A row *holds* when the
peak is the plan's, what the tier reserves is what the plan's layout takes, and the step takes at most 5 % longer than the plain one; whether the link
suffices for that is in the row: the plan's own prediction.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

import lowtide
from benchmarks.cases import gpt
from benchmarks.common import keep_pages, median_difference, paired, rounds_within, save, total_peak, twins
from benchmarks.versus_checkpoint import checkpoint_blocks
from lowtide import policies

LAYERS = 4


def lengths_on(device: str) -> tuple[tuple[int, ...], int]:
    """Tokens of a step, and features."""
    return ((8192, 16384, 32768, 65536), 2048) if device == "cuda" else ((512, 1024), 256)


def rows_of(tokens: int, width: int, device: str, links: dict[str, Any]) -> list[dict[str, Any]]:
    """One row a contender."""
    case = gpt(LAYERS, width, batch=1, sequence=tokens)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    tier = "host" if device == "cuda" else "disk"
    plain, moved, saved, rival = (model.to(device, dtype) for model in twins(case.build(), 4))
    batch = {name: value.to(device) for name, value in case.batch().items()}
    checkpoint_blocks(rival)
    handle = lowtide.limit_memory(moved, policy=policies.offload(tier, links=links))
    pinned = device == "cuda"
    around: dict[str, tuple[torch.nn.Module, Callable[[], AbstractContextManager[Any]]]] = {
        "plain": (plain, nullcontext),
        "lowtide": (moved, nullcontext),
        "save_on_cpu": (saved, lambda: torch.autograd.graph.save_on_cpu(pin_memory=pinned)),
        "per block": (rival, nullcontext),
    }
    steps = {name: _step(model, batch, context, device) for name, (model, context) in around.items()}
    for step in steps.values():
        for _ in range(3):
            step()
    peaks = {name: total_peak(around[name][0], batch, step) for name, step in steps.items()}
    seconds = dict(zip(steps, paired(list(steps.values()), rounds_within(list(steps.values()), 40.0, least=7)), strict=True))
    base = statistics.median(seconds["plain"])
    plan = handle._limiter.latest.plan if handle._limiter.latest is not None else None
    assert plan is not None
    reserved = sum(t.arena.static_bytes for t in handle._limiter.stores.tiers.values())
    rows = []
    for name in steps:
        extra = median_difference(seconds[name], seconds["plain"]) / base
        mine = name == "lowtide"
        predicted = plan.predicted_peak_bytes if mine else peaks[name]
        rows.append(
            {
                "tokens": tokens,
                "contender": name,
                "peak_bytes": peaks[name],
                "predicted_peak_bytes": predicted,
                "seconds": statistics.median(seconds[name]),
                "extra": extra,
                "predicted_extra": plan.predicted_extra_seconds / base if mine else None,
                "moved_bytes": sum(m.encoded_bytes for m in plan.moves) if mine else None,
                "reserved_bytes": reserved if mine else None,
                "holds": not mine or (abs(peaks[name] / predicted - 1) <= 0.01 and extra <= 0.05),
            }
        )
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    """Run and write benchmarks/results/long_sequence_{device}.json."""
    warnings.simplefilter("ignore")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    pages = keep_pages()
    lengths, width = lengths_on(device)
    links = lowtide.measure_links("host" if device == "cuda" else "disk", device=device)
    rows: list[dict[str, Any]] = []
    for tokens in lengths:
        rows += rows_of(tokens, width, device, links)
        save(f"long_sequence_{device}", rows, layers=LAYERS, width=width, pages_kept=pages)


def _step(
    model: torch.nn.Module, batch: dict[str, torch.Tensor], around: Callable[[], AbstractContextManager[Any]], device: str
) -> Callable[[], None]:
    def step() -> None:
        model.zero_grad(set_to_none=True)
        with around():
            loss = model(**batch).loss
        loss.backward()
        if device == "cuda":
            torch.cuda.synchronize()

    return step


if __name__ == "__main__":
    main()
