"""Directors decide, operation by operation, what the recorder records and what stays: one inside a
checkpointing scope, which knows no graph, the other by a plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lowtide.ops import OpInfo, has_plain_storage, op_info
from lowtide.plan.data import Move, ProgramStep

_LOOK_AHEAD = 400


class RegionDirector:
    """Records and evicts everything, or nothing.

    Args:
        evicted: whether everything is.
    """

    def __init__(self, evicted: bool = True) -> None:
        self._evicted = evicted

    def evicts(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """The next operation, which is about to run: whether it is recorded and its results evicted. To be
        called once for each that is no view.
        """
        return self._evicted

    def skip(self, count: int) -> None:
        """So many operations have passed."""

    def stays(self, info: OpInfo, writes: int) -> tuple[bool, ...]:
        """The operation has run: which of the ``writes`` values that it wrote stay (missing ones do not)."""
        return ()


class PlanDirector:
    """Follows a plan's program, operation by operation.

    Args:
        program, moves: the plan's.
        smaller: whether the step is smaller than the one that was planned for.

    Where the running step departs from the program (data-dependent routing), it looks ahead for where the two
    meet again; an operation that the plan does not know is recorded and evicted, which is always safe; but
    not a collective, which other ranks may know.

    Attributes:
        at: the place in the program.
        departed: how many operations the plan did not know.
        missed: how many of the plan's operations the step did not have, or had otherwise.
    """

    def __init__(
        self, program: Sequence[ProgramStep], moves: Sequence[Move] = (), smaller: bool = False
    ) -> None:
        self._program = program
        self._moves = moves
        self._smaller = smaller
        self.at = 0
        self.departed = 0
        self.missed = 0
        self.moves: tuple[int, ...] = ()
        """for each value that the latest operation wrote, its place among the plan's moves, or -1"""

    def _find(self, info: OpInfo) -> int | None:
        program, at = self._program, self.at
        if at < len(program) and program[at].name == info.name:
            return at
        for ahead in range(at, min(at + _LOOK_AHEAD, len(program))):
            if program[ahead].name == info.name:
                return ahead
        return None

    def skip(self, count: int) -> None:
        """On by so many operations of the program."""
        self.at += count

    def evicts(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the plan runs this operation again."""
        info = op_info(func)
        at = self._find(info)
        return not info.collective if at is None else self._program[at].replayed

    def moves_of(self, wrote: Sequence[torch.Tensor]) -> tuple[int, ...]:
        """For each value that the latest operation wrote its place among the plan's moves, or -1.

        A value of another shape, dtype or size than the plan's was written by another operation of that name:
        the step has departed from the program. Only what comes back as it was may move from there on.
        """
        moves = [
            number if number >= 0 and has_plain_storage(t) else -1
            for number, t in zip(self.moves, wrote, strict=True)
        ]
        for number, tensor in zip(moves, wrote, strict=True):
            if number >= 0 and not self._is_of(tensor, self._moves[number]):
                self.departed += 1
                self.missed += 1
                return (-1,) * len(moves)
        departed = self.departed > 0 or self.missed > 0
        return tuple(
            -1 if number < 0 or (departed and self._moves[number].encoded) else number for number in moves
        )

    def _is_of(self, tensor: torch.Tensor, move: Move) -> bool:
        """Whether a value that is moved so was written through this tensor; in a smaller step through one
        that is larger in no dimension.
        """
        shape, nbytes = tuple(tensor.shape), tensor.untyped_storage().nbytes()
        if str(tensor.dtype) != f"torch.{move.dtype}" or len(shape) != len(move.shape):
            return False
        if self._smaller:
            return nbytes <= move.bytes and all(a <= b for a, b in zip(shape, move.shape, strict=True))
        return nbytes == move.bytes and shape == move.shape

    def stays(self, info: OpInfo, writes: int) -> tuple[bool, ...]:
        """What the plan says of it; on to the next."""
        self.moves = ()
        at = self._find(info)
        if at is None:
            self.departed += 1
            return ()
        self.departed += at - self.at
        self.missed += at - self.at
        self.at = at + 1
        step = self._program[at]
        if len(step.stored) != writes:
            self.departed += 1
            self.missed += 1
            return ()
        self.moves = step.moves
        return step.stored


Director = RegionDirector | PlanDirector
