"""What is slow in Inductor's vectorized C++ kernels, measured on this machine and kept on its disk: functions
such as the exponential, and booleans, which they convert between vectors' lanes and bytes one by one.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path

import torch

from lowtide.compiled.shelf import Shelf, name_machine
from lowtide.native import cache_folder
from lowtide.private import inductor
from lowtide.trace.costs.roofline import outside_modes

_SOURCE = Path(__file__).with_name("vector_costs.cpp")
_NAMES = (
    *("add", "write", "read", "div", "erf", "exp", "expm1", "log", "log1p", "pow", "rsqrt", "sigmoid"),
    *("sin", "sqrt", "tanh"),
)
_ALIKE = {"cos": "sin", "erfc": "erf", "exp2": "exp", "log10": "log", "log2": "log", "reciprocal": "div"}
_COUNT = 1 << 15  # elements for each thread: what they take lies in its cache, so that only computing counts
_RUNS = 9


@dataclass(frozen=True)
class KernelCosts:
    """What calls add to a kernel that has their inputs, in seconds an element.

    Attributes:
        mask_written, mask_read: of a boolean tensor that the kernel is given.
        functions: of operations, by the name of their ATen packet; the others add next to nothing.
    """

    mask_written: float = 0.0
    mask_read: float = 0.0
    functions: Mapping[str, float] = field(default_factory=dict)


def kernel_costs() -> KernelCosts:
    """Those of this machine, measured once for each number of threads (0.02 s, and a second of the
    compiler's) and kept in lowtide's cache folder. Nothing where there is no compiler: there Inductor can
    generate no kernel.
    """
    return _known(torch.get_num_threads())


@lru_cache(maxsize=8)
def _known(threads: int) -> KernelCosts:
    """Those that are kept for so many threads, else measured and kept."""
    shelf, key = Shelf(cache_folder() / "vector_costs"), f"{name_machine()} {torch.__version__} {threads}"
    key += _SOURCE.read_text()
    kept = shelf.find(key)
    if kept is not None:
        return KernelCosts(**kept)
    found = _measure(threads)
    if found.functions:
        shelf.keep(key, asdict(found))
    return found


def _measure(threads: int) -> KernelCosts:
    types = ["const float*", "float*", "bool*", "const int64_t", "const int64_t", "const int64_t"]
    try:
        kernel = inductor.cpp_kernel(types, _SOURCE.read_text())
    except inductor.NoCompiler:
        return KernelCosts()
    count = threads * _COUNT
    with outside_modes(), torch.no_grad():
        drawn = torch.Generator().manual_seed(0)
        given, taken = torch.rand(count, generator=drawn), torch.empty(count)
        mask = given.flip(0) > 0.5  # without order, so that no processor foresees it
        seconds: dict[str, float] = {}
        for what, name in enumerate(_NAMES):
            best = float("inf")
            for _ in range(_RUNS):
                begin = time.perf_counter()
                kernel(given, taken, mask, what, count, threads)
                best = min(best, time.perf_counter() - begin)
            seconds[name] = best / count
    base = seconds.pop("add")
    more = {name: max(0.0, one - base) for name, one in seconds.items()}
    written, read = more.pop("write"), more.pop("read")
    return KernelCosts(written, read, more | {name: more[other] for name, other in _ALIKE.items()})
