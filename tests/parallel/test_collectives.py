"""The collectives of a column-row pair, counted one by one, with the bytes that they move."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import pytest
import torch
from counted import Collectives
from ranks import on_each_backend, on_ranks
from torch import Tensor, nn

import lowtide
from lowtide import parallel as lp
from lowtide.models import preset
from lowtide.models.gpt import GPT
from lowtide.models.llama import Llama

pytestmark = on_each_backend
SEQUENCE, BATCH, WIDTH = 8, 3, 16
WHOLE = SEQUENCE * BATCH * WIDTH * 4  # bytes of a float32 activation


class Pair(nn.Module):
    """Norm, column-parallel, GELU, row-parallel, as an MLP has them."""

    def __init__(self, sequence: int | None, columns: int = 1, **linear: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        sp: dict[str, Any] = {"sequence_parallel_enabled": sequence is not None}
        both = {**sp, "sequence_dimension": sequence, **linear}
        self.norm = lp.LayerNorm(WIDTH, **sp)
        self.ups = nn.ModuleList(
            lp.ColumnParallelLinear(WIDTH, 4 * WIDTH, gather_output=False, **both) for _ in range(columns)
        )
        self.down = lp.RowParallelLinear(4 * WIDTH, WIDTH, input_is_parallel=True, **both)

    def forward(self, x: Tensor) -> Tensor:
        ups = lp.column_parallel(self.norm(x), list(self.ups))  # type: ignore[arg-type]
        return x + self.down(torch.stack([nn.functional.gelu(up) for up in ups]).sum(0))


def count(
    sequence: int | None, columns: int = 1, frozen: bool = False, scope: str = "", input_grad: bool = True
) -> tuple[list[str], list[str], list[str], int]:
    """Collectives of forward, of backward, backward's order with its products, and the bytes moved in all."""
    pair = Pair(sequence, columns)
    if frozen:
        for up in pair.ups:
            up.weight.requires_grad_(False)  # type: ignore[union-attr]
    shape = [SEQUENCE, BATCH, WIDTH] if sequence != 1 else [BATCH, SEQUENCE, WIDTH]
    if sequence is not None:
        shape[sequence] //= torch.distributed.get_world_size()
    x = torch.randn(shape, requires_grad=input_grad)
    around: Callable[[], AbstractContextManager[Any]] = lowtide.checkpointing if scope else nullcontext
    with Collectives() as forward, around():
        out = pair(x)
    with Collectives() as backward:
        out.sum().backward()
    return forward.seen, backward.seen, backward.order, forward.moved + backward.moved


def counts() -> dict[str, Any]:
    return {
        "tensor": count(None),
        "sequence 0": count(0),
        "sequence 1": count(1),
        "three columns": count(0, columns=3),
        "frozen": count(0, frozen=True),
        "recomputed": count(0, scope="full"),
        "recomputed 1": count(1, scope="full"),
        "recomputed three columns": count(0, columns=3, scope="full"),
        "recomputed tensor": count(None, scope="full"),
    }


@cache
def counted(size: int) -> list[dict[str, Any]]:
    return on_ranks(size, counts)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_collectives_of_a_pair(size: int) -> None:
    for found in counted(size):
        sent = WHOLE * (size - 1) // size
        forward, backward, _, moved = found["tensor"]
        assert (forward, backward) == (["AR"], ["AR"]) and moved == 4 * sent
        for name in ("sequence 0", "sequence 1", "three columns"):
            forward, backward, _, moved_here = found[name]
            assert (forward, backward) == (["AG", "RS"], ["AG", "AG", "RS"]), name
            assert moved_here == moved + sent, "plain tensor parallelism plus the one extra gather"
        # what a frozen weight does not need is not gathered
        forward, backward, _, moved_here = found["frozen"]
        assert (forward, backward) == (["AG", "RS"], ["AG", "RS"]) and moved_here == moved
        # recomputation gathers the input once, for the products and for the weight's gradient, and scatters
        # nothing again
        for name in ("recomputed", "recomputed 1", "recomputed three columns"):
            forward, backward, _, moved_here = found[name]
            assert (forward, backward) == (["AG", "RS"], ["AG", "AG", "RS"]), name
            assert moved_here == moved + sent
        forward, backward, _, _ = found["recomputed tensor"]
        assert (forward, backward) == (["AR"], ["AR"])


