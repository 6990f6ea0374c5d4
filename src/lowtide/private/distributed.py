"""torch.distributed: functional collectives and their groups, DTensors, DistributedDataParallel, pretended
ranks, and the stages and buffers of a pipeline's schedule.

Seen in PyTorch 2.11 to 2.13. `lowtide.parallel.pipelining` has what lowtide's own stage of a pipeline
overrides.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from lowtide.private.dispatch import schema_of
from lowtide.private.fake import is_fake


def collectives() -> Any:
    """The functional collectives: operations on tensors and the name of a group, waited for apart."""
    import torch.distributed._functional_collectives  # registers them

    return torch.ops._c10d_functional


def wait_for_collective(tensor: torch.Tensor) -> torch.Tensor:
    """The result of a functional collective, once it is there. On fake tensors nothing runs, and the fake
    wait would make a copy.
    """
    return tensor if is_fake(tensor) else torch.ops._c10d_functional.wait_tensor(tensor)


def wait_for_work(result: Any) -> Any:
    """What an operation of ``c10d`` returned, once it is done: tensors, and the work that is under way."""
    for item in result if isinstance(result, (tuple, list)) else (result,):
        if isinstance(item, torch.ScriptObject):
            item.wait()  # pyright: ignore
    return result


def process_group_of(collective: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The process group that a call of a functional collective runs over."""
    places = [argument.name for argument in schema_of(collective).arguments]
    place = places.index("group_name")
    group = args[place] if place < len(args) else kwargs["group_name"]
    return process_group_named(group) if isinstance(group, str) else group


def replicated_by(model: torch.nn.Module) -> Any:
    """The process group over which `DistributedDataParallel` averages all of a model's gradients: it is the
    model, or its forward runs the model now. ``None`` where there is none.
    """
    from torch.nn.parallel import DistributedDataParallel

    around: Any = model if isinstance(model, DistributedDataParallel) else None
    if around is None:
        active: Any = DistributedDataParallel._get_active_ddp_module()  # pyright: ignore
        around = active if active is not None and active.module is model else None
    return around.process_group if around is not None else None


def averaged_now(model: torch.nn.Module) -> Any:
    """The process group over which a `DistributedDataParallel` whose forward runs now averages the gradients
    of a model that it holds; ``None`` where none runs.
    """
    from torch.nn.parallel import DistributedDataParallel

    active: Any = DistributedDataParallel._get_active_ddp_module()  # pyright: ignore
    if active is None or all(module is not model for module in active.module.modules()):
        return None
    return active.process_group


def averages_gradients(model: torch.nn.Module) -> bool:
    """Whether a step that begins now ends with `DistributedDataParallel` averaging gradients over all ranks,
    each of which is in that step: not under ``no_sync()``, and not where ranks join that have no more inputs.
    """
    from torch.nn.parallel import DistributedDataParallel

    around: Any = model if isinstance(model, DistributedDataParallel) else None
    around = around or DistributedDataParallel._get_active_ddp_module()  # pyright: ignore
    return around is not None and around.require_backward_grad_sync and not around._join_config.enable


def has_new_buckets(model: torch.nn.Module) -> bool:
    """Whether `DistributedDataParallel` has put the gradients of ``model`` into new buckets, which it does
    once: where its second step begins, it frees those that it was made with.
    """
    return getattr(model, "_has_rebuilt_buckets", False)


def process_group_named(name: str) -> Any:
    """The process group of that name.

    Raises:
        RuntimeError, ValueError, LookupError: there is none in this process.
    """
    from torch.distributed.distributed_c10d import _resolve_process_group  # pyright: ignore

    return _resolve_process_group(name)  # pyright: ignore


def is_distributed(tensor: Any) -> bool:
    """Whether a tensor is a ``DTensor``, of which this process holds a part."""
    return hasattr(tensor, "_local_tensor")


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """What this process holds of a tensor, with its version counter: the tensor itself unless it is a
    ``DTensor``.
    """
    return getattr(tensor, "_local_tensor", tensor)


def own_part(tensor: Any) -> torch.Tensor:
    """What this process holds of a tensor, with its history: the tensor itself unless it is a ``DTensor``."""
    return tensor.to_local() if is_distributed(tensor) else tensor


def distributed_like(piece: torch.Tensor, like: Any) -> torch.Tensor:
    """``piece`` as this process's part of a ``DTensor`` that is laid out like ``like``.

    ``DTensor.from_local`` would move what lies on the host to the mesh's device.
    """
    from torch.distributed.tensor import DTensor

    make: Any = DTensor
    return make(piece, like._spec, requires_grad=False)


def store() -> Any:
    """Where the processes of this job met, and can leave words for one another; ``None`` without a process
    group, or with one of pretended ranks.
    """
    if not torch.distributed.is_initialized() or torch.distributed.get_backend() == "fake":
        return None
    from torch.distributed.distributed_c10d import _get_default_store  # pyright: ignore

    return _get_default_store()


def fake_store() -> Any:
    """A store for the ``fake`` backend, whose collectives move nothing: ranks that are not there."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


assert_on_device: Any = torch._assert_async  # pyright: ignore
"""Raise, with a message, where a tensor of one boolean is false: on a GPU without waiting for it, as a failed
device-side assertion.
"""


def stages_of(schedule: Any) -> list[Any]:
    """This rank's stages. Each runs the forward of a micro-batch in ``forward_one_chunk``, of its module
    ``submod``.
    """
    return list(schedule._stages) if hasattr(schedule, "_stages") else [schedule._stage]


INFERS = "_compute_outputs"
"""The method in which a stage runs its module to work out the shapes that travel (PyTorch 2.13 and later)."""


def trains(schedule: Any) -> bool:
    """Whether a step of the schedule, as it is called now, runs backwards: ``schedule.eval`` runs none."""
    return schedule._has_backward


def has_begun(schedule: Any) -> bool:
    """Whether the schedule has what its next step begins with (`make_buffers`). A step of training makes it
    anew after one of evaluation, and the other way round.
    """
    of_one, of_both = "_stage_forward_initialized", "_stages_forward_initialized"
    forward = of_one if hasattr(schedule, of_one) else of_both
    if not hasattr(schedule, forward):  # before PyTorch 2.13 it is made once
        return any(getattr(schedule, f"_{one}_initialized", False) for one in ("stage", "stages"))
    backward = getattr(schedule, forward.replace("forward", "backward"))
    return getattr(schedule, forward) and backward == schedule._has_backward


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


def buffer_bytes(schedule: Any) -> int:
    """What the buffers take into which this rank's stages receive."""
    received = [
        one
        for stage in stages_of(schedule)
        for infos in (stage.args_recv_info, stage.grad_recv_info)
        for of_batch in infos.values()
        for one in of_batch
    ]
    buffers = (
        None if getattr(one, "is_root_arg", False) else getattr(one, "buffer", None) for one in received
    )
    return sum(buffer.nbytes for buffer in buffers if buffer is not None)


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
