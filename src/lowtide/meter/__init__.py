"""The meter: what a step really does to memory, and how long it takes.

On the CPU a counting allocator (compiled once, exact, all threads), or the profiler's memory events where no
compiler is; on CUDA the allocator's own statistics. See `measure`, `peak`, `resident_bytes`.
"""

from lowtide.errors import MeterError

from .allocator import CountingAllocator, available, counting_allocator
from .machine import free_main_memory
from .measure import Measurement, measurable, measure, peak
from .register import Peak
from .resident import resident_bytes, resident_tensors, storages

__all__ = [
    "CountingAllocator",
    "Measurement",
    "MeterError",
    "Peak",
    "available",
    "counting_allocator",
    "free_main_memory",
    "measurable",
    "measure",
    "peak",
    "resident_bytes",
    "resident_tensors",
    "storages",
]
