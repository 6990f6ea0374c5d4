"""A model whose parameters, gradients and optimizer state the data-parallel processes share (FSDP2), outside
the tensor-parallel group.

Every block is a unit of its own: its weights are gathered in front of it and let go behind it, and its
gradients are averaged into this process's share as backward goes. A budget chooses how many blocks are
recomputed: a replay happens within the block's own backward, while its weights are there. What that takes is
measured rather than predicted, since FSDP decides when it gathers.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

import lowtide
from lowtide import budget as budgets
from lowtide import meter
from lowtide.errors import BudgetError
from lowtide.meter.cuda import resident_workspace_bytes
from lowtide.models import ModelSpec
from lowtide.parallel.gradients import (
    allreduce_sequence_parallel_gradients,
    mark_partial_gradients,
    partial_gradients,
    reduced_bytes,
)
from lowtide.run.limit.need import missing_gradient_bytes, optimizer_need
from lowtide.train.errors import require
from lowtide.train.options import TrainOptions
from lowtide.train.part import Batch, WholeModel, raised
from lowtide.train.ranks import Ranks
from lowtide.words import count_text

_READINGS = 2
"""Steps that are measured for one way of running: what a collective moves through goes when the other
processes let it.
"""

_OVERLAP = 1.03
"""A step may take so many times what a measured one took: gathers and scatters overlap otherwise each time
(2.7 % more was seen).
"""


class _Block:
    """Stands in for a block's ``forward``: recomputes it where it is told to.

    Attributes:
        recomputed: whether backward keeps what enters the block only.
    """

    def __init__(self, block: nn.Module) -> None:
        self.forward = block.forward
        self.recomputed = False
        block.forward = self  # type: ignore[method-assign]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.recomputed:
            return self.forward(*args, **kwargs)
        with lowtide.checkpointing():
            return self.forward(*args, **kwargs)


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
        self._blocks = [_Block(block) for block in blocks]
        for block in blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        mark_partial_gradients(self.model)
        self._limit_bytes: int | None = None
        self._measured_bytes: int | None = None

    # ---- the budget ------------------------------------------------------------------------------

    def limit(self, optimizer: torch.optim.Optimizer) -> None:
        """Choose how many blocks are recomputed: the fewest with which the fullest process fits.

        Raises:
            BudgetError: not even recomputing all of them fits; on every process.
        """
        count, policy, budget = len(self._blocks), self.options.policy, self.options.budget
        if budget is None:
            self._recompute(0 if policy == "keep_all" else count)
            return
        if self.ranks.any(self.ranks.device.type != "cuda" and not meter.available()):
            raise BudgetError(
                "a --budget with --shard-parameters needs the counting allocator, and this machine has no "
                "C++ compiler: pass --policy full or keep_all"
            )
        standing, step_bytes = self._standing(optimizer)
        peaks: dict[int, int] = {}

        def peak(recomputed: int) -> int:
            if recomputed not in peaks:
                taken = max(
                    self.ranks.gather(standing + max(self._measure(recomputed, optimizer), step_bytes))
                )
                peaks[recomputed] = math.ceil(_OVERLAP * taken)
            return peaks[recomputed]

        relative = isinstance(budget, str) and budget.strip().endswith("%")
        fixed = {"keep_all": 0, "full": count}.get(policy or "")
        if budgets.asks_for(budget) == "auto":
            limit = min(
                self.ranks.gather(
                    self.auto_budget(meter.resident_bytes(self.modules[0], device=self.ranks.device))
                )
            )
        else:  # devices are alike: a percentage is of the fullest one's plain step
            limit = budgets.resolve(
                budget, peak(0) if relative else 0, lambda: peak(count if fixed is None else fixed)
            )
        choice = (
            bisect_left(range(count), True, key=lambda recomputed: peak(recomputed) <= limit)
            if fixed is None
            else fixed
        )
        if peak(choice) > limit:
            least = min(peaks.values()) if fixed is None else peak(fixed)
            parts = {budgets.PARAMETERS: standing, budgets.ACTIVATIONS: least - standing}
            detail = (
                f"Parameters are this process's share, with gradients and optimizer state; {choice} of "
                f"{count_text(count, 'block')} recomputed."
            )
            refusal = budgets.too_small(limit, least, parts, detail=detail)
            if not self.options.raises_budget:
                raise refusal
            limit, self.note = least, raised(budget, refusal)
        self._recompute(choice)
        self._limit_bytes, self._measured_bytes = limit, peak(choice)

    def _recompute(self, count: int) -> None:
        """The first ``count`` blocks are recomputed: backward needs them last, when the others have let go of
        what they kept.
        """
        for number, block in enumerate(self._blocks):
            block.recomputed = number < count

    def _standing(self, optimizer: torch.optim.Optimizer) -> tuple[int, int]:
        """Bytes of this process's share of parameters, gradients and optimizer state, and of what an update
        takes in passing.
        """
        optimizer.zero_grad(set_to_none=True)
        need = optimizer_need(optimizer)
        own = meter.resident_bytes(self.model, optimizer, self.ranks.device)
        own += resident_workspace_bytes(self.ranks.device)
        passing = max(need.step_bytes, reduced_bytes(partial_gradients(self.model.parameters())))
        return own + need.state_bytes + missing_gradient_bytes(optimizer), passing

    def _measure(self, recomputed: int, optimizer: torch.optim.Optimizer) -> int:
        """The most that a step's forward and backward take on top of what stands, gradients included in
        that.
        """
        options, device = self.options, self.ranks.device
        self._recompute(recomputed)
        rows = options.batch // options.dp
        most = 0
        for reading in range(1 + _READINGS):
            optimizer.zero_grad(set_to_none=True)
            tokens = torch.zeros(rows, options.seq, dtype=torch.long, device=device)
            if options.grad_accum > 1:
                self._loss(tokens, tokens).backward()  # the later micro-batches find gradients
            there = meter.resident_bytes(self.model, None, device)
            with meter.peak(device) as seen:
                self._loss(tokens, tokens).backward()
            added = meter.resident_bytes(self.model, None, device) - there
            if reading:  # the first sets FSDP up
                most = max(most, seen.peak_bytes - added + 2 * tokens.nbytes)
        optimizer.zero_grad(set_to_none=True)
        return most

    # ---- a step ----------------------------------------------------------------------------------

    def step(self, batches: Sequence[Batch], optimizer: torch.optim.Optimizer) -> float:
        loss = self._backward(batches)
        allreduce_sequence_parallel_gradients(optimizer)
        return loss

    def evaluate(self, batches: Sequence[Batch]) -> float:
        loss = super().evaluate(batches)
        self.model.reshard()  # type: ignore[operator]  # no backward follows that would let go of the weights
        return loss

    @property
    def plans(self) -> int:
        return 0

    def release(self) -> None:
        """Nothing: the blocks belong to this part alone."""

    def about(self) -> dict[str, Any]:
        return {
            "budget_bytes": self._limit_bytes,
            "predicted_peak_bytes": self._measured_bytes,
            "blocks": len(self._blocks),
            "blocks_recomputed": sum(block.recomputed for block in self._blocks),
        }


def _blocks_of(model: nn.Module) -> list[nn.Module]:
    """The members of the model's outermost lists of modules."""
    found: list[nn.Module] = []
    for child in model.children():
        found += list(child) if isinstance(child, nn.ModuleList) else _blocks_of(child)
    return found
