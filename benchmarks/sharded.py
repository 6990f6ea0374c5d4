"""One budget for the whole step of a sharded model, on Gloo processes: gradients bit by bit, peaks, gathers
and time, of eight families shared in five ways.

python -m benchmarks sharded [--quick] [--resume]
"""

from __future__ import annotations

import gc
import json
import os
import queue
import random
import statistics
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.multiprocessing as mp
from torch import Tensor

import lowtide
from benchmarks import sharded_models
from benchmarks.common import (
    RESULTS,
    UNSETTLED,
    keep_pages,
    kept_rows,
    median_difference,
    quick,
    run_key,
    save,
)
from benchmarks.sharded_models import (
    BATCH,
    FAMILIES,
    LARGER,
    LAYERS,
    SEQUENCE,
    WAYS,
    WIDTH,
    Model,
    batch,
    build,
)
from benchmarks.tables import table, where, yes
from lowtide import meter, private

STEPS = 4
BUDGETS = ("checkpoint", "70%", "min")
SECONDS = 900
"""A row that takes longer hangs."""
LARGE = "FSDP2, larger"
"""Models that are shared in this way are larger, and held against checkpointing at its peak."""
LATE_SECONDS = 0.5
"""At most so long a collective waits for Gloo's threads to let go of what they moved."""
_COLLECTIVES = ("all_gather_into_tensor", "all_gather_single", "reduce_scatter_tensor")
_COLLECTIVES += ("reduce_scatter_single", "all_reduce")
_TASKS = Path("/proc/self/task")


class Gathers:
    """Counts FSDP's gathers from here on."""

    def __init__(self) -> None:
        from torch.distributed.fsdp._fully_shard import _fsdp_param_group

        groups: Any = _fsdp_param_group
        self.count, own = 0, groups.foreach_all_gather

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            return own(*args, **kwargs)

        groups.foreach_all_gather = counted


@contextmanager
def collectives_finish() -> Iterator[None]:
    """Within the block collectives of FSDP and of DTensors return when Gloo's threads hold nothing of what
    they moved.

    A thread that has told that a collective is done lets go of its buffers when it runs next. On a busy
    machine that is milliseconds later, in whatever is live at its peak then, with a limit or without. NCCL
    has no such threads.
    """
    places = [(dist, name) for name in _COLLECTIVES if hasattr(dist, name)]
    places += [(functional, "wait_tensor"), (private, "wait_for_collective")]
    with ExitStack() as stack:
        for place, name in places:
            own = getattr(place, name)
            setattr(place, name, partial(_finished, own))
            stack.callback(setattr, place, name, own)
        yield


