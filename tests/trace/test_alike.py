"""A trace on fake tensors takes the ways that the step takes: the layouts of the CPU's kernels, masks of
numbers, comparisons.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

import lowtide
from lowtide.ops import op_info
from lowtide.trace.fake import laid_out

NORM = torch.ops.aten.native_batch_norm.default
BACKWARD = torch.ops.aten.native_batch_norm_backward.default
SHAPES = [
    (2, 4),
    (2, 4, 3),
    (2, 4, 1),
    (2, 4, 3, 5),
    (2, 4, 1, 1),
    (2, 1, 3, 3),
    (1, 4, 1, 3),
    (2, 4, 3, 1),
    (2, 4, 2, 3, 2),
    (2, 4, 1, 1, 1),
]


def arranged(shape: tuple[int, ...], order: tuple[int, ...], gap: bool) -> torch.Tensor:
    """A tensor whose dimensions lie in memory in ``order``, with gaps or without."""
    sizes = [shape[k] for k in order]
    whole = torch.randn([*sizes[:-1], sizes[-1] * (2 if gap else 1)])
    return (whole[..., ::2] if gap else whole).permute([order.index(k) for k in range(len(order))])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_batch_norm_is_laid_out_as_its_kernel_does(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    mode, ones = FakeTensorMode(), torch.ones(shape[1])
    orders = list(itertools.permutations(range(len(shape))))
    grads = (tuple(range(len(shape))), (0, *range(2, len(shape)), 1))
    seen: set[tuple[int, ...]] = set()
    for order, gap in itertools.product(
        orders if len(shape) < 4 else orders[:: 3 + 4 * (len(shape) - 4)], (False, True)
    ):
        x = arranged(shape, order, gap)
        real = NORM(x, ones, ones, None, None, True, 0.1, 1e-5)
        with mode:
            fake_x, fake_ones = mode.from_tensor(x), mode.from_tensor(ones)
            fake = laid_out(
                op_info(NORM), (fake_x,), NORM(fake_x, fake_ones, fake_ones, None, None, True, 0.1, 1e-5)
            )
        assert fake[0].stride() == real[0].stride(), (order, gap)
        seen.add(real[0].stride())
        for way, gap_of_grad in itertools.product((order, *grads), (False, True)):
            grad = arranged(shape, way, gap_of_grad)
            given = BACKWARD(grad, x, ones, None, None, real[1], real[2], True, 1e-5, [True, True, True])
            with mode:
                fake_grad = mode.from_tensor(grad)
                shown = BACKWARD(
                    fake_grad, fake_x, fake_ones, None, None, fake[1], fake[2], True, 1e-5, [True, True, True]
                )
                shown = laid_out(op_info(BACKWARD), (fake_grad, fake_x), shown)
            assert shown[0].stride() == given[0].stride(), (order, gap, way, gap_of_grad)
    assert len(seen) == 1 or len(shape) > 3


class Masked(nn.Module):
    """Puts a mask of ones together from numbers and integers, and goes another way where it holds a zero."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> Any:
        mask = torch.cat([torch.ones(x.shape[0], 3), torch.ones(x.shape[0], 5, dtype=torch.long)], dim=1)
        h = self.inner(x)
        if not torch.all(mask == 1):
            h = h.masked_fill(mask == 0, 0).sin()
        return {"loss": functional.gelu(h).square().mean()}


def test_a_mask_that_is_put_together_is_looked_at() -> None:
    model = Masked()
    graph = lowtide.trace(lambda x: model(x)["loss"], torch.randn(4, 8), model=model, costs=False, fake=True)
    assert graph.source == "fake"
    assert not any(operation.name == "aten.sin.default" for operation in graph.operations)


class Handed(nn.Module):
    """Two convolutions after a value that is cheap to bring back, in a step that fake tensors cannot
    follow.
    """

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList([nn.Conv2d(8, 8, 3, padding=1) for _ in range(2)])

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        h = functional.interpolate(x, scale_factor=4, mode="bilinear")
        for conv in self.convs:
            h = conv(h).relu()
        chosen = h.mean(1)[labels > 0]
        return {"loss": chosen.square().sum() / torch.tensor(float(len(chosen.nonzero()) + 1))}


def test_a_real_trace_knows_how_long_backward_holds_what_it_was_handed() -> None:
    graph = lowtide.trace(
        Handed(), torch.randn(2, 8, 8, 8, requires_grad=True), torch.ones(2, 32, 32), costs=False
    )
    place = {event.index: at for at, event in enumerate(graph.events) if event.kind == "op"}
    ends = {event.index: at for at, event in enumerate(graph.events) if event.kind == "done"}
    handed = {event.index: at for at, event in enumerate(graph.events) if event.kind == "unpack"}
    released = {event.index: at for at, event in enumerate(graph.events) if event.kind == "release"}
    checked = 0
    for operation in graph.operations:
        if operation.name == "aten.convolution_backward.default":
            read = [
                s
                for s in graph.saved
                if s.value in operation.reads
                and s.droppable
                and handed.get(s.id, -1) < place[operation.index] < released[s.id]
            ]
            near = [s for s in read if place[operation.index] - handed[s.id] < 8]
            checked += len(near)
            assert near and all(place[operation.index] < ends[s.id] <= released[s.id] for s in near)
    assert checked >= 2
