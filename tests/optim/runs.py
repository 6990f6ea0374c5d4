"""Training runs to compare: a plain optimizer of `torch.optim` with its fused kernels, and ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from benchmarks.throttled_link import ThrottledLink
from torch import nn

from lowtide.optim import HostOptimizer

FRACTIONS = [round(0.1 * tenth, 1) for tenth in range(11)]
ADAMW: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}
KINDS = [
    (torch.optim.AdamW, ADAMW),
    (torch.optim.Adam, {"lr": 1e-2, "weight_decay": 0.1, "amsgrad": True}),
    (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    (torch.optim.SGD, {"lr": 0.05, "maximize": True}),
]
IDS = ["adamw", "adam-amsgrad", "sgd-nesterov", "sgd-plain"]

Make = Callable[[Any], torch.optim.Optimizer]


class Model(nn.Module):
    """Sizes that are no multiple of anything, a shared weight, a scalar, a frozen and an unused parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(33, 57), nn.Linear(57, 33), nn.LayerNorm(33)
        self.frozen = nn.Linear(33, 33)
        self.frozen.requires_grad_(False)
        self.convolution = nn.Conv1d(1, 3, 5, padding=2).to(memory_format=torch.contiguous_format)
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.unused = nn.Parameter(torch.ones(50))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.frozen(self.norm(self.second(torch.nn.functional.gelu(self.first(x)))))
        h = self.convolution(h[:, None]).mean(1)
        return (torch.nn.functional.linear(h, self.first.weight) * self.gain).square().mean()


def model(dtype: torch.dtype = torch.float32) -> Model:
    torch.manual_seed(0)
    return Model().to(dtype)


def batch(step: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(8, 33, generator=torch.Generator().manual_seed(step)).to(dtype)


def train(
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: range,
    clip: float | None = None,
    accumulate: int = 1,
    scheduler: Any = None,
    after: Callable[[int], None] | None = None,
) -> list[float]:
    """Losses; the optimizer's own clipping where gradients are streamed."""
    losses = []
    for step in steps:
        optimizer.zero_grad()
        for micro in range(accumulate):
            loss = net(batch(step * 10 + micro, next(net.parameters()).dtype))
            loss.backward()
        losses.append(loss.item())
        if clip is not None and isinstance(optimizer, HostOptimizer) and optimizer.stream_gradients:
            optimizer.clip_grad_norm_(clip)
        elif clip is not None:
            nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], clip)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        if after is not None:
            after(step)
    return losses


def groups(net: nn.Module) -> list[dict[str, Any]]:
    """Two groups, one without decay."""
    parameters = list(net.parameters())
    return [
        {"params": [p for p in parameters if p.ndim >= 2]},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0, "lr": 5e-3},
    ]


def equal(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


def same_state(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Whether two state dicts hold the same tensors."""
    if set(a["state"]) != set(b["state"]):
        return False
    return all(
        set(a["state"][k]) == set(b["state"][k])
        and all(torch.equal(a["state"][k][n], b["state"][k][n]) for n in a["state"][k])
        for k in a["state"]
    )


MODES: dict[str, Callable[[], dict[str, Any]]] = {
    "disk": lambda: {"host": "disk"},
    "memory": lambda: {"host": "memory"},
    "disk-streamed": lambda: {"host": "disk", "stream_gradients": True, "chunk_bytes": 4096},
    "memory-streamed": lambda: {"host": "memory", "stream_gradients": True},
    "link": lambda: {"link": ThrottledLink(), "chunk_bytes": 4096},
    "link-streamed": lambda: {"link": ThrottledLink(), "stream_gradients": True, "chunk_bytes": 4096},
    "link-disk-streamed": lambda: {
        "link": ThrottledLink(),
        "host": "disk",
        "stream_gradients": True,
        "chunk_bytes": 4096,
    },
}
