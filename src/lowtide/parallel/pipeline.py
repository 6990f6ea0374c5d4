"""Pipeline parallelism on ``torch.distributed.pipelining``, in the memory of arXiv 2205.05198, appendix B.

Each rank holds a stage, or several, and a step runs its micro-batches through them by a schedule. What was
sent is not held. `lowtide.limit_memory` takes ``Pipeline(...).schedule``: one plan for all of the rank's
micro-batches in flight (appendix C).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage

from lowtide.errors import BudgetError
from lowtide.parallel.errors import ParallelError
from lowtide.parallel.gradients import note_added
from lowtide.parallel.groups import TensorGroup, tensor_group
from lowtide.parallel.pipelining import most_in_flight, stage_of


@dataclass(frozen=True)
class ScheduleKind:
    """A schedule of micro-batches.

    Attributes:
        make: PyTorch's class.
        stages: per rank.
        sends_end: by when it has waited for a send, see `lowtide.parallel.pipelining.MemoryStage`.
        v_shaped: the second half of the stages runs backwards through the ranks, so that the first rank holds
            the last stage.
    """

    make: Any
    stages: int
    sends_end: Literal["next", "backward", "gradient"]
    v_shaped: bool = False


SCHEDULES = {
    "1f1b": ScheduleKind(pipelining.Schedule1F1B, 1, "next"),
    "gpipe": ScheduleKind(pipelining.ScheduleGPipe, 1, "backward"),
    "interleaved": ScheduleKind(pipelining.ScheduleInterleaved1F1B, 2, "gradient"),
    "zero-bubble": ScheduleKind(pipelining.ScheduleInterleavedZeroBubble, 2, "gradient"),
    "zbv": ScheduleKind(pipelining.ScheduleZBVZeroBubble, 2, "gradient", v_shaped=True),
}


def stages_of(rank: int, ranks: int, kind: ScheduleKind) -> list[int]:
    """Which stages a rank holds.

    >>> stages_of(0, 2, SCHEDULES["interleaved"]), stages_of(0, 2, SCHEDULES["zbv"])
    ([0, 2], [0, 3])
    """
    if kind.v_shaped:
        return [rank, 2 * ranks - 1 - rank]
    return [rank + turn * ranks for turn in range(kind.stages)]


class Pipeline:
    """This rank's stages and the schedule that runs them.

    Args:
        modules: its stages, in the order of `stages_of`; each maps a tensor to a tensor, and the last one has
            ``loss(output, targets)``.
        schedule: one of `SCHEDULES`.
        micro_batches: in a step.
        example: a tensor on the meta device, of the shape that travels between stages.
        group: the ranks of the pipeline, as `lowtide.parallel.tensor_group` takes them.
        device: where it computes.

    Attributes:
        schedule: PyTorch's.
        refused: called with what `limit_memory` on the schedule refuses at the end of its first step, whose
            gradients are complete; raises it unless another function is put here.

    Raises:
        ParallelError: an unknown schedule, or too few micro-batches for it.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        schedule: str,
        micro_batches: int,
        example: Tensor,
        group: Any,
        device: torch.device | str = "cpu",
    ) -> None:
        self.kind = schedule_kind(schedule)
        self.group: TensorGroup = tensor_group(group, "pp")
        ranks = self.group.size
        if micro_batches < ranks * (2 if self.kind.v_shaped else 1) or (
            self.kind.stages > 1 and micro_batches % ranks
        ):
            raise ParallelError(
                f"{micro_batches} micro-batches do not fill the schedule {schedule!r} on {ranks} ranks: use "
                + (f"a multiple of {ranks}" if self.kind.stages > 1 else f"at least {ranks}")
                + (f", at least {2 * ranks}" if self.kind.v_shaped else "")
            )
        self.modules = list(modules)
        self.micro_batches = micro_batches
        self.device = torch.device(device)
        self.stages = stages_of(self.group.rank, ranks, self.kind)
        self.count = ranks * self.kind.stages
        stages = [
            self._stage(index, module, example)
            for index, module in zip(self.stages, self.modules, strict=True)
        ]
        last = next(
            (
                module
                for index, module in zip(self.stages, self.modules, strict=True)
                if index == self.count - 1
            ),
            None,
        )
        options: dict[str, Any] = {
            "n_microbatches": micro_batches,
            "scale_grads": False,
            "loss_fn": self._loss(last),
        }
        self.refused: Callable[[BudgetError], None] = _raise
        self.schedule = self.kind.make(stages if self.kind.stages > 1 else stages[0], **options)
        self.has_first, self.has_last = 0 in self.stages, last is not None

    @property
    def in_flight(self) -> int:
        """How many micro-batches this rank holds at once at most, each stage's counted."""
        return most_in_flight(self.schedule, self.group.rank, self.group.size, self.micro_batches)

    def _stage(self, index: int, module: nn.Module, example: Tensor) -> PipelineStage:
        tokens = torch.empty(example.shape[0], 1, dtype=torch.long, device="meta")
        leaves = example.detach()
        if index == self.count - 1 and hasattr(module, "vocabulary"):
            leaves = leaves.new_empty(*example.shape[:-1], module.vocabulary)  # type: ignore[call-overload]
        return stage_of(
            module,
            index,
            self.count,
            self.device,
            example_input=tokens if index == 0 else example.detach().requires_grad_(),
            example_output=leaves.requires_grad_(),
            group=self.group.process_group,
            sends_end=self.kind.sends_end,
        )

    def _loss(self, last: Any) -> Callable[[Tensor, Tensor], Tensor]:
        """A micro-batch's share of the mean loss; ranks without the last stage never call it."""
        return lambda output, targets: last.loss(output, targets) / self.micro_batches

    def step(self, tokens: Tensor, targets: Tensor) -> float:
        """Forward and backward of all micro-batches, which lie one behind the other in ``tokens``
        (micro-batches x batch, sequence).

        Returns:
            The mean loss on the rank of the last stage, 0 on the others. Gradients are those of the mean
            loss.
        """
        losses: list[Tensor] = []
        arguments = (tokens,) if self.has_first else ()
        more: dict[str, Any] = {"target": targets, "losses": losses} if self.has_last else {}
        try:
            self.schedule.step(*arguments, return_outputs=False, **more)
        except BudgetError as error:
            self.refused(error)
        note_added(parameter for module in self.modules for parameter in module.parameters())
        return float(sum(loss.item() for loss in losses))

    @torch.no_grad()
    def evaluate(self, tokens: Tensor, targets: Tensor, example: Tensor) -> float:
        """The mean loss of one batch without training, on the rank of the last stage; 0 on the others."""
        x = tokens
        result = 0.0
        for index in range(self.count):
            owner = self._owner(index)
            if owner == self.group.rank:
                module = self.modules[self.stages.index(index)]
                if index and self._owner(index - 1) != owner:
                    x = torch.empty(example.shape, dtype=example.dtype, device=self.device)
                    dist.recv(
                        x, self.group.global_rank(self._owner(index - 1)), group=self.group.process_group
                    )
                x = module(x)
                if index == self.count - 1:
                    result = float(module.loss(x, targets).item())  # type: ignore[operator]
                elif self._owner(index + 1) != owner:
                    dist.send(
                        x, self.group.global_rank(self._owner(index + 1)), group=self.group.process_group
                    )
        return result

    def _owner(self, stage: int) -> int:
        ranks = self.group.size
        return 2 * ranks - 1 - stage if self.kind.v_shaped and stage >= ranks else stage % ranks


def _raise(error: BudgetError) -> None:
    raise error


def schedule_kind(name: str) -> ScheduleKind:
    """The schedule of that name.

    Raises:
        ParallelError: there is none.
    """
    if name not in SCHEDULES:
        raise ParallelError(f"schedule={name!r}: choose {', '.join(SCHEDULES)}")
    return SCHEDULES[name]
