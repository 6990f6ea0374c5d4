"""The learning rate over a run: linear warm-up, then down to a tenth, or level."""

from __future__ import annotations

import math
from functools import partial

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

FINAL_SHARE = 0.1
SHAPES = ("cosine", "linear", "constant")


def share(step: int, steps: int, warmup: int, shape: str = "cosine") -> float:
    """The learning rate of step ``step`` (from 0) of ``steps``, as a share of the peak.

    >>> [round(share(step, steps=6, warmup=2), 3) for step in range(6)]
    [0.5, 1.0, 1.0, 0.775, 0.325, 0.1]
    """
    if step < warmup:
        return (step + 1) / warmup
    if shape == "constant":
        return 1.0
    done = min(1.0, (step - warmup) / max(1, steps - warmup - 1))
    left = 1 - done if shape == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return FINAL_SHARE + (1 - FINAL_SHARE) * left


def make_schedule(
    optimizer: Optimizer, peak: float, done: int, steps: int, warmup: int, shape: str
) -> LambdaLR:
    """PyTorch's scheduler over the whole run. It depends on the step alone, so that a run can go on for more
    steps than it was started with.

    Args:
        optimizer: whose groups get the rate of the next step at once.
        peak: the highest rate.
        done: steps done before.
        steps, warmup: of the whole run.
        shape: one of `SHAPES`.
    """
    for group in optimizer.param_groups:
        group["initial_lr"] = peak
    return LambdaLR(optimizer, partial(share, steps=steps, warmup=warmup, shape=shape), last_epoch=done - 1)
