"""Which processes see each other, and whether one still runs."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path


def machine() -> str:
    """What tells machines, and containers on one machine, apart: processes see each other under equal
    ones.
    """
    space = Path("/proc/self/ns/pid")
    with contextlib.suppress(OSError):
        return f"{socket.gethostname()} {os.readlink(space)}"
    return socket.gethostname()


def lives(pid: int) -> bool:
    """Whether a process of this machine runs; one that has ended and waits to be buried does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (OSError, IndexError):
        return True
