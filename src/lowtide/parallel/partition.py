"""Which part of a parameter a rank holds: the one place that knows, for making, loading, saving and checking
parameters.

A parameter is the whole of a matrix or vector, and a rank holds some of its slices along one dimension.
``stride`` is neuronx-distributed's: the whole is first cut into that many blocks (q, k and v one above the
other, say), and each rank holds its piece of every block. Padding makes a size divide: the last ranks' pieces
then end in rows that belong to nobody.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

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
        """How long this rank's piece is without padding, which comes last."""
        return sum(stop - start for start, stop in self.slices())

    def slices(self) -> list[tuple[int, int]]:
        """Where this rank's pieces lie in the whole, as (start, stop) along the dimension, in the order in
        which it holds them.
        """
        if self.dimension is None:
            return [(0, self.shape[0])] if self.shape else [(0, 1)]
        length, block = self.shape[self.dimension], self.padded // self.stride
        piece = block // self.group.size
        starts = [k * block + self.group.rank * piece for k in range(self.stride)]
        return [(min(start, length), min(start + piece, length)) for start in starts]

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
        at = 0
        for start, stop in self.slices():
            local.narrow(self.dimension, at, stop - start).copy_(
                whole.narrow(self.dimension, start, stop - start)
            )
            at += stop - start
        return local


def partition(
    shape: tuple[int, ...],
    dimension: int,
    group: TensorGroup,
    *,
    stride: int = 1,
    pad: bool = False,
    what: str = "size",
    remedy: str = "",
) -> Partition:
    """Cut ``dimension`` of ``shape`` among the ranks.

    Args:
        shape: of the whole parameter.
        dimension: which dimension is cut.
        group: the ranks.
        stride: cut it into that many blocks first.
        pad: make it divide by padding it with zeros.
        what: its name, for messages.
        remedy: what else to do where it does not divide.

    Raises:
        ParallelError: it does not divide and may not be padded.
    """
    length = shape[dimension]
    check_counts("a layer", 1, stride=stride)
    pieces = group.size * stride
    if length % stride or (length % pieces and not pad):
        short = -length % pieces
        advice = remedy or "pass pad=True"
        raise ParallelError(
            f"{what}={length} does not divide into {stride} block{'s' * (stride > 1)} on each of "
            f"{group.size} ranks: {advice}, or choose {length + short}, or a number of ranks that divides it"
        )
    if pad and length % pieces and stride > 1:
        raise ParallelError(
            f"{what}={length} with stride={stride} would need padding inside each block on {group.size} "
            f"ranks: use a size of {length + -length % pieces}, or stride=1"
        )
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
