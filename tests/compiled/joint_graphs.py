"""The joint graph of a model as Inductor has it, and what is predicted of its halves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lowtide.compiled.joint import Joint
from lowtide.compiled.lower import Generated
from lowtide.compiled.price import costs_of
from lowtide.private import inductor, partitioning

ROWS, WIDTH = 64, 48


class Seen(Exception):
    """Ends a compilation."""


class Look(inductor.CustomPartitionerFn):
    """Shows the plain halves to a test, with what is predicted of them."""

    def __call__(self, gm: Any, inputs: Any, *, num_fwd_outputs: int, **_: Any) -> Any:
        partitioning.clean_joint(gm)
        self.joint = joint = Joint(partitioning.twin(gm), num_fwd_outputs, (), partitioning.default_fusible())
        self.costs = costs_of(joint)
        self.halves = partitioning.min_cut(joint.module, num_fwd_outputs, ())
        self.memory = Generated(joint, {}, {}, self.halves)(joint.size)
        raise Seen

    def uuid(self) -> None:
        return None


def look_at(model: nn.Module, *args: torch.Tensor) -> Look:
    """The joint graph of a model as Inductor has it, and what is predicted of its plain halves."""
    found = Look()
    compiled = torch.compile(
        model,
        backend=lambda module, inputs: inductor.compile_with(
            module, inputs, {"custom_partitioner_fn": found}
        ),
    )
    with pytest.raises(inductor.BackendCompilerFailed) as failed:
        compiled(*args)
    assert isinstance(failed.value.inner_exception, Seen)
    return found
