"""What a codec is, and the bits and chunks that lowtide's own are made of.

A codec has three methods: `Codec.encoded_bytes` says how many bytes it takes at most, `Codec.encode` turns a
flat tensor into a few smaller ones, `Codec.decode` writes it back. All of them work in chunks, so that what
they allocate on the way does not grow with the tensor (`Codec.scratch`), and draw random numbers from
generators of their own. Encoding asks the device once whether a value fits, decoding never.

A user's own codec is a class with those three methods; give an instance to `lowtide.Compress` or to the
policy ``compress``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import NamedTuple

import torch

from lowtide.errors import LowtideError

CHUNK = 1 << 16
"""Elements that a CPU encodes or decodes at a time: they stay in its caches."""

DEVICE_CHUNK = 1 << 21
"""The same on an accelerator, where each chunk takes some 20 kernels, however few its elements."""

Parts = tuple[torch.Tensor, ...]


class CodecError(LowtideError):
    """A value does not fit a codec (too many distinct values, not finite): it has to stay as it is."""


class Form(NamedTuple):
    """What is known of a value before it exists.

    Attributes:
        elements: how many.
        dtype: of each.
    """

    elements: int
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Bytes without a codec."""
        return self.elements * self.dtype.itemsize


class Codec(ABC):
    """The way in and out of fewer bytes.

    Attributes:
        name: by which plans and tables know it.
        lossless: whether `decode` gives back every bit, or at least what leaves gradients bitwise the same.
        replayable_from: whether an operation may be replayed from what `decode` gives back.
        error: the bound on the error in words, empty for a lossless one.
        scratch_bytes: the most it allocates beyond what it returns, for `CHUNK` elements or more; see
            `scratch`.

    Example:
        >>> import torch
        >>> class Half(Codec):
        ...     name, error = "half", "relative 2**-11"
        ...     def encoded_bytes(self, form):
        ...         return 2 * form.elements
        ...     def encode(self, flat):
        ...         return (flat.half(),)
        ...     def decode(self, parts, out):
        ...         out.copy_(parts[0])
        >>> x = torch.randn(100)
        >>> y = torch.empty(100)
        >>> Half().decode(Half().encode(x), y)
        >>> bool((x - y).abs().max() < 0.01)
        True
    """

    name: str = "own"
    lossless: bool = False
    replayable_from: bool = True
    error: str = ""
    scratch_bytes: int = 16 * CHUNK

    def scratch(self, elements: int, device: str = "cpu") -> int:
        """The most it allocates beyond what it returns, for a value of so many elements on a kind of
        device.
        """
        return min(self.scratch_bytes, self.scratch_bytes * elements // CHUNK + 4096)

    @abstractmethod
    def encoded_bytes(self, form: Form) -> int:
        """The most bytes that a value of this form takes, or its own bytes where the codec does not apply."""

    @abstractmethod
    def encode(self, flat: torch.Tensor) -> Parts:
        """Smaller tensors for a flat one.

        Raises:
            CodecError: this value cannot be encoded; it is kept instead.
        """

    @abstractmethod
    def decode(self, parts: Parts, out: torch.Tensor) -> None:
        """Write the value into ``out``, flat and of the form that was encoded."""


class Chunked(Codec):
    """A codec of ours: its scratch follows the device's chunk."""

    def scratch(self, elements: int, device: str = "cpu") -> int:
        """As many bytes as chunks of the device's size take, in whole blocks of 256 elements."""
        within = min(ceil_div(elements, 256) * 256, chunk_elements(device))
        return self.scratch_bytes * within // CHUNK


def chunk_elements(device: str) -> int:
    """Elements that are encoded or decoded at a time.

    >>> chunk_elements("cpu"), chunk_elements("cuda:0")
    (65536, 2097152)
    """
    return CHUNK if device.partition(":")[0] == "cpu" else DEVICE_CHUNK


def chunks(flat: torch.Tensor) -> Iterator[slice]:
    """Slices of a flat tensor, each of a chunk's elements at most."""
    step = chunk_elements(flat.device.type)
    for start in range(0, flat.numel(), step):
        yield slice(start, min(start + step, flat.numel()))


def ceil_div(a: int, b: int) -> int:
    """How many times ``b`` fits, rounded up."""
    return -(-a // b)


def bits_of(part: slice, bits: int = 1) -> slice:
    """Where the codes of a chunk lie, at so many bits each."""
    return slice(part.start * bits // 8, ceil_div(part.stop * bits, 8))


_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Whole numbers of so many bytes."""


def pack_bits(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes of 1, 2, 4 or 8 bits, one a byte, packed; a multiple of 8 codes fills whole bytes.

    >>> pack_bits(torch.tensor([1, 0, 1, 1, 0, 0, 0, 0], dtype=torch.uint8), 1)
    tensor([13], dtype=torch.uint8)
    """
    each = 8 // bits
    short = -codes.numel() % each
    if short:
        codes = torch.cat([codes, codes.new_zeros(short)])
    whole = codes.view(_WORDS[each])
    packed = whole.clone()
    # the k-th byte's bits move down next to those before it; what is above the lowest byte is dropped
    for k in range(1, each):
        packed |= whole >> (k * (8 - bits))
    return packed.to(torch.uint8)


def unpack_bits(packed: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """What `pack_bits` packed, one a byte."""
    each = 8 // bits
    whole = packed.to(_WORDS[each])
    codes = whole & ((1 << bits) - 1)
    for k in range(1, each):
        codes |= (whole << (k * (8 - bits))) & ((1 << bits) - 1 << 8 * k)
    return codes.view(torch.uint8)[:count]


def words(flat: torch.Tensor) -> torch.Tensor:
    """The same bits as integers."""
    return flat.view(_WORDS[flat.element_size()])
