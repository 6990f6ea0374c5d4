"""The meter: what a step really does to memory, and how long it takes.

In: a callable, a block of code, or a model and its optimizer. Out: the most live bytes, live bytes over time,
seconds (`measure`, `peak`), and what is resident before a step (`resident_bytes`). On the CPU a counting
allocator says so (compiled once, exact, all threads), or the profiler's memory events where no compiler is;
on CUDA the allocator's own statistics. Begin with `measuring.py`, then `register.py` (what any of these
counts).
"""

from typing import TYPE_CHECKING, Any

from lowtide.errors import MeterError

from .allocator import CountingAllocator, available, counting_allocator
from .peaks import measurable, peak, peaks
from .register import LiveSource, Peak
from .resident import free_main_memory, resident_bytes, resident_tensors, storages

if TYPE_CHECKING:
    from .measuring import Measurement, measure

__all__ = [
    "CountingAllocator",
    "LiveSource",
    "Measurement",
    "MeterError",
    "Peak",
    "available",
    "counting_allocator",
    "free_main_memory",
    "measurable",
    "measure",
    "peak",
    "peaks",
    "resident_bytes",
    "resident_tensors",
    "storages",
]


def __getattr__(name: str) -> Any:
    """What a limit does without is loaded when it is first used."""
    if name not in ("Measurement", "measure"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import measuring

    return getattr(measuring, name)
