"""Shards: each rank of a group keeps its part of a value that all of them hold, and the parts are gathered ahead of need (ZeRO-R's P_a)."""

from __future__ import annotations

import torch
import torch.distributed as dist

from lowtide.errors import PlanError


class Replicas:
    """A process group over which some values are replicated.

    Args:
        group: the process group.

    Attributes:
        gathers, gathered_bytes: what was gathered so far.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        self.gathers = 0
        self.gathered_bytes = 0

    def part_elements(self, elements: int) -> int:
        """Elements of each part; the last part is padded, by less than one element a rank."""
        return -(-elements // self.size)

    def cut(self, flat: torch.Tensor) -> torch.Tensor:
        """This rank's part of a flat tensor, a tensor of its own: the caller's is left as it is."""
        each = self.part_elements(flat.numel())
        mine = flat[self.rank * each : (self.rank + 1) * each]
        if mine.numel() == each:
            return mine.clone()
        part = flat.new_zeros(each)
        part[: mine.numel()] = mine
        return part

    def gather(self, part: torch.Tensor, out: torch.Tensor) -> dist.Work | None:
        """Start putting the parts together in ``out``, flat bytes for all of them; returns what to wait for.

        The parts arrive where the value is needed, so that no buffer grows with it.
        """
        work = dist.all_gather_into_tensor(out, part.view(torch.uint8), group=self.group, async_op=True)
        self.gathers += 1
        self.gathered_bytes += out.numel()
        return work

    def check(self, digest: tuple[int, int], what: str) -> None:
        """Every rank holds the same bytes.

        Raises:
            PlanError: they differ.
        """
        device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend(self.group) == "nccl" else torch.device("cpu")
        mine = torch.tensor([*digest], dtype=torch.int64, device=device)
        everyone = mine.new_empty(2 * self.size)
        dist.all_gather_into_tensor(everyone, mine, group=self.group)
        if not bool((everyone.view(self.size, 2) == mine).all()):
            raise PlanError(
                f"{what} differs between the ranks of its group, so it cannot be kept in parts: it is already sharded (along the sequence, "
                "for one, where sequence parallelism leaves 1/n of it on each rank) or belongs to another batch. Leave it out of values=, or give "
                "the group over which it is replicated"
            )
