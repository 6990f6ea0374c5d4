"""Which tokens of a sequence a rank holds.

The sequence is cut into chunks of equal length. Under the all-to-all exchange rank r holds chunk r of c. In a
ring it holds two of 2c chunks, r and 2c - 1 - r, so that all ranks have equal work under a causal mask: an
early chunk attends to few tokens, a late one to many.

Source: the order is that of Megatron-LM's context parallelism and of zigzag ring attention; Striped Attention
(arXiv 2311.09431) balances by single tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class Layout:
    """How ranks share a sequence.

    Attributes:
        size: how many ranks there are.
        balanced: each holds two chunks, one from each end.

    >>> Layout(2, balanced=True).of(1), Layout(2, balanced=False).of(1)
    ((1, 2), (1,))
    """

    size: int
    balanced: bool

    @property
    def chunks(self) -> int:
        """How many chunks the sequence has."""
        return self.size * (2 if self.balanced else 1)

    def of(self, rank: int) -> tuple[int, ...]:
        """The chunks that a rank holds, in the order in which it holds them."""
        return (rank, 2 * self.size - 1 - rank) if self.balanced else (rank,)

    def padded(self, length: int) -> int:
        """The length of a sequence that is padded so that it divides.

        >>> Layout(2, balanced=True).padded(9)
        12
        """
        return length + -length % self.chunks

    def take(self, x: Tensor, rank: int, dimension: int, fill: Any = 0) -> Tensor:
        """A rank's part of a tensor with the whole sequence along ``dimension``, padded with ``fill``."""
        missing = self.padded(x.shape[dimension]) - x.shape[dimension]
        if missing:
            behind = (x.ndim - 1 - dimension % x.ndim) * 2
            x = F.pad(x, (0,) * (behind + 1) + (missing,), value=fill)
        chunks = x.chunk(self.chunks, dimension)
        return torch.cat([chunks[number] for number in self.of(rank)], dimension)

    def join(self, parts: Tensor, dimension: int, length: int) -> Tensor:
        """The first ``length`` tokens of the sequence in their order, from the ranks' parts one behind the
        other.
        """
        held = [number for rank in range(self.size) for number in self.of(rank)]
        chunks = parts.chunk(self.chunks, dimension)
        ordered = torch.cat([chunks[held.index(number)] for number in range(self.chunks)], dimension)
        return ordered.narrow(dimension, 0, length)
