"""Small models with what neuronx-distributed's layers do beside splitting, each with an unsharded twin of the
same state dict.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from ranks import seeded
from torch import Tensor, nn
from torch.nn import functional as F

from lowtide import parallel as lp

WIDTH, HEAD, VOCABULARY = 6, 4, 11
F64: dict[str, Any] = {"dtype": torch.float64}


class Twins(nn.Module):
    """A model that is shared or not.

    Args:
        shared: made of the parallel layers.
        degree: how many ranks share it.
        group: these ranks, where they are not all.
    """

    def __init__(self, shared: bool, degree: int, group: Any = None) -> None:
        super().__init__()
        self.shared, self.degree = shared, degree
        self.made: dict[str, Any] = {**F64, "tensor_model_parallel_group": group}
        self.group = group

    def example(self, batch: int) -> Tensor:
        return torch.randn(batch, 8, WIDTH, generator=seeded(3), dtype=torch.float64)

    def column(self, size: int, out: int, **options: Any) -> nn.Module:
        if self.shared:
            return lp.ColumnParallelLinear(size, out, gather_output=False, **self.made, **options)
        return nn.Linear(size, out, **F64)

    def row(self, size: int, out: int, **options: Any) -> nn.Module:
        if self.shared:
            return lp.RowParallelLinear(size, out, input_is_parallel=True, **self.made, **options)
        return nn.Linear(size, out, **F64)

    def table(self, size: int, **options: Any) -> nn.Module:
        if self.shared:
            return lp.ParallelEmbedding(
                VOCABULARY, size, collect_output=False, pad=True, **self.made, **options
            )
        return nn.Embedding(VOCABULARY, size, **F64)


class Tokens(Twins):
    def example(self, batch: int) -> Tensor:
        return torch.randint(VOCABULARY, (batch, 8), generator=seeded(3))


class Rows(Tokens):
    """Vectors that are parts of a sum, of a vocabulary with padding."""

    def __init__(self, shared: bool, degree: int, group: Any = None) -> None:
        super().__init__(shared, degree, group)
        self.embedding = self.table(WIDTH, pad_alignment_size_per_rank=8)

    def forward(self, x: Tensor) -> Tensor:
        found = self.embedding(x)
        return lp.reduce_from_tensor_model_parallel_region(found, self.group) if self.shared else found


class Features(Tokens):
    """A rank's features of each vector, into a row-parallel layer; their padding is not zero there."""

    def __init__(self, shared: bool, degree: int, group: Any = None) -> None:
        super().__init__(shared, degree, group)
        options = {"pad_alignment_size_per_rank": 4}
        self.embedding = self.table(5, shard_across_embedding=True, **options)
        self.down = self.row(5, WIDTH, pad=True, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.softplus(self.embedding(x)))


class Aligned(Twins):
    """One block; the padding is not zero between the layers."""

    def __init__(self, shared: bool, degree: int, group: Any = None) -> None:
        super().__init__(shared, degree, group)
        options = {"pad": True, "pad_alignment_size_per_rank": 8}
        self.up, self.down = self.column(WIDTH, 10, **options), self.row(10, WIDTH, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.softplus(self.up(x)))


class Blocks(Twins):
    """Three blocks, each with padding of its own."""

    def __init__(self, shared: bool, degree: int, group: Any = None) -> None:
        super().__init__(shared, degree, group)
        self.up = self.column(WIDTH, 15, stride=3, pad=True, pad_alignment_size_per_rank=2)
        self.down = self.row(5, WIDTH, pad=True, pad_alignment_size_per_rank=4 if degree > 1 else 2)

    def forward(self, x: Tensor) -> Tensor:
        a, b, c = self.up(x).chunk(3, -1)
        return self.down(F.softplus(a) * b + c)


class Kept(Twins):
    """A gathered output that keeps its padding."""

    def __init__(self, shared: bool, degree: int, group: Any = None) -> None:
        super().__init__(shared, degree, group)
        self.up: Any = nn.Linear(WIDTH, 5, **F64)
        if shared:
            options: dict[str, Any] = {"pad_alignment_size_per_rank": 4, "keep_padded_output": True}
            self.up = lp.ColumnParallelLinear(WIDTH, 5, pad=True, **options, **self.made)

    def forward(self, x: Tensor) -> Tensor:
        found = self.up(x)
        width = 4 * self.degree + 4 * (self.degree == 1)
        assert not self.shared or found.shape[-1] == width
        return F.softplus(F.pad(found, (0, 8 - found.shape[-1])))


