"""Shared models under a budget: one plan for all ranks, recomputed collectives issued by all, the same gradients bit by bit."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import needs_gloo, on_ranks
from test_collectives_count import Collectives
from torch import Tensor, nn

import lowtide
from lowtide import parallel as lp
from lowtide.models import preset
from lowtide.models.gpt import GPT
from lowtide.models.llama import Llama

pytestmark = needs_gloo


def make(family: str, sequence_parallel: bool, **changes: Any) -> nn.Module:
    torch.manual_seed(0)
    changes = {"vocabulary": 64, "layers": 3, "dropout": 0.1 if family == "gpt" else 0.0, "fused_attention": False, **changes}
    return (GPT if family == "gpt" else Llama)(preset(f"{family}-nano", **changes), dist.group.WORLD, sequence_parallel)


def tokens() -> Tensor:
    return torch.randint(64, (16, 32), generator=torch.Generator().manual_seed(1))


def train(model: nn.Module, steps: int = 4) -> tuple[list[Tensor], list[list[str]]]:
    """Losses, gradients and weights, and the collectives of each backward."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    found: list[Tensor] = []
    seen: list[list[str]] = []
    for step in range(steps):
        torch.manual_seed(step)
        loss = model(tokens(), tokens()).loss
        with Collectives() as backward:
            loss.backward()
        seen.append(backward.seen)
        lp.allreduce_sequence_parallel_gradients(optimizer)
        found += [loss.detach().clone(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        optimizer.step()
        optimizer.zero_grad()
    return found + [p.detach().clone() for p in model.parameters()], seen


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


def limited(family: str, sequence_parallel: bool, budgets: list[Any]) -> list[tuple[bool, str, int, int]]:
    """For each budget: same bits, the plan, collectives in a plain backward and in a limited one."""
    warnings.simplefilter("ignore", lowtide.LowtideWarning)
    expected, plain = train(make(family, sequence_parallel))
    found = []
    for budget in budgets:
        model = make(family, sequence_parallel)
        own = budget[dist.get_rank()] if isinstance(budget, tuple) else budget
        handle = lowtide.limit_memory(model, own) if own != "full" else lowtide.limit_memory(model, policy="full")
        result, seen = train(model)
        assert handle.plan is not None and handle.graph is not None
        if handle.plan.budget_bytes is not None:
            assert handle.plan.predicted_peak_bytes <= handle.plan.budget_bytes
        found.append((equal(expected, result), str(handle.plan.program), len(plain[-1]), len(seen[-1])))
    return found


@pytest.mark.parametrize(
    ("family", "sequence_parallel"),
    [("gpt", True), ("llama", False), *(pytest.param(*case, marks=pytest.mark.slow) for case in (("gpt", False), ("llama", True)))],
)
def test_one_plan_and_the_same_bits(family: str, sequence_parallel: bool) -> None:
    budgets = ["full", "70%", ("90%", "65%")]
    results = on_ranks(2, limited, family, sequence_parallel, budgets)
    for budget, first, second in zip(budgets, *results, strict=True):
        assert first[0] and second[0], f"{budget}: other gradients than without a budget"
        assert first[1] == second[1], f"{budget}: the ranks follow different plans"
        assert first[3] == second[3], f"{budget}: the ranks issue different collectives"
    full = results[0][0]
    assert full[3] > full[2], "under full recomputation a collective runs again"


def refused() -> tuple[str, int | None]:
    model = make("gpt", True)
    lowtide.limit_memory(model, ["1GiB", "1KiB"][dist.get_rank()])
    with pytest.raises(lowtide.BudgetError) as error:
        model(tokens(), tokens())
    return str(error.value), error.value.smallest_bytes


def test_a_budget_that_one_rank_cannot_meet_is_refused_by_all() -> None:
    (first, smallest), (second, also) = on_ranks(2, refused)
    assert first == second and smallest == also is not None


def different_programs() -> bool:
    """The vocabulary is padded on the last rank only, which makes its program another one: each plans alone, and keeps collectives."""
    warnings.simplefilter("ignore", lowtide.LowtideWarning)
    expected, plain = train(make("gpt", True, vocabulary=65))
    model = make("gpt", True, vocabulary=65)
    lowtide.limit_memory(model, policy="full")
    found, seen = train(model)
    return equal(expected, found) and seen == plain


def test_ranks_with_different_programs_keep_collectives() -> None:
    assert all(on_ranks(2, different_programs))
