"""A model whose parameters, gradients and optimizer state the data-parallel processes share (FSDP2), outside
the tensor-parallel group.

Every block is a unit of its own: its weights are gathered in front of it and let go behind it, and its
gradients are averaged into this process's share as backward goes. One limit on the whole holds the budget.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from lowtide.models import ModelSpec
from lowtide.parallel.gradients import (
    allreduce_sequence_parallel_gradients,
    mark_partial_gradients,
    partial_gradients,
    reduced_bytes,
)
from lowtide.train.errors import require
from lowtide.train.options import TrainOptions
from lowtide.train.part import Batch, WholeModel
from lowtide.train.ranks import Ranks


class ShardedModel(WholeModel):
    """Every layer, or this process's share of every layer, of which it holds some rows only."""

    def __init__(self, spec: ModelSpec, options: TrainOptions, ranks: Ranks) -> None:
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import fully_shard

        super().__init__(spec, options, ranks)
        mesh = DeviceMesh.from_group(ranks.data.process_group, ranks.device.type)
        blocks = _blocks_of(self.model)
        require(
            bool(blocks),
            "model",
            options.model,
            "--shard-parameters shards it block by block, and it has no list of blocks",
        )
        for block in blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        mark_partial_gradients(self.model)

    @property
    def reduced_bytes(self) -> int:
        """As the base's; FSDP averages within backward."""
        return reduced_bytes(partial_gradients(self.model.parameters()))

    def reduce(self, optimizer: torch.optim.Optimizer) -> None:
        allreduce_sequence_parallel_gradients(optimizer)

    def evaluate(self, batches: Sequence[Batch]) -> float:
        loss = super().evaluate(batches)
        self.model.reshard()  # type: ignore[operator]  # no backward follows that would let go of the weights
        return loss


def _blocks_of(model: nn.Module) -> list[nn.Module]:
    """The members of the model's outermost lists of modules."""
    found: list[nn.Module] = []
    for child in model.children():
        found += list(child) if isinstance(child, nn.ModuleList) else _blocks_of(child)
    return found
