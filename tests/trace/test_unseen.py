"""What backward does where no mode watches it, and what autograd keeps without telling: predicted all the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import lowtide
from lowtide import meter
from lowtide.plan.simulate import plain
from lowtide.trace.numbers import NUMBER

pytestmark = pytest.mark.skipif(not meter.available(), reason="needs the counting allocator")
ROWS, WIDTH = 256, 128


class Picks(nn.Module):
    """Ends in what a case picks of a wide tensor, so that the peak stands where backward writes the gradient of it."""

    def __init__(self, pick: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.pick = nn.Linear(16, WIDTH), nn.Linear(WIDTH, 4 * WIDTH), pick

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.pick(self.last(torch.tanh(self.first(x)))).square().mean()


PICKS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gather": lambda h: h.gather(1, torch.arange(h.shape[0])[:, None].expand(-1, 3) % h.shape[1]),
    "max": lambda h: h.max(0).values,
    "median": lambda h: h.median(1).values,
    "topk": lambda h: h.topk(3, dim=1).values,
    "sort": lambda h: h.sort(1).values[:, :2],
    "index_select": lambda h: h.index_select(0, torch.tensor([1, 5, 5])),
    "cummax": lambda h: h.cummax(1).values[:, -1],
}


def measured(model: nn.Module, x: torch.Tensor, step: Callable[[], object]) -> int:
    model.zero_grad()
    return meter.resident_bytes(model) + x.nbytes + meter.measure(step, timeline=False).peak_bytes


@pytest.mark.parametrize("pick", PICKS)
def test_the_gradient_of_what_was_picked_is_made_once(pick: str) -> None:
    torch.manual_seed(0)
    model, x = Picks(PICKS[pick]), torch.randn(ROWS, 16)
    step = lambda: model(x).backward()  # noqa: E731
    step()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    peak = measured(model, x, step)
    model.zero_grad()
    graph = lowtide.trace(lambda x: model(x), x, model=model)
    assert plain(graph).peak_bytes == pytest.approx(peak, abs=64)

    plan = lowtide.plan(graph, policy=lowtide.policies.keep_all())

    def under_a_plan() -> None:
        with lowtide.apply(plan):
            model(x).backward()

    assert measured(model, x, under_a_plan) == pytest.approx(peak, abs=64)
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert parameter.grad is not None and torch.equal(parameter.grad, gradient)


class Scaled(nn.Module):
    """Small tensors, and many numbers that they are scaled by."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x * self.weight
        for number in range(200):
            h = (h * (1 + number / 1e3)) / (3 if number % 2 else 1.5)
        return (h * True).sum()


def test_numbers_that_autograd_keeps_are_counted() -> None:
    model, x = Scaled(), torch.randn(4)
    step = lambda: model(x).backward()  # noqa: E731
    step()
    peak = measured(model, x, step)
    model.zero_grad()
    graph = lowtide.trace(lambda x: model(x), x, model=model, costs=False)
    assert plain(graph).peak_bytes == pytest.approx(peak, abs=64)
    kept = [storage for storage in graph.storages if storage.name == NUMBER]
    assert sum(storage.bytes for storage in kept) == 400 * 8 + 1
    ends = {event.index for event in graph.events if event.kind == "free"}
    assert all(storage.id in ends for storage in kept)
    assert sum(storage.bytes for storage in kept) > 0.5 * (peak - graph.resident_bytes)
    with torch.no_grad():
        held = meter.measure(lambda: model(x), timeline=False).peak_bytes
    assert held < 200


def test_numbers_are_let_go_where_backward_takes_them() -> None:
    model, x = Scaled(), torch.randn(4)
    graph = lowtide.trace(lambda x: model(x), x, model=model, costs=False)
    numbers = {storage.id for storage in graph.storages if storage.name == NUMBER}
    order = [event.index for event in graph.events if event.kind == "free" and event.index in numbers]
    assert order == sorted(order, reverse=True)


class Reflectors(nn.Module):
    """Some columns of a product of Householder reflectors, or a matrix times it."""

    def __init__(self, rows: int, columns: int, reflectors: int, of: str) -> None:
        super().__init__()
        vectors, scales = torch.geqrf(torch.randn(rows, columns))
        self.vectors, self.scales, self.of = nn.Parameter(vectors), nn.Parameter(scales[:reflectors].clone()), of

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.of == "columns":
            return (x @ torch.linalg.householder_product(self.vectors, self.scales)).sum()
        return torch.ormqr(self.vectors, self.scales, x.mT, transpose=self.of == "transposed").square().sum()


@pytest.mark.parametrize("real", [False, True], ids=["fake", "real"])
@pytest.mark.parametrize(
    "case", [(32, 16, 16, "columns"), (24, 24, 24, "columns"), (32, 16, 9, "columns"), (32, 1, 1, "columns"), (32, 16, 16, "times"),
             (32, 16, 16, "transposed")],
    ids=lambda case: "-".join(map(str, case)),
)  # fmt: skip
def test_gradients_of_reflectors_are_written_into_zeros(case: tuple[int, int, int, str], real: bool) -> None:
    torch.manual_seed(0)
    model, x = Reflectors(*case), torch.randn(4, case[0])
    graph = lowtide.trace(model, x, real=real)
    assert plain(graph).peak_bytes == pytest.approx(measured(model, x, lambda: model(x).backward()), abs=4)
