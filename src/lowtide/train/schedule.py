"""The learning rate over a run: linear warm-up, then half a cosine down to a tenth."""

from __future__ import annotations

import math

FINAL_SHARE = 0.1


def learning_rate(step: int, steps: int, peak: float, warmup: int) -> float:
    """The learning rate of step ``step`` (from 0) of ``steps``.

    >>> [round(learning_rate(step, steps=6, peak=1.0, warmup=2), 3) for step in range(6)]
    [0.5, 1.0, 1.0, 0.775, 0.325, 0.1]
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup - 1)
    return peak * (FINAL_SHARE + (1 - FINAL_SHARE) * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))
