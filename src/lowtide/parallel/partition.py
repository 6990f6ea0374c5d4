"""Which part of a parameter a rank holds: the one place that knows, for making, loading, saving and checking
parameters.

A parameter is the whole of a matrix or vector, and a rank holds some of its slices along one dimension.
``stride`` is neuronx-distributed's: the whole is first cut into that many blocks (q, k and v one above the
other, say), and each rank holds its piece of every block. Padding makes a block divide: the last ranks'
pieces of each block then end in rows that belong to nobody.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import gcd

import torch
from torch import Tensor
from torch.nn import functional as F

from lowtide.parallel.errors import ParallelError
from lowtide.parallel.given import check_counts
from lowtide.parallel.groups import TensorGroup


@dataclass(frozen=True)
class Partition:
    """What one rank holds of a parameter.

    Attributes:
        shape: shape of the whole parameter, without padding.
        dimension: along which it is cut, or ``None`` where every rank holds all of it.
        group: the ranks.
        stride: number of blocks that are cut each on their own.
        padded: length of that dimension with padding.
    """

    shape: tuple[int, ...]
    dimension: int | None
    group: TensorGroup
    stride: int = 1
    padded: int = 0

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of this rank's parameter, padding included."""
        if self.dimension is None:
            return self.shape
        return (
            *self.shape[: self.dimension],
            self.padded // self.group.size,
            *self.shape[self.dimension + 1 :],
        )

    @property
    def valid(self) -> int:
        """How long this rank's pieces are together, without padding."""
        return sum(stop - start for start, stop in self.slices())

    @property
    def is_whole(self) -> bool:
        """Whether this rank's parameter is the whole one: no other rank has a part, nothing is padding."""
        return self.dimension is None or (self.group.size == 1 and self.padded == self.shape[self.dimension])

    @property
    def is_padded(self) -> bool:
        """Whether this rank's parameter has rows that belong to nobody."""
        return self.dimension is not None and self.valid < self.padded // self.group.size

    def slices(self) -> list[tuple[int, int]]:
        """Where this rank's pieces lie in the whole, as (start, stop) along the dimension, in the order in
        which it holds them.
        """
        if self.dimension is None:
            return [(0, self.shape[0])] if self.shape else [(0, 1)]
        block = self.shape[self.dimension] // self.stride
        piece = self.padded // self.stride // self.group.size
        start, stop = (min(end * piece, block) for end in (self.group.rank, self.group.rank + 1))
        return [(k * block + start, k * block + stop) for k in range(self.stride)]

    def pieces(self) -> list[tuple[int, int, int]]:
        """The `slices`, each with where it begins in this rank's parameter."""
        each = 0 if self.dimension is None else self.padded // self.stride // self.group.size
        return [(start, stop, k * each) for k, (start, stop) in enumerate(self.slices())]

    def take(self, whole: Tensor) -> Tensor:
        """This rank's parameter from the whole one; padding is zero.

        Raises:
            ParallelError: the tensor does not have the whole parameter's shape.
        """
        if tuple(whole.shape) != self.shape:
            raise ParallelError(
                f"a parameter of shape {tuple(whole.shape)} was given where the whole one has {self.shape}"
            )
        if self.dimension is None:
            return whole
        local = whole.new_zeros(self.local_shape)
        for start, stop, at in self.pieces():
            local.narrow(self.dimension, at, stop - start).copy_(
                whole.narrow(self.dimension, start, stop - start)
            )
        return local

    def without_padding(self, local: Tensor) -> Tensor:
        """A copy of this rank's parameter, its pieces one behind the other."""
        cut = self.dimension or 0
        return torch.cat([local.narrow(cut, at, stop - start) for start, stop, at in self.pieces()], cut)

    def blank(self, local: Tensor, dimension: int) -> Tensor:
        """Zeros where a tensor that is laid out as this rank's parameter, along its own ``dimension``, has
        padding. No gradient reaches the padding.
        """
        if not self.is_padded:
            return local
        at, each = dimension % local.ndim, local.shape[dimension] // self.stride
        valid = self.valid // self.stride
        kept = local.unflatten(at, (self.stride, each)).narrow(at + 1, 0, valid)
        return F.pad(kept, (0, 0) * (kept.ndim - at - 2) + (0, each - valid)).flatten(at, at + 1)


def partition(
    shape: tuple[int, ...],
    dimension: int,
    group: TensorGroup,
    *,
    stride: int = 1,
    pad: bool = False,
    alignment: int = 1,
    what: str = "size",
    remedy: str = "",
) -> Partition:
    """Cut ``dimension`` of ``shape`` among the ranks.

    Args:
        shape: of the whole parameter.
        dimension: which dimension is cut.
        group: the ranks.
        stride: cut it into that many blocks first.
        pad: make it divide by padding it with zeros, each block on its own.
        alignment: each rank's part is padded to a multiple of this. Needs ``pad``.
        what: its name, for messages.
        remedy: what else to do where it does not divide.

    Raises:
        ParallelError: it does not divide and may not be padded.
    """
    length = shape[dimension]
    check_counts("a layer", 1, stride=stride, pad_alignment_size_per_rank=alignment)
    if alignment > 1 and not pad:
        raise ParallelError(
            f"pad_alignment_size_per_rank={alignment} does nothing without pad=True: pass pad=True, or leave "
            "it out"
        )
    pieces = group.size * stride
    if length % stride or (length % pieces and not pad):
        short = -length % pieces
        advice = remedy or "pass pad=True"
        raise ParallelError(
            f"{what}={length} does not divide into {stride} block{'s' * (stride > 1)} on each of "
            f"{group.size} ranks: {advice}, or choose {length + short}, or a number of ranks that divides it"
        )
    pieces *= alignment // gcd(alignment, stride)
    return Partition(tuple(shape), dimension, group, stride, length + (-length % pieces))


def replicated(shape: tuple[int, ...], group: TensorGroup) -> Partition:
    """Every rank holds all of it."""
    return Partition(tuple(shape), None, group)


@torch.no_grad()
def initialize(parameter: Tensor, where: Partition, init_method: Callable[[Tensor], object]) -> Tensor:
    """Fill ``parameter`` with this rank's part of what ``init_method`` makes of the whole one, and return the
    whole.

    Every rank draws the whole parameter from the same random state, so that the weights are the same at every
    number of ranks; in float32 at least, so that they are the same in every lower precision. Nothing is drawn
    on the meta device.
    """
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    whole = torch.empty(where.shape, dtype=dtype, device=parameter.device)
    init_method(whole)
    parameter.copy_(where.take(whole))
    return whole
