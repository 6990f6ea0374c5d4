"""Directors decide for each operation of a checkpointing scope, which has no plan, whether it is recorded."""

from __future__ import annotations

from typing import Any


class ScopeDirector:
    """Records and evicts everything, or nothing.

    Args:
        evicted: whether everything is.
    """

    def __init__(self, evicted: bool = True) -> None:
        self._evicted = evicted

    def evicts(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the next operation is recorded and its results evicted; asked once before each that is no
        view.
        """
        return self._evicted
