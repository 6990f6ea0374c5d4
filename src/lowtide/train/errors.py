"""What is wrong with an option of a training run."""

from __future__ import annotations

from lowtide.errors import LowtideError


class OptionError(LowtideError):
    """An option has an impossible value, or does not go with another."""


def require(holds: bool, name: str, value: object, message: str) -> None:
    """Raise an `OptionError` about an option unless ``holds``."""
    if not holds:
        raise OptionError(f"--{name.replace('_', '-')} {value}".rstrip() + f": {message}")
