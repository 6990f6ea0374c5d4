"""Shapes and numbers that change from step to step: few plans, and the budget held in every step."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from itertools import accumulate
from typing import Any

import pytest
import torch
from compare import SLACK_BYTES, check, differences, peak_of, snapshot
from loops import data, mlp
from torch import nn

import lowtide

pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("quiet_transformers")

LONGEST, SHORTEST = 256, 16


def gpt2() -> nn.Module:
    """Four layers of 64 features over 128 tokens, random weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=128, n_positions=LONGEST, n_embd=64, n_layer=4, n_head=4, use_cache=False)
    ).train()


def tokens(length: int, rows: int = 4) -> torch.Tensor:
    """A batch of a length."""
    return torch.randint(128, (rows, length), generator=torch.Generator().manual_seed(length))


class Plannings:
    """Counts the plannings of a limited model: those that the handle counts, or else the plans that it has
    ever shown.
    """

    def __init__(self, handle: lowtide.Handle) -> None:
        self.handle = handle
        self.keys: set[Any] = set()

    def look(self) -> None:
        """After each step."""
        self.keys |= {plan.graph for plan in self.handle.plans}

    @property
    def count(self) -> int:
        """So far."""
        counted = getattr(self.handle, "plannings", None)
        return len(self.keys) if counted is None else counted


def over(model: nn.Module, lengths: list[int], budget: int, most_plans: int) -> dict[int, int]:
    """Steps of these lengths: bytes above the budget, by step. Fails as soon as there are more than
    ``most_plans`` plannings.
    """
    counter, above = Plannings(lowtide.limit_memory(model, budget)), {}
    for number, length in enumerate(lengths):
        batch = tokens(length)

        def step(batch: torch.Tensor = batch) -> None:
            model(input_ids=batch, labels=batch).loss.backward()

        peak, _ = peak_of(step, [model], batch)
        counter.look()
        if peak > budget + SLACK_BYTES:
            above[number] = peak - budget
        model.zero_grad()
        if counter.count > most_plans:
            pytest.fail(
                f"{counter.count} plannings in {number + 1} steps; bytes above the budget by step: {above}"
            )
    return above


@cache
def _plain_peak(length: int) -> int:
    model, batch = gpt2(), tokens(length)
    return peak_of(lambda: model(input_ids=batch, labels=batch).loss.backward(), [model], batch)[0]


@pytest.mark.parametrize(
    ("steps", "share"),
    [
        (16, 0.7),
        (8, 1.0),
        pytest.param(1000, 0.7, marks=pytest.mark.slow),
        pytest.param(1000, 1.0, marks=pytest.mark.slow),
    ],
)
def test_random_lengths_are_planned_when_longer_than_all_before(steps: int, share: float) -> None:
    lengths = [random.Random(number).randint(SHORTEST, LONGEST) for number in range(steps)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lowtide.LowtideWarning)
        longer = len(set(accumulate(lengths, max)))
        above = over(gpt2(), lengths, int(_plain_peak(LONGEST) * share), most_plans=longer)
    assert not above, f"bytes above the budget by step: {above}"


def test_growing_lengths_cost_few_plans() -> None:
    lengths = sorted(random.Random(1).sample(range(SHORTEST, LONGEST + 1), 10))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lowtide.LowtideWarning)
        above = over(gpt2(), lengths, int(_plain_peak(LONGEST) * 0.7), most_plans=5)
    assert not above, f"bytes above the budget by step: {above}"


def test_random_lengths_give_the_same_bits() -> None:
    lengths = [150, 50, 256, 17, 151, 16, 100]

    def pattern(limit: Callable[..., Any]) -> Iterator[Any]:
        model = limit(gpt2())
        for length in lengths:
            model.zero_grad()
            torch.manual_seed(length)
            loss = model(input_ids=tokens(length), labels=tokens(length)).loss
            loss.backward()
            yield model, loss

    check(pattern, int(_plain_peak(LONGEST) * 0.75))


def test_smaller_steps_move_what_the_plan_of_a_larger_one_moves() -> None:
    torch.manual_seed(0)
    plain, model = (nn.Sequential(*(mlp(64, 64, 64) for _ in range(4))) for _ in range(2))
    model.load_state_dict(plain.state_dict())
    handle = lowtide.limit_memory(model, "min", policy=lowtide.policies.mixed("host"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number, rows in enumerate((1024, 1024, 1000, 700, 1023)):
            batch = data(number, rows, 64)
            for one in (plain, model):
                one.zero_grad()
            plain(batch).square().mean().backward()
            peak, _ = peak_of(lambda: model(batch).square().mean().backward(), [model], batch)  # noqa: B023
            plan = handle.plan
            assert plan is not None and plan.moves and plan.budget_bytes is not None
            assert number == 0 or peak <= plan.budget_bytes + plan.slab_bytes + SLACK_BYTES, rows
            assert not differences([snapshot(plain)], [snapshot(model)]), rows
    assert not [one for one in caught if "was predicted" in str(one.message)] and len(handle.plans) == 1
