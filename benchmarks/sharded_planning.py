"""How long planning takes for blocks that FSDP2 shards, beside the same model on one device: seconds on a
processor, of the first of two Gloo ranks.

python -m benchmarks sharded_planning [--quick]
"""

from __future__ import annotations

import os
import statistics
import time
import warnings
from contextlib import suppress
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import lowtide
from benchmarks import sharded_models
from benchmarks.common import quick, save
from lowtide.graph import StepGraph
from lowtide.plan import make, plain
from lowtide.plan.search import search_of

BLOCKS, FAMILY, SHARES = 32, "GPT", (80, 70, 60)
MOST = 2.0
"""How many times as long planning of sharded blocks may take."""


def _seconds(graph: StepGraph, budget: int) -> float:
    """Median seconds of planning from the graph alone; 1 byte is refused with the smallest budget."""
    found = list[float]()
    for _ in range(1 if quick() else 3):
        search_of.cache_clear()
        begin = time.process_time()
        with suppress(lowtide.BudgetError):
            make(graph, budget=budget, progress=False)
        found.append(time.process_time() - begin)
    return statistics.median(found)


def _graph(rank: int, shares: bool) -> StepGraph:
    """The profiled step."""
    torch.manual_seed(0)
    model = sharded_models.FAMILIES[FAMILY]()
    if shares:
        model = sharded_models.fully_sharded(model, FAMILY, sharded_models.line())
    handle = lowtide.limit_memory(model, "90%", progress=False)
    model(sharded_models.batch(FAMILY, rank)).backward()
    assert handle.graph is not None
    return handle.graph


def _rank(rank: int, folder: str, results: Any) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    sharded_models.LAYERS = BLOCKS
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", lowtide.LowtideWarning)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    alone, sharded = (_graph(rank, shares) for shares in (False, True))
    dist.barrier()
    dist.destroy_process_group()
    if rank:
        return
    rows = list[dict[str, Any]]()
    for share in (*SHARES, 0):
        one, many = (
            _seconds(graph, plain(graph).peak_bytes * share // 100 or 1) for graph in (alone, sharded)
        )
        rows.append(
            {
                "model": f"{FAMILY}, {BLOCKS} blocks",
                "budget": f"{share}%" if share else "the smallest",
                "operations": len(alone.operations),
                "sharded_operations": len(sharded.operations),
                "seconds": one,
                "sharded_seconds": many,
                "holds": many <= MOST * one,
            }
        )
        print(f"{rows[-1]['budget']:13}{one:6.2f} s, sharded {many:6.2f} s", flush=True)
    results.put(rows)


def main() -> int:
    """Write benchmarks/results/sharded_planning.json."""
    context = mp.get_context("spawn")
    results: Any = context.Queue()
    with TemporaryDirectory() as folder:
        ranks = [context.Process(target=_rank, args=(rank, folder, results)) for rank in range(2)]
        for process in ranks:
            process.start()
        rows = results.get()
        for process in ranks:
            process.join()
    save("sharded_planning", rows)
    return 0


if __name__ == "__main__":
    main()
