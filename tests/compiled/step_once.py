"""A process of `test_alone_stored`: one step under a budget; what the handle knows, on standard output."""

from __future__ import annotations

import json
import sys
from itertools import pairwise

import torch
from torch import nn

import lowtide
from lowtide.compiled.alone import Partitioner
from lowtide.private import inductor


class Model(nn.Module):
    """A graph that returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        widths = (16, 64, 64, 64, 64)
        layers = (nn.Linear(*pair) for pair in pairwise(widths))
        self.layers = nn.Sequential(*(part for layer in layers for part in (layer, nn.GELU())))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def step(budget: str, sizes: str = "open", rows: int = 512) -> dict[str, object]:
    """Compile and step; says whether the partitioner was asked, too."""
    asked, hits = [], inductor.cache_hits()
    plans = Partitioner.__call__

    def count(self: Partitioner, *args: object, **kwargs: object) -> object:
        asked.append(1)
        return plans(self, *args, **kwargs)

    Partitioner.__call__ = count
    torch.manual_seed(0)
    model = Model()
    compiled = lowtide.compile(model, budget)
    x = torch.randn(rows, 16)
    if sizes == "open":
        torch._dynamo.mark_dynamic(x, 0)
    compiled(x).backward()
    handle = lowtide.handle_of(compiled)
    Partitioner.__call__ = plans
    return {
        "asked": len(asked),
        "hits": inductor.cache_hits() - hits,
        "plan": None if handle.plan is None else handle.plan.to_json(),
        "predicted": handle.predicted_peak_bytes,
        "gradient": model.layers[0].weight.grad.sum().item(),
    }


if __name__ == "__main__":
    print(json.dumps(step(*sys.argv[1:3])))
