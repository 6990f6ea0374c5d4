"""Directors decide for each operation whether it is recorded and which of its results stay.

`ScopeDirector` serves a checkpointing scope, which has no graph; `PlanDirector` follows a plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lowtide.ops import OpInfo, has_plain_storage, op_info
from lowtide.plan.data import Move, ProgramStep

_LOOK_AHEAD = 400


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

    def stays(self, info: OpInfo, writes: int) -> tuple[bool, ...]:
        """Which of the ``writes`` values of the operation that has run stay."""
        return (False,) * writes


class PlanDirector:
    """Follows a plan's program, operation by operation.

    Args:
        program, moves: the plan's.
        smaller: whether the step is smaller than the one that was planned for.

    Where the step runs other operations than the program (data-dependent routing), it searches ahead for the
    place where the two agree again. An operation that the program does not have is recorded and evicted,
    which is always safe; but not a collective, which other ranks may not run.

    Attributes:
        at: the place in the program.
        extra: how many operations of the step the program does not have.
        skipped: how many of the program's operations the step did not run, or ran on other tensors.
        moves: for each value of the latest operation, its place among the plan's moves, or -1.

    The C++ recorder reads and writes the slots ``at`` and ``skipped``.
    """

    __slots__ = ("_moves", "_program", "_smaller", "at", "extra", "moves", "skipped")

    def __init__(
        self, program: Sequence[ProgramStep], moves: Sequence[Move] = (), smaller: bool = False
    ) -> None:
        self._program = program
        self._moves = moves
        self._smaller = smaller
        self.at = 0
        self.extra = 0
        self.skipped = 0
        self.moves: tuple[int, ...] = ()

    @property
    def departed(self) -> bool:
        """Whether the step has run other operations than the program."""
        return self.extra > 0 or self.skipped > 0

    def _find(self, info: OpInfo) -> int | None:
        program, at = self._program, self.at
        for ahead in range(at, min(at + _LOOK_AHEAD, len(program))):
            if program[ahead].name == info.name:
                return ahead
        return None

    def evicts(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the plan runs this operation again."""
        info = op_info(func)
        at = self._find(info)
        return not info.collective if at is None else self._program[at].replayed

    def moves_of(self, wrote: Sequence[torch.Tensor]) -> tuple[int, ...]:
        """For each value of the latest operation its place among the plan's moves, or -1.

        A value of another shape, dtype or size than the plan's comes from another operation of that name: the
        step has departed from the program. From there on only values that come back bitwise may move.
        """
        moves = [
            number if number >= 0 and has_plain_storage(t) else -1
            for number, t in zip(self.moves, wrote, strict=True)
        ]
        pairs = zip(moves, wrote, strict=True)
        if not all(number < 0 or self._is_of(tensor, self._moves[number]) for number, tensor in pairs):
            self.skipped += 1
            return (-1,) * len(moves)
        if self.departed:
            moves = [-1 if number < 0 or self._moves[number].encoded else number for number in moves]
        return tuple(moves)

    def _is_of(self, tensor: torch.Tensor, move: Move) -> bool:
        """Whether this is the tensor that the move is for; in a smaller step one that is larger in no
        dimension.
        """
        shape, nbytes = tuple(tensor.shape), tensor.untyped_storage().nbytes()
        if str(tensor.dtype) != f"torch.{move.dtype}" or len(shape) != len(move.shape):
            return False
        if self._smaller:
            return nbytes <= move.bytes and all(a <= b for a, b in zip(shape, move.shape, strict=True))
        return nbytes == move.bytes and shape == move.shape

    def stays(self, info: OpInfo, writes: int) -> tuple[bool, ...]:
        """As the program says; advance to its next operation."""
        self.moves = ()
        at = self._find(info)
        if at is None:
            self.extra += 1
            return (False,) * writes
        self.skipped += at - self.at
        self.at = at + 1
        step = self._program[at]
        if len(step.stored) != writes:
            self.skipped += 1
            return (False,) * writes
        self.moves = step.moves
        return step.stored


Director = ScopeDirector | PlanDirector
