"""The processes of a training run: how many share a layer, a sequence and the batch, how many stages there
are, and who this one is.

One process is a run of one rank: the same trainer, and nothing here travels. With several, `torchrun` starts
them and names them in the environment. Ranks that share layers are neighbours (tensor parallel varies
fastest, pipeline stages slowest), since they talk most.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lowtide.parallel.groups import ALONE, TensorGroup, tensor_group
from lowtide.train.options import OptionError, TrainOptions

TIMEOUT = timedelta(minutes=10)
"""How long a collective waits for a rank that lives. One that died is noticed within seconds by
`lowtide.train.alive`.
"""


@dataclass(frozen=True)
class Ranks:
    """This process's place in a run.

    Attributes:
        rank, size: among all processes.
        tensor, context, data, pipeline: the ranks that share its layers, its sequences, the batch, and the
            stages of its copy of the model.
        shards: those of ``data`` and ``context``, which may share parameters.
        device: where it computes.
        store: what `lowtide.train.alive` writes to; ``None`` for a process alone or a group that somebody
            else set up.
    """

    rank: int = 0
    size: int = 1
    tensor: TensorGroup = ALONE
    context: TensorGroup = ALONE
    data: TensorGroup = ALONE
    pipeline: TensorGroup = ALONE
    shards: TensorGroup = ALONE
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    store: Any = None

    @property
    def alone(self) -> bool:
        """Whether this is the only process."""
        return self.size == 1

    @property
    def name(self) -> str:
        """This rank in words."""
        parts = [
            ("data", self.data), ("stage", self.pipeline), ("context", self.context), ("tensor", self.tensor),
        ]  # fmt: skip
        places = ", ".join(f"{word} {group.rank}" for word, group in parts if group.size > 1)
        return f"rank {self.rank}" + (f" ({places})" if places else "")

    def share_of(self, batch: int) -> slice:
        """Which sequences of a micro-batch are this rank's."""
        each = batch // self.data.size
        return slice(self.data.rank * each, (self.data.rank + 1) * each)

    def sum(self, *numbers: float) -> list[float]:
        """Sums over all ranks."""
        if self.alone:
            return list(numbers)
        total = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return total.tolist()

    def any(self, flag: bool, group: TensorGroup | None = None) -> bool:
        """Whether ``flag`` holds on any rank, of all or of a group."""
        if self.alone or (group is not None and group.size == 1):
            return flag
        found = torch.tensor(float(flag), device=self.device)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=None if group is None else group.process_group)
        return bool(found.item())

    def gather(self, item: Any) -> list[Any]:
        """What every rank gives, by rank."""
        if self.alone:
            return [item]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, item)
        return found

    def seed(self, seed: int, step: int) -> None:
        """Seed this step's random numbers, which depend on the seed, the step and the place in batch and
        pipeline.

        Nothing needs to be saved for a resumed run, and ranks that share layers have the same ones. A process
        alone goes on with its generator instead.
        """
        if not self.alone:
            torch.manual_seed(
                ((seed * 1_000_003 + step) * 4_099 + self.data.rank) * 4_099 + self.pipeline.rank
            )


@contextmanager
def ranks_for(options: TrainOptions) -> Iterator[Ranks]:
    """The processes that the options ask for, connected for the length of the block.

    Raises:
        OptionError: there are not as many as the options need, with the command that starts them.
    """
    wanted = options.ranks
    launched = _launched_as()
    if launched is None and not dist.is_initialized():
        if wanted > 1:
            raise OptionError(
                f"{options.layout} needs {wanted} processes, and this is one: start them with\n"
                f"  torchrun --nproc-per-node {wanted} -m lowtide train {options.layout} ..."
            )
        yield Ranks(device=torch.device(options.device))
        return
    started = dist.get_world_size() if dist.is_initialized() else launched[1] if launched else 1
    if started != wanted:
        raise OptionError(
            f"{options.layout} is a layout of {wanted} processes, and {started} were started: pass --dp "
            f"{max(1, started // max(1, wanted // options.dp))} or start {wanted} (torchrun --nproc-per-node "
            f"{wanted})"
        )
    device = _device(options)
    if wanted == 1:
        yield Ranks(device=device)
        return
    if dist.is_initialized():  # somebody else's
        yield _layout(options, device, None)
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store = _store(started)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    prefixed = dist.PrefixStore(f"group/{restarts}", store)  # pyright: ignore
    dist.init_process_group(
        backend, store=prefixed, rank=launched[0] if launched else 0, world_size=started, timeout=TIMEOUT
    )
    yield _layout(options, device, store)
    dist.destroy_process_group()  # not after an error, when it would wait for the others


def _launched_as() -> tuple[int, int] | None:
    """Rank and number of processes that `torchrun` put into the environment."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def _device(options: TrainOptions) -> torch.device:
    device = torch.device(options.device)
    if device.type != "cuda" or options.ranks == 1:
        return device
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if device.index is not None:
        raise OptionError(
            f"--device {options.device}: {options.ranks} processes need a device each: pass --device cuda"
        )
    if local >= torch.cuda.device_count():
        raise OptionError(
            f"--device cuda: process {local} of this machine has no device of its own, there are "
            f"{torch.cuda.device_count()}"
        )
    return torch.device("cuda", local)


def _store(size: int) -> Any:
    """The store under which the processes meet: that of `torchrun`, which outlives them all, or the first
    rank's.
    """
    host, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("MASTER_PORT", "29500"))
    hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    first = int(os.environ["RANK"]) == 0
    two_minutes = timedelta(minutes=2)
    hosts = first and not hosted
    return dist.TCPStore(host, port, size, hosts, two_minutes, wait_for_workers=False)  # pyright: ignore


def _layout(options: TrainOptions, device: torch.device, store: Any) -> Ranks:
    """Make the groups; every process makes all of them in the same order."""
    rank, size = dist.get_rank(), dist.get_world_size()
    grid = torch.arange(size).view(options.pp, options.dp, options.cp, options.tp)

    def own(rows: torch.Tensor) -> TensorGroup:
        found = ALONE
        for row in rows.tolist():
            group = dist.new_group(row, timeout=TIMEOUT)
            if rank in row and len(row) > 1:
                found = tensor_group(group)
        return found

    return Ranks(
        rank=rank,
        size=size,
        tensor=own(grid.reshape(-1, options.tp)),
        context=own(grid.transpose(2, 3).reshape(-1, options.cp)),
        data=own(grid.movedim(1, 3).reshape(-1, options.dp)),
        pipeline=own(grid.movedim(0, 3).reshape(-1, options.pp)),
        shards=own(grid.movedim(3, 1).reshape(-1, options.dp * options.cp)),
        device=device,
        store=store,
    )
