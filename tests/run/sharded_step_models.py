"""Models that the tests of sharded steps shard, what ranks train them on, and how gathers are counted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import lowtide
from lowtide import meter, private

LAYERS, WIDTH, BATCH, LENGTH, WORDS = 2, 32, 4, 64, 32


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        parts = self.mix(self.norm(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in parts)
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.mlp(x + found.transpose(1, 2).flatten(2))


class Scoped(Block):
    """A block that says itself that it is checkpointed."""

    def forward(self, x: Tensor) -> Tensor:
        with lowtide.checkpointing():
            return super().forward(x)


class Adapted(Block):
    """A block with an adapter, which alone is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.adapter = nn.Sequential(nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.adapter(x)


class Model(nn.Module):
    def __init__(self, kind: type[Block] = Block, repeats: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.repeats = nn.Embedding(WORDS, WIDTH), repeats
        self.blocks = nn.ModuleList(kind() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        if kind is Adapted:
            for part in (self.tokens, self.norm, self.head):
                part.requires_grad_(False)

    def run(self, block: nn.Module, x: Tensor) -> Tensor:
        return block(x)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in list(self.blocks) * self.repeats:
            x = self.run(block, x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens.roll(-1, 1).flatten())


class ByMethod(Model):
    """Its blocks are called by a method of their own name."""

    def run(self, block: Any, x: Tensor) -> Tensor:
        return block.mixed(x)


def sharded(model: Any, each: Any = None, **options: Any) -> Any:
    """Each block a unit, and the root."""
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks:
        fully_shard(block, **options)
        if each is not None:
            each(block)
    return fully_shard(model, **{name: item for name, item in options.items() if "reshard" not in name})


def local(tensor: Any) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def batch(number: int) -> Tensor:
    seed = torch.Generator().manual_seed(100 * number + dist.get_rank())
    return torch.randint(WORDS, (BATCH, LENGTH), generator=seed)


@contextmanager
def watched() -> Iterator[list[int]]:
    """The number of gathers so far, in a list. Collectives return when Gloo's threads have let go of what
    they moved: when they do is up to the machine's load.
    """
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as groups

    count, own = [0], groups.foreach_all_gather
    names = ("all_gather_into_tensor", "all_gather_single", "reduce_scatter_tensor", "reduce_scatter_single")
    collectives = {name: getattr(dist, name) for name in (*names, "all_reduce") if hasattr(dist, name)}

    def settled(collective: Any, *args: Any, **kwargs: Any) -> Any:
        moved = [item.untyped_storage() for item in (*args, *kwargs.values()) if isinstance(item, Tensor)]
        before = [private.storage_use_count(storage) for storage in moved]
        with meter.peak(torch.get_default_device()) as seen:
            result = collective(*args, **kwargs)
            for _ in range(100_000 if result is None else 0):
                if seen.live_bytes <= 0 and [private.storage_use_count(one) for one in moved] == before:
                    break
        return result

    def counted(*args: Any, **kwargs: Any) -> Any:
        count[0] += 1
        return own(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(groups, "foreach_all_gather", counted)
        for name, collective in collectives.items():
            patch.setattr(dist, name, partial(settled, collective))
        yield count
