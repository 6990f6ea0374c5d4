"""What the machine itself has left."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path


def free_main_memory(root: Path = Path("/")) -> int | None:
    """Bytes of main memory that this process can still have, or ``None`` where the system does not say.

    What the system has available, within the limits of the process's control groups.

    Args:
        root: where the system's files are.

    >>> free = free_main_memory()
    >>> free is None or free > 0
    True
    """
    found = [count for count in (_available(root), *_left_in_groups(root)) if count is not None]
    return max(0, min(found)) if found else None


def _available(root: Path) -> int | None:
    """What the system says is available; where it says nothing, the pages that are free."""
    try:
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):  # not a name that this system knows
        return None


def _left_in_groups(root: Path) -> Iterator[int | None]:
    """What each control group around this process leaves, of those with a limit: version 2 and version 1."""
    mounts = root / "sys/fs/cgroup"
    for controllers, path in _groups(root):
        if controllers == "":
            yield from _limits(mounts, path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            yield from _limits(mounts / "memory", path, *names)


def _groups(root: Path) -> list[tuple[str, str]]:
    """(controllers, path) of each hierarchy that this process is in."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
        return [(controllers, path) for _, controllers, path in (line.split(":", 2) for line in lines)]
    except (OSError, ValueError):
        return []


def _limits(mount: Path, path: str, limit: str, used: str, cache: str) -> Iterator[int | None]:
    """From a group up to the root of its hierarchy; inside a container that root is all there is to see."""
    for folder in _up(mount, path):
        try:
            most = int((folder / limit).read_text())  # "max" where there is none
            taken = int((folder / used).read_text())
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            continue
        yield most - taken + int(stat.get(cache, 0))  # the page cache goes when memory is wanted


def _up(mount: Path, path: str) -> list[Path]:
    parts = [part for part in path.split("/") if part]
    return [mount.joinpath(*parts[:count]) for count in range(len(parts), -1, -1)]
