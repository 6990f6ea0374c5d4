"""The stores that one model's plans use: opened when a plan first asks, closed together.

And shards (ZeRO-R's P_a): each rank of a group keeps its part of a value that all of them hold, and the parts
are gathered ahead of need.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from lowtide import accelerator
from lowtide.errors import PlanError, expect
from lowtide.extensions.moves.store.codec import Codec, codec_named
from lowtide.extensions.moves.store.disk import Disk
from lowtide.extensions.moves.store.host import Host
from lowtide.extensions.moves.store.slab import Slab
from lowtide.extensions.moves.store.tier import StoreError, Tier

_OPEN: dict[str, Callable[[str, torch.device], Tier]] = {
    "host": lambda path, device: Host(device),
    "disk": lambda path, device: Disk(path or None, device),
}
"""How the tiers are opened that plans name (`lowtide.Offload`)."""


def with_index(device: torch.device) -> torch.device:
    """The device with its index: the current one's where it has none, so that a plan's ``cuda`` and a
    tensor's ``cuda:0`` are one device.

    >>> with_index(torch.device("cpu")), with_index(torch.device("cuda:1"))
    (device(type='cpu'), device(type='cuda', index=1))
    """
    if device.type == "cpu" or device.index is not None:
        return device
    return torch.device(device.type, torch.accelerator.current_device_index())


class Stores:
    """Tiers, codecs and groups by the names that plans use.

    Args:
        groups: name -> group over which values are replicated, for `Shard`: a process group, or what else
            `lowtide.parallel.tensor_group` takes.
        codecs: codecs of your own.

    Attributes:
        groups: name -> process group.
        codecs: as given.
        prepared: the plan for which tiers and slab are laid out, and the device.
        slab: the slab into which values return; ``None`` if each value has memory of its own.
        unplaced: how many values (and encoded forms) returned into memory of their own, although the plan has
            a place for them.
        tiers: the open tiers.
        host_bytes: the most that the host tier may take; ``None`` for no limit.

    Example:
        >>> with Stores() as stores:
        ...     stores.tier("host", "", torch.device("cpu")).name
        'host'
    """

    def __init__(self, *, groups: Mapping[str, Any] | None = None, codecs: Sequence[Codec] = ()) -> None:
        if groups is not None and not isinstance(groups, Mapping):
            raise PlanError(
                f"groups={groups!r} is not a mapping: give the process groups by the names that plans use, "
                f"groups={{'model': group}}"
            )
        listed = isinstance(codecs, Sequence) and all(isinstance(codec, Codec) for codec in codecs)
        expect(listed, "Stores(codecs=)", codecs, "a list of codecs of your own; lowtide's need none")
        self.groups = {name: _process_group(group) for name, group in (groups or {}).items()}
        self._replicas: dict[str, Replicas] = {}
        self.codecs = tuple(codecs)
        self._used: dict[str, Codec] = {}
        self.tiers: dict[tuple[str, str, str], Tier] = {}
        self.prepared: tuple[object, torch.device] | None = None
        self.slab: Slab | None = None
        self.unplaced = 0
        self.host_bytes: int | None = None

    def reserve(self, bytes_: int, device: torch.device) -> None:
        """Have a slab of exactly so many bytes for values that come back. Kinds of steps that take turns each
        count their own in their peak: the slab is as large as the one that runs."""
        if bytes_ != (self.slab.memory.numel() if self.slab is not None else 0) or (
            self.slab is not None and self.slab.memory.device != with_index(device)
        ):
            self.slab = None  # before the next one is made
            self.slab = Slab(device, bytes_) if bytes_ else None

    def destination(self, device: torch.device, at: int, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Flat bytes of these sizes for what comes back: at their place in the slab if that is free, else of
        their own.
        """
        found = self.slab.take(at, sizes) if self.slab is not None and at >= 0 else None
        if found is None:
            self.unplaced += 1
            found = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
        return found

    def fresh(self) -> Stores:
        """New stores with the same groups and codecs, and no tier open."""
        found = Stores(groups=self.groups, codecs=self.codecs)
        found.host_bytes = self.host_bytes
        return found

    def tier(self, name: str, path: str, device: torch.device) -> Tier:
        """The tier of that name: one for a device (`with_index`).

        Raises:
            PlanError: it cannot be opened.
        """
        device = with_index(device)
        key = (name, os.path.abspath(path) if path else "", str(device))
        if key not in self.tiers:
            self.tiers[key] = _OPEN[name](path, device)
        if name == "host":
            self.tiers[key].most_bytes = self.host_bytes
        return self.tiers[key]

    def codec(self, name: str) -> Codec:
        """The codec of that name, always the same one: its random numbers go on from value to value and from
        step to step.
        """
        if name not in self._used:
            self._used[name] = codec_named(name, self.codecs)
        return self._used[name]

    def group(self, name: str, size: int) -> Replicas:
        """The replicas of that name.

        Raises:
            PlanError: none was given, or one of another size.
        """
        if name not in self.groups:
            raise PlanError(
                f"the plan shards over a group {name!r} that was not given: pass "
                f"stores=lowtide.Stores(groups={{{name!r}: group}})"
            )
        if name not in self._replicas:
            self._replicas[name] = Replicas(self.groups[name])
        found = self._replicas[name]
        if found.size != size:
            raise PlanError(
                f"the plan shards over {size} ranks of {name!r}, the group has {found.size}: make the plan "
                "again"
            )
        return found

    def close(self) -> None:
        """Give everything back. A tier in which something is stored lasts until that is gone: steps that are
        under way finish.
        """
        self.tiers.clear()
        self.prepared = self.slab = None

    def __enter__(self) -> Stores:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _process_group(group: Any) -> dist.ProcessGroup:
    """The process group of what names one."""
    if isinstance(group, dist.ProcessGroup):
        return group
    from lowtide.parallel.groups import process_group

    return process_group(group)


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
        """Check that every rank of the group holds the same bytes.

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
                f"{what} differs between the ranks of its group, so it cannot be sharded over them: it "
                "is sharded already (by sequence parallelism, for example), or the ranks have "
                "different batches. Leave it out of values=, or give the group over which it is "
                "replicated"
            )


class Gather:
    """A gather under way. It holds this rank's part, which it reads."""

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
