"""What the optimizer room raises."""

from __future__ import annotations

from lowtide.errors import LowtideError


class OptimError(LowtideError, RuntimeError):
    """An optimizer cannot do what it was asked to, or its state is not whole."""
