"""Which elements live where: a split by elements, at places where the fused kernels give the same bits.

The fused CPU kernels of `torch.optim` share their work out in cache lines and take a vector's worth of
elements at once; what is left over at the end of a tensor goes through scalar code, which may round
differently. A cut at a whole number of cache lines, and of 16 elements, leaves every element in the kind of
lane that it has in the whole tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

CACHE_LINE_BYTES = 64
LEAST_ELEMENTS = 16


def granule(dtype: torch.dtype, least: int = LEAST_ELEMENTS) -> int:
    """Elements that a cut has to be a multiple of: ``least`` (the kernel's), and a cache line.

    >>> granule(torch.float32), granule(torch.bfloat16), granule(torch.float64)
    (16, 32, 16)
    """
    return max(least, CACHE_LINE_BYTES // dtype.itemsize)


def cuts(sizes: Sequence[int], granules: Sequence[int], host_fraction: float) -> list[int]:
    """How many leading elements of each tensor stay on the device.

    The device keeps the first tensors and the host takes the last ones: their gradients come first in
    backward, so they travel, and are updated, while the rest of backward runs. At most one tensor is split.

    Args:
        sizes: elements of each tensor, in the order of the model.
        granules: what a cut in each has to be a multiple of.
        host_fraction: share of all elements that goes to the host, 0 to 1; rounding favours the host, by less
            than a granule.

    >>> cuts([100, 100], [16, 16], 0.5), cuts([100, 100], [16, 16], 0.7), cuts([100, 100], [16, 16], 1.0)
    ([100, 0], [48, 0], [0, 0])
    """
    left = sum(sizes) - round(sum(sizes) * host_fraction)
    result = []
    for size, step in zip(sizes, granules, strict=True):
        keep = size if size <= left else left // step * step
        left -= size if size <= left else left
        result.append(keep)
    return result


def spans(start: int, stop: int, most: int) -> Iterator[tuple[int, int]]:
    """The stretch from ``start`` to ``stop`` in pieces of at most ``most`` elements.

    >>> list(spans(16, 100, 64))
    [(16, 80), (80, 100)]
    """
    for begin in range(start, stop, most):
        yield begin, min(begin + most, stop)
