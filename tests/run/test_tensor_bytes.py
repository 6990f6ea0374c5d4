"""Digests: what changes in a tensor's bytes, or moves among them, changes its digest."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lowtide
from lowtide.interception import unseen
from lowtide.run import tensor_bytes as module
from lowtide.run.tensor_bytes import Geometry, digest, same_bytes

SIZES = [2, 7, 64, 255, 256, 257, 258, 300, 1000, 1024, 4096, 10_007]
"""In words of eight bytes: below, at and above where tables are summed."""


def of(tensor: torch.Tensor) -> int:
    return digest(tensor, tensor.untyped_storage().nbytes())


def values(words: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Numbers as activations have them."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(words * 8 // dtype.itemsize, generator=generator).to(dtype)


def rearranged(plain: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """What a kernel that goes wrong could have made instead of ``plain``."""
    last = plain.numel() - 1
    for distance in range(1, min(64, last) + 1):
        for at in (0, (last - distance) // 2, last - distance):
            swapped = plain.clone()
            swapped[at], swapped[at + distance] = plain[at + distance], plain[at]
            yield f"swap {at} {distance}", swapped
        yield f"rotation {distance}", plain.roll(distance)
        if distance <= plain.numel() // 2:
            # as an exchange of neighbouring groups would: every pair at this distance changes places
            whole = plain.numel() // (2 * distance) * 2 * distance
            pairs = plain[:whole].view(-1, 2, distance).flip(1).reshape(-1)
            yield f"all pairs {distance}", torch.cat([pairs, plain[whole:]])
        negated = plain.clone()
        negated[::distance] *= -1
        yield f"signs of every {distance}th", negated
        negated = plain.clone()
        negated[:distance] *= -1
        yield f"signs of the first {distance}", negated
    yield "all signs", -plain
    yield "backwards", plain.flip(0)
    for width in (2, 3, 8, 16, 64):
        if plain.numel() % width == 0 and plain.numel() > width:
            yield f"transposed {width}", plain.view(-1, width).t().reshape(-1)
        if plain.numel() % (2 * width) == 0:  # as half of a head's features would be
            yield f"every other {width} negated", (plain.view(-1, 2, width) * SIGNS).reshape(-1)


SIGNS = torch.tensor([1.0, -1.0]).view(1, 2, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("words", SIZES)
def test_what_is_rearranged_is_found(words: int, dtype: torch.dtype) -> None:
    plain = values(words, dtype)
    expected = of(plain)
    assert of(plain.clone()) == expected
    missed = [
        name
        for name, made in rearranged(plain)
        if not torch.equal(plain, other := made.to(dtype).contiguous()) and of(other) == expected
    ]
    assert not missed


@settings(max_examples=60, deadline=None)
@given(words=st.sampled_from(SIZES), seed=st.integers(0, 2**32 - 1), data=st.data())
def test_any_permutation_is_found(words: int, seed: int, data: st.DataObject) -> None:
    plain = values(words, seed=seed)
    picked = data.draw(st.lists(st.integers(0, plain.numel() - 1), min_size=2, max_size=12, unique=True))
    other = plain.clone()
    other[picked] = plain[picked[1:] + picked[:1]]
    assert torch.equal(plain, other) or of(plain) != of(other)


@settings(max_examples=60, deadline=None)
@given(words=st.sampled_from(SIZES), data=st.data())
def test_any_change_of_bits_is_found(words: int, data: st.DataObject) -> None:
    """Single bits, and the same bit of several words: the highest ones, which sums alone would cancel."""
    plain = values(words).view(torch.int64)
    bit = data.draw(st.integers(0, 63))
    at = data.draw(st.lists(st.integers(0, words - 1), min_size=1, max_size=3, unique=True))
    other = plain.clone()
    other[at] ^= torch.tensor(1, dtype=torch.int64) << bit
    assert of(plain) != of(other)


def test_payloads_of_nans_and_signs_of_zeros_are_found() -> None:
    bits = torch.full((600,), 0x7FC00000, dtype=torch.int32)
    other = bits.clone()
    other[599] = 0x7FC00001
    assert of(bits.view(torch.float32)) != of(other.view(torch.float32))
    zeros = torch.zeros(600)
    assert of(zeros) != of(-zeros)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.float8_e4m3fn, torch.complex64], ids=str)
@pytest.mark.parametrize("count", [0, 1, 3, 8, 13, 5003])
def test_any_type_and_size(dtype: torch.dtype, count: int) -> None:
    plain = torch.arange(count).remainder(2).to(dtype)
    raw = plain.view(torch.uint8) if count else plain
    assert of(plain) == of(plain.clone())
    for place in {0, count // 2, count - 1} if count else ():
        other = raw.clone()
        other[place * dtype.itemsize] ^= 1
        assert of(raw) != of(other)


def test_only_the_extent_counts() -> None:
    plain = torch.arange(20, dtype=torch.uint8)
    other = plain.clone()
    other[13:] = 99
    assert digest(plain, 13) == digest(other, 13) != digest(plain, 14)


def test_little_is_allocated() -> None:
    tensor = torch.randn(1 << 20)
    measured = lowtide.measure(lambda: of(tensor), timeline=False)
    assert measured.peak_bytes <= tensor.nbytes // 32


def test_a_digest_is_a_number_below_autograd_and_above() -> None:
    tensor = torch.randn(300, requires_grad=True)
    with unseen(), torch.no_grad():
        below = of(tensor)
    assert of(tensor.detach()) == below and isinstance(below, int)


def test_the_compiled_half_gives_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    if module._library() is None:
        pytest.skip("there is no C++ compiler")
    for size in (0, 1, 7, 8, 9, 63, 2047, 2048, 2049, 2056, 2063, 3000, 65_537):
        bytes_ = torch.randint(-128, 128, (size,), dtype=torch.int8)
        other = bytes_.clone()
        if size:
            other[-1] += 1
        for extent in {size, max(0, size - 3)}:
            compiled = digest(bytes_, extent)
            with monkeypatch.context() as without:
                without.setattr(module, "_library", lambda: None)
                assert digest(bytes_, extent) == compiled
        assert same_bytes(bytes_, bytes_.clone()) and same_bytes(bytes_, other) is (size == 0)


def test_chunks_of_one_storage_overlap_only_where_they_share_a_byte() -> None:
    whole = torch.zeros(4, 6)
    left, right = whole.chunk(2, 1)
    rows = whole[1:3]
    size = whole.untyped_storage().nbytes()
    assert not Geometry(left).overlaps(Geometry(right), size)
    assert Geometry(left).overlaps(Geometry(rows), size) and Geometry(rows).overlaps(Geometry(right), size)
    assert not Geometry(whole[:0]).overlaps(Geometry(whole), size)