def _finished(own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    result = own(*args, **kwargs)
    end, asleep = time.monotonic() + LATE_SECONDS, 0
    while asleep < 2 and not isinstance(result, dist.Work) and time.monotonic() < end:
        time.sleep(0.001)  # which takes no time on a processor
        asleep = asleep + 1 if _gloo_sleeps() else 0
    return result


def _gloo_sleeps() -> bool:
    """Whether all of Gloo's threads in this process wait for something to do."""
    for task in _TASKS.iterdir():
        name, _, state = (task / "stat").read_text().rpartition(") ")
        if "gloo" in name and state[0] != "S":
            return False
    return True


class Run:
    """A model with its optimizer, its batches, and what of them is resident between steps.

    Args:
        family, way: of the model.
        checkpoints: whether each block is under `torch.utils.checkpoint`.
    """

    def __init__(self, family: str, way: str, checkpoints: bool = False) -> None:
        self.family = family
        self.model: Model = build(family, way)
        self.model.checkpoints = checkpoints
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained)
        rank = dist.get_rank()
        self.data = {"FSDP2": rank, LARGE: rank, "HSDP": rank, "tp x FSDP2": rank // 2}.get(way, 0)
        self.tokens = self.batch(0)

    def batch(self, number: int) -> Tensor:
        """This rank's batch; ranks that share activations have one."""
        return batch(self.family, 1000 * self.data + number)

    def step(self) -> Tensor:
        """One forward and backward from cleared gradients."""
        self.optimizer.zero_grad()
        loss = self.model(self.tokens)
        loss.backward()
        return loss.detach()

    def train(self, handle: lowtide.Handle | None = None) -> tuple[list[Tensor], int]:
        """Losses and gradients of a few steps, and the most bytes that one after the first took, with what
        stands: the first is profiled. The search that goes on then has ended before the second.
        """
        found, peaks = list[Tensor](), list[int]()
        for number in range(STEPS):
            self.tokens = self.batch(number)
            self.optimizer.zero_grad()
            gc.collect()
            dist.barrier()
            resident = meter.resident_bytes(self.model, self.optimizer) + self.tokens.nbytes
            measured = meter.measure(self.step, timeline=False)
            peaks.append(resident + measured.peak_bytes)
            found.append(measured.value.clone())
            found += [local(p.grad).clone() for p in self.model.parameters() if p.grad is not None]
            self.optimizer.step()
        return found, max(peaks[1:])


def local(tensor: Any) -> Tensor:
    """This rank's part."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def most(count: int) -> int:
    """The most of any rank."""
    found = torch.tensor(count)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return int(found)


def rows_of(family: str, way: str) -> list[dict[str, Any]]:
    """A model without a limit, with each block checkpointed, and within budgets."""
    if way == LARGE:
        sharded_models.make_larger()
    with collectives_finish():  # in timed steps, too: one that takes more may be planned for again
        runs, rows = _trained(family, way)
        if way in ("FSDP2", LARGE):
            _time(runs, rows)
    return rows


def _trained(family: str, way: str) -> tuple[list[Run], list[dict[str, Any]]]:
    gathers = Gathers()
    plain = Run(family, way)
    expected, plain_peak = plain.train()
    asked = gathers.count
    checkpointed = Run(family, way, checkpoints=True)
    checkpoint_peak = most(checkpointed.train()[1])
    rows, runs = list[dict[str, Any]](), [plain, checkpointed]
    for budget in BUDGETS[:1] if way == LARGE else BUDGETS:
        run = Run(family, way)
        handle = lowtide.limit_memory(
            run.model,
            checkpoint_peak if budget == "checkpoint" else budget,
            optimizer=run.optimizer,
            progress=False,
        )
        gathers.count = 0
        found, peak = run.train(handle)
        plan = handle.plan
        assert plan is not None and plan.budget_bytes is not None
        rows.append(
            {
                "family": family,
                "way": way,
                "budget": budget,
                "plain_peak_bytes": plain_peak,
                "checkpoint_peak_bytes": checkpoint_peak,
                "measured_peak_bytes": peak,
                "own_measured_peak_bytes": handle.measured_peak_bytes,
                "predicted_peak_bytes": plan.predicted_peak_bytes,
                "budget_bytes": plan.budget_bytes,
                "same": len(found) == len(expected) and all(map(torch.equal, found, expected)),
                "gathers": gathers.count,
                "plain_gathers": asked,
                "plans": len(handle.plans),
                "predicted_extra_seconds": plan.predicted_extra_seconds,
                "bound_extra_seconds": plan.bound_extra_seconds,
                "bound_peak_bytes": plan.bound_peak_bytes,
            }
        )
        runs.append(run)
    return runs, rows


def _time(runs: list[Run], rows: list[dict[str, Any]]) -> None:
    """Add what each budget costs beside the plain step: medians of the differences within rounds, of this
    thread's seconds on a processor, since a rank that waits for others takes none.
    """
    for run in runs:
        run.tokens = run.batch(0)
    for run in runs[2:]:
        for _ in range(UNSETTLED - STEPS):
            run.step()
    seconds: list[list[float]] = [[] for _ in runs]
    draw, order = random.Random(0), list(range(len(runs)))  # on all ranks alike
    for _ in range(5 if quick() else 11):
        draw.shuffle(order)
        for which in order:
            dist.barrier()
            begin = time.thread_time()
            runs[which].step()
            seconds[which].append(time.thread_time() - begin)
    base = statistics.median(seconds[0])
    extra = [median_difference(found, seconds[0]) / base for found in seconds]
    for row, own in zip(rows, extra[2:], strict=True):
        row |= {"plain_seconds": base, "checkpoint_extra": extra[1], "extra": own}
        for name in ("predicted", "bound"):
            row[f"{name}_extra"] = row[f"{name}_extra_seconds"] / base
        row["gap"] = row["predicted_extra"] - row["bound_extra"]


def _rank(rank: int, ranks: int, folder: str, family: str, way: str, results: Any) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    keep_pages()
    said = list[str]()
    try:
        dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", lowtide.LowtideWarning)
            rows = rows_of(family, way)
            said = [str(one.message) for one in caught if issubclass(one.category, lowtide.LowtideWarning)]
        results.put((rank, [row | {"rank": rank, "warnings": said} for row in rows]))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException as error:
        where_ = "".join(traceback.format_exception(error)[-3:])
        results.put((rank, f"{type(error).__name__}: {error}\n{where_}"))
        results.close()
        results.join_thread()
        os._exit(1)  # the others wait in a collective


def on_ranks(family: str, way: str) -> list[dict[str, Any]]:
    """The rows of one model shared in one way, or one row that says what failed: of each budget that of the
    rank that is furthest from its prediction.
    """
    ranks, context = WAYS[way][0], mp.get_context("spawn")
    results: Any = context.Queue()
    found: dict[int, Any] = {}
    with TemporaryDirectory() as folder:
        arguments = (ranks, folder, family, way, results)
        processes = [context.Process(target=_rank, args=(rank, *arguments)) for rank in range(ranks)]
        for process in processes:
            process.start()
        end = time.monotonic() + SECONDS
        while len(found) < ranks and time.monotonic() < end:
            with suppress(queue.Empty):
                rank, item = results.get(timeout=1)
                found[rank] = item
                if isinstance(item, str):
                    break
        for process in processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
    failed = [f"rank {rank}: {item}" for rank, item in found.items() if isinstance(item, str)]
    if failed or len(found) < ranks:
        reason = failed[0] if failed else f"no answer within {SECONDS} s"
        return [{"family": family, "way": way, "ranks": ranks, "failure": reason}]
    rows = list[dict[str, Any]]()
    for several in zip(*found.values(), strict=True):
        worst = max(several, key=lambda row: abs(off(row)))
        rows.append(
            worst
            | {
                "ranks": ranks,
                "same": all(row["same"] for row in several),
                "within": all(row["measured_peak_bytes"] <= row["budget_bytes"] for row in several),
            }
        )
    return rows


def off(row: dict[str, Any]) -> float:
    """How far the measured peak is from the predicted one, as a share of it."""
    return row["measured_peak_bytes"] / row["predicted_peak_bytes"] - 1


_TIMES = ("checkpoint_extra", "extra", "predicted_extra", "bound_extra", "gap")


def page(found: dict[str, Any]) -> str:
    """The rows as a page."""
    lines = [
        "# One budget for a sharded step",
        "",
        where(found),
        "",
        f"{LAYERS} blocks of width {WIDTH}, {BATCH} x {SEQUENCE} tokens a rank; larger: width "
        f"{LARGER['WIDTH']}, {LARGER['BATCH']} x {LARGER['SEQUENCE']}. AdamW, Gloo, {STEPS} steps; "
        "`python -m benchmarks sharded`. Peaks are all that a rank holds, in KiB: plain, with every block "
        "under `torch.utils.checkpoint`, and within the budget (the most of the steps after the first, which "
        "is profiled); of all ranks, those of the one that is furthest from its prediction. *Off*: measured "
        "over predicted. *Bitwise*: losses and gradients of all steps, on every rank. *Extra*: medians of "
        "differences between steps in turn, in seconds of its thread on a processor. *Predicted*: of it by "
        "the plan. *No plan below*: with the same operations. *Gap*: the difference of these two.",
        "",
    ]
    head = ["family", "shared by", "ranks", "budget", "plain", "checkpoint", "limited", "off", "within"]
    head += ["bitwise", "gathers", "checkpoint's extra", "extra", "predicted", "no plan below", "gap"]
    cells = list[list[str]]()
    for row in found["rows"]:
        first = [row["family"], row["way"], str(row["ranks"])]
        if "failure" in row:
            said = row["failure"].splitlines()[0][:90].replace("|", "/")
            cells.append([*first, f"**failed**: {said}", *[""] * (len(head) - 4)])
            continue
        kib = [f"{row[f'{of}_peak_bytes'] / 1024:,.0f}" for of in ("plain", "checkpoint", "measured")]
        cells.append(
            [
                *first,
                row["budget"],
                *kib,
                f"{off(row):+.2%}" if abs(off(row)) <= 0.01 else f"**{off(row):+.2%}**",
                yes(row["within"]),
                yes(row["same"]),
                f"{row['gathers']} of {row['plain_gathers']}",
                *(f"{row[name]:+.1%}" for name in _TIMES if name in row),
                *("" for name in _TIMES if name not in row),
            ]
        )
    return "\n".join(lines) + table(head, cells) + "\n"


def main(families: tuple[str, ...] = tuple(FAMILIES), ways: tuple[str, ...] = tuple(WAYS)) -> int:
    """Write benchmarks/results/sharded.json and .md, row by row; rows of others that stand there stay."""
    path = RESULTS / "sharded.json"
    rows: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in json.loads(path.read_text())["rows"] if path.exists() else []:
        rows.setdefault((row["way"], row["family"]), []).append(row)
    known = {(row["way"], row["family"]) for row in kept_rows("sharded") if "failure" not in row}
    rows = {
        one: found
        for one, found in rows.items()
        if one[0] not in ways or one[1] not in families or one in known
    }
    order = [(way, family) for way in WAYS for family in FAMILIES]
    for way in ways:
        for family in families:
            if (way, family) in known:
                continue
            begin = time.monotonic()
            new = on_ranks(family, way)
            rows[way, family] = [row | {"run": run_key()} for row in new]
            save("sharded", [row for one in order for row in rows.get(one, [])])
            for row in new:
                print(_line(row), flush=True)
            print(f"  {time.monotonic() - begin:.0f} s", flush=True)
            (RESULTS / "sharded.md").write_text(page(json.loads(path.read_text())))
    return 0


def _line(row: dict[str, Any]) -> str:
    if "failure" in row:
        return f"{row['family']}, {row['way']}: {row['failure']}"
    kib = {name[:-6]: round(row[name] / 1024) for name in row if name.endswith("_bytes")}
    times = {name: f"{row[name]:+.1%}" for name in _TIMES if name in row}
    return (
        f"{row['family']:22} {row['way']:12} {row['budget']:10} off {off(row):+.2%} within {row['within']} "
        f"same {row['same']} gathers {row['gathers']}/{row['plain_gathers']} {kib} {times} "
        f"{row['warnings'][:2]}"
    )


if __name__ == "__main__":
    main()
