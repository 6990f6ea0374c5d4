"""A model whose parameters, gradients and optimizer state the data-parallel processes share (FSDP2), and
those that share a sequence, outside the tensor-parallel group.

Every block is a unit of its own: its weights are gathered in front of it and let go behind it, and its
gradients are averaged into this process's share as backward goes. One limit on the whole holds the budget.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from lowtide.parallel.gradients import mark_partial_gradients
from lowtide.train.errors import require
from lowtide.train.options import TrainOptions
from lowtide.train.ranks import Ranks


def shard(model: nn.Module, options: TrainOptions, ranks: Ranks) -> None:
    """Share the model's parameters among the data-parallel processes; with ``dp_replicate`` among so many
    groups of them, each of which holds all of the model (HSDP).

    Raises:
        OptionError: the model has no list of blocks.
    """
    from torch.distributed.fsdp import fully_shard

    mesh = _mesh(options, ranks)
    blocks = _blocks_of(model)
    why = "--shard-parameters shards it block by block, and it has no list of blocks"
    require(bool(blocks), "model", options.model, why)
    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    mark_partial_gradients(model)


def _mesh(options: TrainOptions, ranks: Ranks) -> Any:
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

    copies = options.dp_replicate
    if copies == 1:
        return DeviceMesh.from_group(ranks.shards.process_group, ranks.device.type)
    shards = options.dp // copies * options.cp
    sizes, names = (copies, shards, options.tp), ("replicate", "shard", "tp")
    return init_device_mesh(ranks.device.type, sizes, mesh_dim_names=names)["replicate", "shard"]


def _blocks_of(model: nn.Module) -> list[nn.Module]:
    """The members of the model's outermost lists of modules."""
    found: list[nn.Module] = []
    for child in model.children():
        found += list(child) if isinstance(child, nn.ModuleList) else _blocks_of(child)
    return found
