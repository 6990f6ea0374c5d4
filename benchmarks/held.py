"""Whether each of two hundred steps keeps its budget, where steps differ from one to the next.

python -m benchmarks held [--steps N] [--kind NAME ...] [--share 60 min] [--ranks] [--out NAME]

Each kind of `benchmarks.held_kinds` trains without a limit, then within "min", then within a share of the
largest plain peak and within 1.1 times the largest budget that "min" came to, both in bytes. Of every step a
meter beside the limit reads the peak: what is resident when the step starts (parameters, buffers, gradients,
inputs) and the most that the step adds. Losses, gradients and what else a step returns are compared bit by
bit with the plain ones. The first five kinds run on two ranks of FSDP2 on Gloo, too; ``--ranks`` asks for
these rows alone. Only what lowtide shows its users is asked.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import queue
import random
import re
import statistics
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

import lowtide
from benchmarks.common import RESULTS, keep_pages, kept_rows, quick, run_key, save
from benchmarks.held_kinds import KINDS, SHARDED, Program
from benchmarks.tables import mib, page_with_warnings, table, yes
from lowtide import meter

STEPS, QUICK_STEPS = 200, 40
SHARES = ("60", "min")
ROOM_ABOVE_MIN = 1.1
RANKS = 2
NEAR_BYTES = 16 << 10
"""So near to the meter's peak is the one that the handle reports."""
ROW_SECONDS, COLLECTIVE_SECONDS = 900, 60


@dataclass
class Step:
    """What one step did.

    Attributes:
        peak_bytes: its peak, with what was resident when it started.
        seconds: of its thread on a processor.
        digest: of all that it returned, and of all gradients.
        reported_bytes: the peak that the handle reports; ``None`` where it reports none.
        alone: whether one limited model took part, whose handle then reports the whole step.
    """

    peak_bytes: int
    seconds: float
    digest: bytes
    reported_bytes: int | None = None
    alone: bool = True


@dataclass
class Run:
    """Some steps of one program.

    Attributes:
        steps: those that ended.
        warned: each warning, and the number of the step that said it.
        smallest_bytes: the largest budget that the handles named.
        error: what ended the run early.
    """

    steps: list[Step] = field(default_factory=list)
    warned: list[tuple[int, str]] = field(default_factory=list)
    smallest_bytes: int = 0
    error: str = ""

    @property
    def largest_bytes(self) -> int:
        """The largest peak."""
        return max((step.peak_bytes for step in self.steps), default=0)


def tensors_in(given: Any) -> Iterator[Tensor]:
    """The tensors in tuples and lists."""
    if isinstance(given, Tensor):
        yield given
    elif isinstance(given, (tuple, list)):
        for one in given:
            yield from tensors_in(one)


