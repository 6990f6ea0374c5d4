"""What a limited model says of itself in one line."""

from __future__ import annotations

import torch

from lowtide.budget import format_bytes
from lowtide.plan.plan import Plan


def limit_line(model: torch.nn.Module, budget: str | int | None, kinds: int, latest: Plan | None) -> str:
    """The model, its budget, how many kinds of steps are planned, and the latest plan's peak."""
    words = ["no budget" if budget is None else f"budget {format_bytes(budget) if isinstance(budget, int) else budget}"]
    words.append(f"{kinds} kind{'' if kinds == 1 else 's'} of steps planned" if kinds else "nothing planned yet")
    if latest is not None:
        words.append(f"latest predicted peak {format_bytes(latest.predicted_peak_bytes)}")
    return f"<lowtide.Handle of {type(model).__name__}: {', '.join(words)}>"
