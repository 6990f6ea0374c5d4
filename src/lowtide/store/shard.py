"""Shards: each rank of a group keeps its part of a value that all of them hold, and the parts are gathered
ahead of need (ZeRO-R's P_a).
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from lowtide import accelerator
from lowtide.errors import PlanError
from lowtide.store.tier import StoreError


class Replicas:
    """A process group over which some values are replicated.

    Args:
        group: the process group.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)

    def cut(self, flat: torch.Tensor) -> torch.Tensor:
        """This rank's part of a flat tensor, a tensor of its own: the caller's is left as it is. The last
        part is padded, by less than one element a rank.
        """
        each = -(-flat.numel() // self.size)
        mine = flat[self.rank * each : (self.rank + 1) * each]
        if mine.numel() == each:
            return mine.clone()
        part = flat.new_zeros(each)
        part[: mine.numel()] = mine
        return part

    def gather(self, part: torch.Tensor, out: torch.Tensor) -> Gather:
        """Start putting the parts together in ``out``, flat bytes for all of them; returns what to wait for.

        The parts arrive where the value is needed, so that no buffer grows with it. The backend holds ``out``
        and its place in a slab until nothing is written there, even where no caller waits.

        Raises:
            StoreError: another rank is gone.
        """
        try:
            work = dist.all_gather_into_tensor(out, part.view(torch.uint8), group=self.group, async_op=True)
        except RuntimeError as error:
            raise self.explain(error) from error
        return Gather(self, work, part)

    def explain(self, error: BaseException) -> StoreError:
        """The error to raise for a gather that failed with ``error``: it says what to do."""
        ranks = ", ".join(str(dist.get_global_rank(self.group, number)) for number in range(self.size))
        return StoreError(
            f"the parts of a saved value could not be gathered over the ranks {ranks}: one of them has ended "
            f"({error}). This step's gradients are not complete: start the ranks again, from the last "
            "checkpoint"
        )

    def check(self, digest: int, what: str) -> None:
        """Every rank holds the same bytes.

        Raises:
            PlanError: they differ.
        """
        device = (
            accelerator.current_device() if dist.get_backend(self.group) == "nccl" else torch.device("cpu")
        )
        own = torch.tensor([digest], dtype=torch.int64, device=device)
        found = own.new_empty(self.size)
        dist.all_gather_into_tensor(found, own, group=self.group)
        if bool((found != digest).any()):
            raise PlanError(
                f"{what} differs between the ranks of its group, so it cannot be kept in parts: it is "
                "already sharded (along the sequence, for one, where sequence parallelism leaves 1/n of it "
                "on each rank) or belongs to another batch. Leave it out of values=, or give the group over "
                "which it is replicated"
            )


class Gather:
    """A gather under way, which holds what it reads."""

    def __init__(self, replicas: Replicas, work: dist.Work | None, part: torch.Tensor) -> None:
        self._replicas, self._work, self._part = replicas, work, part

    def join(self) -> None:
        """Order the device's work behind it; on a CPU, return when the parts are there.

        Raises:
            StoreError: another rank is gone.
        """
        try:
            if self._work is not None:
                self._work.wait()
        except RuntimeError as error:
            raise self._replicas.explain(error) from error
