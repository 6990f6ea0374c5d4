"""Saved bytes and peak per rank at t = 1, 2, 4 on Gloo processes, against table 2 of arXiv 2205.05198; and
pipelines within budgets.

python -m benchmarks parallel_memory
"""

from __future__ import annotations

import json
import os
import queue
import socket
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import lowtide
from benchmarks.common import RESULTS, machine, save
from lowtide import meter
from lowtide.models import preset
from lowtide.models.gpt import GPT
from lowtide.models.stage import cut, stage_input
from lowtide.parallel.pipeline import Pipeline, schedule_kind, stages_of

LAYERS, WIDTH, HEADS, BATCH, SEQUENCE, VOCABULARY = 4, 128, 4, 2, 128, 512
ELEMENT = 4  # float32
READINGS = 3
"""How many steps are measured: what the step before left in Gloo's buffers may go during a step, so the
largest reading counts.
"""
ROWS: list[tuple[str, Callable[[int, float], float], bool, str]] = [
    # name, formula in units of tokens x width bytes at 2 bytes an element, sequence parallel, what is
    # recomputed
    ("tensor parallel", lambda t, core: 10 + 24 / t + core / t, False, ""),
    ("tensor + sequence parallel", lambda t, core: 34 / t + core / t, True, ""),
    ("tensor parallel, selective", lambda t, core: 10 + 24 / t, False, "selective"),
    ("tensor + sequence parallel, selective", lambda t, core: 34 / t, True, "selective"),
    ("tensor + sequence parallel, full", lambda t, core: 2 / t, True, "full"),
]


SETTLE_SECONDS = 0.1
"""How long Gloo's threads get to free what the last collective moved through, before bytes that stay are
read.
"""
PLANS: dict[str, dict[str, Any]] = {
    'policy="full"': {"policy": "full"},
    'budget="80%"': {"budget": "80%"},
    'budget="65%"': {"budget": "65%"},
}


