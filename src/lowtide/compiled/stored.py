"""Plans of compiled graphs, kept beside the artefacts that PyTorch keeps of them on disk.

A warm process takes compiled code from PyTorch's cache, and no partitioner is asked: what was planned is
found here, under a digest of the code itself and of what its plan follows from. Where the code is found and
its plan is not, it is compiled anew.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import zlib
from collections.abc import Sequence
from pathlib import Path

import torch

from lowtide.errors import PlanError
from lowtide.plan.data import Plan
from lowtide.version import __version__


class Shelf:
    """Keeps plans in a folder, under the code that they are of.

    Args:
        folder: where files are kept; one that cannot be read or written is as good as none.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find(self, key: str) -> list[Plan]:
        """What was planned for code; nothing where that is not known."""
        try:
            kept = json.loads(zlib.decompress(self._file(key).read_bytes()))
            return list(map(Plan.from_json, kept))
        except (OSError, ValueError, zlib.error, PlanError):
            return []

    def keep(self, key: str, plans: Sequence[Plan]) -> None:
        """Keep what was planned for code, the plans of regions within it included."""
        file = self._file(key)
        whole = file.with_suffix(f".{os.getpid()}")
        with contextlib.suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            whole.write_bytes(zlib.compress(json.dumps([plan.to_json() for plan in plans]).encode(), 1))
            os.replace(whole, file)

    def _file(self, key: str) -> Path:
        return self._folder / hashlib.sha256(key.encode()).hexdigest()


@functools.cache
def own_facts() -> str:
    """What every plan follows from beside its graph and budget: this machine and this code."""
    digest = hashlib.sha256(f"{__version__} {torch.__version__} {_machine()}".encode())
    package = Path(__file__).parents[1]
    for folder in ("compiled", "plan", "private"):
        for file in sorted((package / folder).rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()


def _machine() -> str:
    """The processors that costs are timed on."""
    names = [torch.cuda.get_device_name(at) for at in range(torch.cuda.device_count())]
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        names += sorted({line.partition(":")[2].strip() for line in lines if line.startswith("model name")})
    return f"{names} {os.cpu_count()}"
