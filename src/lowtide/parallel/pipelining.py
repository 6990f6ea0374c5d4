"""What lowtide leans on within `torch.distributed.pipelining` beyond its documented interface, in one place.

`stage_of` makes a ``PipelineStage`` that holds memory only for micro-batches in flight: buffers for what is
received are made when it is awaited and dropped when backward has used it, and an output's bytes go with the
send (arXiv 2205.05198, appendix B). PyTorch's own does so from 2.15 on; before, it keeps a buffer for every
micro-batch of the step and each output until backward, and `MemoryStage` is used in its place.
`tests/parallel/test_pipelining.py` says by name which interface moved.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage

from lowtide.private import storage_use_count

SendsEnd = Literal["next", "backward", "gradient"]
FREES_BY_ITSELF = hasattr(PipelineStage, "release_fwd_send_outputs")
"""PyTorch's own stage holds memory only for micro-batches in flight."""
_SENT_ONLY = 2  # the tensor that was sent, and the Python object that looks at its storage
USED = (
    "args_recv_info",
    "grad_recv_info",
    "fwd_cache",
    "device",
    "has_backward",
    "is_last",
    "get_fwd_recv_ops",
    "get_bwd_recv_ops",
    "get_fwd_send_ops",
    "backward_one_chunk",
    "clear_runtime_states",
    "_prepare_forward_infra",
    "_prepare_backward_infra",
)
"""Attributes and methods of a stage that `MemoryStage` uses or overrides."""


def stage_of(
    module: nn.Module,
    index: int,
    count: int,
    device: torch.device,
    *,
    example_input: Tensor,
    example_output: Tensor,
    group: Any,
    sends_end: SendsEnd = "gradient",
) -> PipelineStage:
    """A stage whose memory is that of its micro-batches in flight.

    Args:
        module: the stage's module.
        index, count: which of how many stages.
        device: where it computes.
        example_input, example_output: tensors on the meta device, of the shapes that travel.
        group: the process group of the pipeline.
        sends_end: as of `MemoryStage`; PyTorch's own stage knows by itself when a send has ended.
    """
    more: dict[str, Any] = {"input_args": example_input, "output_args": example_output, "group": group}
    if FREES_BY_ITSELF:
        return PipelineStage(module, index, count, device, **more)
    return MemoryStage(module, index, count, device, sends_end=sends_end, **more)


class MemoryStage(PipelineStage):
    """A stage whose memory is that of its micro-batches in flight, with PyTorch before 2.15.

    Args:
        stage, more: what PyTorch's own takes.
        sends_end: by when the schedule has waited for a send, after which an output's bytes are dropped
            whoever still looks at them: the ``next`` send, any ``backward``, or (those that wait at the end
            of the step) when the ``gradient`` of that output has come back.
    """

    def __init__(self, *stage: Any, sends_end: SendsEnd, **more: Any) -> None:
        super().__init__(*stage, **more)
        self._sends_end = sends_end
        self._sent: dict[int, list[Tensor]] = {}
        self._shapes: dict[int, tuple[torch.Size, torch.dtype]] = {}

    # ---- buffers of what is received -------------------------------------------------------------

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        with _Device(self, "meta"):
            result = super()._prepare_forward_infra(*args, **kwargs)
        self._note_shapes(self.args_recv_info.values())
        return result

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        with _Device(self, "meta"):
            result = super()._prepare_backward_infra(*args, **kwargs)
        self._note_shapes(self.grad_recv_info.values())
        return result

    def _note_shapes(self, received: Any) -> None:
        """Remember what PyTorch's buffers, which were made without memory, look like."""
        for infos in received:
            for info in _from_other_stages(infos):
                self._shapes[id(info)] = (info.buffer.shape, info.buffer.dtype)
            _drop(infos)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> Any:
        """Make the buffers, then what PyTorch does."""
        self._make(self.args_recv_info[fwd_chunk_id])
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> Any:
        """Make the buffers, then what PyTorch does."""
        if self.has_backward and not self.is_last:
            self._make(self.grad_recv_info[bwd_chunk_id])
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def _make(self, infos: Any) -> None:
        for info in _from_other_stages(infos):
            shape, dtype = self._shapes[id(info)]
            info.buffer = torch.empty(shape, dtype=dtype, device=self.device)

    # ---- what was sent ---------------------------------------------------------------------------

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> Any:
        """As PyTorch's; the bytes then belong to the send, and the output keeps its shape and its history
        only.
        """
        if self._sends_end == "next":
            self._release(list(self._sent))
        operations = super().get_fwd_send_ops(fwd_chunk_id)
        outputs, _ = self.fwd_cache[fwd_chunk_id]
        for operation in operations:
            operation.tensor = operation.tensor.detach()
        self._sent[fwd_chunk_id] = [operation.tensor for operation in operations]
        if operations:
            for output in outputs:
                output.data = torch.empty(1, dtype=output.dtype, device=output.device).expand(output.shape)
        return operations

    def _release(self, chunks: list[int]) -> None:
        """Drop the bytes of outputs that have been sent; schedules and their work hold on to the tensors."""
        for chunk in chunks:
            for tensor in self._sent.pop(chunk, ()):
                storage = tensor.untyped_storage()
                # else backward needs the bytes: an operation saved what it gave
                if storage_use_count(storage) <= _SENT_ONLY:
                    storage.resize_(0)

    # ---- micro-batches ---------------------------------------------------------------------------

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        """Backward of one micro-batch, or the part of it that gives the input's gradient."""
        self._release([bwd_chunk_id] if self._sends_end == "gradient" else list(self._sent))
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        _drop(self.args_recv_info[bwd_chunk_id])
        _drop(self.grad_recv_info.get(bwd_chunk_id, ()))

    def clear_runtime_states(self) -> None:
        """Between steps, also after one that failed."""
        super().clear_runtime_states()
        self._sent.clear()
        for infos in (*self.args_recv_info.values(), *self.grad_recv_info.values()):
            _drop(infos)


class _Device:
    """The stage takes another device for its own in the block, so that buffers made there take no memory."""

    def __init__(self, stage: Any, device: str) -> None:
        self._stage, self._device = stage, torch.device(device)

    def __enter__(self) -> None:
        self._stage.device, self._device = self._device, self._stage.device

    def __exit__(self, *_: object) -> None:
        self._stage.device, self._device = self._device, self._stage.device


def _from_other_stages(infos: Any) -> list[Any]:
    """Of the inputs of a stage those that another stage sends."""
    return [
        info
        for info in infos
        if not getattr(info, "is_root_arg", False) and getattr(info, "buffer", None) is not None
    ]


def _drop(infos: Any) -> None:
    for info in _from_other_stages(infos):
        info.buffer = torch.empty(0)


def most_in_flight(schedule: Any, rank: int, ranks: int, micro_batches: int) -> int:
    """How many micro-batches a rank holds at once at most, each stage's counted."""
    if isinstance(schedule, pipelining.ScheduleGPipe):
        return micro_batches
    if isinstance(schedule, pipelining.Schedule1F1B):
        return min(micro_batches, ranks - rank)
    most = now = 0
    for action in schedule.pipeline_order[rank]:
        for part in () if action is None else (getattr(action, "sub_actions", None) or (action,)):
            kind = part.computation_type.name
            now += (kind == "FORWARD") - (kind in ("FULL_BACKWARD", "BACKWARD_WEIGHT"))
            most = max(most, now)
    return most
