"""Updates that run in a thread of their own: beside backward (``overlap_update``), or beside the next step
(``delayed``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from lowtide.extensions.moves.store.lanes import ThreadLane, Transfer
from lowtide.optim.kernels import detached_options
from lowtide.optim.pipeline import Task, Updater
from lowtide.optim.slots import Slot
from lowtide.optim.stream import GradientStream, sent
from lowtide.optim.undo import Undo

Groups = Iterable[dict[str, Any]]


class BackgroundUpdater:
    """Runs host updates in a thread. They write masters and state; parameters change when
    `HostOptimizer.step` copies back.

    Args:
        updater: what updates.
        stream: where gradients lie.
        undo: keeps what updates replace, if they can be undone.
    """

    def __init__(self, updater: Updater, stream: GradientStream, undo: Undo | None = None) -> None:
        self.updater = updater
        self.stream = stream
        self.undo = undo
        self._early: list[tuple[Slot, Transfer]] = []
        self._options: dict[int, dict[str, Any]] = {}
        self._late: Transfer | None = None
        self._worker = ThreadLane("optim")

    # ---- beside backward -------------------------------------------------------------------------

    def update_early(self, slot: Slot, group: dict[str, Any]) -> None:
        """Begin the update of a slot whose gradient is on its way."""
        assert slot.host is not None and slot.gradient is not None
        options = self._options.setdefault(id(group), detached_options(group))
        self.updater.refresh(slot)
        slot.updated = True
        task = Task(slot, slot.host, options, slot.gradient.elements, slot.gradient)

        def update() -> None:
            if self.undo is not None:
                self.undo.keep([task])
            self.updater.update_host([task], copy_back=False)

        self._early.append((slot, self._submit(update)))

    @property
    def early(self) -> bool:
        """Whether updates have begun beside backward."""
        return bool(self._early)

    def wait_early(self) -> None:
        """Wait for the updates that ran beside backward: what these read may be changed after it."""
        for _, transfer in self._early:
            transfer.wait()

    def finish_early(self, groups: Groups) -> str:
        """Wait for the updates that ran beside backward. Returns why these are not the updates that `step`
        would do, or nothing: they used other hyper-parameters, or a gradient that is not there any more.
        """
        self.wait_early()
        early, self._early = self._early, []
        options, self._options = self._options, {}
        for group in groups:
            used = options.get(id(group))
            if used is not None and any(_differ(used[name], group[name]) for name in used):
                return "hyper-parameters changed after an update beside backward had begun"
        if any(sent(slot.parameter.grad) is None for slot, _ in early):
            return "a gradient was cleared after its update had run beside backward"
        return ""

    # ---- beside the next step --------------------------------------------------------------------

    def update_late(self, tasks: Sequence[Task]) -> None:
        """Begin updates that parameters see with the next step. Gradients in ``.grad`` are copied before this
        returns.
        """
        options: dict[int, dict[str, Any]] = {}
        later: list[Task] = []
        for task in tasks:
            held = task.arriving if task.arriving is not None else self.stream.hold(task.slot, task.gradient)
            group = options.setdefault(id(task.group), detached_options(task.group))
            later.append(Task(task.slot, task.part, group, held.elements, held))
        for task in later:
            assert task.arriving is not None
            task.arriving.wait()
        for task in later:
            task.slot.gradient, task.slot.spare = task.slot.spare, task.arriving
            task.slot.placeholder = None
            task.slot.pending = True
        self._late = self._submit(lambda: self.updater.update_host(later, copy_back=False))

    def wait_late(self) -> None:
        """Wait for the updates of `update_late`, and raise what they raised."""
        if self._late is not None:
            self._late.wait()
            self._late = None

    # ---- the thread ------------------------------------------------------------------------------

    def quiet(self) -> None:
        """Wait for everything, whatever comes of it."""
        for transfer in (*(transfer for _, transfer in self._early), self._late):
            if transfer is not None:
                with suppress(Exception):
                    transfer.wait()
        self._early, self._options, self._late = [], {}, None

    def close(self) -> None:
        """Let go of the thread."""
        self.quiet()
        self._worker.close()

    def _submit(self, work: Callable[[], None]) -> Transfer:
        return self._worker.do(torch.no_grad()(work))


def _differ(a: Any, b: Any) -> bool:
    return not torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a is not b and a != b
