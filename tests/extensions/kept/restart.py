"""One process of `test_kept.py`: steps of several models under limits that keep their plans in a folder."""

from __future__ import annotations

import json
import logging
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import lowtide
from lowtide.models import preset
from lowtide.models.gpt import GPT


def gpt() -> nn.Module:
    return GPT(preset("gpt-nano"))


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        attention_dropout=0.1,
    )
    return LlamaForCausalLM(config)


def loss_of(model: nn.Module, rows: int, length: int) -> torch.Tensor:
    tokens = torch.randint(256, (rows, length), generator=torch.Generator().manual_seed(rows))
    result = model(tokens, tokens) if isinstance(model, GPT) else model(input_ids=tokens, labels=tokens)
    return result.loss


class Log(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def case(make: Callable[[], nn.Module], budget: str | int, folder: Path, sizes: Any) -> dict[str, Any]:
    log = Log()
    logging.getLogger("lowtide").addHandler(log)
    torch.manual_seed(0)
    model = make()
    twin = make()
    twin.load_state_dict(model.state_dict())
    same, peaks = True, []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", lowtide.LowtideWarning)
        handle = lowtide.limit_memory(model, budget, plans=folder)
        for seed, (rows, length) in enumerate(sizes):
            for one in (model, twin):
                one.zero_grad()
                torch.manual_seed(seed)
                loss_of(one, rows, length).backward()
            peaks.append(handle.measured_peak_bytes)
            both = zip(model.parameters(), twin.parameters(), strict=True)
            same &= all(torch.equal(a.grad, b.grad) for a, b in both)  # type: ignore[arg-type]
        found = {
            "same_bits": same,
            "peaks": peaks,
            "budget_bytes": handle.budget_bytes,
            "plans": len(handle.plans),
            "profiled": sum("profiled" in line for line in log.lines),
            "solved": sum(line.startswith("planned") for line in log.lines),
            "said": [str(one.message) for one in said if issubclass(one.category, lowtide.LowtideWarning)],
        }
        handle.remove()
    logging.getLogger("lowtide").removeHandler(log)
    return found


def main() -> None:
    logging.getLogger("lowtide").setLevel(logging.INFO)
    names = sys.argv[2:]
    folder, sizes = Path(sys.argv[1]), [(4, 48), (4, 64), (4, 64), (4, 64), (2, 64), (4, 48)]
    found = {
        f"{make.__name__} {budget}": case(make, budget, folder / f"{make.__name__}{budget}", sizes)
        for make in (gpt, llama)
        for budget in ("60%", "min", 4 << 20)
        if not names or f"{make.__name__} {budget}" in names
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
