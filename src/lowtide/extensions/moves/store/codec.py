"""Codecs: a saved value in fewer bytes, exactly or within a stated error.

A codec has three methods: `Codec.encoded_bytes` says how many bytes it takes at most, `Codec.encode` turns a
flat tensor into a few smaller ones, `Codec.decode` writes it back. All of them work in chunks, so that what
they allocate on the way does not grow with the tensor (`Codec.scratch`), and draw random numbers from
generators of their own. Encoding asks the device once whether a value fits, decoding never.

A user's own codec is a class with those three methods; give an instance to `lowtide.Compress` or to the
policy ``compress``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from lowtide.errors import LowtideError

CHUNK = 1 << 16
"""Elements that a CPU encodes or decodes at a time: they stay in its caches."""

DEVICE_CHUNK = 1 << 21
"""Elements that an accelerator encodes or decodes at a time: each chunk takes some 20 kernels, however few
its elements."""

Parts = tuple[torch.Tensor, ...]


class CodecError(LowtideError):
    """A value does not fit a codec (more than two distinct numbers, not finite) and stays as it is; or no
    codec has that name.
    """


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
    """``a / b``, rounded up."""
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
    """The codes that `pack_bits` packed, one in each byte."""
    each = 8 // bits
    whole = packed.to(_WORDS[each])
    codes = whole & ((1 << bits) - 1)
    for k in range(1, each):
        codes |= (whole << (k * (8 - bits))) & ((1 << bits) - 1 << 8 * k)
    return codes.view(torch.uint8)[:count]


def words(flat: torch.Tensor) -> torch.Tensor:
    """The same bits as integers."""
    return flat.view(_WORDS[flat.element_size()])


class Mask(Chunked):
    """Lossless, for values of two distinct numbers: dropout masks, also scaled ones, and comparisons. One bit
    an element.
    """

    name = "mask"
    lossless = True
    scratch_bytes = 5 * CHUNK

    def encoded_bytes(self, form: Form) -> int:
        """A bit an element, and the two numbers."""
        return ceil_div(form.elements, 8) + 2 * form.dtype.itemsize

    def encode(self, flat: torch.Tensor) -> Parts:
        """A bit for each element, set where it is the larger of the two numbers; and the two numbers."""
        source = words(flat)
        codes = torch.empty(ceil_div(source.numel(), 8), dtype=torch.uint8, device=source.device)
        if not source.numel():
            return codes, source.new_zeros(2)
        least, largest = torch.aminmax(source)
        fits = []
        for part in chunks(source):
            here = source[part]
            code = here == largest
            fits.append(((here == least) | code).all())
            codes[bits_of(part)] = pack_bits(code.view(torch.uint8), 1)
        if not bool(torch.stack(fits).all()):
            raise CodecError(f"{self.name}: more than 2 distinct values")
        return codes, torch.stack([least, largest])

    def decode(self, parts: Parts, out: torch.Tensor) -> None:
        """Write for each bit the number that it stands for."""
        codes, known = parts
        target = words(out)
        for part in chunks(target):
            torch.index_select(
                known, 0, unpack_bits(codes[bits_of(part)], 1, part.stop - part.start).int(), out=target[part]
            )


class Positive(Chunked):
    """One bit an element: whether it is above zero. Lossless for ReLU's backward, which needs nothing
    else; the policy checks that nothing else reads the value."""

    name = "positive"
    lossless = True
    replayable_from = False
    scratch_bytes = 4 * CHUNK + 4096

    def encoded_bytes(self, form: Form) -> int:
        """A bit an element."""
        return ceil_div(form.elements, 8)

    def encode(self, flat: torch.Tensor) -> Parts:
        """A bit for each element, set where the gradient passes."""
        mask = torch.empty(ceil_div(flat.numel(), 8), dtype=torch.uint8, device=flat.device)
        for part in chunks(flat):
            # threshold_backward drops the gradient where x <= 0, so that NaN passes it on
            mask[bits_of(part)] = pack_bits((~(flat[part] <= 0)).to(torch.uint8), 1)
        return (mask,)

    def decode(self, parts: Parts, out: torch.Tensor) -> None:
        """Write one where the bit is set, else zero."""
        for part in chunks(out):
            out[part] = unpack_bits(parts[0][bits_of(part)], 1, part.stop - part.start)


class BFloat16(Chunked):
    """Half the bytes of float32: 8 bits of precision, float32's range."""

    name = "bfloat16"
    error = "relative 2**-8, rounded to nearest"
    scratch_bytes = 0

    def encoded_bytes(self, form: Form) -> int:
        """Two bytes an element of float32 or float64; the bytes themselves of other types."""
        return 2 * form.elements if form.dtype in (torch.float32, torch.float64) else form.bytes

    def encode(self, flat: torch.Tensor) -> Parts:
        """The elements as bfloat16, rounded to nearest."""
        if flat.dtype not in (torch.float32, torch.float64):
            raise CodecError(f"bfloat16: {flat.dtype} has nothing to gain")
        return (flat.to(torch.bfloat16),)

    def decode(self, parts: Parts, out: torch.Tensor) -> None:
        """Write the elements in the value's own type."""
        out.copy_(parts[0])


