"""The error of this room."""

from __future__ import annotations

from lowtide.errors import LowtideError


class ParallelError(LowtideError):
    """A size does not divide, a layer is called in a way that cannot be, or ranks disagree."""
