"""One layer of the 22B model as one of eight tensor-parallel ranks computes it: plain, recomputed in full, and selectively.

python -m benchmarks layer_times

The rows of arXiv 2205.05198, table 4, that need no second device, as ratios to the plain layer: there the whole layer on eight A100s, collectives included,
here a rank's share of its matrices and heads without them. On a GPU in bfloat16 at the paper's sizes; on a CPU in float32 at an eighth of the
sequence and of the width, which says that it works and not how fast a GPU is.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import lowtide
from benchmarks.common import save
from lowtide import meter, policies

RANKS = 8
PUBLISHED = {"full": 0.39, "selective": 0.07}
"""Overhead of forward and backward over the baseline (arXiv 2205.05198, table 4)."""


@dataclass(frozen=True)
class Shape:
    """A layer and its input."""

    width: int
    heads: int
    sequence: int
    batch: int
    dtype: torch.dtype


def shape_on(device: str) -> Shape:
    """The 22B model's on a GPU, a small one on a CPU."""
    if device == "cuda":
        return Shape(6144, 64, 2048, 4, torch.bfloat16)
    return Shape(768, 64, 256, 4, torch.float32)


class RankLayer(nn.Module):
    """A transformer layer's share of one rank: all of the width comes in and goes out, an eighth of heads and hidden features lies between."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        mine = shape.width // RANKS
        self.heads = shape.heads // RANKS
        self.norm1, self.norm2 = nn.LayerNorm(shape.width), nn.LayerNorm(shape.width)
        self.qkv, self.out = nn.Linear(shape.width, 3 * mine), nn.Linear(mine, shape.width)
        self.up, self.down = nn.Linear(shape.width, 4 * mine), nn.Linear(4 * mine, shape.width)
        self.core = Core()

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence, _ = x.shape
        q, k, v = (t.view(batch, sequence, self.heads, -1).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        x = x + functional.dropout(self.out(self.core(q, k, v).transpose(1, 2).reshape(batch, sequence, -1)), 0.1)
        return x + functional.dropout(self.down(functional.gelu(self.up(self.norm2(x)), approximate="tanh")), 0.1)


class Core(nn.Module):
    """Attention in its separate operations: what selective recomputation runs again."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        mask = torch.ones(q.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        return functional.dropout(torch.softmax(scores.masked_fill(mask, float("-inf")), -1), 0.1) @ v


class Net(nn.Module):
    """The layer and a loss."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.layer = RankLayer(shape)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).float().square().mean()


def main(seconds_for_it: float = 60.0) -> None:
    """Run and write benchmarks/results/layer_times_{device}.json."""
    warnings.simplefilter("ignore")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = shape_on(device)
    x = torch.randn(shape.batch, shape.sequence, shape.width, device=device, dtype=shape.dtype)
    nets: dict[str, Net] = {}
    for name in ("plain", "full", "selective", "torch.utils.checkpoint"):
        torch.manual_seed(0)
        nets[name] = Net(shape).to(device, shape.dtype).train()
    lowtide.limit_memory(nets["full"], policy=policies.full(["layer"]))
    lowtide.limit_memory(nets["selective"], policy=policies.selective())
    forward = nets["torch.utils.checkpoint"].layer.forward
    nets["torch.utils.checkpoint"].layer.forward = lambda x: checkpoint(forward, x, use_reentrant=False)  # type: ignore[method-assign]
    timed = {name: _step(net, x) for name, net in nets.items()}
    for step in timed.values():
        for _ in range(4):
            step()
    peaks = {name: meter.measure(step, timeline=False).peak_bytes for name, step in timed.items()}
    begin = time.perf_counter()
    for step in timed.values():
        step()
    rounds = min(200, max(11, int(seconds_for_it / (time.perf_counter() - begin))))
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in timed}
    for _ in range(rounds):
        for name, step in timed.items():
            found[name].append(step())
    base = statistics.median(sum(pair) for pair in found["plain"])
    rows: list[dict[str, Any]] = []
    for name, pairs in found.items():
        extra = statistics.median(sum(a) - sum(b) for a, b in zip(pairs, found["plain"], strict=True)) / base
        rows.append(
            {
                "layer": name,
                "forward_seconds": statistics.median(a for a, _ in pairs),
                "backward_seconds": statistics.median(b for _, b in pairs),
                "extra": extra,
                "published_extra": PUBLISHED.get(name),
                "peak_bytes": peaks[name],
                "rounds": rounds,
            }
        )
        print(rows[-1], flush=True)
    shown = {k: str(v) if isinstance(v, torch.dtype) else v for k, v in vars(shape).items()}
    save(f"layer_times_{device}", rows, shape=shown, ranks=RANKS)


def _step(net: Net, x: Tensor) -> Callable[[], tuple[float, float]]:
    def now() -> float:
        if x.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def step() -> tuple[float, float]:
        net.zero_grad(set_to_none=True)
        begin = now()
        loss = net(x)
        middle = now()
        loss.backward()
        return middle - begin, now() - middle

    return step


if __name__ == "__main__":
    main()
