"""What a run tells TensorBoard."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any


class Curves:
    """Curves over the steps of a run; nothing without a folder.

    Args:
        folder: of this run, or ``None``.
        first_step: where it begins: what an earlier part of the run wrote beyond that is not shown.
    """

    def __init__(self, folder: Path | None, first_step: int) -> None:
        self._writer: Any = None
        if folder is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # what TensorBoard's own imports warn of
                from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(folder), purge_step=first_step + 1)

    def add(self, step: int, **values: float | None) -> None:
        """The values of a step, by name; ``None`` is left out."""
        if self._writer is not None:
            for name, value in values.items():
                if value is not None:
                    self._writer.add_scalar(name.replace("__", "/"), value, step)

    def close(self) -> None:
        """Write what is left."""
        if self._writer is not None:
            self._writer.close()
