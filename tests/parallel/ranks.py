"""Run a function on several real processes that share a group, and bring back what each returned.

Tests that are `on_each_backend` run over Gloo, and again over NCCL, where each rank has a card of its own:
what it makes without naming a device is there (`torch.get_default_device()`). Without cards the twin is
skipped.
"""

from __future__ import annotations

import gc
import os
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
import torch.multiprocessing as mp

import lowtide.limits
from lowtide.parallel import collectives
from lowtide.private import wait_for_collective
from lowtide.run.record.engine import engine

IMPORTED = torch._dynamo, lowtide.limits
"""Once, before processes are made."""

needs_gloo = pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="needs Gloo")
on_each_backend = pytest.mark.on_each_backend
"""For tests whose ranks are of `on_ranks`; `conftest.py` makes the two of each."""

BACKEND = "LOWTIDE_TEST_BACKEND"
"""Variable with the backend of the test that runs."""

_INITIALIZED = {"gloo": "gloo", "nccl": "cpu:gloo,cuda:nccl"}

TIDY_SECONDS = 0.001
"""How long Gloo's threads get to free what a collective moved through."""


def backends() -> list[Any]:
    """The parameters of a test that is `on_each_backend`."""
    cards = dist.is_available() and dist.is_nccl_available() and torch.cuda.device_count() > 0
    reason = "NCCL needs a card for each rank, and there is none"
    return [
        pytest.param("gloo", marks=needs_gloo),
        pytest.param("nccl", marks=pytest.mark.skipif(not cards, reason=reason)),
    ]


def start_method() -> str:
    """How ranks begin: a fork is ready at once, and autograd's threads for cards do not survive it."""
    return "spawn" if torch.cuda.device_count() else "fork"


def on_ranks(size: int, body: Callable[..., Any], *args: Any) -> list[Any]:
    """``body(*args)`` on ``size`` processes; what each returns, on the CPU. An error fails the test."""
    if os.environ.get(BACKEND) == "nccl" and (cards := torch.cuda.device_count()) < size:
        pytest.skip(f"NCCL needs a card for each of {size} ranks, and there are {cards}")
    engine()  # built once, here
    with TemporaryDirectory() as folder:
        try:
            mp.start_processes(_start, (size, body, args, folder), nprocs=size, start_method=start_method())
        except Exception as error:
            texts = [path.read_text() for path in sorted(Path(folder).glob("error*"))]
            pytest.fail("\n".join(texts) or str(error))
        places = [f"{folder}/result{rank}" for rank in range(size)]
        return [torch.load(place, "cpu", weights_only=False) for place in places]


def _start(rank: int, size: int, body: Callable[..., Any], args: tuple[Any, ...], folder: str) -> None:
    gc.freeze()  # the parent's objects: collecting them would copy the pages that the processes share
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    backend = os.environ.get(BACKEND, "gloo")
    if backend == "nccl":
        torch.cuda.set_device(rank)
        torch.set_default_device(torch.device("cuda", rank))
        os.environ["LOCAL_RANK"] = str(rank)  # as torchrun, for what chooses a card itself
    dist.init_process_group(
        _INITIALIZED[backend],
        init_method=f"file://{folder}/meet",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=60),
    )
    try:
        torch.save(body(*args), f"{folder}/result{rank}")
        dist.barrier()
    except BaseException:
        Path(folder, f"error{rank}").write_text(f"rank {rank} of {size}:\n{traceback.format_exc()}")
        os._exit(1)  # the others wait in a collective: let the launcher end them
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def seeded(seed: int) -> torch.Generator:
    """A generator where this process computes."""
    return torch.Generator(torch.get_default_device()).manual_seed(seed)


@contextmanager
def collectives_at_once() -> Iterator[None]:
    """Every collective ends, and Gloo's threads let go of its buffers, before the next operation starts.

    How long one takes that runs beside others, and when its thread tidies up, is up to the machine's load.
    """
    start = collectives.Pending.__init__

    def started(
        self: collectives.Pending, result: torch.Tensor, finish: Any = None, running: bool = True
    ) -> None:
        if running:
            wait_for_collective(result)
            time.sleep(TIDY_SECONDS)
        start(self, result, finish, running)

    with patch.object(collectives.Pending, "__init__", started):
        yield


def any_rank(flag: bool, group: Any) -> bool:
    """Whether it holds on any rank."""
    found = torch.tensor(int(flag))
    torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX, group)
    return bool(found)
