"""Who adds up the gradients of the ranks that share a sequence.

Each rank has the gradients of its own tokens' loss. DDP or FSDP2 average them where the ranks over which they
do so include these: over a mesh of ``dp`` and ``cp`` flattened into one dimension. Else every parameter is
marked, as those of norms are under sequence parallelism: no optimizer steps before
`lowtide.parallel.allreduce_sequence_parallel_gradients` has summed the gradients.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from lowtide import private
from lowtide.parallel.context.context import Context
from lowtide.parallel.errors import ParallelError
from lowtide.parallel.gradients import (
    Marker,
    mark_partial_gradient,
    partial_gradients,
    unmark_partial_gradient,
)


class ContextMarker(Marker):
    """Finds out in each forward of a model who adds up the gradients, and marks the parameters accordingly.

    Args:
        model: whose parameters.
        context: the ranks.
    """

    def __init__(self, model: torch.nn.Module, context: Context) -> None:
        self._context = context
        super().__init__(model, (), context.group)

    def mark(self, module: torch.nn.Module, by_hand: bool = False) -> None:
        """Mark the parameters as they are now."""
        context = self._context
        context.averaged = any(map(self._covers, _averaging(module)))
        for parameter in module.parameters():
            if context.averaged:
                unmark_partial_gradient(parameter, context.group)
            elif parameter.requires_grad and parameter.is_leaf:
                mark_partial_gradient(parameter, context.group)

    def __call__(self, module: torch.nn.Module, args: Any) -> None:
        if not torch.is_grad_enabled():
            return
        if not private.units(module):
            self.mark(module)
            return
        # the root's weights are gathered here, and only the others are as FSDP holds them
        self._context.averaged = any(map(self._covers, _averaging(module)))
        held = [one for one in module.parameters() if private.is_distributed(one) and one.requires_grad]
        if not self._context.averaged and len(partial_gradients(held)) < len(held):
            raise ParallelError(
                "FSDP has replaced the parameters of a model whose ranks share its sequences, and averages "
                "no gradients over these ranks: call lowtide.parallel.mark_partial_gradients(model) after "
                "fully_shard, or shard over a mesh that has the context-parallel ranks in it, such as "
                "mesh['dp', 'cp']._flatten()"
            )

    def _covers(self, group: Any) -> bool:
        """Whether a process group has all ranks that share the sequences."""
        own = dist.get_process_group_ranks(self._context.group.process_group)
        return set(own) <= set(dist.get_process_group_ranks(group))


def _averaging(model: torch.nn.Module) -> list[Any]:
    """The process groups over which gradients are averaged."""
    replicas = private.averaged_now(model)
    return private.process_groups(model) + ([] if replicas is None else [replicas])
