"""What Inductor's C++ kernels take for booleans in memory.

They convert masks between a vector's lanes and bytes one by one, so a boolean takes as long as some hundred
bytes of other types. Seen in PyTorch 2.12 to 2.13.
"""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch._inductor.codecache import CppPythonBindingsCodeCache

_COUNT = 1 << 18

_TEXT = """
#include <torch/csrc/inductor/cpp_prefix.h>
extern "C" void kernel(const float* numbers, bool* mask, float* out, const int64_t count, const int64_t back)
{
    using Numbers = at::vec::Vectorized<float>;
    using Mask = at::vec::VecMask<float, 1>;
    constexpr int64_t step = Numbers::size();
    for (int64_t at = 0; at < count; at += step) {
        auto number = Numbers::loadu(numbers + at, step);
        if (back) {
            auto dropped = Mask::from(mask + at, step);
            Numbers::blendv(number, Numbers(0), dropped.template cast<float, 1>()).store(out + at);
        } else {
            Mask(number <= Numbers(0.5)).store(mask + at, step);
        }
    }
}
"""
"""A kernel as Inductor writes them: ``numbers <= 0.5``, and zeros where that holds."""


@cache
def load_mask_kernel() -> Callable[..., Any]:
    """The kernel, compiled by Inductor or from its cache on disk."""
    kinds = ["const float*", "bool*", "float*", "const int64_t", "const int64_t"]
    return CppPythonBindingsCodeCache.load_pybinding(kinds, _TEXT, device_type="cpu")


@cache
def mask_seconds() -> tuple[float, float]:
    """Seconds to write one boolean and to read one, on the CPU."""
    kernel = load_mask_kernel()
    numbers, mask, out = torch.rand(_COUNT), torch.empty(_COUNT, dtype=torch.bool), torch.empty(_COUNT)

    def best(back: bool) -> float:
        took: list[float] = []
        for _ in range(5):
            begin = time.perf_counter()
            kernel(numbers, mask, out, _COUNT, int(back))
            took.append(time.perf_counter() - begin)
        return min(took) / _COUNT

    return best(False), best(True)
