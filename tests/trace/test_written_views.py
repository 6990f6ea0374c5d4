"""Views whose storage is written in place: a trace on fake tensors shows the backward that real tensors have."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import lowtide
from lowtide import TraceError

torch.set_num_threads(1)


def written_and_used(h: torch.Tensor) -> torch.Tensor:
    v = h.view(-1, 4)
    v.relu_()
    return (v * 2).sum() + v.sigmoid().sum() + h.sum()


def another_view_is_older(h: torch.Tensor) -> torch.Tensor:
    left, right = h[:, :3], h[:, 2:].t()
    left.mul_(2)
    return (right * right).sum() + left.square().sum()


def the_base_is_written(h: torch.Tensor) -> torch.Tensor:
    v = h.t()
    h.sigmoid_()
    return torch.cat([v, v.square()]).sum()


def written_twice(h: torch.Tensor) -> torch.Tensor:
    v = h[1:]
    v.tanh_()
    a = v.square().sum()
    h.mul_(3)
    return a + (v * 5).sum() + F.linear(v, v).sum()


def a_stale_view_is_written(h: torch.Tensor) -> torch.Tensor:
    a, b = h[:, :4], h[:, 2:6]
    a.exp_()
    b.mul_(2)
    F.leaky_relu(b, 0.1, inplace=True)
    return (a * b).sum()


def items_are_set(h: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(8, 6)
    older = out[2]
    for row in range(8):
        out[row] = h[row] * 2
    return out.square().sum() + (older * 3).sum()


def views_of_views(h: torch.Tensor) -> torch.Tensor:
    v = h.view(2, 4, 6)[:, 1:].permute(2, 0, 1)
    w = v[1:3].unsqueeze(0)
    v.sin_()
    return (w.mT * w.mT).sum() + v.contiguous().view(-1).cos().sum()


def norm_then_in_place(h: torch.Tensor) -> torch.Tensor:
    return F.leaky_relu(F.instance_norm(h.view(2, 4, 6)), 0.2, inplace=True).square().sum()


def without_history(h: torch.Tensor) -> torch.Tensor:
    v = h.detach()[1:]
    with torch.no_grad():
        v.zero_()
    return (h * v.sum()).sum()


def in_functions_of_their_own(h: torch.Tensor) -> torch.Tensor:
    padded = F.pad(h.view(1, 2, 4, 6), (1, 1, 1, 1), mode="circular")
    return padded.square().sum()


PROGRAMS: list[Callable[[torch.Tensor], torch.Tensor]] = [
    written_and_used, another_view_is_older, the_base_is_written, written_twice, a_stale_view_is_written, items_are_set, views_of_views,
    norm_then_in_place, without_history, in_functions_of_their_own,
]  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_fake_tensors_show_the_operations_of_real_ones(program: Callable[[torch.Tensor], torch.Tensor]) -> None:
    torch.manual_seed(0)
    lin, x = torch.nn.Linear(6, 6), torch.randn(8, 6)

    def step() -> torch.Tensor:
        return program(lin(x) * 1)

    fake, real = lowtide.trace(step, model=lin, costs=False), lowtide.trace(step, model=lin, costs=False, real=True)
    rows = [
        [(o.name, o.phase, o.replayable, [g.storages[g.values[w].storage].bytes for w in o.writes]) for o in g.operations]
        for g in (fake, real)
    ]
    assert rows[0] == rows[1]
    assert fake.source == "fake"


def test_what_no_function_mode_sees_is_refused() -> None:
    """``mul_`` keeps a copy of what it overwrites, made of the stale view itself."""
    lin, x = torch.nn.Linear(6, 6), torch.randn(8, 6)

    def step() -> torch.Tensor:
        h = lin(x) * 1
        a, b = h[:, :4], h[:, 2:]
        a.exp_()
        b.mul_(b)
        return b.sum()

    with pytest.raises(TraceError, match="real=True"):
        lowtide.trace(step, model=lin, costs=False)
    assert lowtide.trace(step, model=lin, costs=False, real=True).source == "real"


def test_a_sum_of_patches_stands_on_as_much_as_they_do() -> None:
    lin, x = torch.nn.Linear(6, 18), torch.randn(1, 16, 6)

    def step() -> torch.Tensor:
        return F.fold(lin(x).mT, (6, 6), 3).relu().sum()

    graphs = [lowtide.trace(step, model=lin, costs=False, real=real) for real in (False, True)]
    sizes = [[s.bytes for s in g.storages if s.producer is not None] for g in graphs]
    assert sizes[0] == sizes[1]
    assert 18 * 16 * 4 in sizes[0]
