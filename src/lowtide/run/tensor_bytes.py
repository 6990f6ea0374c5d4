"""The bytes of tensors: seen through any geometry, compared at once, or by a digest kept in their place."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache, lru_cache
from math import isqrt
from pathlib import Path
from typing import Any

import torch

from lowtide import private
from lowtide.interception import unseen
from lowtide.native import load
from lowtide.ops import covers_storage

_FEW_WORDS = 256
_SMALL_BYTES = 1 << 20
"""Of main memory, up to here `tensor_bytes.cpp` is faster on one thread than PyTorch on many."""
_STRIDE, _FIRST, _SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15


def reach(tensor: torch.Tensor) -> int:
    """How many bytes of its storage the tensor reaches over, from the storage's start."""
    elements = tensor.numel()
    if elements == 0 or tensor.is_contiguous():
        return int(tensor.storage_offset() + elements) * tensor.element_size() if elements else 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (tensor.storage_offset() + last + 1) * tensor.element_size()  # pyright: ignore


class Geometry:
    """What makes a tensor of a storage's bytes.

    Args:
        tensor: the tensor whose geometry this is.
    """

    __slots__ = ("conjugate", "dtype", "negative", "offset", "shape", "strides")

    def __init__(self, tensor: torch.Tensor) -> None:
        # a plain tuple, which the garbage collector need not look at
        self.dtype, self.shape, self.strides = tensor.dtype, tuple(tensor.shape), tensor.stride()
        self.offset, self.conjugate, self.negative = (
            tensor.storage_offset(),
            tensor.is_conj(),
            tensor.is_neg(),
        )

    def over(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """A new tensor of this geometry over a storage."""
        return self._with_marks(_tensor_over(storage, self.dtype, self.offset, self.shape, self.strides))

    def view(self, base: torch.Tensor) -> torch.Tensor:
        """This geometry over the storage of ``base``: ``base`` itself where it has this geometry."""
        if base.dtype is not self.dtype:
            return self.over(base.untyped_storage())
        if base.shape != self.shape or base.stride() != self.strides or base.storage_offset() != self.offset:
            base = base.as_strided(self.shape, self.strides, self.offset)
        return self._with_marks(base)

    def overlaps(self, other: Geometry, nbytes: int) -> bool:
        """Whether some byte of a storage of ``nbytes`` is in both geometries."""
        size = self.dtype.itemsize
        if size != other.dtype.itemsize or max(map(_end, (self, other))) * size > nbytes:
            return True  # perhaps not, but "may" is enough for whoever asks
        return _meet(nbytes // size, *((one.shape, one.strides, one.offset) for one in (self, other)))

    def _with_marks(self, base: torch.Tensor) -> torch.Tensor:
        if base.is_conj() is not self.conjugate:
            base = private.conjugate_view(base)
        return base if base.is_neg() is self.negative else private.negative_view(base)


@lru_cache(maxsize=1024)
def _meet(elements: int, one: Any, other: Any) -> bool:
    """Whether two geometries (shape, strides, offset) over so many elements have one in common. A recurrence
    asks for the same ones again and again.
    """
    marks = torch.zeros(elements, dtype=torch.bool)
    marks.as_strided(*one).fill_(True)
    return bool(marks.as_strided(*other).any())


def _end(where: Geometry) -> int:
    """The element behind the last one of a geometry."""
    last = sum((size - 1) * stride for size, stride in zip(where.shape, where.strides, strict=True))
    return 0 if 0 in where.shape else int(where.offset + last + 1)


def _tensor_over(
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    offset: int | torch.SymInt,
    shape: Sequence[int],
    strides: Sequence[int],
) -> torch.Tensor:
    empty = torch.empty(0, dtype=dtype, device=storage.device)
    return empty.set_(storage, offset, shape, strides)  # type: ignore


def words_of(tensor: torch.Tensor, dtype: torch.dtype, extent: int) -> torch.Tensor:
    """The first ``extent`` bytes of the tensor's storage as numbers of ``dtype``; an incomplete last one is
    left out.
    """
    return _tensor_over(tensor.untyped_storage(), dtype, 0, (extent // dtype.itemsize,), (1,))


def digest(tensor: torch.Tensor, extent: int) -> int:
    """A number of 64 bits that depends on the first ``extent`` bytes of the tensor's storage and their order.

    The bytes are taken as 64-bit words and summed over the columns of two tables, of widths w and w + 2, and
    over the rows of the first. Two places share a column in both tables only if they are the same: so one
    word more, less or elsewhere changes a sum. The sums, each with its place, go through a mixing function
    (splitmix64's) and are added. Only they are allocated: three times the root of the number of words. It
    waits for the device once.

    >>> one, other = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([3.0, 4.0, 1.0, 2.0])
    >>> digest(one, 16) == digest(one.clone(), 16), digest(one, 16) == digest(other, 16)
    (True, False)
    """
    if extent <= _SMALL_BYTES and (native := _native(tensor)):
        return native.lt_digest(private.storage_data(tensor), extent)
    words = words_of(tensor, torch.int64, extent)
    parts = [words_of(tensor, torch.uint8, extent)[words.numel() * 8 :].long()]
    if words.numel() <= _FEW_WORDS:
        parts.append(words)
    else:
        width = isqrt(words.numel()) | 1  # an odd one: it and the next have no divisor in common
        parts += [_columns(words, width), _columns(words, width + 2), _rows(words, width)]
    return int(_mix(torch.cat(parts)).sum())


def digest_of_shown(tensor: torch.Tensor) -> int:
    """A digest of what the tensor shows, not of all of its storage."""
    with unseen():
        own = tensor if covers_storage(tensor) else tensor.detach().clone()
        return digest(own, reach(own))


def fingerprint(tensor: torch.Tensor, extent: int) -> torch.Tensor:
    """Numbers on the tensor's device that depend on the first ``extent`` bytes of its storage, to be compared
    with later ones. It reads them once, and user code does not wait for the device as it does for `digest`.

    They are the sums over the columns of a table of 64-bit words, as wide as it is high; of few words the
    words themselves.
    """
    words = words_of(tensor, torch.int64, extent)
    rest = words_of(tensor, torch.uint8, extent)[words.numel() * 8 :].long()
    few = words.numel() <= _FEW_WORDS
    return torch.cat([rest, words if few else _columns(words, isqrt(words.numel()) | 1)])


def _native(tensor: torch.Tensor) -> Any:
    """What `tensor_bytes.cpp` compiles to, where the tensor lies in main memory and there is one."""
    return _library() if tensor.is_cpu else None


def digest_address() -> int:
    """Where C++ finds the digest of bytes and their number; 0 where there is none."""
    library = _library()
    return 0 if library is None else ctypes.cast(library.lt_digest, ctypes.c_void_p).value or 0


@cache
def _library() -> Any:
    library: Any = (
        load(Path(__file__).with_name("tensor_bytes.cpp")) if private.knows_storage_data() else None
    )
    if library is not None:
        place, extent = ctypes.c_void_p, ctypes.c_int64
        library.lt_digest.argtypes, library.lt_digest.restype = [place, extent], ctypes.c_int64
        library.lt_same.argtypes = [place, place, extent]
    return library


def _table(words: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The words as rows of ``width``, and the rest."""
    whole = words.numel() // width * width
    return words[:whole].view(-1, width), words[whole:]


def _columns(words: torch.Tensor, width: int) -> torch.Tensor:
    table, rest = _table(words, width)
    sums = table.sum(0)
    sums[: rest.numel()] += rest
    return sums


def _rows(words: torch.Tensor, width: int) -> torch.Tensor:
    table, rest = _table(words, width)
    return torch.cat([table.sum(1), rest.sum().view(1)])


def _mix(sums: torch.Tensor) -> torch.Tensor:
    mixed = torch.arange(1, sums.numel() + 1, device=sums.device).mul_(_STRIDE).add_(sums)
    for factor in (_FIRST, _SECOND):
        mixed.bitwise_xor_(mixed >> 31).mul_(factor)
    return mixed.bitwise_xor_(mixed >> 31)


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one shape are equal bit by bit, NaN included."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.numel() == 0:
        return True
    if a.is_neg() or b.is_neg():
        a, b = a.resolve_neg(), b.resolve_neg()
    if a.stride() == b.stride() and a.is_conj() == b.is_conj() and covers_storage(a) and covers_storage(b):
        extent = a.untyped_storage().nbytes()
        if extent <= _SMALL_BYTES and b.device == a.device and (native := _native(a)):
            return bool(native.lt_same(private.storage_data(a), private.storage_data(b), extent))
        wide = torch.int64 if extent % 8 == 0 else torch.uint8
        return torch.equal(words_of(a, wide, extent), words_of(b, wide, extent))
    if a.is_complex():
        a, b = torch.view_as_real(a.resolve_conj()), torch.view_as_real(b.resolve_conj())
    if a.dtype.is_floating_point:
        kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        a, b = a.contiguous().view(kinds[a.element_size()]), b.contiguous().view(kinds[b.element_size()])
    return torch.equal(a, b)
