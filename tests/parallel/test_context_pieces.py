"""Models whose ranks share every sequence, with a loss and MLPs in pieces, under a limit and without: the
steps of one process, and no more logits than a piece has.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import on_each_backend, on_ranks, seeded
from test_context import make, train, worst
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import lowtide
from lowtide import parallel as lp

pytestmark = on_each_backend
VOCABULARY, PIECES = 67, 4


def in_pieces(model: nn.Module) -> None:
    lowtide.chunked_loss(model, PIECES)
    lowtide.tile([one for name, one in model.named_modules() if name.endswith("mlp")], PIECES)


def shared(kind: str, exchange: Any, first: str) -> nn.Module:
    model = make(kind)
    if first == "pieces":
        in_pieces(model)
    lp.context_parallel(model, dist.group.WORLD, exchange)
    if first == "context":
        in_pieces(model)
    return model


def differences(kinds: list[str], exchange: Any) -> dict[str, float]:
    """The largest differences of ten steps from one process."""
    warnings.simplefilter("ignore", lowtide.LowtideWarning)
    found = {}
    for kind in kinds:
        expected = train(make(kind))
        for first in ("pieces", "context"):
            for budget in ("", "min"):
                model = shared(kind, exchange, first)
                if budget:
                    lowtide.limit_memory(model, budget, progress=False)
                found[f"{kind}, {first} first, {budget}"] = worst(train(model), expected)
    return found


@pytest.mark.parametrize(
    ("kinds", "exchange"),
    [
        (["gpt"], "ring"),
        (["llama"], "all-to-all"),
        pytest.param(["llama", "built-in llama"], "ring", marks=pytest.mark.slow),
        pytest.param(["gpt", "qwen3"], "all-to-all", marks=pytest.mark.slow),
    ],
)
def test_ten_steps(kinds: list[str], exchange: str) -> None:
    for found in on_ranks(2, differences, kinds, exchange):
        assert max(found.values()) < 1e-12, found


class Rows(TorchDispatchMode):
    """Counts the rows of the largest tensor with a number for each word."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for one in tree_leaves(made):
            if isinstance(one, torch.Tensor) and one.ndim and one.shape[-1] == VOCABULARY:
                self.most = max(self.most, one.numel() // VOCABULARY)
        return made


def rows(kind: str, first: str) -> int:
    warnings.simplefilter("ignore", lowtide.LowtideWarning)
    model = lp.context_parallel(make(kind), dist.group.WORLD) if not first else shared(kind, "auto", first)
    tokens = torch.randint(VOCABULARY, (8, 64), generator=seeded(0))
    with Rows() as seen:
        named = {"input_ids": tokens, "labels": tokens}
        (model(tokens, tokens) if kind == "gpt" else model(**named)).loss.backward()
    return seen.most


@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_no_more_logits_than_a_piece_has(kind: str) -> None:
    tokens = 8 * 64 // 2
    assert on_ranks(2, rows, kind, "") == [tokens] * 2
    for first in ("pieces", "context"):
        assert on_ranks(2, rows, kind, first) == [tokens // PIECES] * 2
