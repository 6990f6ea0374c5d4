"""GPT and Llama as small as they come, and one step of them."""

from __future__ import annotations

from typing import Any

import torch
from ranks import seeded
from torch import Tensor, nn

import lowtide
from lowtide import parallel as lp
from lowtide.models import preset
from lowtide.models.gpt import GPT
from lowtide.models.llama import Llama

VOCABULARY = 37  # divides by nothing


def config(family: str, **changes: Any) -> Any:
    changes = {"vocabulary": VOCABULARY, "layers": 2, "heads": 4, **changes}
    if family == "gpt":
        changes["key_value_heads"] = changes["heads"]
    return preset(f"{family}-nano", **changes)


def make(family: str, group: Any = None, sequence_parallel: bool = False, **changes: Any) -> nn.Module:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    try:
        return (GPT if family == "gpt" else Llama)(config(family, **changes), group, sequence_parallel)
    finally:
        torch.set_default_dtype(torch.float32)


def tokens() -> Tensor:
    return torch.randint(VOCABULARY, (3, 8), generator=seeded(1))


def distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm().clamp_min(1e-30))


def scoped(function: Any) -> Any:
    def call(*args: Any, **options: Any) -> Any:
        with lowtide.checkpointing():
            return function(*args, **options)

    return call


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    optimizer.zero_grad()
    loss = model(tokens(), tokens().roll(-1, 1)).loss
    loss.backward()
    lp.allreduce_sequence_parallel_gradients(optimizer)
    optimizer.step()
    return loss.item()
