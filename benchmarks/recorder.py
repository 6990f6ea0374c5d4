"""What the executor adds to an operation: microseconds beyond plain for each forward operation that is
recorded, replayed, or neither, on blocks so narrow that there is little else.

python -m benchmarks recorder
python -m benchmarks.recorder --smoke    a few steps of two blocks, to see that it runs; writes nothing

The step is the user's: a model under `lowtide.limit_memory`, forward and backward, with all that this does
around a step. Every round runs each way once, and a difference is the median over the rounds of what two ways
took in the same round. The cost of an operation is the difference between two depths, and that of a step what
is left. Replays are compared with the kernels alone: the same forward again without autograd. Beside it
stands `torch.utils.checkpoint` for every block. All of it runs on one thread, whose processor time is taken:
other processes count only by the caches that they share.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lowtide
from benchmarks.common import UNSETTLED, save
from lowtide.graph import StepGraph
from lowtide.plan.data import Plan
from lowtide.plan.policies import make_plan
from lowtide.plan.simulate.simulator import Simulator

WIDTH = 16
ROWS = 16
OPERATIONS = 5
"""Forward operations of a block."""


class Block(nn.Module):
    """Five operations: norm, linear, GELU, linear, sum."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """As a transformer's."""
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Blocks(nn.Module):
    """Some blocks, one after another."""

    def __init__(self, count: int, checkpointed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(count))
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        """All of them."""
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)  # type: ignore
        return x


def keep_but_one(graph: StepGraph, budget: int | None = None) -> Plan:
    """All stays but what the last GELU wrote: nearly nothing is recorded."""
    writers = [graph.operations[v.producer].name if v.producer is not None else "" for v in graph.values]
    evicted = [v for v in Simulator(graph).droppable if "gelu" in writers[v]][-1:]
    stored = [v for v in Simulator(graph).droppable if v not in evicted]
    return make_plan(graph, stored=stored, policy="keep_but_one", budget=budget)


def timed(model: nn.Module, x: Tensor) -> tuple[float, float]:
    """Seconds of a forward and of its backward."""
    model.zero_grad(set_to_none=True)
    begin = time.thread_time()
    out = model(x)
    middle = time.thread_time()
    out.backward(torch.ones_like(out))
    return middle - begin, time.thread_time() - middle


def kernels(model: nn.Module, x: Tensor) -> float:
    """Seconds of a forward without autograd."""
    with torch.no_grad():
        begin = time.thread_time()
        model(x)
        return time.thread_time() - begin


def measured(count: int, rounds: int) -> dict[str, float]:
    """Milliseconds of forward and backward of ``count`` blocks each way, and what two ways add to plain."""
    plain, checkpointed = Blocks(count), Blocks(count, checkpointed=True)
    full, idle = Blocks(count), Blocks(count)
    handle = lowtide.limit_memory(full, policy="full")
    lowtide.limit_memory(idle, policy=keep_but_one)
    ways: dict[str, Callable[[Tensor], tuple[float, float]]] = {
        "plain": lambda x: timed(plain, x),
        "kernels": lambda x: (kernels(plain, x), 0.0),
        "checkpoint": lambda x: timed(checkpointed, x),
        "full": lambda x: timed(full, x),
        "idle": lambda x: timed(idle, x),
    }
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    gc.collect()
    gc.disable()
    for step in range(UNSETTLED + rounds):
        for name, run in ways.items():
            seconds = run(x)
            if step >= UNSETTLED:
                found[name].append(seconds)
    gc.enable()
    assert handle.plan is not None

    def beyond(name: str, part: int) -> float:
        pairs = zip(found[name], found["plain"], strict=True)
        return 1e3 * statistics.median(own[part] - base[part] for own, base in pairs)

    row: dict[str, float] = {
        "blocks": count,
        "operations": count * OPERATIONS,
        "recorded": sum(1 for operation in handle.plan.program if operation.replayed),
    }
    for name in ("plain", "checkpoint", "full", "kernels"):
        row[f"{name}_ms"] = 1e3 * statistics.median(map(sum, found[name]))
    for name in ("idle", "full"):
        row[f"{name}_forward_beyond_ms"], row[f"{name}_backward_beyond_ms"] = beyond(name, 0), beyond(name, 1)
    return row


def of_an_operation(few: dict[str, float], many: dict[str, float]) -> dict[str, float]:
    """Microseconds that the executor adds to an operation, from models of two depths, and to a step.

    An operation that stays has its hooks in the backward, too. What is recorded is told from what is not by
    the plan that records nothing; what is replayed takes a kernel's time besides.
    """

    def more(name: str) -> float:
        return many[name] - few[name]

    operations, recorded = more("operations"), more("recorded")
    idle, full = more("idle_forward_beyond_ms"), more("full_forward_beyond_ms")
    kernel = more("kernels_ms") / operations
    back = more("full_backward_beyond_ms") - more("idle_backward_beyond_ms") * (1 - recorded / operations)
    per_operation = idle / operations
    return {
        "unrecorded_us": 1e3 * per_operation,
        "unrecorded_backward_us": 1e3 * more("idle_backward_beyond_ms") / operations,
        "recorded_us": 1e3 * (per_operation + (full - idle) / recorded),
        "replayed_us": 1e3 * (back / recorded - kernel),
        "kernel_us": 1e3 * kernel,
        "step_us": 1e3 * (few["idle_forward_beyond_ms"] - per_operation * few["operations"]),
    }


def main(arguments: list[str] | None = None) -> None:
    """Run and write benchmarks/results/recorder.json."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recorder", description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="few steps of two blocks; writes nothing")
    smoke = parser.parse_args(arguments or []).smoke
    warnings.simplefilter("ignore")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    rows = [measured(count, 3 if smoke else 300) for count in ((2, 4) if smoke else (24, 96))]
    cost = of_an_operation(*rows)
    for row in (*rows, cost):
        print("  ".join(f"{name} {value:.4g}" for name, value in row.items()), flush=True)
    if not smoke:
        save("recorder", rows, cost=cost)
    torch.set_num_threads(before)


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
