"""A process of `test_shelf`: one step under a budget; what the handle knows, on standard output."""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from unittest import mock

import torch
from torch import nn

import lowtide
from lowtide.compiled import price
from lowtide.compiled.choose_cuts import Choice
from lowtide.private import inductor


class Model(nn.Module):
    """A graph that returns its loss, or two."""

    def __init__(self, broken: bool) -> None:
        super().__init__()
        self.broken = broken
        widths = (16, 64, 64, 64, 64)
        layers = (nn.Linear(*pair) for pair in pairwise(widths))
        self.layers = nn.Sequential(*(part for layer in layers for part in (layer, nn.GELU())))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.broken:
            x = self.layers[:4](x)
            torch._dynamo.graph_break()
            return self.layers[4:](x).square().mean()
        return self.layers(x).square().mean()


def step(budget: str, sizes: str = "open", rows: int = 512) -> dict[str, object]:
    """Compile and step; says how often cuts were searched for, too."""
    hits = inductor.cache_hits()
    torch.manual_seed(0)
    model = Model(sizes == "broken")
    compiled = lowtide.compile(model, budget)
    x = torch.randn(rows, 16)
    if sizes == "open":
        torch._dynamo.mark_dynamic(x, 0)
    with (
        mock.patch.object(Choice, "search", autospec=True, side_effect=Choice.search) as searched,
        mock.patch.object(price, "costs_of", side_effect=price.costs_of) as timed,
        mock.patch.object(inductor, "compile_with", side_effect=inductor.compile_with) as compiling,
    ):
        for _ in range(2):
            model.zero_grad()
            compiled(x).backward()
    handle = lowtide.handle_of(compiled)
    kept = [one.args for one in compiling.call_args_list if "fx_graph_cache" not in one.args[2]]
    return {
        "asked": searched.call_count,
        "timed": timed.call_count,
        "at_once": sorted({args[4] for args in kept}),
        "hits": inductor.cache_hits() - hits,
        "plan": None if handle.plan is None else handle.plan.to_json(),
        "measured": handle.measured_peak_bytes,
        "predicted": handle.predicted_peak_bytes,
        "gradient": model.layers[0].weight.grad.sum().item(),
    }


if __name__ == "__main__":
    print(json.dumps(step(*sys.argv[1:3])))
