"""torch.distributed.pipelining: the stages of a schedule, and what its first step makes.

Seen in PyTorch 2.11 to 2.13. `lowtide.parallel.pipelining` has what lowtide's own stage overrides.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any


def is_schedule(item: Any) -> bool:
    """Whether this is a schedule of a pipeline."""
    module: Any = sys.modules.get("torch.distributed.pipelining.schedules")  # imported, if there is one
    return module is not None and isinstance(item, module._PipelineSchedule)


def stages_of(schedule: Any) -> list[Any]:
    """This rank's stages. Each runs the forward of a micro-batch in ``forward_one_chunk``, of its module
    ``submod``.
    """
    return list(schedule._stages) if hasattr(schedule, "_stages") else [schedule._stage]


def forget_last_step(stage: Any) -> None:
    """Let go of what a stage holds of the step before: the results and gradients of its micro-batches, as a
    schedule does when its next step begins, and what it was handed by a stage of the same rank, which the
    next step replaces one by one.
    """
    stage.clear_runtime_states()
    ranks, index = stage.stage_index_to_group_rank, stage.stage_index
    handed = ((index - 1, stage.args_recv_info), (index + 1, stage.grad_recv_info))
    for neighbour, received in handed:
        if ranks.get(neighbour) == stage.group_rank:
            for one in (one for of_batch in received.values() for one in of_batch):
                if getattr(one, "buffer", None) is not None:
                    one.buffer = None


def make_buffers(schedule: Any, step: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> None:
    """Make what the schedule makes at the beginning of its first step and holds from then on (it works out
    the shapes that travel, and makes buffers for them), and run nothing else. All ranks of the pipeline do so
    together.

    Args:
        schedule: the schedule.
        step: its own method ``step``.
        args, kwargs: of the step.
    """
    of_one = hasattr(schedule, "_initialize_stage")
    begin = schedule._initialize_stage if of_one else schedule._initialize_stages
    parameters = inspect.signature(begin).parameters

    def only_begin(
        args: Any = None, kwargs: Any = None, targets: Any = None, *_: Any, loss_kwargs: Any = None
    ) -> None:
        args, kwargs = schedule._check_inputs(args, kwargs, targets, None)
        more = {"target": targets[0] if targets else None, "loss_kwargs": loss_kwargs}
        begin(args[0], kwargs[0], **{name: given for name, given in more.items() if name in parameters})

    schedule._step_microbatches = only_begin
    try:
        step(*args, **{**kwargs, "return_outputs": False})
    finally:
        del schedule._step_microbatches
