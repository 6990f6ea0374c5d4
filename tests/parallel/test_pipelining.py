"""What `lowtide.parallel.pipelining` leans on within PyTorch, each by name, so that a release that moves one
fails here and says which.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import on_each_backend, on_ranks
from torch import nn
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage

from lowtide.parallel.pipeline import SCHEDULES
from lowtide.parallel.pipelining import FREES_BY_ITSELF, USED

pytestmark = on_each_backend


def parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


def stage() -> list[str]:
    """The attributes that a stage does not have, and what is odd about what it receives into."""
    example = torch.empty(2, 3, device="meta").requires_grad_()
    built = PipelineStage(
        nn.Linear(3, 3),
        dist.get_rank(),
        2,
        torch.get_default_device(),
        input_args=example,
        output_args=example,
    )
    missing = [name for name in USED if not hasattr(built, name)]
    schedule = pipelining.Schedule1F1B(
        built, 2, loss_fn=lambda output, target: (output - target).sum(), scale_grads=False
    )
    x = torch.ones(4, 3)
    schedule.step(
        *((x,) if dist.get_rank() == 0 else ()),
        **({"target": x} if dist.get_rank() else {}),
        return_outputs=False,
    )
    infos = [*built.args_recv_info[0], *built.grad_recv_info.get(0, ())]
    received = [info for info in infos if not getattr(info, "is_root_arg", False) and hasattr(info, "buffer")]
    if (
        len(received) != 1
        or not isinstance(received[0].buffer, torch.Tensor)
        or tuple(received[0].buffer.shape) != (2, 3)
    ):
        missing.append("_RecvInfo.buffer is the tensor received into")
    return missing


@pytest.mark.skipif(FREES_BY_ITSELF, reason="PyTorch's own stage is used from 2.15 on")
def test_a_stage_has_what_is_used() -> None:
    assert on_ranks(2, stage) == [[], []]


def test_methods_take_what_they_are_given() -> None:
    assert parameters(PipelineStage.forward_one_chunk)[:2] == ["self", "fwd_chunk_id"]
    assert parameters(PipelineStage.backward_one_chunk) == [
        "self",
        "bwd_chunk_id",
        "loss",
        "full_backward",
        "last_backward",
    ]
    assert parameters(PipelineStage.backward_weight_one_chunk)[:2] == ["self", "bwd_chunk_id"]
    for name in ("get_fwd_recv_ops", "get_fwd_send_ops"):
        assert parameters(getattr(PipelineStage, name)) == ["self", "fwd_chunk_id"]
    assert parameters(PipelineStage.get_bwd_recv_ops) == ["self", "bwd_chunk_id"]


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_take_what_they_are_given(name: str) -> None:
    taken = parameters(SCHEDULES[name].make.__init__)
    assert {"n_microbatches", "loss_fn", "scale_grads"} <= set(taken)
    assert "return_outputs" in parameters(SCHEDULES[name].make.step)


def test_actions_of_a_schedule_say_what_they_are() -> None:
    from torch.distributed.pipelining.schedules import _Action, _ComputationType

    names = {kind.name for kind in _ComputationType}
    assert {"FORWARD", "FULL_BACKWARD", "BACKWARD_WEIGHT", "BACKWARD_INPUT"} <= names
    assert {"computation_type", "sub_actions"} <= set(_Action._fields)


def test_data_of_an_output_can_be_let_go() -> None:
    """Shape and history stay, the bytes go, and backward does not mind."""
    x = torch.ones(4, 3, requires_grad=True)
    y = x * 2
    y.data = torch.empty(1).expand(4, 3)
    assert y.untyped_storage().nbytes() == 4
    y.backward(torch.ones(4, 3))
    assert x.grad is not None and torch.equal(x.grad, torch.full((4, 3), 2.0))