class Blockwise(Chunked):
    """Whole numbers of 8 or 4 bits, spread over the range of each block and rounded at random so that the
    expected value is exact.

    Dettmers et al. (arXiv 2110.02861, section 2.1) for the blocks, ActNN (arXiv 2104.14129, section 3) for
    the range (an activation's output lies to one side of zero) and the unbiased rounding. A block's least
    number and step are bfloat16, rounded so that the range is covered.

    The error of 4 bits is large enough to bias what goes through a function first, so nothing is replayed
    from them.

    Args:
        bits: 8 or 4.

    Attributes:
        block: elements that share a range.
    """

    def __init__(self, bits: int = 8) -> None:
        if bits not in (4, 8):
            raise CodecError(f"Blockwise(bits={bits}): give 8 or 4")
        self.bits, self.block = bits, 256 if bits == 8 else 64
        self.levels = (1 << bits) - 1
        self.name = f"int{bits}"
        self.replayable_from = bits == 8
        self.error = (
            f"absolute, 1/{self.levels} of the range of each block of {self.block} (and 1/128 of its largest "
            "number), unbiased"
        )
        self.scratch_bytes = 12 * CHUNK
        self._generators: dict[torch.device, torch.Generator] = {}

    def encoded_bytes(self, form: Form) -> int:
        """``bits`` an element and four bytes a block."""
        if not form.dtype.is_floating_point:
            return form.bytes
        return ceil_div(form.elements * self.bits, 8) + 4 * ceil_div(form.elements, self.block)

    def _generator(self, device: torch.device) -> torch.Generator:
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(0)
        return self._generators[device]

    def encode(self, flat: torch.Tensor) -> Parts:
        """Codes, and the least number and the step of each block."""
        if not flat.dtype.is_floating_point:
            raise CodecError(f"{self.name}: {flat.dtype} is no floating-point type")
        source = self._generator(flat.device)
        codes = torch.empty(ceil_div(flat.numel() * self.bits, 8), dtype=torch.uint8, device=flat.device)
        ranges = torch.empty(2, ceil_div(flat.numel(), self.block), dtype=torch.bfloat16, device=flat.device)
        for part in chunks(flat):
            here = flat[part].to(torch.float32, copy=True)
            short = -here.numel() % self.block
            if short:
                here = torch.cat([here, here[-1:].expand(short)])
            here = here.view(-1, self.block)
            low = _upwards(here.amin(1).neg_()).neg_()
            step = _upwards(here.amax(1).sub_(low).div_(self.levels))
            blocks = slice(part.start // self.block, ceil_div(part.stop, self.block))
            ranges[0, blocks], ranges[1, blocks] = low, step
            # a step below the normal numbers would make quotients that are off the scale
            here.sub_(low.unsqueeze(1)).div_(step.clamp_min_(1e-38).unsqueeze(1))
            here.view(-1).add_(_noise(here.numel(), source, flat.device), alpha=2**-16).add_(
                0.5 + 2**-17
            ).floor_().clamp_(0, self.levels)
            code = here.view(-1)[: part.stop - part.start].to(torch.int32).to(torch.uint8)
            codes[bits_of(part, self.bits)] = pack_bits(code, self.bits)
        if not bool(torch.isfinite(ranges).all()):
            raise CodecError(f"{self.name}: not every element is finite")
        return codes, ranges.view(-1)

    def decode(self, parts: Parts, out: torch.Tensor) -> None:
        """Codes times steps, from the least number up."""
        codes, ranges = parts
        ranges = ranges.view(2, -1)
        limits = torch.finfo(out.dtype)
        for part in chunks(out):
            packed = codes[bits_of(part, self.bits)]
            here = unpack_bits(packed, self.bits, part.stop - part.start).to(torch.float32)
            low, step = ranges[:, part.start // self.block : ceil_div(part.stop, self.block)].to(
                torch.float32
            )
            whole = here.numel() // self.block * self.block
            blocks = here[:whole].view(-1, self.block)
            count = blocks.shape[0]
            blocks.mul_(step[:count].unsqueeze(1)).add_(low[:count].unsqueeze(1))
            if whole < here.numel():
                here[whole:].mul_(step[-1]).add_(low[-1])
            # bfloat16 reaches further than float16
            out[part] = here if limits.max > 1e38 else here.clamp_(limits.min, limits.max)


def _noise(count: int, source: torch.Generator, device: torch.device) -> torch.Tensor:
    """Whole numbers from -32768 to 32767, each as likely as another: four of every 64 random bits, which is
    four times as fast as `torch.rand`.
    """
    bits = torch.empty(ceil_div(count, 4), dtype=torch.int64, device=device).random_(
        -(2**63), None, generator=source
    )  # type: ignore[call-overload]
    return bits.view(torch.int16)[:count].to(torch.float32)


def _upwards(x: torch.Tensor) -> torch.Tensor:
    """The least numbers of bfloat16 that are not below those of ``x``, as float32; in place."""
    near = x.to(torch.bfloat16)
    x.copy_(torch.where(near < x, torch.nextafter(near, near.new_tensor(float("inf"))), near))
    return x


_GONE = ("dictionary", "sparse")
"""How the names of codecs began that lowtide 0.2 had and that are gone."""


def codec_named(name: str, own: Sequence[Codec] = ()) -> Codec:
    """The codec that a plan names.

    Raises:
        CodecError: there is none; a codec of the user's own has to be given again where a plan is read from a
            file.

    Example:
        >>> codec_named("int4").bits
        4
    """
    ours = (Mask(), Positive(), BFloat16(), Blockwise(8), Blockwise(4))
    known: dict[str, Codec] = {codec.name: codec for codec in (*ours, *reversed(own))}
    if name in known:
        return known[name]
    if name.startswith(_GONE):
        raise CodecError(
            f"lowtide 0.3 has no codec {name!r} any more: use 'mask' for two distinct numbers, 'bfloat16' or "
            "'int8' where a bounded error is right, or recompute the value. A plan that names it has to "
            "be made again"
        )
    raise CodecError(
        f"there is no codec {name!r}: use one of {', '.join(sorted(known))}, or give your own "
        "with codecs=[...]"
    )
