"""One layer of the 22B model as one of eight tensor-parallel ranks computes it: plain, recomputed in full,
and selectively.

python -m benchmarks layer_times
python -m benchmarks.layer_times --smoke    a few steps of a small layer, to see that all of it runs; writes
nothing

The rows of arXiv 2205.05198, table 4, that need no second device, as ratios to the plain layer: there the
whole layer on eight A100s, collectives included, here a rank's share of its matrices and heads without them.
On a GPU in bfloat16 at the paper's sizes; on a CPU in float32 at an eighth of the sequence and of the width,
which says that it works and not how fast a GPU is.
"""

from __future__ import annotations

import argparse
import random
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
from benchmarks.common import UNSETTLED, keep_pages, save, total_peak
from lowtide import meter, policies
from lowtide.models.common import CausalAttention, Dropout

RANKS = 8
DROPOUT = 0.1
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


SMOKE = Shape(64, 8, 32, 2, torch.float32)


def shape_on(device: str) -> Shape:
    """The 22B model's on a GPU, a small one on a CPU."""
    if device == "cuda":
        return Shape(6144, 64, 2048, 4, torch.bfloat16)
    return Shape(768, 64, 256, 4, torch.float32)


class RankLayer(nn.Module):
    """A transformer layer's share of one rank: all of the width comes in and goes out, an eighth of heads and
    hidden features lies between.

    Attention is a chain of separate operations, and each dropout keeps one byte an element on every device,
    as the paper counts.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        mine = shape.width // RANKS
        self.heads = shape.heads // RANKS
        self.norm1, self.norm2 = nn.LayerNorm(shape.width), nn.LayerNorm(shape.width)
        self.qkv, self.out = nn.Linear(shape.width, 3 * mine), nn.Linear(mine, shape.width)
        self.up, self.down = nn.Linear(shape.width, 4 * mine), nn.Linear(4 * mine, shape.width)
        self.core, self.dropout = CausalAttention(DROPOUT, fused=False), Dropout(DROPOUT)

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence, _ = x.shape
        q, k, v = (
            t.view(batch, sequence, self.heads, -1).transpose(1, 2)
            for t in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        x = x + self.dropout(self.out(self.core(q, k, v).transpose(1, 2).reshape(batch, sequence, -1)))
        return x + self.dropout(self.down(functional.gelu(self.up(self.norm2(x)), approximate="tanh")))


class Net(nn.Module):
    """The layer, and a number to go back from that costs next to nothing beside it."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.layer = RankLayer(shape)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).sum()


def contenders(shape: Shape, device: str) -> dict[str, Net]:
    """The same layer four times."""
    nets: dict[str, Net] = {}
    for name in ("plain", "full", "selective", "torch.utils.checkpoint"):
        torch.manual_seed(0)
        nets[name] = Net(shape).to(device, shape.dtype).train()
    lowtide.limit_memory(nets["full"], policy=policies.full(["layer"]))
    lowtide.limit_memory(nets["selective"], policy=policies.selective())
    forward = nets["torch.utils.checkpoint"].layer.forward
    again = nets["torch.utils.checkpoint"].layer
    again.forward = lambda x: checkpoint(forward, x, use_reentrant=False)  # type: ignore
    return nets


def held_bytes(net: Net, x: Tensor) -> int:
    """What a layer keeps from forward to backward, its input included: the part of the memory that a model
    has of every layer at once.
    """
    net.zero_grad(set_to_none=True)  # as in every step
    x.grad = None
    with meter.peak(x.device) as seen:
        loss = net(x)
        held = seen.live_bytes
    loss.backward()
    return held + x.nbytes


def layer_rows(shape: Shape, device: str, seconds: float, least: int = 11) -> list[dict[str, Any]]:
    """One row a contender.

    Args:
        shape: of the layer.
        device: where it runs.
        seconds: how long to go on with rounds of one step of each.
        least: rounds at least.
    """
    # the input needs a gradient, as what the layer before gave does
    x = torch.randn(
        shape.batch, shape.sequence, shape.width, device=device, dtype=shape.dtype, requires_grad=True
    )
    nets = contenders(shape, device)
    timed = {name: _step(net, x) for name, net in nets.items()}
    for step in timed.values():
        for _ in range(UNSETTLED):
            step()
    held, peaks = {}, {}
    for name, step in timed.items():
        held[name] = held_bytes(nets[name], x)
        x.grad = None
        peaks[name] = total_peak(nets[name], {"x": x}, step)
    begin = time.perf_counter()
    for step in timed.values():
        step()
    rounds = min(200, max(least, int(seconds / (time.perf_counter() - begin))))
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in timed}
    draw, order = random.Random(0), list(timed)
    for _ in range(rounds):
        draw.shuffle(order)  # no step always follows the same one
        for name in order:
            found[name].append(timed[name]())
    base = statistics.median(sum(pair) for pair in found["plain"])
    return [
        {
            "layer": name,
            "forward_seconds": statistics.median(a for a, _ in pairs),
            "backward_seconds": statistics.median(b for _, b in pairs),
            "extra": statistics.median(sum(a) - sum(b) for a, b in zip(pairs, found["plain"], strict=True))
            / base,
            "published_extra": PUBLISHED.get(name),
            "held_bytes": held[name],
            "peak_bytes": peaks[name],
            "rounds": rounds,
        }
        for name, pairs in found.items()
    ]


def main(smoke: bool = False) -> None:
    """Run, and write benchmarks/results/layer_times_{device}.json unless it is for the smoke only."""
    warnings.simplefilter("ignore")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    pages = keep_pages()
    shape = SMOKE if smoke else shape_on(device)
    rows = layer_rows(shape, device, 0.0, least=2) if smoke else layer_rows(shape, device, 60.0)
    for row in rows:
        print(row, flush=True)
    if not smoke:
        shown = {k: str(v) if isinstance(v, torch.dtype) else v for k, v in vars(shape).items()}
        save(f"layer_times_{device}", rows, shape=shown, ranks=RANKS, pages_kept=pages)


def _step(net: Net, x: Tensor) -> Callable[[], tuple[float, float]]:
    def now() -> float:
        if x.device.type == "cuda":
            torch.cuda.synchronize(x.device)
        return time.perf_counter()

    def step() -> tuple[float, float]:
        net.zero_grad(set_to_none=True)
        x.grad = None
        begin = now()
        loss = net(x)
        middle = now()
        loss.backward()
        return middle - begin, now() - middle

    return step


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Times of one layer, recomputed or not.")
    parser.add_argument("--smoke", action="store_true", help="a few steps of a small layer; writes nothing")
    main(parser.parse_args().smoke)
