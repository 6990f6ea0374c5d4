"""The update, batch by batch: gradients come down, the host updates, parameters go up, and the device updates
its own part meanwhile.

While the host updates one batch, the gradients of the next ones come down and the parameters of the last ones
go up. Buffers have a constant size, whatever the model's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lowtide.extensions.moves.store.lanes import Transfer
from lowtide.optim.kernels import Group, Kernel, Operands, on_host
from lowtide.optim.layout import spans
from lowtide.optim.link import Link
from lowtide.optim.pool import Pool
from lowtide.optim.slots import HostGradient, Part, Slot

DEPTH = 3
"""Batches under way at once: one comes down, one is updated, one goes up."""

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass
class Task:
    """A part that is to be updated.

    Attributes:
        slot, part: of which parameter, and which part of it.
        group: the hyper-parameters.
        gradient: flat elements of the part's gradient: on the device, or on the host.
        arriving: the host gradient that `gradient` belongs to, if it does.
    """

    slot: Slot
    part: Part
    group: Group
    gradient: Tensor
    arriving: HostGradient | None = None


@dataclass
class Stretch:
    """Elements ``start`` to ``stop`` of a task's parameter."""

    task: Task
    start: int
    stop: int

    def of(self, elements: Tensor) -> Tensor:
        """The stretch of something that covers the task's part."""
        if self.stop - self.start == elements.numel():
            return elements
        return elements[self.start - self.task.part.start : self.stop - self.task.part.start]


Batch = list[Stretch]
"""Stretches that one kernel call updates."""


def batches(tasks: Iterable[Task], most: int) -> Iterator[Batch]:
    """Tasks cut into batches of at most ``most`` elements and one `_kind` each; stretches of one part stay in
    order.
    """
    batch: Batch = []
    room = most
    for task in tasks:
        start = task.part.start
        while start < task.part.stop:
            if room == 0 or (batch and _kind(batch[0].task) != _kind(task)):
                yield batch
                batch, room = [], most
            stop = min(task.part.stop, start + room)
            batch.append(Stretch(task, start, stop))
            room -= stop - start
            room -= room % 64  # every stretch begins at a whole granule
            start = stop
    if batch:
        yield batch


def _kind(task: Task) -> tuple[Any, ...]:
    """What the tasks of one kernel call have in common."""
    return id(task.group), task.gradient.dtype, task.part.fresh


def copies_of(scalars: dict[str, Any]) -> dict[str, Any]:
    """The scalars, for an update that is not to change them."""
    return {name: item.clone() if isinstance(item, Tensor) else item for name, item in scalars.items()}


def _wait(going: deque[list[Transfer]], left: int = 0) -> None:
    """Wait for the oldest transfers, until those of ``left`` batches are under way."""
    while len(going) > left:
        for transfer in going.popleft():
            transfer.wait()


