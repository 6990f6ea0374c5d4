"""Codecs: exact where they say so, unbiased and within their bound elsewhere, in as many bytes as they
say.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lowtide import PlanError, meter, policies
from lowtide.extensions.moves.store.codec import (
    CHUNK,
    DEVICE_CHUNK,
    BFloat16,
    Blockwise,
    Codec,
    CodecError,
    Form,
    Mask,
    Positive,
    chunk_elements,
    codec_named,
    pack_bits,
    unpack_bits,
)
from lowtide.extensions.moves.store.stores import Stores

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
    assert same(mask, there_and_back(Mask(), mask))
    assert same(mask == 0, there_and_back(Mask(), mask == 0))


def test_odd_numbers_survive() -> None:
    odd = torch.tensor([0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1e-45] + [0.0] * 60)
    for pair in (odd[:2], odd[2:4], odd[5:]):
        assert same(pair, there_and_back(Mask(), pair))
    assert same(odd == 0, there_and_back(Mask(), odd == 0))
    # ReLU's backward passes a gradient on where the saved value is not <= 0
    gradient = torch.ones_like(odd)
    plain = torch.ops.aten.threshold_backward(gradient, odd, 0)
    assert same(plain, torch.ops.aten.threshold_backward(gradient, there_and_back(Positive(), odd), 0))


def test_what_does_not_fit_is_said() -> None:
    with pytest.raises(CodecError, match="more than 2 distinct"):
        Mask().encode(torch.arange(10.0))
    for codec in (Blockwise(8), Blockwise(4)):
        with pytest.raises(CodecError, match="finite"):
            codec.encode(torch.tensor([1.0, float("inf")]))
        with pytest.raises(CodecError, match="floating-point"):
            codec.encode(torch.arange(4))
    with pytest.raises(CodecError, match="nothing to gain"):
        BFloat16().encode(torch.zeros(4, dtype=torch.float16))
    with pytest.raises(CodecError, match="there is no codec 'zip'"):
        codec_named("zip")
    with pytest.raises(CodecError, match="give"):
        Blockwise(2)


@pytest.mark.parametrize("name", ["dictionary2", "dictionary8", "sparse0.6"])
def test_codecs_of_0_2_are_refused_by_name(name: str) -> None:
    with pytest.raises(CodecError, match=rf"no codec '{name}' any more: use 'mask'.*has to be made again"):
        codec_named(name)
    with pytest.raises(CodecError, match=f"{name}.* any more"):
        policies.compress(name)


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
    [Mask(), Positive(), BFloat16(), Blockwise(8), Blockwise(4)],
    ids=lambda c: c.name,
)
def test_scratch_does_not_grow_with_the_tensor(codec: Codec) -> None:
    for elements in (300, 4 * CHUNK, 16 * CHUNK):
        x = (torch.rand(elements) < 0.3).float()
        out = torch.empty_like(x)
        encoding = meter.measure(lambda x=x: codec.encode(x), timeline=False)
        parts = encoding.value
        encoded = sum(p.untyped_storage().nbytes() for p in parts)
        assert encoding.peak_bytes - encoded <= codec.scratch(elements)
        decoding = meter.measure(lambda out=out, parts=parts: codec.decode(parts, out), timeline=False)
        assert decoding.peak_bytes <= codec.scratch(elements)


class Asked(TorchDispatchMode):
    """Counts what makes the program wait for the device: numbers read, and sizes that depend on the data."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        waits = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
        self.count += func in waits or func.overloadpacket is torch.ops.aten.index
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("codec", "most"),
    [
        (Mask(), 1),
        (Positive(), 0),
        (BFloat16(), 0),
        (Blockwise(8), 1),
        (Blockwise(4), 1),
    ],
    ids=lambda c: getattr(c, "name", None),
)
def test_the_device_is_asked_once_whatever_the_size(codec: Codec, most: int) -> None:
    """A list of numbers is read at once from a device, and number by number from main memory, where nobody
    waits.
    """
    x = (torch.rand(4 * CHUNK + 9) < 0.3).float()
    with Asked() as encoding:
        parts = codec.encode(x)
    with Asked() as decoding:
        codec.decode(parts, torch.empty_like(x))
    assert (encoding.count <= most, decoding.count) == (True, 0)


def test_an_accelerator_takes_larger_chunks_and_the_planner_knows() -> None:
    count = 100 * CHUNK
    assert chunk_elements("cuda:1") == DEVICE_CHUNK == 32 * CHUNK
    for codec in (Mask(), Positive(), Blockwise(4)):
        assert codec.scratch(count) == codec.scratch_bytes
        assert codec.scratch(count, "cuda:1") == 32 * codec.scratch_bytes
        assert codec.scratch(1000, "cuda") == codec.scratch(1000) < codec.scratch_bytes / 8
    assert BFloat16().scratch(count, "cuda") == 0


def test_chunks_of_any_size_hold_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    x = torch.relu(torch.randn(5 * CHUNK + 77))
    for make in (Positive, lambda: Blockwise(8), lambda: Blockwise(4)):
        small = make().encode(x)
        with monkeypatch.context() as patched:
            patched.setattr("lowtide.extensions.moves.store.codec.CHUNK", 2 * CHUNK)
            large = make().encode(x)
            back = torch.empty_like(x)
            make().decode(small, back)
        assert all(torch.equal(a, b) for a, b in zip(small, large, strict=True))
        again = torch.empty_like(x)
        make().decode(large, again)
        assert torch.equal(back, again)


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
