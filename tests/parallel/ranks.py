"""Run a function on several real processes that share a Gloo group, and bring back what each returned."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

needs_gloo = pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="needs Gloo")


def on_ranks(size: int, body: Callable[..., Any], *args: Any) -> list[Any]:
    """``body(*args)`` on ``size`` processes; its results by rank. What any of them raises fails the test."""
    with TemporaryDirectory() as folder:
        try:
            mp.start_processes(_start, (size, body, args, folder), nprocs=size, start_method="fork")
        except Exception as error:
            texts = [path.read_text() for path in sorted(Path(folder).glob("error*"))]
            pytest.fail("\n".join(texts) or str(error))
        return [torch.load(f"{folder}/result{rank}", weights_only=False) for rank in range(size)]


def _start(rank: int, size: int, body: Callable[..., Any], args: tuple[Any, ...], folder: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=size, timeout=timedelta(seconds=60))
    try:
        torch.save(body(*args), f"{folder}/result{rank}")
        dist.barrier()
    except BaseException:
        Path(folder, f"error{rank}").write_text(f"rank {rank} of {size}:\n{traceback.format_exc()}")
        os._exit(1)  # the others wait in a collective: let the launcher end them
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
