"""What a limited model says: of itself in one line, and in warnings to the code that runs its steps."""

from __future__ import annotations

import sys
import warnings

import torch

from lowtide.budget import format_bytes
from lowtide.plan.plan import Plan


class LowtideWarning(UserWarning):
    """Something that a user should know and that stops nothing: an operation that does not reproduce, a plan
    made again.
    """


def warn(text: str) -> None:
    """Warn whoever called: the warning points at the innermost code that is neither lowtide's nor
    PyTorch's.
    """
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in (
        "lowtide",
        "torch",
    ):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, LowtideWarning, stacklevel=level)


def limit_line(model: torch.nn.Module, budget: str | int | None, kinds: int, latest: Plan | None) -> str:
    """The model, its budget, how many kinds of steps are planned, and the latest plan's peak."""
    words = [
        "no budget"
        if budget is None
        else f"budget {format_bytes(budget) if isinstance(budget, int) else budget}"
    ]
    words.append(
        f"{kinds} kind{'' if kinds == 1 else 's'} of steps planned" if kinds else "nothing planned yet"
    )
    if latest is not None:
        words.append(f"latest predicted peak {format_bytes(latest.predicted_peak_bytes)}")
    return f"<lowtide.Handle of {type(model).__name__}: {', '.join(words)}>"
