"""Every technique on one step: the peak, the time it adds, and whether gradients keep their bits.

python -m benchmarks techniques [--quick]

What docs/which.md shows. One model, so that rows can be compared: a GPT with a vocabulary that makes the loss
as heavy as it is in practice. Techniques that share work among processes are not here; what they hold is
in the results of ``parallel_memory``.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.cases import language
from benchmarks.common import (
    UNSETTLED,
    Case,
    keep_pages,
    median_difference,
    paired,
    quick,
    save,
    step_of,
    total_peak,
)
from benchmarks.versus_checkpoint import checkpoint_blocks
from lowtide import Offload, limit_memory, policies

SHARE = "60%"
"""Budget of what takes one, of the plain step's peak."""

CHUNKS = 8

Model = torch.nn.Module


@dataclass(frozen=True)
class Technique:
    """A row: how the model is built, and what is done to it."""

    name: str
    apply: Callable[[Model, int], object]
    loss_chunks: int = 1


def techniques() -> list[Technique]:
    """The rows; ``apply`` gets the model and 60 % of the plain peak in bytes."""
    return [
        Technique("plain", lambda model, budget: None),
        Technique("torch.utils.checkpoint on every block", lambda model, budget: checkpoint_blocks(model)),
        Technique("full", lambda model, budget: limit_memory(model, policy="full")),
        Technique("sqrt", lambda model, budget: limit_memory(model, policy="sqrt")),
        Technique("selective", lambda model, budget: limit_memory(model, policy="selective")),
        Technique("optimal", lambda model, budget: limit_memory(model, budget)),
        Technique("optimal, min", lambda model, budget: limit_memory(model, "min")),
        Technique(
            "offload to disk",
            lambda model, budget: limit_memory(model, budget, policy=policies.offload("disk")),
        ),
        Technique("mixed", lambda model, budget: limit_memory(model, budget, policy="mixed")),
        Technique("compress, lossless", lambda model, budget: limit_memory(model, policy="compress")),
        Technique(
            "compress, int8", lambda model, budget: limit_memory(model, policy=policies.compress("int8"))
        ),
        Technique(
            "compress, int8, then disk",
            lambda model, budget: limit_memory(model, policy=policies.compress("int8", then=Offload("disk"))),
        ),
        Technique("loss in chunks", lambda model, budget: None, CHUNKS),
        Technique("loss in chunks, optimal", lambda model, budget: limit_memory(model, budget), CHUNKS),
    ]


def case(loss_chunks: int) -> Case:
    """The model of all rows."""
    shape = dict(family="gpt", layers=4, width=384, heads=6, hidden_width=1536, key_value_heads=6)
    return language("gpt 4x384", 1, 512, vocabulary=8192, dropout=0.1, loss_chunks=loss_chunks, **shape)


def gradients(model: Model) -> list[torch.Tensor | None]:
    """Copies of a step's gradients."""
    return [p.grad.clone() if p.grad is not None else None for p in model.parameters()]


def same(ours: list[Any], plain: list[Any]) -> bool:
    """Bit by bit."""
    return all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True) if a is not None)


def main() -> None:
    """Run all rows in turn and write benchmarks/results/techniques.json."""
    warnings.simplefilter("ignore")
    pages = keep_pages()
    rows, steps, models = techniques(), [], []
    plain_peak = 0
    for row in rows:
        model, batch = case(row.loss_chunks).build(), case(1).batch()
        row.apply(model, int(0.6 * plain_peak))
        step = step_of(model, batch)
        for _ in range(UNSETTLED if rows.index(row) > 1 else 1):
            step()
        plain_peak = plain_peak or total_peak(model, batch, step)
        steps.append(step)
        models.append((model, batch))
    found = []
    for (model, batch), step in zip(models, steps, strict=True):
        torch.manual_seed(7)
        step()
        found.append((total_peak(model, batch, step), gradients(model)))
        model.zero_grad(set_to_none=True)
    seconds = paired(steps, 5 if quick() else 9)
    base = statistics.median(seconds[0])
    plain = found[0][1]
    results = []
    for row, (peak, grads), each in zip(rows, found, seconds, strict=True):
        extra = median_difference(each, seconds[0]) / base
        results.append(
            {
                "technique": row.name,
                "peak_bytes": peak,
                "of_plain": peak / plain_peak,
                "seconds": statistics.median(each),
                "extra": extra,
                "same_gradients": same(grads, plain),
            }
        )
        print(f"{row.name:38} {peak / 2**20:7.1f} MiB {100 * extra:+6.1f} %  {results[-1]['same_gradients']}")
    save("techniques", results, model="gpt 4x384, 1 x 512 tokens, vocabulary 8192, dropout 0.1",
         budget=SHARE, loss_chunks=CHUNKS, pages_kept=pages)  # fmt: skip


if __name__ == "__main__":
    main()
