"""What a training run did, as data."""

from __future__ import annotations

import platform
from dataclasses import dataclass, field
from typing import Any

import torch

from lowtide.report import Report
from lowtide.train.compare import Comparison
from lowtide.train.options import TrainOptions


@dataclass
class TrainResult:
    """What a run did.

    Attributes:
        options: what was asked for.
        corpus: what it read, in words.
        parameters: of the model.
        first_step: where it began; above 0 after a resume.
        losses: training loss of every step that this run did.
        validation: (steps done, validation loss).
        gradient_norms: before clipping, of every step.
        step_seconds: wall time of every step.
        step_peak_bytes: most live bytes within every step, from its first forward to the end of its optimizer
            step, evaluation and checkpoint included; empty where they cannot be counted. The first step
            plans. Of this process.
        budget_bytes: one for all kinds of steps, see `Handle.budget_bytes`; ``None`` without a budget.
        ranks: what every process did that is its own: its name, its peaks, what its plans were; empty for a
            process alone.
        plans: how many plans were made (one for each shape of step).
        comparison: the plain and the planned step side by side, unless turned off.
        report: all that is shown of them, where results or a report are written.
        stopped: whether the run was interrupted before its last step.
        seconds: of the whole run.
    """

    options: TrainOptions
    corpus: str
    parameters: int
    first_step: int
    losses: list[float] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(default_factory=list)
    gradient_norms: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    step_peak_bytes: list[int] = field(default_factory=list)
    budget_bytes: int | None = None
    plans: int = 0
    comparison: Comparison | None = None
    report: Report | None = None
    stopped: bool = False
    seconds: float = 0.0
    ranks: list[dict[str, Any]] = field(default_factory=list)

    @property
    def last_step(self) -> int:
        """Optimizer steps done, those before a resume included."""
        return self.first_step + len(self.losses)

    @property
    def worst_step(self) -> int | None:
        """The step with the most live memory, counted from 1; ``None`` where memory was not counted."""
        peaks = self.step_peak_bytes
        return self.first_step + peaks.index(max(peaks)) + 1 if peaks else None

    @property
    def steps_over_budget(self) -> list[int]:
        """The steps that took more than the budget, counted from 1: none when it was held."""
        if self.budget_bytes is None:
            return []
        return [
            step
            for step, peak in enumerate(self.step_peak_bytes, self.first_step + 1)
            if peak > self.budget_bytes
        ]

    @property
    def within_budget(self) -> bool | None:
        """Whether every step stayed within the budget, those of the comparison included; ``None`` without a
        budget, or where steps were not counted.
        """
        if self.budget_bytes is None:
            return None
        if self.comparison is not None and self.comparison.within_budget is False:
            return False
        return not self.steps_over_budget if self.step_peak_bytes else None

    def to_json(self) -> dict[str, Any]:
        """Everything as plain values."""
        return {
            "lowtide": "train",
            "options": self.options.to_json(),
            "corpus": self.corpus,
            "parameters": self.parameters,
            "first_step": self.first_step,
            "last_step": self.last_step,
            "losses": self.losses,
            "validation": [{"step": step, "loss": loss} for step, loss in self.validation],
            "gradient_norms": self.gradient_norms,
            "step_seconds": self.step_seconds,
            "step_peak_bytes": self.step_peak_bytes,
            "budget_bytes": self.budget_bytes,
            "within_budget": self.within_budget,
            "worst_step": self.worst_step,
            "steps_over_budget": self.steps_over_budget,
            "plans": self.plans,
            "comparison": None if self.comparison is None else self.comparison.to_json(),
            "stopped": self.stopped,
            "ranks": self.ranks,
            "seconds": self.seconds,
            "machine": {
                "torch": torch.__version__,
                "python": platform.python_version(),
                "processor": platform.machine(),
                "threads": torch.get_num_threads(),
            },
        }
