"""Which saved values backward uses linearly: by the operations, and by what rounding them does to
gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lowtide
from lowtide import policies
from lowtide.plan.data import Compress
from lowtide.plan.moves.linear import linear_values

torch.set_num_threads(1)


class Recomputes(torch.autograd.Function):
    """Saves what enters a GELU and a matrix product, and runs the GELU again in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return F.gelu(x) @ weight

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, torch.Tensor]:  # pyright: ignore
        x, _ = ctx.saved_tensors
        return None, F.gelu(x).t() @ gradients[0]


def weights(count: int) -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(8, 8)) for _ in range(count)]


def product(x: torch.Tensor, w: list[nn.Parameter]) -> torch.Tensor:
    return torch.tanh(x @ w[0])


def square_product(x: torch.Tensor, w: list[nn.Parameter]) -> torch.Tensor:
    y = torch.tanh(x @ w[0])
    return y @ y.t()


def gate(x: torch.Tensor, w: list[nn.Parameter]) -> torch.Tensor:
    y = torch.sigmoid(x @ w[0]).clone()
    return y * (y @ w[1])  # the gradient of w[1] is y^T (dout * y)


def branches(x: torch.Tensor, w: list[nn.Parameter]) -> torch.Tensor:
    y = (x @ w[0]).clone()
    return torch.tanh(y @ w[1]) * torch.tanh(y @ w[2])


def scores(x: torch.Tensor, w: list[nn.Parameter]) -> torch.Tensor:
    return torch.softmax(x @ w[0], -1) @ w[1]


def recomputed(x: torch.Tensor, w: list[nn.Parameter]) -> torch.Tensor:
    return Recomputes.apply((x @ w[0]).clone(), w[1])  # pyright: ignore[reportReturnType]


@pytest.mark.parametrize(
    ("net", "producer", "expected"),
    [
        (product, "aten.tanh", False),  # its own backward squares it
        (square_product, "aten.tanh", False),
        (gate, "aten.clone", False),  # twice along one path
        (branches, "aten.clone", True),  # twice, but never on one path
        (scores, "aten._softmax", False),
        (recomputed, "aten.clone", False),  # a function of it is made again
    ],
)
def test_what_is_linear(net: Callable[..., torch.Tensor], producer: str, expected: bool) -> None:
    w = weights(3)
    graph = lowtide.trace(lambda: net(torch.randn(4, 8), w).sum())
    saved = {s.value for s in graph.saved if s.droppable and graph.values[s.value].producer is not None}
    mine = {
        v for v in saved if graph.operations[graph.values[v].producer or 0].name.startswith(producer + ".")
    }
    assert mine
    assert mine & linear_values(graph) == (mine if expected else set())


class Net(nn.Module):
    """Everything that a transformer saves: norms, attention, GELU and the loss's softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down, self.head = (
            nn.LayerNorm(32),
            nn.Linear(32, 64),
            nn.Linear(64, 32),
            nn.Linear(32, 16),
        )
        self.qkv = nn.Linear(32, 96)

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.contiguous() for t in self.qkv(self.norm(x)).split(32, dim=-1))
        x = x + torch.softmax(q @ k.transpose(-1, -2) / 4, -1) @ v
        x = x + self.down(F.gelu(self.up(self.norm(x))))
        return F.cross_entropy(8 * self.head(x).flatten(0, 1), targets)


@pytest.fixture(scope="module")
def batch() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(4, 16, 32), torch.randint(16, (64,))


def gradient(net: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    net.zero_grad()
    net(*batch).backward()
    return torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])


def bias_over_chance(
    batch: tuple[torch.Tensor, torch.Tensor], everywhere: bool, draws: int = 200
) -> tuple[float, set[str]]:
    """How far the mean gradient is from the exact one, over how far it would be by chance, and the codecs in
    use.
    """
    torch.manual_seed(0)
    net = Net()
    exact = gradient(net, batch)
    handle = lowtide.limit_memory(net, policy=policies.compress("int4", min_bytes=1, everywhere=everywhere))
    found = torch.stack([gradient(net, batch) for _ in range(draws)])
    plan = handle.plan
    handle.remove()
    mean = found.mean(0)
    chance = ((found - mean).square().sum() / (draws - 1) / draws).sqrt()
    assert float(chance) > 0  # every step rounds anew
    assert plan is not None
    return float((mean - exact).norm() / chance), {
        d.codec for d in plan.decisions.values() if isinstance(d, Compress)
    }


def test_four_bits_leave_the_gradient_without_bias_where_backward_is_linear(
    batch: tuple[torch.Tensor, torch.Tensor],
) -> None:
    bias, codecs = bias_over_chance(batch, everywhere=False)
    assert codecs == {"int4", "int8"}
    assert bias < 1.2  # 1 is chance
    bias, codecs = bias_over_chance(batch, everywhere=True)
    assert codecs == {"int4"}
    assert bias > 2  # the test would see a bias
