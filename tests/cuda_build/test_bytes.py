"""What PyTorch's allocator takes on a card for models of some size. Nothing is computed: memory that nobody
touches costs none here.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from card_models import (
    ON_THE_CUDA_BUILD,
    UNCOMPUTED,
    check_peak,
    decoder,
    family_on_the_card,
    taken,
    within_a_third,
)

import lowtide
from lowtide.meter.reserved import CachingAllocator
from lowtide.plan.reserved import reserved_after

pytestmark = ON_THE_CUDA_BUILD
MODELS = {
    "GPT": ("gpt", 6, 768, 1024, 8, 0.0),
    "GPT, wide": ("gpt", 3, 1536, 1024, 4, 0.0),
    "GPT, dropout": ("gpt", 5, 512, 512, 8, 0.1),
    "GPT, small": ("gpt", 4, 256, 256, 16, 0.0),
    "Llama": ("llama", 6, 768, 1024, 4, 0.0),
    "Llama, long": ("llama", 3, 512, 4096, 2, 0.0),
}
BUDGETS = ("80%", "65%", "min")


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    torch.ones(1, device="cuda", requires_grad=True).mul(2).backward()  # autograd's thread holds a step
    gc.collect()
    torch.cuda.empty_cache()


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("name", MODELS)
def test_requested_and_reserved_bytes_are_those_predicted(name: str, budget: str) -> None:
    model, batch = decoder(*MODELS[name])
    model = model.to(torch.bfloat16)
    handle = lowtide.limit_memory(model, budget, verify="never")

    def step() -> None:
        model(**batch).loss.backward()
        model.zero_grad(set_to_none=True)

    for _ in range(2):
        step()
    plan = handle.plan
    assert plan is not None and handle.graph is not None and plan.budget_bytes is not None
    peak = taken(model, batch, step)
    assert peak <= plan.budget_bytes
    assert peak == pytest.approx(plan.predicted_peak_bytes, rel=0.001)
    torch.cuda.empty_cache()
    allocator = CachingAllocator()
    allocator.resume(torch.cuda.memory_snapshot())
    predicted = reserved_after(handle.graph, plan.stored, allocator, steps=10)[-1]
    for _ in range(10):
        step()
    # an operation's scratch counts as one block: flash attention's backward takes several
    assert torch.cuda.memory_reserved() == pytest.approx(predicted, rel=0.12)


@pytest.mark.parametrize("name", UNCOMPUTED)
def test_families_take_what_was_predicted(name: str) -> None:
    pytest.importorskip("transformers")
    model, batch = family_on_the_card(name)

    def step() -> None:
        torch.manual_seed(1)
        model(**batch).loss.backward()
        model.zero_grad(set_to_none=True)

    check_peak(within_a_third(model, step, verify="never"), model, batch, step)
