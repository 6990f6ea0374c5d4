"""What the machine itself has left."""

from __future__ import annotations

from pathlib import Path


def free_main_memory() -> int | None:
    """Bytes of main memory that can still be had, or ``None`` where the system does not say.

    >>> free = free_main_memory()
    >>> free is None or free > 0
    True
    """
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None
