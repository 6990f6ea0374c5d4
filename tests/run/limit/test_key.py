"""The cache key of a step: what makes another one, and whose plan serves which."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from compare import check, peak_of
from loops import data, mlp, said_by
from torch import nn

import lowtide
from lowtide.run.limit.key import Inputs, StepKey


def key(*shapes: tuple[int, ...], **kwargs: Any) -> StepKey:
    """Of a step of one model, with tensors of these shapes."""
    return Inputs(MODEL, tuple(map(torch.zeros, shapes)), kwargs, compiled=False).key


MODEL = nn.Linear(4, 4)


def test_a_plan_serves_steps_that_are_smaller_in_some_dimensions_and_larger_in_none() -> None:
    large = key((8, 4), (8, 2))
    assert key((8, 4), (6, 2)).fits_in(large) and large.fits_in(large)
    for other in (key((9, 4), (6, 2)), key((8, 4)), key((8, 4, 1), (8, 2)), key((4, 4), (4, 2), flag=True)):
        assert not other.fits_in(large) and not large.fits_in(other)
    assert key((9, 4), (6, 2)).is_alike_but_for_size(large) and not key((8, 4)).is_alike_but_for_size(large)
    assert large.elements() == 8 * 4 + 8 * 2


def test_what_changes_a_step_is_part_of_its_key_and_a_number_is_not() -> None:
    before = key((8, 4), scale=1.0)
    assert key((8, 4), scale=2.0) == before != key((8, 4), scale=None)
    inputs = Inputs(MODEL, (torch.zeros(8, 4),), {"scale": 1.0}, compiled=False)
    assert inputs.has_unkeyed_arguments
    assert not Inputs(MODEL, (torch.zeros(8, 4), "sum", None), {}, compiled=False).has_unkeyed_arguments
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout())
    of = lambda: Inputs(model, (torch.zeros(8, 4),), {}, compiled=False).key  # noqa: E731
    found = [of()]
    model[1].eval()
    found.append(of())
    model[0].bias.requires_grad_(False)
    found.append(of())
    with torch.autocast("cpu"):
        found.append(of())
    model[0].weight.grad = torch.zeros(4, 4)
    found.append(of())
    assert len(set(found)) == 5 and found[4].without_gradients() == found[2]


def test_nested_tensors_of_other_lengths_are_steps_of_other_sizes() -> None:
    def of(lengths: list[int], layout: torch.layout) -> StepKey:
        nested = torch.nested.nested_tensor([torch.zeros(n, 4) for n in lengths], layout=layout)
        return Inputs(MODEL, (nested,), {}, compiled=False).key

    for layout in (torch.jagged, torch.strided):
        large = of([8, 4], layout)
        assert of([8, 4], layout) == large != of([6, 4], layout) and of([6, 4], layout).fits_in(large)
        assert not of([9, 4], layout).fits_in(large)
    assert not of([6, 4], torch.jagged).is_alike_but_for_size(of([6, 4], torch.strided))


def test_a_model_that_is_cast_between_steps_is_another_kind_of_step() -> None:
    """Nothing of the inputs tells: tokens are integers whatever the model computes in."""

    def make() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(50, 64), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU())

    model, tokens = make().bfloat16(), torch.arange(512) % 50
    handle = lowtide.limit_memory(model, "80%")
    for number in range(6):
        if number == 2:
            model.float()
        model.zero_grad()
        (peak, _), said = said_by(
            lambda: peak_of(lambda: model(tokens).float().sum().backward(), [model], tokens)
        )
        assert handle.budget_bytes is not None
        above = [one for one in said if "above the budget" in str(one.message)]
        assert len(above) == (peak > handle.budget_bytes), number
        assert number == 2 or not said, number
    assert len(handle.plans) == 2


class Scaled(nn.Module):
    """A model that takes numbers beside its tensors and computes with them."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(width=64)

    def forward(self, x: torch.Tensor, number: float, *, items: int) -> torch.Tensor:
        h = self.net(x * number) + number
        return (h * h).mul(0.5).sum() / items


NUMBERS: dict[str, list[tuple[float, int]]] = {
    "a time step": [(float(step), 128) for step in range(1, 7)],
    "the items of a batch": [(1.0, 100 + 7 * step) for step in range(6)],
    "a decaying rate": [(0.9**step, 128) for step in range(6)],
    "all at once": [(0.3 * step, 90 + step) for step in range(6)],
}


@pytest.mark.parametrize("budget", ["100%", "60%"])
@pytest.mark.parametrize("which", NUMBERS)
def test_numbers_that_change_make_no_new_plan(which: str, budget: str) -> None:
    def pattern(limit: Callable[..., Any]) -> Iterator[Any]:
        model = limit(Scaled())
        for step, (number, items) in enumerate(NUMBERS[which]):
            model.zero_grad()
            loss = model(data(step), number, items=items)
            loss.backward()
            yield model, loss

    run = check(pattern, budget)
    handle = run.handles[0]
    assert len(handle.plans) == 1, f"{len(handle.plans)} plans; {run.messages}"
    assert handle.plannings == (budget != "100%"), (
        "where the step fits as it is, there is nothing to search for"
    )


def test_a_number_that_decides_what_runs_is_not_mixed_up() -> None:
    class Depth(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

        def forward(self, x: torch.Tensor, depth: int) -> torch.Tensor:
            for layer in self.layers[:depth]:
                x = x + layer(x).tanh()
            return x.square().mean()

    def pattern(limit: Callable[..., Any]) -> Iterator[Any]:
        model = limit(Depth())
        for step, depth in enumerate((4, 2, 4, 1, 3, 4, 2)):
            model.zero_grad()
            loss = model(data(step), depth)
            loss.backward()
            yield model, loss

    check(pattern)
