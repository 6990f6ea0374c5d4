"""`lowtide.chunked_loss` beside the plain loss and PyTorch's own fused one: peak, time, distance.

python -m benchmarks chunked_loss [--quick]

What docs/techniques/chunked_loss.md shows: an output layer with its loss alone, and a model of transformers.
Liger's fused loss joins where its library is installed and runs (it needs Triton).
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lowtide
from benchmarks.common import keep_pages, paired, quick, save
from lowtide import meter

TOKENS, WIDTH, VOCABULARY = 1024, 512, 32768
LAYERS = 2


class Head(nn.Module):
    """An output layer and its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, hidden: Tensor, labels: Tensor, reduction: str = "mean") -> Tensor:
        return F.cross_entropy(self.head(hidden), labels, reduction=reduction)


class Torch(Head):
    """The same by PyTorch's fused function, in pieces of its own choice."""

    def forward(self, hidden: Tensor, labels: Tensor, reduction: str = "mean") -> Tensor:
        options = torch.nn.LinearCrossEntropyOptions()
        return F.linear_cross_entropy(hidden, self.head.weight, labels, reduction=reduction, options=options)


class Liger(Head):
    """The same by Liger's fused loss."""

    def __init__(self) -> None:
        super().__init__()
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss  # pyright: ignore

        self.fused: Any = LigerFusedLinearCrossEntropyLoss()

    def forward(self, hidden: Tensor, labels: Tensor, reduction: str = "mean") -> Tensor:
        return self.fused(self.head.weight, hidden, labels)


def head_step(model: nn.Module, reduction: str) -> Callable[[], None]:
    """Forward and backward of the output layer."""
    torch.manual_seed(1)
    hidden = torch.randn(TOKENS, WIDTH, requires_grad=True)
    labels = torch.randint(VOCABULARY, (TOKENS,))

    def step() -> None:
        hidden.grad = None
        model.zero_grad(set_to_none=True)
        model(hidden, labels, reduction).mean().backward()

    return step


def model_step(model: nn.Module) -> Callable[[], None]:
    """Forward and backward of a model of transformers."""
    torch.manual_seed(1)
    tokens = torch.randint(VOCABULARY, (1, TOKENS))

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(input_ids=tokens, labels=tokens).loss.backward()

    return step


def llama() -> nn.Module:
    """A small Llama with a large vocabulary."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=4 * WIDTH, num_hidden_layers=LAYERS,
            num_attention_heads=8, num_key_value_heads=8,
        )
    )  # fmt: skip


def cases() -> list[tuple[str, str, nn.Module, Callable[[], None]]]:
    """What is run, in which way, on which model, and its step."""
    found = []
    torch.manual_seed(0)
    heads: list[tuple[str, nn.Module]] = [("plain", Head())]
    for pieces in (2, 8, 32):
        heads.append((f"in {pieces} pieces", Head()))
        lowtide.chunked_loss(heads[-1][1], pieces)
    heads.append(("torch.nn.functional.linear_cross_entropy", Torch()))
    try:
        heads.append(("Liger's fused loss", Liger()))
    except ImportError:
        print("Liger is not installed: it is not measured")
    for _, model in heads[1:]:
        model.load_state_dict(heads[0][1].state_dict())
    found += [("output layer, mean", way, model, head_step(model, "mean")) for way, model in heads]
    for way, model in heads[:1] + heads[2:3]:
        found.append(("output layer, a loss for each token", way, model, head_step(model, "none")))
    plain = llama()
    chunked, limited = copy.deepcopy(plain), copy.deepcopy(plain)
    lowtide.chunked_loss(chunked, 8)
    lowtide.chunked_loss(limited, 8)
    ways = ("plain", "in 8 pieces", "in 8 pieces, limited to its least")
    for way, model in zip(ways, (plain, chunked, limited), strict=True):
        found.append((f"Llama of {LAYERS} layers", way, model, model_step(model)))
    lowtide.limit_memory(limited, "min", progress=False)
    for _ in range(13):  # until its plan is settled
        found[-1][-1]()
    return found


def main() -> None:
    """Measure, and write the result file."""
    pages = keep_pages()
    found = cases()
    rows: list[dict[str, Any]] = []
    base: dict[str, tuple[int, list[float], list[Any]]] = {}
    # seconds of the processor: other processes of the machine do not count
    seconds = paired([step for *_, step in found], 3 if quick() else 5, clock=time.process_time)
    for (what, way, model, step), each in zip(found, seconds, strict=True):
        model.zero_grad(set_to_none=True)
        peak = meter.measure(step, timeline=False).peak_bytes
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        plain = base.setdefault(what, (peak, each, gradients))
        far = max(
            float((own - other).abs().max() / other.abs().max())
            for own, other in zip(gradients, plain[2], strict=True)
        )
        rows.append(
            {
                "what": what,
                "way": way,
                "peak_bytes": peak,
                "of_plain": peak / plain[0],
                "seconds": statistics.median(each),
                "extra": statistics.median(a / b - 1 for a, b in zip(each, plain[1], strict=True)),
                "gradients_differ_by": far,
            }
        )
        print(f"{what:36} {way:42} {peak / 2**20:8.1f} MiB {100 * rows[-1]['extra']:+6.1f} %  {far:.0e}")
    save(
        "chunked_loss", rows, tokens=TOKENS, width=WIDTH, vocabulary=VOCABULARY,
        logits_bytes=4 * TOKENS * VOCABULARY, pages_kept=pages,
    )  # fmt: skip


if __name__ == "__main__":
    main()
