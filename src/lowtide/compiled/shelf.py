"""Plans on disk, beside the code that PyTorch keeps there: a warm process plans nothing anew."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from lowtide import accelerator
from lowtide import budget as budgets
from lowtide.compiled.moving import Way
from lowtide.errors import PlanError
from lowtide.plan.data import Plan
from lowtide.private import inductor
from lowtide.version import __version__


class Shelf:
    """Keeps facts in a folder, under a text that tells them apart.

    Args:
        folder: where files are kept; one that cannot be read or written is as good as none.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find(self, key: str) -> Any:
        """What was kept, as JSON says it; ``None`` where nothing was."""
        try:
            return json.loads(zlib.decompress(self._file(key).read_bytes()))
        except (OSError, ValueError, zlib.error):
            return None

    def keep(self, key: str, facts: Any) -> None:
        """Keep what JSON can say."""
        file = self._file(key)
        whole = file.with_suffix(f".{os.getpid()}")
        with contextlib.suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            whole.write_bytes(zlib.compress(json.dumps(facts).encode(), 1))
            os.replace(whole, file)

    def _file(self, key: str) -> Path:
        return self._folder / hashlib.sha256(key.encode()).hexdigest()


def facts_of(plan: Plan, ways: Sequence[Way], levels: Sequence[int]) -> list[Any]:
    """A step's plan and how each call is cut, for a shelf.

    Args:
        plan: the plan.
        ways: of each call.
        levels: the bytes that were recorded, moment by moment.
    """
    return [plan.to_json(), [one.facts for one in ways], list(levels)]


def ways_in(facts: Any, levels: Sequence[int]) -> tuple[Plan, list[Way]] | None:
    """What `facts_of` was given; ``None`` where a shelf kept nothing, or where more bytes differ than a plan
    leaves for what no recording shows.

    Args:
        facts: as a shelf kept them.
        levels: the bytes that were recorded now, moment by moment.
    """
    try:
        plan, ways, before = facts
        plan = Plan.from_json(plan)
        far = max((abs(one - other) for one, other in zip(levels, before, strict=True)), default=0)
        alike = far <= budgets.slack_bytes(plan.budget_bytes)
        return (plan, list(map(Way.of_facts, ways))) if alike else None
    except (PlanError, TypeError, ValueError):
        return None


def open_shelf(options: dict[str, Any] | None) -> Shelf | None:
    """Where plans are kept; ``None`` where no compiled code is.

    Args:
        options: Inductor's settings; ``None`` under ``aot_eager``.
    """
    folder = None if options is None else inductor.cache_folder()
    return None if folder is None else Shelf(folder / "lowtide")


def cache_key(budget: str | int, options: dict[str, Any] | None, resident_bytes: int, *facts: Any) -> str:
    """A key for a plan, and for PyTorch's cache: a digest of what it follows from.

    Args:
        budget: as of `lowtide.limit_memory`.
        options: Inductor's settings.
        resident_bytes: what is resident beside the graphs.
        facts: anything else.
    """
    settings = sorted((options or {}).items())
    known = [own_facts(), str(budget), torch.get_num_threads(), settings]
    said = json.dumps([*known, resident_bytes, _available(budget, resident_bytes), facts], default=str)
    return hashlib.sha256(said.encode()).hexdigest()


def _available(budget: str | int, resident_bytes: int) -> int | None:
    """What ``"auto"`` finds, to a twentieth: free memory is never the same twice."""
    if budgets.asks_for(budget) != "auto":
        return None
    device = torch.accelerator.current_accelerator() or "cpu"
    return int(math.log(budgets.available_bytes(device, resident_bytes) or 1, 1.05))


@functools.cache
def own_facts() -> str:
    """What every plan follows from beside its graph and budget: this machine and this code."""
    found = hashlib.sha256(f"{__version__} {torch.__version__} {name_machine()}".encode())
    package = Path(__file__).parents[1]
    for folder in ("compiled", "plan", "private"):
        for file in sorted((package / folder).rglob("*.py")):
            found.update(file.read_bytes())
    return found.hexdigest()


def name_machine() -> str:
    """The processors that costs are timed on."""
    names = list(map(accelerator.name_of, accelerator.all_devices()))
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        names += sorted({line.partition(":")[2].strip() for line in lines if line.startswith("model name")})
    return f"{names} {os.cpu_count()}"