class Attention(nn.Module):
    """Of the heads that a rank has."""

    def __init__(self, of: Twins, heads: int, key_value_heads: int, fused: bool) -> None:
        super().__init__()
        self.rank_heads, self.groups = heads, heads // key_value_heads
        sizes = [heads * HEAD, key_value_heads * HEAD, key_value_heads * HEAD]
        pad: dict[str, Any] = {"pad": True} if of.shared else {}
        if fused:
            self.qkv: Any = of.column(WIDTH, sum(sizes), stride=3, **pad)
        else:
            self.q, self.k, self.v = (of.column(WIDTH, size, **pad) for size in sizes)
        self.fused = fused
        self.out = of.row(heads * HEAD, WIDTH, **pad)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).chunk(3, -1) if self.fused else (self.q(x), self.k(x), self.v(x))
        q, k, v = (part.unflatten(-1, (-1, HEAD)).transpose(1, 2) for part in parts)
        assert q.shape[1] == self.rank_heads
        k, v = (part.repeat_interleave(self.groups, 1) for part in (k, v))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))


class Heads(Twins):
    """Attention with heads that the ranks do not divide."""

    heads, key_value_heads, fused = 3, 3, False

    def __init__(self, shared: bool, degree: int, group: Any = None) -> None:
        super().__init__(shared, degree, group)
        self.attention = Attention(self, self.heads, self.key_value_heads, self.fused)
        self.up, self.down = self.column(WIDTH, 4), self.row(4, WIDTH)  # of no attention
        if not shared:
            return
        seen: list[float] = []

        def hook(module: Any, ratio: float) -> None:
            module.rank_heads = round(module.rank_heads * ratio) // degree
            seen.append(ratio)

        fewer = self.key_value_heads if self.key_value_heads != self.heads else None
        padded: Any = lp.pad_model(
            self, max(degree, 2), self.heads, [Attention], hook, n_key_value_heads=fewer
        )
        assert padded is self and seen == [4 / 3]

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x) + self.down(F.softplus(self.up(x)))


class FusedHeads(Heads):
    fused = True


class GroupedHeads(Heads):
    heads = 6
    key_value_heads = 3


class Convolutions(Twins):
    """Channels with padding on one rank, or on both; the padding is not zero between the layers."""

    def __init__(self, shared: bool, degree: int, group: Any = None) -> None:
        super().__init__(shared, degree, group)
        first, second = {"stride": (2, 1), "padding": 2, "dilation": 2}, {"padding": (0, 1)}
        if not shared:
            self.convolutions = nn.ModuleList(
                [
                    nn.Conv2d(3, 5, 3, **first, **F64),
                    nn.Conv2d(5, 4, (2, 3), **second, **F64),
                    nn.Conv2d(4, 1, 1, **F64),
                    nn.Conv2d(1, 3, 1, bias=False, **F64),
                    nn.Conv2d(3, 8, 3, bias=False, **F64),
                ]
            )
            return
        out, into = lp.OutputChannelParallelConv2d, lp.InputChannelParallelConv2d
        own, pad = {"gather_output": False, **self.made}, {"partition_pad": True}
        parallel: dict[str, Any] = {"input_is_parallel": True, **self.made}
        self.convolutions = nn.ModuleList(
            [
                out(3, 5, 3, **first, **own, **pad),
                into(5, 4, (2, 3), **second, **parallel, **pad),
                out(4, 1, 1, **self.made, **pad),
                into(1, 3, 1, bias=False, **self.made, **pad),
                into(3, 8, 3, bias=False, **self.made, **pad),
            ]
        )

    def example(self, batch: int) -> Tensor:
        images = torch.randn(batch, 3, 9, 8, generator=seeded(3), dtype=torch.float64)
        return images if batch > 1 else images[0]

    def forward(self, x: Tensor) -> Tensor:
        for convolution in self.convolutions:
            x = F.softplus(convolution(x))
        return x


MODELS: list[Callable[[bool, int], Any]] = [
    Rows,
    Features,
    Aligned,
    Blocks,
    Heads,
    FusedHeads,
    GroupedHeads,
    Kept,
    Convolutions,
]
