"""The numbers that are fitted to published runs: ``efficiency.json``, which ``python -m benchmarks
estimate_published`` writes.
"""

from __future__ import annotations

import json
from functools import lru_cache
from importlib.resources import files
from typing import Any


@lru_cache(maxsize=1)
def fitted() -> dict[str, Any]:
    """The file: ``common`` and ``devices`` are `lowtide.estimate.speed.Efficiency`, ``reserved`` what PyTorch
    reserves over what it allocates.

    >>> 0 < fitted()["reserved"]["plain"] < 0.2
    True
    """
    return json.loads((files("lowtide.estimate") / "efficiency.json").read_text(encoding="utf-8"))
