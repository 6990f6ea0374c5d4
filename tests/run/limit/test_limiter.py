"""`limit_memory`: how much memory steps really take, and what is left after them."""

from __future__ import annotations

import copy
import gc
import itertools
import threading
import warnings
import weakref
from typing import Any

import pytest
import torch
from small_model import batch, needs_meter, small
from torch import nn

import lowtide
from lowtide import BudgetError, meter
from lowtide.meter import measure, resident_bytes
from lowtide.run.limit.limiter import Limiter


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
            nn.Dropout(0.1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).view(*x.shape[:2], 3, 4, -1).permute(2, 0, 3, 1, 4)
        h = (
            nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            .transpose(1, 2)
            .reshape(x.shape)
        )
        x = x + self.out(h)
        return x + self.mlp(x)


class Gpt(nn.Module):
    def __init__(self, width: int = 64, layers: int = 3, vocabulary: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(layers)])
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens.roll(-1, 1).flatten())


@needs_meter
def test_budgets_hold_and_are_monotone(same: Any) -> None:
    torch.manual_seed(0)
    plain = Gpt()
    tokens = torch.randint(0, 64, (8, 64))

    def peak(model: nn.Module) -> int:
        found = 0
        for _ in range(3):
            model.zero_grad()
            if isinstance(model.__dict__.get("forward"), Limiter):
                model.__dict__["forward"].prepare((tokens,), {})  # outside the meter
            torch.manual_seed(1)
            found = max(found, measure(lambda: model(tokens).backward()).peak_bytes)
        return found + sum(p.nbytes for p in model.parameters()) + tokens.nbytes

    most = peak(plain)
    grads = [p.grad.clone() for p in plain.parameters()]
    probe = copy.deepcopy(plain)
    probe.zero_grad()
    lowtide.limit_memory(probe, "1KiB")
    with pytest.raises(BudgetError) as caught:
        probe(tokens).backward()
    least = caught.value.smallest_bytes
    assert least < 0.7 * most
    peaks, seconds = [], []
    model = copy.deepcopy(plain)
    model.zero_grad()
    # one look for all budgets: what operations took is measured once
    handle = lowtide.limit_memory(model, most)
    for k in range(5):
        budget = least + (most - least) * k // 4
        handle.set_budget(budget)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            peaks.append(peak(model))
        plan = handle.plan
        assert peaks[-1] <= budget
        assert abs(peaks[-1] - plan.predicted_peak_bytes) <= 0.01 * peaks[-1], (
            peaks[-1],
            plan.predicted_peak_bytes,
        )
        assert all(same(a, p.grad) for a, p in zip(grads, model.parameters(), strict=True))
        seconds.append(plan.predicted_extra_seconds / plan.plain_seconds)
    assert peaks == sorted(peaks)
    # Each plan is within a gap of the best.
    assert all(later <= earlier + 0.05 for earlier, later in itertools.pairwise(seconds))


def test_an_optimizer_that_comes_later_counts_from_then_on() -> None:
    model = small()
    handle = lowtide.limit_memory(model, "200%")
    model(batch()).backward()
    optimizer = torch.optim.AdamW(model.parameters())
    before = handle.plan.predicted_peak_bytes
    moments = sum(2 * parameter.nbytes + 4 for parameter in model.parameters())  # and a counter
    for given, state in ((optimizer, moments), (None, 0), (optimizer, moments)):
        handle.set_optimizer(given)
        model.zero_grad()
        model(batch()).backward()
        assert handle.plan.predicted_peak_bytes == before + state
    told = lowtide.limit_memory(model, "200%", optimizer=optimizer)
    model.zero_grad()
    model(batch()).backward()
    assert told.plan.predicted_peak_bytes == handle.plan.predicted_peak_bytes
    with pytest.raises(lowtide.PlanError, match="none of this model's parameters"):
        told.set_optimizer(torch.optim.SGD(small().parameters()))
    with pytest.raises(lowtide.PlanError, match="removed, or replaced"):
        handle.set_optimizer(None)


@needs_meter
@pytest.mark.parametrize("way", ["limit", "scope"])
def test_a_hundred_steps_hold_no_more_memory(way: str) -> None:
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    if way == "limit":
        lowtide.limit_memory(model, "92%")

    def step() -> None:
        optimizer.zero_grad()
        if way == "limit":
            loss = model(batch())
        else:
            with lowtide.checkpointing():
                loss = model(batch())
        loss.backward()
        optimizer.step()

    try:
        with meter.peak("cpu"):  # knows the gradients that the first steps leave
            for _ in range(3):  # the first of them plans, the second knows what the first taught
                step()
            gc.collect()
            gc.disable()
            with meter.peak("cpu") as seen:
                for _ in range(48):
                    step()
                gc.collect()  # PyTorch's own pytree leaves small cycles
                half = len(gc.get_objects())
                for _ in range(50):
                    step()
                live = seen.live_bytes  # before the collector runs: no cycle holds a tensor
            gc.collect()
            grown = len(gc.get_objects()) - half
    finally:
        gc.enable()
    assert live <= 0
    assert grown < 50


def test_no_threads_and_no_files_are_left() -> None:
    model = small()
    before = threading.active_count()
    lowtide.limit_memory(model, "90%")
    model(batch()).backward()
    assert threading.active_count() == before


def test_handle_and_model_die_together() -> None:
    model = small()
    handle = lowtide.limit_memory(model, policy="full")
    model(batch()).backward()
    reference = weakref.ref(model)
    del model, handle
    gc.collect()
    assert reference() is None


class SetsOut(nn.Module):
    """Layers that take the range of what they see in their first step, and a moving average of it from then
    on.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))
        self.register_buffer("top", torch.zeros(6))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        tops = []
        for k, layer in enumerate(self.layers):
            h = layer(x)
            now = h.detach().max()
            tops.append(self.top[k] + now if self.top[k] < 1e-6 else self.top[k] * 0.9 + now * 0.1)
            x = x + torch.tanh(torch.sin(h / tops[-1]) * tops[-1])
        self.top = torch.stack(tops)
        return {"loss": x.square().mean()}


@needs_meter
def test_a_model_whose_first_step_is_another_keeps_the_budget_from_where_it_was_seen_on() -> None:
    torch.manual_seed(0)
    model, x = SetsOut(), torch.randn(1024, 64)
    handle = lowtide.limit_memory(model, budget="60%")
    peaks = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lowtide.LowtideWarning)
        for _ in range(5):

            def step() -> None:
                model(x)["loss"].backward()

            model.zero_grad(set_to_none=True)
            resident = resident_bytes(model) + x.nbytes
            peaks.append(resident + measure(step, timeline=False).peak_bytes)
    assert handle.budget_bytes is not None and max(peaks) <= handle.budget_bytes
