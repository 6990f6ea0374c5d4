"""What a row and its place are: `parts` lists them, the other files measure them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]

Row = dict[str, Any]
Measure = Callable[[str], Row]

AS_PER_BLOCK = "as per block"
"""The budget that is the peak of checkpointing per block."""


class Unmeasured(Exception):
    """A row cannot be had here, and says why."""


@dataclass(frozen=True)
class Where:
    """What a part runs on.

    Attributes:
        device: ``cuda`` or ``cpu``.
        small: whether models are as small as a CPU needs them.
        card: false on PyTorch's CUDA build without one, where nothing is computed: rows have bytes alone.
        seconds: of paired timing for one row.
    """

    device: str
    small: bool
    card: bool = True

    @property
    def seconds(self) -> float:
        return (0.5 if self.small else 5.0) if self.card else 0.0


_OF_A_CARD = ("seconds", "extra", "tokens_a_second", "bytes_per_second", "gap", "rounds")
_OF_VALUES = ("same_gradients", "largest_difference", "plain_repeats", "plain_difference", "same_loss")


def bytes_alone(found: Any) -> Any:
    """A row without times, and without what values are compared for."""
    if isinstance(found, list):
        return [bytes_alone(item) for item in found]
    if not isinstance(found, dict):
        return found
    return {
        key: bytes_alone(item)
        for key, item in found.items()
        if not key.endswith(_OF_A_CARD) and key not in _OF_VALUES
    }
