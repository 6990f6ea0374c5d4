"""What main memory has left for this process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/")


def free_main_memory() -> int | None:
    """Bytes of main memory that this process can still have, or ``None`` where the system does not say.

    What the system has available, within the limits of the process's control groups.

    >>> free = free_main_memory()
    >>> free is None or free > 0
    True
    """
    found = [count for count in (_available(), *_left_in_groups()) if count is not None]
    return max(0, min(found)) if found else None


def _available() -> int | None:
    try:
        for line in (_ROOT / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def _left_in_groups() -> Iterator[int]:
    """What each control group around this process leaves, of those with a limit: version 2 and version 1.
    Inside a container the root of its hierarchy is all there is to see.
    """
    try:
        lines = (_ROOT / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    mounts = _ROOT / "sys/fs/cgroup"
    for _, controllers, path in (line.split(":", 2) for line in lines):
        names, mount = ("memory.max", "memory.current", "inactive_file"), mounts
        if controllers:  # version 1
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            mount = mounts / "memory"
        if controllers and "memory" not in controllers.split(","):
            continue
        own = mount / path.lstrip("/")
        for folder in (own, *own.parents):
            if folder.is_relative_to(mount) and (left := _left(folder, *names)) is not None:
                yield left


def _left(group: Path, limit: str, used: str, cache: str) -> int | None:
    """What a control group leaves; ``None`` for one without a limit."""
    try:
        most = int((group / limit).read_text())  # "max" where there is none
        taken = int((group / used).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    return most - taken + int(stat.get(cache, 0))  # the page cache goes when memory is wanted
