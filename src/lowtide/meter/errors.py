"""The meter's own error."""

from __future__ import annotations

from ..errors import LowtideError


class MeterError(LowtideError):
    """Memory cannot be measured the way that was asked for."""
