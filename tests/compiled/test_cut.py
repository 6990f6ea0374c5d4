"""What runs again, and what is cut, lies where its memory is least."""

from __future__ import annotations

import torch
from joint_graphs import ROWS, Look, look_at
from torch import nn

from lowtide.compiled.choose_cuts import Asked, choice_of
from lowtide.compiled.price import CandidateCuts
from lowtide.plan.choose import at_or_smallest


class Tied(nn.Module):
    """An embedding that is the head, too, and between them more than the logits take."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(2048, 16)
        self.up, self.down = nn.Linear(16, 8192, bias=False), nn.Linear(8192, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.down(nn.functional.gelu(self.up(self.tokens(x))))
        return nn.functional.cross_entropy(hidden @ self.tokens.weight.t(), x)


def planned_and_taken(found: Look) -> tuple[int, int]:
    """What the least plan is predicted to take, and what the text of its cut says."""
    cuts = CandidateCuts(found.joint, {})
    choice = choice_of(cuts.timeline_alone(), [cuts], Asked("min"))
    plan = at_or_smallest(choice.step.graph, 1)
    return plan.predicted_peak_bytes, choice.peak((cuts.of(plan, choice.step, 0),))


class Head(nn.Module):
    """A head and its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(16, 2048, bias=False)

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(x), targets)


def test_a_product_that_is_added_late_runs_where_it_stands() -> None:
    planned, taken = planned_and_taken(look_at(Tied(), torch.randint(2048, (ROWS,))))
    hidden, logits = 4 * ROWS * 8192, 4 * ROWS * 2048
    assert taken == planned
    assert taken < 2 * hidden + 1.5 * logits  # beside which the gradient of the logits was live


def test_what_a_kernel_writes_over_what_it_reads_counts_once() -> None:
    planned, taken = planned_and_taken(look_at(Head(), torch.randn(ROWS, 16), torch.randint(2048, (ROWS,))))
    assert taken == planned < 2 * 4 * ROWS * 2048