def digest_of(tensors: Sequence[Tensor | None]) -> bytes:
    """A digest of all bits."""
    found = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        if tensor is None:
            found.update(b"none")
            continue
        own: Any = tensor.to_local() if hasattr(tensor, "to_local") else tensor  # pyright: ignore
        found.update(own.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.digest()


def run_step(program: Program, name: str, number: int) -> Step:
    """Run one step and measure it."""
    torch.manual_seed(number)
    inputs, parts = program.inputs(number, random.Random(f"{name} {number}")), program.parts(number)
    gc.collect()
    given = sum(storage.nbytes() for storage in meter.storages(tensors_in(inputs)))
    resident = given + sum(meter.resident_bytes(model) for model in parts)
    torch.manual_seed(1_000_000 + number)
    with meter.peak() as seen:
        begin = time.thread_time()
        results = program.step(*inputs)
        seconds = time.thread_time() - begin
    gradients = [one.grad for model in program.models for one in model.parameters()]
    handles = [lowtide.handle_of(model) for model in parts]
    reported = handles[-1].measured_peak_bytes if handles[-1] is not None else None
    found = Step(
        resident + seen.peak_bytes, seconds, digest_of([*results, *gradients]), reported, len(parts) == 1
    )
    del results, gradients, inputs
    program.between(number)
    return found


def run_steps(name: str, count: int, budget: int | str | None = None) -> Run:
    """Train with a budget for each model, or without."""
    ranked = dist.is_available() and dist.is_initialized()
    run = Run()
    program = KINDS[name](dist.get_rank() if ranked else 0, fully_sharded if ranked else None)
    handles = [
        lowtide.limit_memory(model, budget, progress=False) for model in program.models if budget is not None
    ]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", lowtide.LowtideWarning)
        for number in range(count):
            try:
                run.steps.append(run_step(program, name, number))
            except Exception as error:
                run.error = f"step {number}: {type(error).__name__}: {error}"
                if isinstance(error, lowtide.BudgetError) and error.smallest_bytes is not None:
                    run.smallest_bytes = max(run.smallest_bytes, error.smallest_bytes)
            run.warned += [(number, str(one.message)) for one in caught]
            caught.clear()
            if run.error:
                break
            run.smallest_bytes = max(run.smallest_bytes, named_bytes(handles))
    for handle in handles:
        handle.remove()
    return run


def named_bytes(handles: Sequence[lowtide.Handle]) -> int:
    """The budget that the handles name: of several models, each of which names its own, the sum."""
    found = 0
    for handle in handles:
        plan = handle.plan
        planned = plan.budget_bytes if plan is not None else None
        found += max(handle.budget_bytes or 0, planned or 0)
    return found


def fully_sharded(model: nn.Module) -> None:
    """Each block a unit of FSDP2, and the root."""
    from torch.distributed.fsdp import fully_shard

    blocks: Any = model.blocks
    for block in blocks:
        fully_shard(block)
    fully_shard(model)


def most(count: int) -> int:
    """The most of any rank."""
    if not (dist.is_available() and dist.is_initialized()):
        return count
    found = torch.tensor(count)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return int(found)


def rows_of(name: str, count: int, shares: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The rows of one kind, as they are done."""
    plain = run_steps(name, count)
    if plain.error:
        raise RuntimeError(f"without a limit: {plain.error}")
    peak = most(plain.largest_bytes)
    smallest = run_steps(name, count, "min")
    common: dict[str, Any] = {"plain_peak_bytes": peak, "smallest_bytes": most(smallest.smallest_bytes)}
    if smallest.error:
        common["min_error"] = smallest.error
    for share in shares:
        budget = int(ROOM_ABOVE_MIN * common["smallest_bytes"] if share == "min" else int(share) / 100 * peak)
        row = {"kind": name, "share": share, "budget_bytes": budget, "steps": count} | common
        if budget:
            row |= compared(plain, run_steps(name, count, budget), budget)
        else:
            row["error"] = f'"min" named no budget: {smallest.error or "no step was planned"}'
        yield row


def compared(plain: Run, run: Run, budget: int) -> dict[str, Any]:
    """What a row says of its steps."""
    said_at = min((number for number, _ in run.warned), default=len(run.steps))
    above = [
        [number, step.peak_bytes - budget, said_at <= number]
        for number, step in enumerate(run.steps)
        if step.peak_bytes > budget
    ]
    pairs = list(zip(plain.steps, run.steps, strict=False))
    differ = [number for number, (a, b) in enumerate(pairs) if a.digest != b.digest]
    alone = [step for step in run.steps if step.alone]
    off = [step.reported_bytes - step.peak_bytes for step in alone if step.reported_bytes is not None]
    ratios = [b.seconds / a.seconds for a, b in pairs]
    row: dict[str, Any] = {
        "done": len(run.steps),
        "above": above,
        "above_unsaid": sum(not said for *_, said in above),
        "largest_over_budget": round(run.largest_bytes / budget, 4),
        "first_over_budget": round(run.steps[0].peak_bytes / budget, 4) if run.steps else None,
        "reported_alone": len(alone),
        "reported_off": sum(abs(one) > NEAR_BYTES for one in off),
        "reported_none": len(alone) - len(off),
        "reported_furthest_bytes": max(off, key=abs, default=0),
        "shared_steps_reported": sum(not s.alone and s.reported_bytes is not None for s in run.steps),
        "other_bits": differ,
        "warnings": kinds_of_warnings(run.warned),
        "time_ratio": round(statistics.median(ratios), 3) if ratios else None,
        "total_time_ratio": round(sum(b.seconds for _, b in pairs) / sum(a.seconds for a, _ in pairs), 3)
        if pairs
        else None,
    }
    if run.error:
        row["error"] = run.error
    return row


def kinds_of_warnings(warned: Sequence[tuple[int, str]]) -> list[dict[str, Any]]:
    """Warnings that differ in numbers alone are of one kind: its first text, and the steps that said it."""
    found: dict[str, dict[str, Any]] = {}
    for number, text in warned:
        one = found.setdefault(re.sub(r"\d[\d.,]*", "#", text), {"text": text, "count": 0, "steps": []})
        one["count"] += 1
        if len(one["steps"]) < 20:
            one["steps"].append(number)
    return list(found.values())


@contextmanager
def watched() -> Iterator[None]:
    """The meter counts from here on, so that it sees what a step frees of what was there before. The garbage
    collector, which runs before each step, leaves out what the first limited step imports.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    small = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    handle = lowtide.limit_memory(small, "100%", progress=False)
    optimizer = torch.optim.SGD(small.parameters(), lr=1e-3)  # whose first step imports Dynamo
    for _ in range(2):
        small(torch.ones(2, 8)).sum().backward()
        optimizer.step()
    handle.remove()
    del small, handle, optimizer
    gc.collect()
    gc.freeze()
    try:
        with meter.peak():
            yield
    finally:
        torch.set_num_threads(threads)
        gc.unfreeze()


def rank_main(rank: int, folder: str, name: str, count: int, shares: Sequence[str], results: Any) -> None:
    """Run the rows of one kind on one rank and send each. A rank whose step fails ends: its collectives no
    longer match.
    """
    from benchmarks.sharded import collectives_finish

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    keep_pages()
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/meet",
            rank=rank,
            world_size=RANKS,
            timeout=timedelta(seconds=COLLECTIVE_SECONDS),
        )
        with watched(), collectives_finish():
            for row in rows_of(name, count, shares):
                results.put((rank, row))
                if "error" in row:
                    raise RuntimeError(row["error"])
        results.put((rank, None))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException as error:
        results.put((rank, f"rank {rank}: {type(error).__name__}: {error}"))
        results.close()
        results.join_thread()
        os._exit(1)  # others wait in a collective


def rows_on_ranks(name: str, count: int, shares: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The rows of one kind on ranks of FSDP2. Where a row ends in an error, other processes go on with the
    next.
    """
    left = list(shares)
    while left:
        rows, errors = spawned(name, count, left)
        done = [one for one in left if one in rows]
        yield from (of_ranks(rows[one]) for one in done)
        left = [one for one in left if one not in done]
        if left and not done:
            why = errors[0] if errors else f"no answer within {ROW_SECONDS} s"
            yield from ({"kind": name, "share": one, "steps": count, "error": why} for one in left)
            return


def spawned(
    name: str, count: int, shares: Sequence[str]
) -> tuple[dict[str, list[dict[str, Any]]], list[str]]:
    """The rows that ranks have sent, by share, and what ended ranks."""
    context = mp.get_context("spawn")
    results: Any = context.Queue()
    rows: dict[str, list[dict[str, Any]]] = {}
    errors, ended = list[str](), 0
    with TemporaryDirectory() as folder:
        arguments = (folder, name, count, tuple(shares), results)
        processes = [context.Process(target=rank_main, args=(rank, *arguments)) for rank in range(RANKS)]
        for process in processes:
            process.start()
        end = time.monotonic() + ROW_SECONDS
        while ended < RANKS and time.monotonic() < end:
            with suppress(queue.Empty):
                rank, item = results.get(timeout=1)
                if isinstance(item, dict):
                    rows.setdefault(item["share"], []).append(item | {"rank": rank})
                    continue
                ended += 1
                errors += [item] if item else []
                end = min(end, time.monotonic() + COLLECTIVE_SECONDS + 5) if errors else end
        for process in processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
    return rows, errors


def of_ranks(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The row of the rank that does worst; counts are the most of any rank."""
    worst = max(rows, key=lambda row: ("error" in row, row.get("largest_over_budget") or 0))
    counts = ("above_unsaid", "reported_off", "reported_none")
    most_of = {one: max(row.get(one, 0) for row in rows) for one in counts}
    longest = {one: max((row.get(one, []) for row in rows), key=len) for one in ("above", "other_bits")}
    return worst | most_of | longest | {"of_ranks": len(rows)}


def holds(row: dict[str, Any]) -> bool:
    """Whether every step ran, none went above, all bits are as plain, and what is reported is true."""
    bad = ("above", "other_bits", "reported_off", "reported_none", "shared_steps_reported")
    return not failure_of(row) and not any(row[one] for one in bad)


def failure_of(row: dict[str, Any]) -> str:
    """What ended a row early, or the steps within "min" that it takes its budget from."""
    own = row.get("error", "")
    return own or (
        f'within "min": {row["min_error"]}' if row["share"] == "min" and "min_error" in row else ""
    )


HEAD = ("kind", "ranks", "budget", "MiB", "of plain", "steps", "above", "not said", "largest", "first")
HEAD += ("reported off", "other bits", "warnings", "time", "holds")


def cells_of(row: dict[str, Any]) -> list[str]:
    """A row as people read it."""
    budget = "1.1 min" if row["share"] == "min" else f"{row['share']} %"
    cells = [row["kind"], str(row["ranks"]), budget]
    if "budget_bytes" in row:
        cells += [mib(row["budget_bytes"]), f"{row['budget_bytes'] / row['plain_peak_bytes']:.2f}"]
    if row.get("done"):
        off = f"{row['reported_off']} ({row['reported_furthest_bytes'] / 1024:+,.0f} KiB)"
        off += f", {row['reported_none']} none" if row["reported_none"] else ""
        cells += [
            f"{row['done']} of {row['steps']}",
            str(len(row["above"])),
            str(row["above_unsaid"]),
            f"{row['largest_over_budget']:.3f}",
            f"{row['first_over_budget']:.3f}",
            off,
            str(len(row["other_bits"])),
            f"{sum(one['count'] for one in row['warnings'])} of {len(row['warnings'])} kinds",
            f"{row['time_ratio']:.2f}",
        ]
    cells += [""] * (len(HEAD) - 1 - len(cells))
    said = failure_of(row).split("\n")[0][:110].replace("|", "/")
    return [*cells, f"**{said}**" if said else yes(holds(row))]


ABOUT = (
    "Made by `python -m benchmarks held`. Budgets are in bytes: a share of the largest plain peak, or "
    '1.1 times the largest that "min" came to. *Above*: steps whose peak, read by a meter beside the '
    "limit, is above it; *not said*: those before any warning. *Largest* and *first*: the largest peak "
    "and the first step's over the budget. *Reported off*: steps whose peak the handle reports by more "
    "than 16 KiB otherwise, with the furthest. *Other bits*: steps whose results or gradients are not "
    "those of the plain run. *Time*: median of the steps' seconds over the plain ones."
)


def name_of(row: dict[str, Any]) -> str:
    """A row in the list of warnings."""
    return f"{row['kind']}, {row['share']}, {row['ranks']} rank{'s' if row['ranks'] > 1 else ''}"


def page(found: dict[str, Any]) -> str:
    """The rows as a page."""
    title = "Steps that differ, each held to its budget"
    return page_with_warnings(title, ABOUT, list(HEAD), found, cells_of, name_of)


def options_of(arguments: Sequence[str]) -> argparse.Namespace:
    """What a command line asks for."""
    parser = argparse.ArgumentParser("python -m benchmarks held", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=QUICK_STEPS if quick() else STEPS)
    parser.add_argument("--kind", nargs="+", choices=tuple(KINDS), default=list(KINDS), metavar="NAME")
    parser.add_argument("--share", nargs="+", default=list(SHARES), help='a percentage, or "min" (1.1 times)')
    parser.add_argument("--ranks", action="store_true", help="only the rows on two ranks of FSDP2")
    parser.add_argument("--out", default="held", help="the name of the result files")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] = ()) -> int:
    """Run, and write benchmarks/results/held.json and .md; rows of others that stand there stay."""
    asked = options_of(arguments)
    keep_pages()
    path = RESULTS / f"{asked.out}.json"
    stand = json.loads(path.read_text())["rows"] if path.exists() else []
    rows = {key_of(row): row for row in stand}
    known = {key_of(row) for row in kept_rows(asked.out)}
    todo = [(name, 1) for name in asked.kind if not asked.ranks]
    todo += [(name, RANKS) for name in asked.kind if name in SHARDED]
    for name, ranks in todo:
        shares = [one for one in asked.share if (name, ranks, one) not in known]
        for row in of_kind(name, ranks, asked.steps, shares):
            row |= {"ranks": ranks, "run": run_key()}
            rows[key_of(row)] = row
            print(" | ".join(cells_of(row)), flush=True)
            written(path, asked.out, rows)
    print(table(list(HEAD), [cells_of(row) for row in in_order(rows)]))
    return 0 if all(map(holds, rows.values())) else 1


def of_kind(name: str, ranks: int, count: int, shares: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The rows of one kind; what goes wrong becomes the text of those that are left."""
    left = list(shares)
    if not left:
        return
    if ranks > 1:
        yield from rows_on_ranks(name, count, shares)
        return
    try:
        with watched():
            for row in rows_of(name, count, shares):
                left.remove(row["share"])
                yield row
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        yield from ({"kind": name, "share": one, "steps": count, "error": why} for one in left)


def key_of(row: dict[str, Any]) -> tuple[str, int, str]:
    """What a row is about."""
    return row["kind"], row["ranks"], row["share"]


def in_order(rows: dict[tuple[str, int, str], dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows by ranks, then by kind."""
    names = list(KINDS)
    return sorted(rows.values(), key=lambda row: (row["ranks"], names.index(row["kind"]), row["share"]))


def written(path: Path, name: str, rows: dict[tuple[str, int, str], dict[str, Any]]) -> None:
    """Write the result files."""
    save(name, in_order(rows))
    path.with_suffix(".md").write_text(page(json.loads(path.read_text())))