def formula_bytes(t: int, sequence_parallel: bool, recompute: str) -> int:
    """Table 2 for one layer, for elements of four bytes and masks of one, with the statistics of its two
    norms.
    """
    tokens = SEQUENCE * BATCH
    shared = t if sequence_parallel else 1
    if recompute == "full":
        return tokens * WIDTH * ELEMENT // shared
    # outside the shared regions: the inputs of two norms and of two linear layers' regions, and two masks;
    # inside: the rest
    outside = tokens * WIDTH * (4 * ELEMENT + 2) // shared
    inside = tokens * WIDTH * 12 * ELEMENT // t
    core = 0 if recompute == "selective" else HEADS * SEQUENCE * SEQUENCE * BATCH * (2 * ELEMENT + 1) // t
    statistics = 2 * 2 * (tokens // shared) * ELEMENT
    return outside + inside + core + statistics


def build(sequence_parallel: bool, recompute: str) -> GPT:
    """The model on the whole world."""
    torch.manual_seed(0)
    shape = {
        "layers": LAYERS,
        "width": WIDTH,
        "heads": HEADS,
        "hidden_width": 4 * WIDTH,
        "key_value_heads": HEADS,
        "vocabulary": VOCABULARY,
    }
    config = preset("gpt-nano", **shape, positions=SEQUENCE, dropout=0.1, fused_attention=False)
    group = dist.group.WORLD if dist.get_world_size() > 1 else None
    model = GPT(config, group, sequence_parallel and group is not None)
    for block in model.blocks:
        if recompute == "selective":
            block.attention.core.forward = _scoped(block.attention.core.forward)  # type: ignore
        elif recompute == "full":
            block.forward = _scoped(block.forward)  # type: ignore[method-assign]
    return model


def _scoped(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        with lowtide.checkpointing(verify="never"):
            return function(*args)

    return call


def tokens(batch: int = BATCH) -> Tensor:
    """A batch, the same on every rank."""
    return torch.randint(VOCABULARY, (batch, SEQUENCE), generator=torch.Generator().manual_seed(1))


def layer_row(sequence_parallel: bool, recompute: str) -> dict[str, int]:
    """Bytes that the layers hold between forward and backward, and the peak of the whole step."""
    model = build(sequence_parallel, recompute)
    x, targets = tokens(), tokens().roll(-1, 1)
    model(x, targets).loss.backward()  # gradients are there from now on
    dist.barrier()
    with meter.peak("cpu") as seen:
        hidden = model.embed(x)
        dist.barrier()
        time.sleep(SETTLE_SECONDS)
        before = seen.live_bytes
        for block in model.blocks:
            hidden = block(hidden)
        # each layer's output is the next one's input, so the layers' inputs are counted and the last output
        # is not
        dist.barrier()
        time.sleep(SETTLE_SECONDS)
        held = seen.live_bytes - before
        del hidden
    peak = largest_peak(lambda: model(x, targets).loss.backward())
    return {
        "layer_bytes": held // LAYERS,
        "step_peak_bytes": peak,
        "standing_bytes": meter.resident_bytes(model),
    }


def largest_peak(step: Callable[[], object]) -> int:
    """The most bytes that a step adds, over some steps."""
    found = []
    for _ in range(READINGS):
        dist.barrier()
        with meter.peak("cpu") as seen:
            step()
        found.append(seen.peak_bytes)
    return max(found)


class Gathers(TorchDispatchMode):
    """Counts all-gathers."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops._c10d_functional.all_gather_into_tensor.default
        return func(*args, **(kwargs or {}))


def planned_rows() -> list[dict[str, Any]]:
    """Whole steps under plans: the peak as predicted and as measured, and the gathers of a backward."""
    x, targets = tokens(), tokens().roll(-1, 1)
    found = []
    for name, options in PLANS.items():
        model = build(True, "")
        model(x, targets).loss.backward()  # gradients are there from now on
        loss = model(x, targets).loss
        with Gathers() as plain:
            loss.backward()
        del loss
        handle = lowtide.limit_memory(model, **options)
        for _ in range(3):  # one is verified, the next watched and listened to
            model(x, targets).loss.backward()
        peak = largest_peak(lambda model=model: model(x, targets).loss.backward())
        loss = model(x, targets).loss
        with Gathers() as planned:
            loss.backward()
        del loss
        assert handle.plan is not None and handle.graph is not None
        found.append(
            {
                "t": dist.get_world_size(),
                "plan": name,
                "budget_bytes": handle.plan.budget_bytes,
                "standing_bytes": handle.graph.resident_bytes,
                "predicted_peak_bytes": handle.plan.predicted_peak_bytes,
                "measured_peak_bytes": handle.graph.resident_bytes + peak,
                "replayed_operations": len(handle.plan.replayed),
                "plain_gathers": plain.count,
                "planned_gathers": planned.count,
            }
        )
    return found


def layer_rows() -> list[dict[str, Any]]:
    """All rows at this number of ranks."""
    t = dist.get_world_size()
    found = []
    for name, _, sequence_parallel, recompute in ROWS:
        if t == 1 and "sequence" in name and recompute != "full":
            continue
        counted = formula_bytes(t, sequence_parallel, recompute)
        found.append(
            {"t": t, "row": name, "formula_bytes": counted, **layer_row(sequence_parallel, recompute)}
        )
    return found


def pipeline_rows() -> list[dict[str, Any]]:
    """This rank's stage, 1F1B with twice as many micro-batches as ranks: the plain step, every block
    checkpointed by PyTorch, and steps within budgets.
    """
    ranks, rank = dist.get_world_size(), dist.get_rank()
    found = []
    for budget in ("plain", "every block checkpointed", "70%", "min"):
        torch.manual_seed(0)
        shape = {
            "layers": LAYERS,
            "width": WIDTH,
            "heads": HEADS,
            "hidden_width": 4 * WIDTH,
            "key_value_heads": HEADS,
        }
        model = GPT(
            preset(
                "gpt-nano",
                **shape,
                vocabulary=VOCABULARY,
                positions=SEQUENCE,
                dropout=0.1,
                fused_attention=False,
                tied=False,
            )
        )
        if budget.startswith("every"):
            for block in model.blocks.children():
                block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        stages: list[nn.Module] = list(cut(model, ranks, stages_of(rank, ranks, schedule_kind("1f1b"))))
        built = Pipeline(stages, "1f1b", 2 * ranks, stage_input(model, BATCH, SEQUENCE), None, "cpu")
        handle = lowtide.limit_memory(built.schedule, budget) if budget in ("70%", "min") else None
        x = tokens(2 * ranks * BATCH)
        y = x.roll(-1, 1)
        for _ in range(2):  # gradients are there from the second on
            built.step(x, y)
        peak = largest_peak(lambda built=built, x=x, y=y: built.step(x, y))
        predicted = None
        if handle is not None and handle.plan is not None and handle.graph is not None:
            predicted = handle.plan.predicted_peak_bytes - handle.graph.resident_bytes
        found.append(
            {
                "p": ranks,
                "rank": rank,
                "budget": budget,
                "in_flight": built.in_flight,
                "predicted_bytes": predicted,
                "step_peak_bytes": peak,
            }
        )
    return found


def on_ranks(size: int, body: Callable[[], list[dict[str, Any]]]) -> list[list[dict[str, Any]]]:
    """Run ``body`` on processes that share a Gloo group; what each returned, by rank."""
    context = mp.get_context("spawn")
    results: Any = context.Queue()
    with TemporaryDirectory() as folder:
        processes = [
            context.Process(target=_start, args=(rank, size, body, folder, results)) for rank in range(size)
        ]
        for process in processes:
            process.start()
        found: dict[int, list[dict[str, Any]]] = {}
        while len(found) < size:
            try:
                rank, rows = results.get(timeout=1)
                found[rank] = rows
            except queue.Empty:
                if any(process.exitcode for process in processes):
                    raise SystemExit("a process of the benchmark failed") from None
        for process in processes:
            process.join()
    return [found[rank] for rank in range(size)]


def _start(rank: int, size: int, body: Callable[[], list[dict[str, Any]]], folder: str, results: Any) -> None:
    os.environ.setdefault(
        "GLOO_SOCKET_IFNAME", "lo" if "lo" in [name for _, name in socket.if_nameindex()] else ""
    )
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=size)
    # so that frees of what was there are seen
    with meter.peak("cpu") if meter.available() else nullcontext():
        results.put((rank, body()))
    dist.barrier()
    dist.destroy_process_group()


def layer_table(rows: list[dict[str, Any]]) -> list[str]:
    """Layers and whole steps at each number of ranks."""
    lines = [
        "Bytes that a layer holds for backward, on the rank that holds most, against table 2 of arXiv "
        "2205.05198 (four bytes an element, one a mask, with the statistics of the norms), and the most "
        "that a whole step adds to what is resident.",
        "",
        "| layers | t | layer, formula | layer, measured | error | step's peak | standing |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        error = row["layer_bytes"] / row["formula_bytes"] - 1
        lines.append(
            f"| {row['row']} | {row['t']} | {row['formula_bytes']:,} | {row['layer_bytes']:,} | "
            f"{100 * error:+.3f} % | {row['step_peak_bytes'] / 2**20:.2f} MiB | "
            f"{row['standing_bytes'] / 2**20:.2f} MiB |"
        )
    return lines


def plan_table(rows: list[dict[str, Any]]) -> list[str]:
    """Whole steps under plans."""
    lines = [
        "Tensor and sequence parallel under one plan for all ranks: the peak of the fullest rank, and "
        "all-gathers in a backward. A gather that is run again for the products behind it serves the "
        "weights' gradients, too; where a tight budget has no room for what is gathered until then, it is "
        "gathered once more.",
        "",
        "| plan | t | budget | predicted peak | measured peak | operations run again | gathers, plain | "
        "gathers, planned |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        budget = "" if row["budget_bytes"] is None else f"{row['budget_bytes']:,}"
        lines.append(
            f"| `{row['plan']}` | {row['t']} | {budget} | {row['predicted_peak_bytes']:,} | "
            f"{row['measured_peak_bytes']:,} | {row['replayed_operations']} | {row['plain_gathers']} | "
            f"{row['planned_gathers']} |"
        )
    return lines


def pipeline_table(rows: list[dict[str, Any]]) -> list[str]:
    """Stages of pipelines."""
    return [
        "Pipelines, 1F1B with twice as many micro-batches as ranks: the most that a step adds, beside "
        "parameters and gradients. A percentage is of the fullest rank's plain step.",
        "",
        "| p | rank | in flight | step | predicted | measured |",
        "|---|---|---|---|---|---|",
        *(
            f"| {r['p']} | {r['rank']} | {r['in_flight']} | {r['budget']} | "
            f"{'' if r['predicted_bytes'] is None else format(r['predicted_bytes'], ',')} | "
            f"{r['step_peak_bytes']:,} |"
            for r in rows
        ),
    ]


def table(found: dict[str, Any]) -> str:
    """The results as text."""
    about = found["machine"]
    lines = [
        "# Memory per rank on Gloo processes",
        "",
        f"GPT, {LAYERS} layers of width {WIDTH}, {HEADS} heads, {BATCH} x {SEQUENCE} tokens, float32, "
        f"dropout 0.1, unfused attention. {about['processor']}, {about['cores']} cores, torch "
        f"{about['torch']}, Python {about['python']}, {about['date']}; `python -m benchmarks "
        "parallel_memory`.",
        "",
        *layer_table(found["rows"]),
        "",
        *plan_table(found["plans"]),
        "",
        *pipeline_table(found["pipeline"]),
    ]
    return "\n".join(lines) + "\n"


def measure(size: int, earlier: dict[str, Any] | None = None) -> None:
    """Run everything at one number of ranks and write the results, with those of ``earlier``."""
    found: dict[str, list[dict[str, Any]]] = {
        key: list((earlier or {}).get(key, ())) for key in ("rows", "plans", "pipeline")
    }
    found["rows"] += [
        max(ranks, key=lambda row: row["layer_bytes"])
        for ranks in zip(*on_ranks(size, layer_rows), strict=True)
    ]
    if size > 1:
        found["plans"] += [
            max(ranks, key=lambda row: row["measured_peak_bytes"])
            for ranks in zip(*on_ranks(size, planned_rows), strict=True)
        ]
        found["pipeline"] += [row for rank in on_ranks(size, pipeline_rows) for row in rank]
    save("parallel_memory", found["rows"], plans=found["plans"], pipeline=found["pipeline"])
    (RESULTS / "parallel_memory.md").write_text(table({"machine": machine(), **found}))


def main() -> None:
    """Write benchmarks/results/parallel_memory.json and .md, after each number of processes anew."""
    earlier = None
    for size in (1, 2, 4):
        measure(size, earlier)
        earlier = json.loads((RESULTS / "parallel_memory.json").read_text())


if __name__ == "__main__":
    main()
