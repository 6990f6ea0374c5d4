"""Models whose ranks share every sequence under a budget: one plan for all ranks, each held to it, and the
same bits as without.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import collectives_at_once, needs_gloo, on_ranks, seeded
from torch import Tensor, nn

import lowtide
from lowtide import meter
from lowtide import parallel as lp
from lowtide.models import preset
from lowtide.models.gpt import GPT
from lowtide.models.llama import Llama

pytestmark = needs_gloo
WIDTH = {"layers": 3, "vocabulary": 64, "positions": 128}
SCALARS = 256  # bytes that a trace does not show


def make(family: str, exchange: Any) -> nn.Module:
    torch.manual_seed(0)
    own = {"heads": 4, "key_value_heads": 4} if family == "gpt" else {}
    config = preset(f"{family}-nano", **WIDTH, **own, loss_chunks=4)
    return lp.context_parallel((GPT if family == "gpt" else Llama)(config), dist.group.WORLD, exchange)


def tokens() -> Tensor:
    return torch.randint(64, (8, 128), generator=seeded(1))


def train(model: nn.Module, steps: int = 5) -> tuple[list[Tensor], list[int]]:
    """Losses and gradients, and the bytes of each step."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    found: list[Tensor] = []
    took, inputs = [], tokens()
    with collectives_at_once():
        for _ in range(steps):
            with meter.peak("cpu") as seen:
                loss = model(inputs, inputs).loss
                loss.backward()
            took.append(seen.peak_bytes)
            lp.allreduce_sequence_parallel_gradients(optimizer)
            found += [loss.detach().clone(), *(p.grad.clone() for p in model.parameters())]  # type: ignore
            optimizer.step()
            optimizer.zero_grad()
    return found, took


def limited(family: str, exchange: Any, budgets: list[str]) -> list[dict[str, Any]]:
    warnings.simplefilter("ignore", lowtide.LowtideWarning)  # Gloo's threads may let go of buffers late
    expected, plain = train(make(family, exchange))
    found = []
    for budget in budgets:
        model = make(family, exchange)
        handle: Any = lowtide.limit_memory(
            model, **({"policy": "full"} if budget == "full" else {"budget": budget})
        )
        result, took = train(model)
        found.append(
            {
                "budget": budget,
                "same": all(map(torch.equal, expected, result)),
                "program": str(handle.plan.program),
                "again": [handle.graph.operations[i].name for i in handle.plan.replayed],
                "foreseen": handle.plan.predicted_peak_bytes - handle.graph.resident_bytes,
                "left": (handle.plan.budget_bytes or 1 << 40) - handle.graph.resident_bytes,
                "took": took,
                "plain": plain,
            }
        )
    return found


@pytest.mark.parametrize(("family", "exchange"), [("gpt", "ring"), ("llama", "all-to-all")])
def test_one_plan_and_the_same_bits(family: str, exchange: str) -> None:
    for first, second in zip(*on_ranks(2, limited, family, exchange, ["60%", "min", "full"]), strict=True):
        for one in (first, second):
            assert one["same"], f"{one['budget']}: other bits than without a budget"
            assert min(one["took"][-3:]) <= one["left"] + SCALARS, one
        assert first["program"] == second["program"]
        ring = "lowtide_ring.attention.default" in first["again"]
        assert first["again"] and (ring or exchange != "ring" or first["budget"] != "full")