class Updater:
    """Runs updates.

    Args:
        kernel: the arithmetic.
        link: the way between device and host.
        pool: where the host parts lie.
        chunk_elements: elements of one batch, and of every buffer; a multiple of 64.
    """

    def __init__(self, kernel: Kernel, link: Link, pool: Pool, chunk_elements: int) -> None:
        self.kernel = kernel
        self.link = link
        self.pool = pool
        self.chunk_elements = chunk_elements
        self.staging = link.memory()
        self._buffers: dict[tuple[str, int, torch.dtype, torch.device], Tensor] = {}

    def buffer(self, use: str, index: int, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
        """One of the constant-size buffers, by use and turn; made when first asked for."""
        where = device or torch.device("cpu")
        key = (use, index % DEPTH, dtype, where)
        if key not in self._buffers:
            host = where.type == "cpu"
            made = (
                self.staging.zeros([(self.chunk_elements, dtype)])[0]
                if host
                else torch.empty(self.chunk_elements, dtype=dtype, device=where)
            )
            self._buffers[key] = made
        return self._buffers[key]

    def buffers(self) -> list[Tensor]:
        """All buffers so far."""
        return list(self._buffers.values())

    @property
    def buffer_bytes(self) -> int:
        """Bytes of all buffers so far."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    # ---- the device's part -----------------------------------------------------------------------

    def update_device(self, tasks: Sequence[Task]) -> Transfer | None:
        """Ask the device to update its parts."""
        if not tasks:
            return None

        def work() -> None:
            for batch in batches(tasks, self.chunk_elements if self._converts(tasks) else 1 << 62):
                self._compute(
                    batch, [stretch.of(stretch.task.gradient) for stretch in batch], batch[0].task.group
                )
                for stretch in batch:
                    if stretch.task.part.master is not None:
                        stretch.task.slot.values(stretch.start, stretch.stop).copy_(
                            stretch.of(stretch.task.part.master)
                        )

        return self.link.on_device(work, sum(task.part.stop - task.part.start for task in tasks))

    # ---- the host's part -------------------------------------------------------------------------

    def update_host(self, tasks: Sequence[Task], copy_back: bool = True) -> None:
        """Update host parts now.

        Args:
            tasks: in the order in which their gradients arrive.
            copy_back: write the results to the parameters, too; otherwise `copy_back` does that later.
        """
        todo = list(batches(tasks, self.chunk_elements if self._in_pieces(tasks) else 1 << 62))
        staged: deque[list[tuple[Tensor, Transfer | None]]] = deque()
        going: deque[list[Transfer]] = deque()
        for index, batch in enumerate(todo):
            for ahead in range(index + len(staged), min(len(todo), index + DEPTH)):
                staged.append(self._fetch(todo[ahead], ahead))
            gradients = self._arrived(batch, staged.popleft())
            group = on_host(batch[0].task.group)
            self.link.on_host(
                lambda batch=batch, gradients=gradients, group=group: self._compute(batch, gradients, group),
                sum(stretch.stop - stretch.start for stretch in batch),
            )
            if copy_back:
                self._send(batch, index, going)
        _wait(going)

    def _converts(self, tasks: Sequence[Task]) -> bool:
        """Whether kernels need memory beside state, parameters and gradients."""
        if self.kernel.temporaries:
            return True
        return any(
            task.part.master is not None or (task.part.fresh and not self.kernel.counts_steps)
            for task in tasks
        )

    def _in_pieces(self, tasks: Sequence[Task]) -> bool:
        """Whether the host's update gains from batches: something moves beside it, or a buffer has to stay
        small.
        """
        return not self.link.direct or self.pool.name == "disk" or self._converts(tasks)

    def copy_back(self, tasks: Sequence[tuple[Slot, Part]]) -> None:
        """Write host parts that have been updated to their parameters."""
        going: deque[list[Transfer]] = deque()
        empty = torch.empty(0)
        every = [Task(slot, part, {}, empty) for slot, part in tasks]
        for task in every:
            task.group = every[0].group
        for index, batch in enumerate(batches(every, self.chunk_elements)):
            self._send(batch, index, going)
        _wait(going)

    def _fetch(self, batch: Batch, index: int) -> list[tuple[Tensor, Transfer | None]]:
        """Start to bring a batch's gradients to the host, where they are not there or on their way, and its
        state from disk.
        """
        found: list[tuple[Tensor, Transfer | None]] = []
        place = 0
        self.pool.prefetch(
            [stretch.of(tensor) for stretch in batch for tensor in stretch.task.part.tensors()]
        )
        for stretch in batch:
            source = stretch.of(stretch.task.gradient)
            if stretch.task.arriving is not None or self.link.direct:
                found.append((source, None))
                continue
            target = self.buffer("gradient", index, source.dtype)[place : place + source.numel()]
            place += source.numel()
            found.append((target, self.link.down(target, source)))
        return found

    def _arrived(self, batch: Batch, fetched: list[tuple[Tensor, Transfer | None]]) -> list[Tensor]:
        """The gradients of a batch, on the host and scaled."""
        for stretch, (elements, transfer) in zip(batch, fetched, strict=True):
            if transfer is not None:
                transfer.wait()
            arriving = stretch.task.arriving
            if arriving is not None:
                arriving.wait()
                for scale in arriving.scales:
                    elements.mul_(scale)
        return [elements for elements, _ in fetched]

    def _send(self, batch: Batch, index: int, going: deque[list[Transfer]]) -> None:
        """Start to bring updated parameters to the device, in their own precision."""
        _wait(going, DEPTH - 1)  # a buffer is free then
        started: list[Transfer] = []
        place = 0
        for stretch in batch:
            if stretch.task.part.master is None:
                continue
            target = stretch.task.slot.values(stretch.start, stretch.stop)
            source = stretch.of(stretch.task.part.master)
            if not self.link.direct and (source.dtype != target.dtype or self.pool.name == "disk"):
                count = source.numel()
                rounded = self.buffer("parameter", index, target.dtype)[place : place + count]
                place += count
                source = rounded.copy_(source)
            started.append(self.link.up(target, source))
        going.append(started)

    # ---- both ------------------------------------------------------------------------------------

    def _compute(self, batch: Batch, gradients: Sequence[Tensor], group: Group) -> None:
        """One kernel call."""
        begun = not batch[0].task.part.fresh
        operands = Operands(state={name: [] for name in self.kernel.names(group)}, begun=begun)
        empty = not (self.kernel.counts_steps or begun)
        place = 0
        for stretch, gradient in zip(batch, gradients, strict=True):
            part = stretch.task.part
            target = (
                stretch.task.slot.values(stretch.start, stretch.stop)
                if part.master is None
                else stretch.of(part.master)
            )
            if gradient.dtype != target.dtype:
                exact = self.buffer(
                    "exact on the host" if part.on_host else "exact", 0, target.dtype, target.device
                )[place : place + gradient.numel()]
                place += gradient.numel()
                gradient = exact.copy_(gradient)
            operands.parameters.append(target)
            operands.gradients.append(gradient)
            for name, pieces in operands.state.items():
                pieces.append(None if empty else stretch.of(part.state[name]))
            # Every stretch of a part does the same step: all but the last count on a copy.
            last = stretch.stop == part.stop
            operands.steps.append(part.step if last else part.step.clone())
            operands.scalars.append(part.scalars if last else copies_of(part.scalars))
        given = {name: list(pieces) for name, pieces in operands.state.items()}
        self.kernel.update(group, operands)
        for place, stretch in enumerate(batch):
            part = stretch.task.part
            for name, pieces in operands.state.items():
                if pieces[place] is not given[name][place]:
                    stretch.of(part.state[name]).copy_(pieces[place])
            if stretch.stop == part.stop and operands.scalars[place] is not part.scalars:
                part.scalars = operands.scalars[place]
                stretch.task.slot.shown = False

    def refresh(self, slot: Slot) -> None:
        """Take masters from a parameter that somebody wrote to since the last update; an element that still
        rounds to it stays exact.
        """
        if not slot.written_by_others():
            return
        for part in slot.parts():
            if part.master is not None:
                self._refresh(slot, part, part.master)
        slot.wrote()

    def _refresh(self, slot: Slot, part: Part, masters: Tensor) -> None:
        for start, stop in spans(part.start, part.stop, self.chunk_elements):
            values = slot.values(start, stop)
            if part.on_host and not self.link.direct:
                near = self.buffer("refresh", 0, values.dtype)[: stop - start]
                self.link.down(near, values).wait()
                values = near
            master = masters[start - part.start : stop - part.start]
            if slot.version < 0:
                master.copy_(values)
            else:
                integer = _INTEGERS[values.dtype.itemsize]
                same = master.to(values.dtype).view(integer) == values.view(integer)
                master.copy_(torch.where(same, master, values.to(master.dtype)))
