"""Models that go by what is in their tensors: one forward on real ones tells a trace on fake ones, and steps fit from the first on."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

import lowtide
from lowtide import TraceError, meter, private
from lowtide.ops import masks_of
from lowtide.trace.answers import Answers, hear
from lowtide.trace.chance import Chance
from lowtide.trace.contents import fit
from lowtide.trace.fake import grouped
from lowtide.trace.limited import ANSWERED

WIDTH, ROWS = 32, 96


class Net(nn.Module):
    """Blocks, and between them what a case does."""

    def __init__(self, between: Callable[[Net, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(2)])
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.router, self.norm = nn.Linear(WIDTH, 3), nn.BatchNorm1d(WIDTH)
        self.count, self.total, self.seen = 0, torch.zeros(()), [1]
        self.between = between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
            x = self.norm(self.between(self, x))
        return x.square().mean()


def by_expert(net: Net, x: torch.Tensor) -> torch.Tensor:
    weights = net.router(x).softmax(-1)
    chosen, out = weights.argmax(-1), torch.zeros_like(x)
    for number, expert in enumerate(net.experts):
        (rows,) = torch.where(chosen == number)
        out.index_add_(0, rows, torch.tanh(expert(x[rows])) * weights[rows, number, None])
    return out


def by_mask(net: Net, x: torch.Tensor) -> torch.Tensor:
    large = x.mean(-1) > 0
    out = x.clone()
    out[large] = torch.tanh(net.experts[0](out[large]))
    return out * 2


def picked(_: Net, x: torch.Tensor) -> torch.Tensor:
    return x * torch.masked_select(x, x > 0.5).tanh().mean()


def in_pieces(net: Net, x: torch.Tensor) -> torch.Tensor:
    order = net.router(x).argmax(-1)
    sizes = torch.bincount(order, minlength=3).tolist()
    parts = x[torch.argsort(order, stable=True)].split(sizes)
    return torch.cat([F.silu(expert(part)) for expert, part in zip(net.experts, parts, strict=True)])


def nested_list(net: Net, x: torch.Tensor) -> torch.Tensor:
    (first, _), (_, last) = (x[:2, :2] > 0).long().add(1).tolist()
    return torch.tanh(net.experts[0](x)) * (first + last)


def assigned(_: Net, x: torch.Tensor) -> torch.Tensor:
    order = np.argsort(x.detach()[:, 0].numpy())
    worst = np.asarray(x.detach()[:4, 1]).argmin()
    return x[torch.from_numpy(order)].tanh() + x[int(worst)]


def until_small(net: Net, x: torch.Tensor) -> torch.Tensor:
    while x.abs().max().item() > 1.5:
        x = torch.tanh(net.experts[1](x))
    return x if bool((x > 0).any()) else -x


def uniques(_: Net, x: torch.Tensor) -> torch.Tensor:
    _, groups, counts = torch.unique((x[:, 0] * 3).round(), return_inverse=True, return_counts=True)
    sums = torch.zeros(len(counts), x.shape[1]).index_add(0, groups, x.sigmoid())
    return x + sums[groups] / counts[groups, None]


def repeated(_: Net, x: torch.Tensor) -> torch.Tensor:
    times = (x[:, 0] > 0).long() + 1
    return torch.repeat_interleave(x, times, dim=0).tanh()[: x.shape[0]]


CASES: dict[str, Callable[[Net, torch.Tensor], torch.Tensor]] = {
    f.__name__: f for f in (by_expert, by_mask, picked, in_pieces, nested_list, assigned, until_small, uniques, repeated)
}
needs_meter = pytest.mark.skipif(not meter.available(), reason="needs the counting allocator")


def step(net: Net, x: torch.Tensor) -> torch.Tensor:
    loss = net(x)
    loss.backward()
    return loss.detach()


def state(net: Net, loss: torch.Tensor) -> list[torch.Tensor | None]:
    return [loss, *(None if p.grad is None else p.grad.clone() for p in net.parameters()), *(b.clone() for b in net.buffers())]


def same(left: list[torch.Tensor | None], right: list[torch.Tensor | None]) -> bool:
    return all(a is b is None or (a is not None and b is not None and torch.equal(a, b)) for a, b in zip(left, right, strict=True))


@needs_meter
@pytest.mark.parametrize("case", CASES)
def test_every_step_fits_from_the_first_on_and_is_bitwise(case: str) -> None:
    torch.manual_seed(0)
    plain, x = Net(CASES[case]), torch.randn(ROWS, WIDTH)
    least = lowtide.limit_memory(copy.deepcopy(plain), budget=1)
    with pytest.raises(lowtide.BudgetError) as refused:
        least.prepare(x)
    assert refused.value.smallest_bytes is not None
    net = copy.deepcopy(plain)
    handle = lowtide.limit_memory(net, budget=refused.value.smallest_bytes)
    handle.share_costs(least)
    for number in range(3):
        expected = state(plain, step(plain, x))
        measured = meter.measure(lambda: step(net, x), timeline=False)
        standing = meter.resident_bytes(net) + x.nbytes
        plan = handle.plan
        assert plan is not None and plan.budget_bytes is not None and handle.graph is not None
        assert handle.graph.source == "fake" and ANSWERED in handle.graph.notes
        gradients = sum(p.grad.nbytes for p in net.parameters() if p.grad is not None)
        assert standing - gradients + measured.peak_bytes <= plan.budget_bytes, number
        if number:
            assert standing - gradients + measured.peak_bytes == pytest.approx(plan.predicted_peak_bytes, rel=0.005)
        assert same(expected, state(net, measured.value))
        plain.zero_grad()
        net.zero_grad()


@pytest.mark.parametrize("case", ["by_expert", "by_mask", "in_pieces", "until_small", "uniques"])
def test_other_numbers_in_the_same_shapes_give_the_same_bits(case: str) -> None:
    torch.manual_seed(1)
    plain = Net(CASES[case])
    net = copy.deepcopy(plain)
    lowtide.limit_memory(net, budget="95%")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lowtide.LowtideWarning)
        for number in range(4):
            x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(number)) * (1 + number)
            assert same(state(plain, step(plain, x)), state(net, step(net, x)))
            plain.zero_grad()
            net.zero_grad()


def test_the_forward_that_is_heard_leaves_everything_as_it_was() -> None:
    kept = torch.zeros(WIDTH)

    def marks(net: Net, x: torch.Tensor) -> torch.Tensor:
        net.count += 1
        net.seen.append(net.count)
        net.total.add_(1)
        kept[: WIDTH // 2].add_(x.detach().mean())
        noise = torch.rand(())
        return F.dropout(x, 0.5) if x.sum().item() > noise - 1e9 else x

    torch.manual_seed(0)
    net, x = Net(marks), torch.randn(ROWS, WIDTH)
    before = {name: item.clone() for name, item in net.state_dict().items()}
    random = torch.get_rng_state()
    answers = hear(lambda: net(x), net, Chance())
    assert answers.known and len(answers.said) == 4  # a number, and whether it is the larger one, twice
    assert torch.equal(random, torch.get_rng_state())
    assert (net.count, net.seen, net.total.item()) == (0, [1], 0)
    assert not kept.any()
    assert all(torch.equal(before[name], item) for name, item in net.state_dict().items())
    assert all(p.grad is None for p in net.parameters())


def test_what_an_operation_hands_back_of_its_arguments_is_not_taken_for_new() -> None:
    def writes_through(net: Net, x: torch.Tensor) -> torch.Tensor:
        torch.unsafe_chunk(net.total.view(1), 1)[0].add_(1)  # by its schema a new tensor, and yet on the same storage
        return x if x.sum().item() < 1e9 else -x

    net, x = Net(writes_through), torch.randn(ROWS, WIDTH)
    hear(lambda: net(x), net, Chance())
    assert net.total.item() == 0


@needs_meter
def test_the_forward_that_is_heard_holds_no_more_than_lives_at_once() -> None:
    net, x = Net(until_small), torch.randn(4 * ROWS, WIDTH)
    wide = 4 * WIDTH * 4 * x.shape[0]
    heard = meter.measure(lambda: hear(lambda: net(x), net, Chance()), timeline=False)
    step_too = meter.measure(lambda: step(net, x), timeline=False)
    assert (
        heard.peak_bytes < 3 * wide < step_too.peak_bytes
    )  # the input of a block, and the two wide tensors on the sides of its activation


def test_a_backward_inside_the_forward_is_traced_for_real() -> None:
    def gradient(_: Net, x: torch.Tensor) -> torch.Tensor:
        y = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad((y.sinh() * y).sum(), y)
        return x + slope * (1 if slope.sum().item() > 0 else -1)

    torch.manual_seed(0)
    plain, x = Net(gradient), torch.randn(ROWS, WIDTH)
    net = copy.deepcopy(plain)
    handle = lowtide.limit_memory(net, budget="100%")
    assert same(state(plain, step(plain, x)), state(net, step(net, x)))
    assert handle.graph is not None and handle.graph.source == "real"


@pytest.mark.parametrize("more", [True, False], ids=["asks more", "asks less"])
def test_a_model_that_asks_otherwise_on_fake_tensors_is_traced_for_real(more: bool) -> None:
    def two_faced(_: Net, x: torch.Tensor) -> torch.Tensor:
        x = x * x.abs().max().item()
        return x * x.abs().min().item() if isinstance(x, FakeTensor) == more else x

    torch.manual_seed(0)
    net, x = Net(two_faced), torch.randn(ROWS, WIDTH)
    handle = lowtide.limit_memory(net, budget="100%")
    handle.prepare(x)
    assert handle.graph is not None and handle.graph.source == "real"
    assert "asks" in handle.graph.notes[0] or "does not ask" in handle.graph.notes[0]


def test_another_question_than_was_heard_is_an_error() -> None:
    answers = Answers()
    answers.hear("aten.nonzero.default", torch.zeros(3, 1))
    answers.known = True
    with pytest.raises(TraceError, match=r"asks aten\.equal\.default, where it asked aten\.nonzero"):
        answers.tell("aten.equal.default")
    answers.hear("aten.equal.default", True)
    with pytest.raises(TraceError, match=r"does not ask aten\.equal"):
        answers.end()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", ["rows", "inner", "columns", "batch"])
def test_products_in_groups_are_laid_out_as_real_ones(layout: str, dtype: torch.dtype) -> None:
    def empty(*shape: int) -> torch.Tensor:
        return torch.randn(*shape).to(dtype)

    ends = torch.tensor([8, 16, 32], dtype=torch.int32)
    arguments: dict[str, tuple[Any, ...]] = {
        "rows": (empty(32, 16), empty(3, 16, 24), ends),
        "inner": (empty(16, 32), empty(32, 24), ends),
        "columns": (empty(3, 16, 8), empty(8, 32), ends),
        "batch": (empty(3, 16, 8), empty(3, 8, 24)),
    }
    call = arguments[layout]
    real = torch._grouped_mm(*call)
    with private.fake_mode() as mode:
        fake = grouped(*(mode.from_tensor(item) for item in call))
    assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)


def test_made_up_inputs_say_how_much_is_picked() -> None:
    func = torch.ops.aten.index.Tensor
    args = (torch.zeros(4, 6), [None, torch.ones(6, dtype=torch.bool)])
    fit(func, args, (2,))
    assert func(*args).shape == (4, 2)
    assert [mask.sum().item() for mask in masks_of(func, args)] == [2]
    for layout, shapes in (("rows", ((32, 16), (3, 16, 24))), ("inner", ((16, 32), (32, 24))), ("columns", ((3, 16, 8), (8, 32)))):
        ends = torch.zeros(3, dtype=torch.int32)
        fit(torch.ops.aten._grouped_mm.default, (*map(torch.zeros, shapes), ends))
        assert ends.tolist() == [10, 21, 32], layout
    lengths = torch.zeros(3, dtype=torch.int64)
    fit(torch.ops.aten.repeat_interleave.Tensor, (lengths,))
    assert lengths.tolist() == [1, 1, 1]
