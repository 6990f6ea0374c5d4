"""Codecs: a saved value in fewer bytes, exactly or within a stated error. Their common parts are in
`lowtide.store.coding`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lowtide.store.coding import (
    CHUNK,
    Chunked,
    Codec,
    CodecError,
    Form,
    Parts,
    bits_of,
    ceil_div,
    chunks,
    pack_bits,
    unpack_bits,
    words,
)


class Dictionary(Chunked):
    """Lossless, for values of few distinct numbers: dropout masks (one bit an element), comparisons, small
    integers.

    Args:
        bits: of each code: 1, 2, 4 or 8, for at most 2, 4, 16 or 256 distinct numbers.
    """

    lossless = True

    def __init__(self, bits: int = 1) -> None:
        if bits not in (1, 2, 4, 8):
            raise CodecError(f"Dictionary(bits={bits}): give 1, 2, 4 or 8")
        self.bits = bits
        self.name = "mask" if bits == 1 else f"dictionary{bits}"
        self.scratch_bytes = (5 if bits == 1 else 32) * CHUNK  # two numbers are found without a search

    def encoded_bytes(self, form: Form) -> int:
        """``bits`` an element, and the dictionary."""
        return ceil_div(form.elements * self.bits, 8) + (1 << self.bits) * form.dtype.itemsize

    def encode(self, flat: torch.Tensor) -> Parts:
        """Codes and the numbers that they mean."""
        source = words(flat)
        if self.bits == 1 and source.numel():
            return self._encode_two(source)
        known = source.new_empty(0)
        for part in chunks(source):
            here = source[part]
            if known.numel():
                here = here[~torch.isin(here, known)]
            if here.numel():
                known = torch.cat([known, torch.unique(here)])
            if known.numel() > 1 << self.bits:
                raise CodecError(f"{self.name}: more than {1 << self.bits} distinct values")
        known = known.sort().values
        codes = torch.empty(ceil_div(source.numel() * self.bits, 8), dtype=torch.uint8, device=flat.device)
        for part in chunks(source):
            code = torch.searchsorted(known, source[part], out_int32=True).to(torch.uint8)
            codes[bits_of(part, self.bits)] = pack_bits(code, self.bits)
        return codes, known

    def _encode_two(self, source: torch.Tensor) -> Parts:
        """Two numbers need no search: they are the least and the largest."""
        least, largest = torch.aminmax(source)
        codes = torch.empty(ceil_div(source.numel(), 8), dtype=torch.uint8, device=source.device)
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
        """Look the codes up."""
        codes, known = parts
        target = words(out)
        for part in chunks(target):
            packed = codes[bits_of(part, self.bits)]
            torch.index_select(
                known, 0, unpack_bits(packed, self.bits, part.stop - part.start).int(), out=target[part]
            )


class Sparse(Chunked):
    """Lossless, for values with many zeros (ReLU's output, what dropout leaves): a bit an element and what is
    not zero.

    Args:
        most: the largest share of elements that may differ from zero.
    """

    lossless = True

    def __init__(self, most: float = 0.6) -> None:
        if not 0 < most < 1:
            raise CodecError(f"Sparse(most={most}): give a share between 0 and 1")
        self.most = most
        self.name = f"sparse{most:g}"
        self.scratch_bytes = 24 * CHUNK

    def encoded_bytes(self, form: Form) -> int:
        """A bit an element and at most ``most`` of the elements."""
        return ceil_div(form.elements, 8) + int(form.elements * self.most) * form.dtype.itemsize

    def encode(self, flat: torch.Tensor) -> Parts:
        """Which differ from zero, and those."""
        source = words(flat)
        counts = [torch.count_nonzero(source[part]) for part in chunks(source)]
        found: list[int] = torch.stack(counts).tolist() if counts else []
        if sum(found) > int(source.numel() * self.most):
            raise CodecError(
                f"{self.name}: {sum(found) / source.numel():.2f} of the elements differ from zero"
            )
        mask = torch.empty(ceil_div(source.numel(), 8), dtype=torch.uint8, device=flat.device)
        kept = source.new_empty(sum(found))
        at = 0
        for part, count in zip(chunks(source), found, strict=True):
            there = source[part] != 0
            mask[bits_of(part)] = pack_bits(there.view(torch.uint8), 1)
            where = torch.nonzero_static(there, size=count).view(-1)
            torch.index_select(source[part], 0, where, out=kept[at : at + count])
            at += count
        return mask, kept

    def decode(self, parts: Parts, out: torch.Tensor) -> None:
        """Zeros, and the others where they were."""
        mask, kept = parts
        target = words(out)
        if not kept.numel():
            target.zero_()
            return
        before = torch.zeros((), dtype=torch.int64, device=out.device)
        for part in chunks(target):
            there = unpack_bits(mask[bits_of(part)], 1, part.stop - part.start)
            before = _spread(kept, there, before, target[part])


def _spread(kept: torch.Tensor, there: torch.Tensor, before: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Write kept elements where they were, after ``before`` others; returns how many are written by then."""
    place = there.cumsum(0).add_(before)
    before = place[-1].clone()
    torch.index_select(kept, 0, place.sub_(1).clamp_(min=0), out=out)
    out.mul_(there)
    return before


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
        """The bits."""
        mask = torch.empty(ceil_div(flat.numel(), 8), dtype=torch.uint8, device=flat.device)
        for part in chunks(flat):
            # threshold_backward drops the gradient where x <= 0, so that NaN passes it on
            mask[bits_of(part)] = pack_bits((~(flat[part] <= 0)).to(torch.uint8), 1)
        return (mask,)

    def decode(self, parts: Parts, out: torch.Tensor) -> None:
        """Ones and zeros."""
        for part in chunks(out):
            out[part] = unpack_bits(parts[0][bits_of(part)], 1, part.stop - part.start)


class BFloat16(Chunked):
    """Half the bytes of float32: 8 bits of precision, float32's range."""

    name = "bfloat16"
    error = "relative 2**-8, rounded to nearest"
    scratch_bytes = 0

    def encoded_bytes(self, form: Form) -> int:
        """Two an element of a wider floating-point type."""
        return 2 * form.elements if form.dtype in (torch.float32, torch.float64) else form.bytes

    def encode(self, flat: torch.Tensor) -> Parts:
        """Rounded to nearest."""
        if flat.dtype not in (torch.float32, torch.float64):
            raise CodecError(f"bfloat16: {flat.dtype} has nothing to gain")
        return (flat.to(torch.bfloat16),)

    def decode(self, parts: Parts, out: torch.Tensor) -> None:
        """Widened."""
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


def codec_named(name: str, own: Sequence[Codec] = ()) -> Codec:
    """The codec that a plan names.

    Raises:
        CodecError: there is none; a codec of the user's own has to be given again where a plan is read from a
            file.

    Example:
        >>> codec_named("int4").bits
        4
    """
    ours = (*map(Dictionary, (1, 2, 4, 8)), Positive(), BFloat16(), Blockwise(8), Blockwise(4))
    known: dict[str, Codec] = {codec.name: codec for codec in (*ours, *reversed(own))}
    if name in known:
        return known[name]
    if name.startswith("sparse"):
        return Sparse(float(name.removeprefix("sparse")))
    raise CodecError(
        f"there is no codec {name!r}: use one of {', '.join(sorted(known))}, sparse0.6, or give your own "
        "with codecs=[...]"
    )
