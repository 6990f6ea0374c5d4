"""The meter: what a step really does to memory, and how long it takes.

In: a callable, a block of code, or a model and its optimizer. Out: the most live bytes, live bytes over time,
seconds (`measure`, `peak`), and what is resident before a step (`resident_bytes`). On the CPU a counting
allocator says so (compiled once, exact, all threads), or the profiler's memory events where no compiler is;
on CUDA the allocator's own statistics. Begin with `measuring.py`, then `allocator.py` (what any of these
counts).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lowtide.errors import MeterError

from .allocator import CountingAllocator, LiveSource, Peak, available, counting_allocator
from .peaks import measurable, peak, peaks
from .resident import resident_bytes, resident_tensors, storages

if TYPE_CHECKING:
    from .main_memory import free_main_memory
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
    home = {"free_main_memory": "main_memory", "Measurement": "measuring", "measure": "measuring"}.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{home}", __name__), name)
