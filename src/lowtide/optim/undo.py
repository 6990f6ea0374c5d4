"""What the last update of each parameter replaced: an update that is undone leaves the bytes from before it.

The copies lie on the host, for the parts on the device, too. Arithmetic that runs an update backwards would
need no copies, and would not give the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from lowtide.extensions.moves.store.lanes import Transfer
from lowtide.optim.pipeline import Task, Updater, copies_of
from lowtide.optim.pool import Pool
from lowtide.optim.slots import Before, Part, Slot


class Undo:
    """Keeps what updates replace, and puts it back.

    Args:
        updater: what updates.
        pool: where the copies lie.
    """

    def __init__(self, updater: Updater, pool: Pool) -> None:
        self.updater = updater
        self.link = updater.link
        self.pool = pool

    def reserve(self, slots: Iterable[Slot]) -> None:
        """Take memory for the copies of slots, of all or of none.

        Raises:
            OptimError: there is not enough.
        """
        parts = [(slot, part) for slot in slots for part in slot.parts()]
        rows = [[*part.state.values(), _values(slot, part)] for slot, part in parts]
        made = iter(self.pool.zeros([(tensor.numel(), tensor.dtype) for row in rows for tensor in row]))
        for _, part in parts:
            state = {name: next(made) for name in part.state}
            part.before = Before(state, next(made), part.step.clone())

    def forget(self, slots: Iterable[Slot]) -> None:
        """Give the memory of slots back."""
        for part in (part for slot in slots for part in slot.parts()):
            if part.before is not None:
                self.pool.give_back(part.before.tensors())
                part.before = None

    def drop(self, slots: Iterable[Slot]) -> None:
        """There is nothing to undo in these slots any more."""
        for part in (part for slot in slots for part in slot.parts()):
            if part.before is not None:
                part.before.kept = False

    def keep(self, tasks: Iterable[Task]) -> None:
        """Copy what the updates of these tasks are going to replace. What the device is asked to do after it
        comes after it.
        """
        going: list[Transfer] = []
        for task in tasks:
            part, before = task.part, task.part.before
            assert before is not None
            before.kept = False
            for copy, tensor in _pairs(task.slot, part, before):
                if part.on_host:
                    copy.copy_(tensor)
                else:
                    going.append(self.link.down(copy, tensor))
            before.step.copy_(part.step)
            before.scalars, before.fresh = copies_of(part.scalars), part.fresh
            before.kept = True
        for transfer in going:
            transfer.join()

    def put_back(self, parts: Iterable[tuple[Slot, Part]]) -> None:
        """Undo the last update of these parts, those of them that have one to undo. A parameter that has a
        master does not change yet (see `show`).
        """
        going: list[Transfer] = []
        for slot, part in parts:
            before = part.before
            if before is None or not before.kept:
                continue
            for copy, tensor in _pairs(slot, part, before):
                if part.on_host:
                    tensor.copy_(copy)
                else:
                    going.append(self.link.up(tensor, copy))
            part.step.copy_(before.step)
            part.scalars, part.fresh = before.scalars, before.fresh
            before.kept = False
        for transfer in going:
            transfer.wait()

    def show(self, slots: Sequence[Slot]) -> None:
        """Write the values of masters to the parameters."""
        for slot in slots:
            if slot.device is not None and slot.device.master is not None:
                slot.values(slot.device.start, slot.device.stop).copy_(slot.device.master)
        self.updater.copy_back([(slot, slot.host) for slot in slots if slot.host is not None])
        for slot in slots:
            slot.wrote()


def can_undo(slot: Slot) -> bool:
    """Whether each part of the slot still has what its last update replaced."""
    return all(part.before is not None and part.before.kept for part in slot.parts())


def _values(slot: Slot, part: Part) -> Tensor:
    """The values that an update of the part writes."""
    return part.master if part.master is not None else slot.values(part.start, part.stop)


def _pairs(slot: Slot, part: Part, before: Before) -> list[tuple[Tensor, Tensor]]:
    """The copies, and what they are of."""
    pairs = [(before.state[name], tensor) for name, tensor in part.state.items()]
    return [*pairs, (before.values, _values(slot, part))]
