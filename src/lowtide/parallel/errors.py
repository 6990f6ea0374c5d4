"""The error of this room."""

from __future__ import annotations

from lowtide.errors import LowtideError


class ParallelWarning(UserWarning):
    """Something is right and takes more memory or time than it has to."""


class ParallelError(LowtideError):
    """A size does not divide, a layer is called in a way that cannot be, or ranks disagree."""
