"""Documents to train on, a small run, and what is compared of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from lowtide.train.options import TrainOptions
from lowtide.train.result import TrainResult

POEM = [f"{i} squared is {i * i}.\n".encode() for i in range(400)]


def options(text: Path, **changes: Any) -> TrainOptions:
    small = {
        "model": "gpt-nano",
        "data": text,
        "steps": 3,
        "batch": 4,
        "seq": 32,
        "warmup": 1,
        "eval_every": 2,
        "eval_batches": 1,
        "device": torch.get_default_device().type,
    }
    return TrainOptions(
        **{**small, "grad_accum": 2, "budget": None, "policy": "keep_all", "compare": False, **changes}
    )


def trail(result: TrainResult) -> list[float]:
    return [*result.losses, *result.gradient_norms, *(loss for _, loss in result.validation)]
