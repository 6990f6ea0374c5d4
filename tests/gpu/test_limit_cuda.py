"""A limited model on a CUDA device: bitwise gradients with dropout, and a peak within the budget by the
allocator's own statistics.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest
import torch

import lowtide
from lowtide.errors import PlanError
from lowtide.meter.reserved import CachingAllocator
from lowtide.models import build_model
from lowtide.models.presets import ModelConfig
from lowtide.plan.reserved_bytes import reserved_after

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """A test's memory is free when it has ended: autograd's thread holds a step until it runs the next."""
    yield
    torch.ones(1, device="cuda", requires_grad=True).mul(2).backward()
    gc.collect()


def model_and_batch() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    config = ModelConfig(
        "gpt", layers=4, width=256, heads=4, hidden_width=1024, key_value_heads=4, positions=512, dropout=0.1
    )
    tokens = torch.randint(256, (4, 512), device="cuda")
    return build_model(config).cuda().train(), {"tokens": tokens, "targets": tokens}


def gradients(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    torch.manual_seed(1)
    model.zero_grad(set_to_none=True)
    model(**batch).loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("budget", ["80%", "60%"])
def test_gradients_are_bitwise_equal_and_the_peak_is_within_the_budget(budget: str) -> None:
    model, batch = model_and_batch()
    expected = gradients(model, batch)
    handle = lowtide.limit_memory(model, budget=budget)
    for _ in range(3):
        found = gradients(model, batch)
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    del expected, found
    model.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    model(**batch).loss.backward()
    assert handle.plan is not None
    taken = torch.cuda.max_memory_allocated()  # the workspaces of cuBLAS included
    assert taken <= handle.plan.budget_bytes * 1.01
    assert abs(taken - handle.plan.predicted_peak_bytes) <= 0.001 * taken


def test_a_scope_replays_dropout_from_the_device_generator() -> None:
    layer = torch.nn.Linear(64, 64, device="cuda")
    x = torch.randn(32, 64, device="cuda", requires_grad=True)

    def step(scoped: bool) -> list[torch.Tensor]:
        torch.manual_seed(2)
        x.grad = layer.weight.grad = None
        if scoped:
            with lowtide.checkpointing():
                y = torch.nn.functional.dropout(torch.nn.functional.gelu(layer(x)), 0.3)
        else:
            y = torch.nn.functional.dropout(torch.nn.functional.gelu(layer(x)), 0.3)
        y.square().sum().backward()
        assert x.grad is not None and layer.weight.grad is not None
        return [x.grad.clone(), layer.weight.grad.clone()]

    for a, b in zip(step(False), step(True), strict=True):
        assert torch.equal(a, b)


def test_out_of_memory_says_what_holds_most() -> None:
    model, batch = model_and_batch()
    lowtide.limit_memory(model, budget="80%")
    for _ in range(2):
        gradients(model, batch)
    with (
        pytest.warns(lowtide.LowtideWarning, match="What holds most at the plan's peak"),
        pytest.raises(torch.OutOfMemoryError),
    ):
        torch.empty(1 << 46, dtype=torch.uint8, device="cuda")


@pytest.mark.parametrize("budget", ["80%", "60%", "min"])
def test_what_the_allocator_reserves_is_predicted(budget: str) -> None:
    model, batch = model_and_batch()
    handle = lowtide.limit_memory(model, budget=budget)
    for _ in range(2):
        model(**batch).loss.backward()
        model.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    expandable = "expandable_segments:True" in os.environ.get("PYTORCH_ALLOC_CONF", "")
    allocator = CachingAllocator(expandable_segments=expandable)
    allocator.resume(torch.cuda.memory_snapshot())
    assert allocator.reserved_bytes == torch.cuda.memory_reserved()
    assert handle.plan is not None and handle.graph is not None
    graph, stored = handle.graph, handle.plan.stored
    predicted = reserved_after(graph, stored, allocator, steps=4, batch_resident=True)[-1]
    for _ in range(4):
        model(**batch).loss.backward()
        model.zero_grad(set_to_none=True)
    assert predicted == pytest.approx(torch.cuda.memory_reserved(), rel=0.02)


@pytest.mark.parametrize("share", [1.0, 1.1, 1.2])
def test_a_budget_of_reserved_bytes_is_held(share: float) -> None:
    model, batch = model_and_batch()
    optimizer = torch.optim.AdamW(model.parameters())
    handle = lowtide.limit_memory(model, budget="100%", optimizer=optimizer)
    model(**batch).loss.backward()
    assert handle.plan is not None
    budget = int(handle.plan.predicted_peak_bytes * share)
    handle.remove()
    model.zero_grad(set_to_none=True)
    handle = lowtide.limit_memory(model, budget=budget, optimizer=optimizer, reserved=True)
    for step in range(11):
        optimizer.zero_grad(set_to_none=True)
        model(**batch).loss.backward()
        if not step:
            torch.cuda.reset_peak_memory_stats()  # the plan was made, the cache is empty
        optimizer.step()
    assert torch.cuda.max_memory_reserved() <= budget
    assert any("allocator reserves" in note for note in handle.plan.notes)


def test_a_share_of_requested_bytes_is_no_budget_of_reserved_ones() -> None:
    model, _ = model_and_batch()
    with pytest.raises(PlanError, match="takes a budget in bytes, such as '20GiB', or 'auto', not '60%'"):
        lowtide.limit_memory(model, "60%", reserved=True)
    handle = lowtide.limit_memory(model, "20GiB", reserved=True)
    with pytest.raises(PlanError, match="takes a budget in bytes"):
        handle.set_budget("min")
