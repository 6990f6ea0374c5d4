"""The kernel that tells what booleans take is one of Inductor's, and right."""

from __future__ import annotations

import shutil

import pytest
import torch

from lowtide.private import masks

needs_compiler = pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler here")


@needs_compiler
def test_the_kernel_writes_a_mask_and_reads_it() -> None:
    numbers, mask, out = torch.rand(4096), torch.empty(4096, dtype=torch.bool), torch.empty(4096)
    kernel = masks.load_mask_kernel()
    kernel(numbers, mask, out, 4096, 0)
    assert torch.equal(mask, numbers <= 0.5)
    kernel(numbers, mask, out, 4096, 1)
    assert torch.equal(out, numbers.masked_fill(mask, 0))


@needs_compiler
def test_writing_and_reading_a_boolean_take_time() -> None:
    assert all(1e-11 < seconds < 1e-6 for seconds in masks.mask_seconds())
