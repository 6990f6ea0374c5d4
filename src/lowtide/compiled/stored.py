"""Plans of compiled graphs, kept beside the artefacts that PyTorch keeps of them on disk.

A warm process takes compiled code from PyTorch's cache, and no partitioner is asked: what was planned is
found here, under a digest of what PyTorch's own key is made of. Where the code is found and its plan is not,
it is compiled anew.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
import os
import tempfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx

from lowtide.errors import PlanError
from lowtide.plan.data import Plan
from lowtide.private import partitioning
from lowtide.version import __version__

_FORMAT = 2
_MOST = 16  # plans of one graph, for sizes that vary


@dataclass(frozen=True)
class Sizes:
    """Sizes that compiled code serves, by the names of their symbols.

    Attributes:
        above, upto: bounds of each; the lower ones are left out themselves.
        product: the largest product of all, or ``None``.
    """

    above: Mapping[str, int]
    upto: Mapping[str, int]
    product: int | None = None

    def __contains__(self, sizes: Mapping[str, int]) -> bool:
        return (
            all(name in sizes and sizes[name] > bound for name, bound in self.above.items())
            and all(name in sizes and sizes[name] <= bound for name, bound in self.upto.items())
            and (self.product is None or math.prod(sizes.values()) <= self.product)
        )

    def __and__(self, other: Sizes) -> Sizes:
        """Sizes that both serve."""
        names = {*self.above, *other.above}, {*self.upto, *other.upto}
        products = [one for one in (self.product, other.product) if one is not None]
        return Sizes(
            {name: max(one.above[name] for one in (self, other) if name in one.above) for name in names[0]},
            {name: min(one.upto[name] for one in (self, other) if name in one.upto) for name in names[1]},
            min(products, default=None),
        )


ANY = Sizes({}, {})


class Shelf:
    """Plans by graph in a folder.

    Args:
        folder: where files are kept; one that cannot be read or written is as good as none.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find(self, key: str, sizes: Mapping[str, int]) -> list[Plan]:
        """What was planned last for a graph, and holds for these sizes; nothing where that is not known."""
        for row in self._rows(key):
            if sizes in Sizes(**row["sizes"]):
                with contextlib.suppress(PlanError):
                    return [Plan.from_json(plan) for plan in row["plans"]]
        return []

    def keep(self, key: str, sizes: Sizes, plans: Sequence[Plan]) -> None:
        """Keep what was planned for a graph, the plans of regions within it included."""
        row = {"sizes": asdict(sizes), "plans": [plan.to_json() for plan in plans]}
        rows = [row, *(one for one in self._rows(key) if one["sizes"] != row["sizes"])][:_MOST]
        with contextlib.suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self._folder, delete=False) as file:
                file.write(zlib.compress(json.dumps(rows).encode(), 1))
            os.replace(file.name, self._folder / key)

    def _rows(self, key: str) -> list[dict[str, Any]]:
        try:
            rows = json.loads(zlib.decompress((self._folder / key).read_bytes()))
        except (OSError, ValueError, zlib.error):
            return []
        return rows if isinstance(rows, list) else []


def sizes_of(inputs: Sequence[Any]) -> dict[str, int]:
    """The values that a graph's open sizes have at hand, by name."""
    return {str(one.symbol): one.seen for one in partitioning.free_sizes_of(inputs)[0]}


def key_of(module: fx.GraphModule, inputs: Sequence[Any], facts: str) -> str:
    """A digest of a graph, what it is given, and in which state of PyTorch.

    Args:
        module: Dynamo's graph.
        inputs: its (fake) inputs.
        facts: of what its plan follows from beside it.
    """
    rows = [
        str(_FORMAT),
        facts,
        *(part.code for part in module.modules() if isinstance(part, fx.GraphModule)),
        *map(_described, inputs),
        str(
            (torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled(), torch.get_default_dtype())
        ),
        *(
            f"{kind} {torch.get_autocast_dtype(kind)}"
            for kind in ("cpu", "cuda")
            if torch.is_autocast_enabled(kind)
        ),
    ]
    return hashlib.sha256("\0".join(rows).encode()).hexdigest()


def _described(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return str(value)
    stride = tuple(value.stride()) if value.layout == torch.strided else value.layout
    kind = f"{value.dtype} {value.device} {type(value).__name__}"
    return f"{tuple(value.shape)} {stride} {kind} {value.requires_grad}"


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
