"""What a search may take: counted, not timed, so that the same graph gets the same plan."""

from __future__ import annotations

A_SECOND = 1_000_000
"""Operations that are simulated in about a second."""

_A_COLUMN = 30
"""Operations that could be simulated while a linear program is solved, for each of its columns."""

_WHOLE = 3
"""How much longer one takes where the columns are to be whole numbers."""


class Effort:
    """What one search has taken so far, and when it is to end.

    Args:
        limit: operations to simulate, or as much of other work.

    Example:
        >>> effort = Effort(limit=100)
        >>> effort.simulated(60), effort.over, effort.simulated(60), effort.over
        (None, False, None, True)
    """

    def __init__(self, limit: float) -> None:
        self.limit, self.spent = limit, 0.0

    @property
    def over(self) -> bool:
        """Whether what is found has to do."""
        return self.spent >= self.limit

    def renew(self, limit: float) -> None:
        """Begin another search."""
        self.limit, self.spent = limit, 0.0

    def simulated(self, operations: float) -> None:
        """Count operations that were simulated."""
        self.spent += operations

    def solved(self, columns: int, whole: bool = False) -> None:
        """Count a linear program that was solved."""
        self.spent += columns * _A_COLUMN * (_WHOLE if whole else 1)
