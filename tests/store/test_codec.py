"""Codecs: exact where they say so, unbiased and within their bound elsewhere, in as many bytes as they
say.
"""

from __future__ import annotations

import pytest
import torch

from lowtide import PlanError, meter
from lowtide.store.codec import (
    CHUNK,
    BFloat16,
    Blockwise,
    Codec,
    CodecError,
    Dictionary,
    Form,
    Positive,
    Raw,
    Sparse,
    codec_named,
    pack_bits,
    unpack_bits,
)
from lowtide.store.stores import Stores

SIZES = [0, 1, 7, 8, 255, 256, 1000, CHUNK, CHUNK + 13, 2 * CHUNK + 257]


def there_and_back(codec: Codec, x: torch.Tensor) -> torch.Tensor:
    parts = codec.encode(x)
    taken = sum(p.untyped_storage().nbytes() for p in parts)
    assert taken <= codec.encoded_bytes(Form(x.numel(), x.dtype))
    y = torch.full_like(x, 7)
    codec.decode(parts, y)
    return y


def same(x: torch.Tensor, y: torch.Tensor) -> bool:
    return torch.equal(x.view(torch.uint8), y.view(torch.uint8))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_lossless_codecs_give_back_every_bit(size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(size)
    mask = (torch.rand(size) < 0.3).to(dtype) / 0.9
    assert same(mask, there_and_back(Dictionary(1), mask))
    few = torch.randint(-7, 8, (size,)).to(dtype)
    assert same(few, there_and_back(Dictionary(4), few))
    relu = torch.where(torch.rand(size) < 0.5, torch.randn(size), torch.zeros(size)).to(dtype)
    relu[::2] = 0
    assert same(relu, there_and_back(Sparse(0.6), relu))
    assert same(relu, there_and_back(Raw(), relu))


def test_odd_numbers_survive() -> None:
    odd = torch.tensor([0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1e-45] + [0.0] * 60)
    assert same(odd, there_and_back(Dictionary(4), odd))
    assert same(odd, there_and_back(Sparse(0.5), odd))
    assert same(odd == 0, there_and_back(Dictionary(1), odd == 0))
    # ReLU's backward passes a gradient on where the saved value is not <= 0
    gradient = torch.ones_like(odd)
    plain = torch.ops.aten.threshold_backward(gradient, odd, 0)
    assert same(plain, torch.ops.aten.threshold_backward(gradient, there_and_back(Positive(), odd), 0))


def test_what_does_not_fit_is_said() -> None:
    with pytest.raises(CodecError, match="more than 2 distinct"):
        Dictionary(1).encode(torch.arange(10.0))
    with pytest.raises(CodecError, match="differ from zero"):
        Sparse(0.5).encode(torch.ones(100))
    for codec in (Blockwise(8), Blockwise(4)):
        with pytest.raises(CodecError, match="finite"):
            codec.encode(torch.tensor([1.0, float("inf")]))
        with pytest.raises(CodecError, match="floating-point"):
            codec.encode(torch.arange(4))
    with pytest.raises(CodecError, match="nothing to gain"):
        BFloat16().encode(torch.zeros(4, dtype=torch.float16))
    with pytest.raises(CodecError, match="there is no codec 'zip'"):
        codec_named("zip")
    for wrong in (
        lambda: Dictionary(3),
        lambda: Blockwise(2),
        lambda: Blockwise(8, 100),
        lambda: Sparse(1.5),
    ):
        with pytest.raises(CodecError, match="give"):
            wrong()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("bits", [8, 4])
def test_blockwise_stays_within_its_bound(size: int, bits: int) -> None:
    torch.manual_seed(size)
    x = torch.randn(size) * torch.logspace(-30, 30, size) if size else torch.randn(0)
    codec = Blockwise(bits)
    y = there_and_back(codec, x)
    padded = torch.cat([x, x[-1:].expand(-size % codec.block)]).view(-1, codec.block)
    width = padded.amax(1) - padded.amin(1) + padded.abs().amax(1) / 128
    bound = (width * (1 + 1 / 128) / codec.levels).repeat_interleave(codec.block)[:size]
    assert bool(((x - y).abs() <= bound * 1.0001).all())


@pytest.mark.parametrize("bits", [8, 4])
def test_blockwise_is_unbiased(bits: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(256)
    codec = Blockwise(bits)
    step = float(x.max() - x.min()) / codec.levels
    runs = 4000
    mean = sum(there_and_back(codec, x) for _ in range(runs)) / runs
    # rounding at random between two neighbours has a standard deviation of at most half a step
    assert float((mean - x).abs().max()) < 5 * 0.5 * step / runs**0.5
    nearest = ((x - x.min()) / step).round() * step + x.min()
    assert float((nearest - x).abs().max()) > 5 * 0.5 * step / runs**0.5  # the test would see a biased codec


def test_bfloat16_stays_within_its_bound() -> None:
    x = torch.randn(5000)
    assert bool(((there_and_back(BFloat16(), x) - x).abs() <= x.abs() * 2**-8).all())


def test_the_callers_random_state_is_left_alone() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    Blockwise(8).encode(torch.ones(1000))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    "codec",
    [Dictionary(1), Dictionary(4), Sparse(0.5), Positive(), BFloat16(), Blockwise(8), Blockwise(4)],
    ids=lambda c: c.name,
)
def test_scratch_does_not_grow_with_the_tensor(codec: Codec) -> None:
    for chunks in (4, 16):
        x = (torch.rand(chunks * CHUNK) < 0.3).float()
        out = torch.empty_like(x)
        encoding = meter.measure(lambda x=x: codec.encode(x), timeline=False)
        parts = encoding.value
        encoded = sum(p.untyped_storage().nbytes() for p in parts)
        assert encoding.peak_bytes - encoded <= codec.scratch_bytes
        decoding = meter.measure(lambda out=out, parts=parts: codec.decode(parts, out), timeline=False)
        assert decoding.peak_bytes <= codec.scratch_bytes


def test_stores_round_anew_each_time() -> None:
    x = torch.randn(1000)
    with Stores() as stores:
        first, second = (stores.codec("int4").encode(x)[0] for _ in range(2))
    assert not torch.equal(first, second)
    assert torch.equal(first, Blockwise(4).encode(x)[0])  # and in the same way in every run


def test_groups_have_names() -> None:
    with pytest.raises(PlanError, match="by the names that plans use"):
        Stores(groups=3)  # type: ignore[arg-type]


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 1000])
def test_bits_are_packed_and_unpacked(bits: int, count: int) -> None:
    codes = torch.randint(
        1 << bits, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(count)
    )
    packed = pack_bits(codes, bits)
    assert packed.numel() == -(-count * bits // 8)
    assert torch.equal(unpack_bits(packed, bits, count), codes)


def test_float16_stays_finite_at_its_ends() -> None:
    x = torch.tensor([-65504.0, 65504.0, 0.0, 1.0] * 16, dtype=torch.float16)
    for bits in (4, 8):
        assert bool(there_and_back(Blockwise(bits), x).isfinite().all())
