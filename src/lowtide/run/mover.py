"""What the recorder asks of values that move. `lowtide.extensions.moves.engine` does it; a step whose plan
moves nothing loads none of that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch


class Mover(Protocol):
    """Moves the values of one step's forwards."""

    def moves_of(
        self, numbers: Sequence[int], wrote: Sequence[torch.Tensor], smaller: bool
    ) -> tuple[int, ...] | None:
        """For each value that an operation has written its place among the plan's moves, or -1; ``None``
        where a value is another one than the plan's. ``smaller``: than the step that was planned for.
        """
        ...

    def move(self, tape: Any, number: int, tensor: torch.Tensor, is_loose: bool) -> None:
        """Store the value of ``tensor``, just written, and have the tape fetch it where it is read."""
        ...

    def begin(self) -> None:
        """Autograd asks for a saved tensor: where a backward has begun, nothing leaves any more."""
        ...

    def ahead(self) -> None:
        """Autograd has got a saved tensor: start fetching what it asks for next."""
        ...