def test_transfers_run_beside_products() -> None:
    """In backward of the column-parallel layer: start the gather, multiply for the input, start the
    reduce-scatter, wait for the gather, multiply for the weight, and only then wait for the
    reduce-scatter."""
    for found in counted(2):
        for name in ("sequence 0", "sequence 1"):
            order = found[name][2]
            assert order == ["AG", "wait", "mm", "mm", "AG", "mm", "RS", "wait", "mm", "wait"], order
        assert found["tensor"][2] == ["mm", "mm", "mm", "AR", "mm", "wait"]


def narrow(sequence: int | None, **linear: Any) -> int:
    """Bytes that a pair in bfloat16 moves."""
    pair = Pair(sequence, dtype=torch.bfloat16, **linear).to(torch.bfloat16)
    length = SEQUENCE if sequence is None else SEQUENCE // torch.distributed.get_world_size()
    with Collectives() as seen:
        pair(torch.randn(length, BATCH, WIDTH, dtype=torch.bfloat16, requires_grad=True)).sum().backward()
    return seen.moved


def narrow_counts() -> list[int]:
    own = {"reduce_dtype": torch.bfloat16}
    return [narrow(None), narrow(0), narrow(None, **own), narrow(0, **own)]


def test_bytes_of_a_pair_in_bfloat16() -> None:
    """Sums travel in float32 unless ``reduce_dtype`` says otherwise, gathers as they are."""
    for found in on_ranks(2, narrow_counts):
        sent = WHOLE // 2 // 2  # an activation in bfloat16, in a ring of two
        assert found == [8 * sent, 7 * sent, 4 * sent, 5 * sent]


def both(family: str) -> list[tuple[dict[str, int], dict[str, int]]]:
    return [layers(family, False), layers(family, True)]


def layers(family: str, scope: bool) -> tuple[dict[str, int], dict[str, int]]:
    """Collectives that one more layer of a model adds."""
    found = []
    for depth in (1, 2):
        config = preset(f"{family}-nano", layers=depth, vocabulary=32)
        torch.manual_seed(0)
        model = (GPT if family == "gpt" else Llama)(
            config, torch.distributed.group.WORLD, sequence_parallel=True
        )
        if scope:
            for block in model.blocks:
                block.forward = in_scope(block.forward)  # type: ignore[method-assign]
        tokens = torch.zeros(2, 8, dtype=torch.long)
        with Collectives() as forward:
            loss = model(tokens, tokens).loss
        with Collectives() as backward:
            loss.backward()
        found.append((forward.seen, backward.seen))
    difference = [
        {kind: b.count(kind) - a.count(kind) for kind in ("AG", "RS", "AR")}
        for a, b in zip(*found, strict=True)
    ]
    return difference[0], difference[1]


def in_scope(function: Callable[..., Any]) -> Callable[..., Any]:
    def scoped(*args: Any) -> Any:
        with lowtide.checkpointing():
            return function(*args)

    return scoped


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_collectives_of_a_layer(family: str) -> None:
    """Two pairs a layer. Recomputing the layer replays the first pair's reduce-scatter, which the second norm
    reads, and not the second's, which nobody reads; each gather serves the replay and the weight's
    gradient."""
    for plain, recomputed in on_ranks(2, both, family):
        assert plain == ({"AG": 2, "RS": 2, "AR": 0}, {"AG": 4, "RS": 2, "AR": 0})
        assert recomputed == ({"AG": 2, "RS": 2, "AR": 0}, {"AG": 4, "RS": 3, "AR": 0})
