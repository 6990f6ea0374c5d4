"""How many micro-batches a pipeline stage keeps whole: arXiv 2205.05198, appendix C.

A rank early in the pipeline holds many micro-batches at once, a late one few, so the early ones run out of
memory first. Each rank spends what it has: as many of the micro-batches in flight as fit are kept whole, the
rest keep each layer's input and are recomputed; as backward frees a place, the next micro-batch takes it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lowtide import accelerator, meter


@dataclass
class Window:
    """How many micro-batches in flight a rank keeps whole.

    Attributes:
        capacity: at most so many at once, all its stages together; ``None`` is all of them.
        whole: (stage, micro-batch) that are kept whole now.
        most_whole: the most there were at once.
        kept, recomputed: how many there were in all.
    """

    capacity: int | None = None
    whole: set[tuple[int, int]] = field(default_factory=set)
    most_whole: int = 0
    kept: int = 0
    recomputed: int = 0

    def enter(self, stage: int, micro_batch: int) -> bool:
        """Whether a micro-batch that begins its forward is kept whole.

        >>> window = Window(capacity=1)
        >>> window.enter(0, 0), window.enter(0, 1)
        (True, False)
        >>> window.leave(0, 0)
        >>> window.enter(0, 2)
        True
        """
        if self.capacity is not None and len(self.whole) >= self.capacity:
            self.recomputed += 1
            return False
        self.whole.add((stage, micro_batch))
        self.kept += 1
        self.most_whole = max(self.most_whole, len(self.whole))
        return True

    def leave(self, stage: int, micro_batch: int) -> None:
        """A micro-batch has ended its backward."""
        self.whole.discard((stage, micro_batch))


@dataclass(frozen=True)
class MicroBatch:
    """What one micro-batch takes on a stage.

    Attributes:
        held_bytes: between its forward and its backward.
        passing_bytes: the most on top of that, within its forward or its backward.
    """

    held_bytes: int
    passing_bytes: int


@dataclass(frozen=True)
class StageMemory:
    """What the micro-batches of a rank take, in both ways of running them.

    Attributes:
        whole, recomputed: one micro-batch kept whole, one that is recomputed.
        in_flight: how many there are at once at most.

    >>> memory = StageMemory(MicroBatch(100, 30), MicroBatch(10, 60), in_flight=4)
    >>> memory.peak_bytes(0), memory.peak_bytes(2), memory.peak_bytes(4)
    (100, 280, 430)
    >>> memory.capacity(300), memory.capacity(99)
    (2, None)
    """

    whole: MicroBatch
    recomputed: MicroBatch
    in_flight: int

    def peak_bytes(self, capacity: int) -> int:
        """The most that the micro-batches take when ``capacity`` of them are kept whole."""
        kept = min(capacity, self.in_flight)
        passing = (
            self.whole.passing_bytes
            if kept == self.in_flight
            else max(self.recomputed.passing_bytes, self.whole.passing_bytes * (kept > 0))
        )
        return kept * self.whole.held_bytes + (self.in_flight - kept) * self.recomputed.held_bytes + passing

    @property
    def least_bytes(self) -> int:
        """The least that they can take. Recomputing has a price in passing, too, so it need not be that of
        keeping none.
        """
        return min(self.peak_bytes(kept) for kept in range(self.in_flight + 1))

    def capacity(self, room_bytes: int) -> int | None:
        """How many can be kept whole within so many bytes, ``None`` where no number fits."""
        fitting = [kept for kept in range(self.in_flight + 1) if self.peak_bytes(kept) <= room_bytes]
        return max(fitting, default=None)


def measure_micro_batch(
    module: Any, make_input: Callable[[], Tensor], targets: Tensor | None, whole: bool, device: torch.device
) -> MicroBatch:
    """Run one micro-batch through a stage and read what it takes. Gradients are there before and after;
    random state is put back.

    Args:
        module: the stage.
        make_input: makes what it receives; its bytes count.
        targets: of the loss, in the last stage.
        whole: whether to keep everything.
        device: whose memory.
    """

    def run() -> MicroBatch:
        module.whole = whole
        with meter.peak(device) as seen:
            x = make_input()
            output = module(x)
            if targets is None:
                gradient = torch.ones_like(output)
                sent = output.untyped_storage().nbytes() + gradient.untyped_storage().nbytes()
                # what is sent is not held, and the gradient comes with backward
                held = seen.live_bytes - sent
                output.backward(gradient)
                del gradient
            else:
                loss = module.loss(output, targets)
                held = seen.live_bytes
                loss.backward()
                del loss
            del output, x
        return MicroBatch(held, seen.peak_bytes - held)

    devices = [device] if accelerator.is_accelerator(device) else []
    with torch.random.fork_rng(devices=devices):
        run()  # makes the gradients
        return run()
