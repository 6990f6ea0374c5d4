"""Run a function on several real processes that share a Gloo group, and bring back what each returned."""

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
from lowtide.run.record.native import native_recorder

IMPORTED = torch._dynamo, lowtide.limits
"""Once, before processes are made."""

needs_gloo = pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="needs Gloo")

TIDY_SECONDS = 0.001
"""How long Gloo's threads get to free what a collective moved through."""


def on_ranks(size: int, body: Callable[..., Any], *args: Any) -> list[Any]:
    """``body(*args)`` on ``size`` processes; its results by rank. What any of them raises fails the test."""
    native_recorder()  # built once, here
    with TemporaryDirectory() as folder:
        try:
            mp.start_processes(_start, (size, body, args, folder), nprocs=size, start_method="fork")
        except Exception as error:
            texts = [path.read_text() for path in sorted(Path(folder).glob("error*"))]
            pytest.fail("\n".join(texts) or str(error))
        return [torch.load(f"{folder}/result{rank}", weights_only=False) for rank in range(size)]


def _start(rank: int, size: int, body: Callable[..., Any], args: tuple[Any, ...], folder: str) -> None:
    gc.freeze()  # the parent's objects: collecting them would copy the pages that the processes share
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=size, timeout=timedelta(seconds=60)
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
