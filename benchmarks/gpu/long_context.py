"""A 4B model of Qwen3's shape on one long sequence: how long it may be, and tokens a second. The optimizer's
state is not on the device, and its update is not timed.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable
from typing import Any

import torch

import lowtide
from benchmarks.gpu.rows import Row, Unmeasured, Where
from benchmarks.long_context_steps import LAYERS, batch_of, in_tiles, model_of
from lowtide.errors import BudgetError

LENGTHS = (32_768, 65_536, 98_304, 131_072, 196_608, 262_144, 393_216)
SMALL = (64, 128)
SECONDS = 300.0
"""No longer sequence begins after so long."""


def long_row(name: str, where: Where) -> Row:
    """Sequences of growing length, until one does not fit or the time is over.

    Args:
        name: one of `benchmarks.gpu.parts.LONG`.
        where: on what.
    """
    if not where.small and where.device == "cpu":
        raise Unmeasured("needs a CUDA device")
    begin, lengths, steps = time.perf_counter(), SMALL if where.small else LENGTHS, list[Row]()
    why = "the longest that was tried"
    for tokens in lengths:
        took = steps[-1]["took_seconds"] if steps else 0.0
        if not where.small and time.perf_counter() - begin + 4 * took > SECONDS:
            why = "the time was over"
            break
        try:
            steps.append(_step(name, tokens, where))
        except (BudgetError, torch.OutOfMemoryError) as error:
            why = f"{type(error).__name__} at {tokens:,} tokens"
            break
        finally:
            gc.collect()
            if where.device == "cuda":
                torch.cuda.empty_cache()
    return {"lengths": steps, "longest_tokens": steps[-1]["tokens"] if steps else 0, "ended": why}


def _step(name: str, tokens: int, where: Where) -> Row:
    """Three steps at one length: the first profiles, the last is timed."""
    begin = time.perf_counter()
    torch.manual_seed(0)
    with torch.device(where.device):
        model: Any = model_of(2 if where.small else LAYERS, where.small)
        batch = batch_of(tokens, where.device)
    around: Callable[[], Any] = contextlib.nullcontext
    handle = None
    if name == "save_on_cpu":
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        pinned = where.device == "cuda"
        around = lambda: torch.autograd.graph.save_on_cpu(pin_memory=pinned)  # noqa: E731
    else:
        if name in ("tiles", "all"):
            in_tiles(model, 4 if where.small else 16)
        policy = "auto" if name in ("moves", "all") else "optimal"
        budget = "auto" if where.device == "cuda" else "min"
        handle = lowtide.limit_memory(model, budget, policy=policy)
    seconds = 0.0
    for _ in range(3):
        model.zero_grad(set_to_none=True)
        if where.device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        with around():
            loss = model(**batch).loss
        loss.backward()
        loss.item()
        if where.device == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
    row: Row = {"tokens": tokens, "seconds": seconds, "tokens_a_second": tokens / seconds}
    if where.device == "cuda":
        row["peak_bytes"] = torch.cuda.max_memory_allocated()
    if handle is not None and handle.plan is not None:
        row |= {
            "predicted_peak_bytes": handle.plan.predicted_peak_bytes,
            "predicted_extra": handle.plan.predicted_extra,
            "moved_bytes": sum(m.bytes for m in handle.plan.moves),
            "notes": list(handle.plan.notes),
        }
        handle.remove()
    return {**row, "took_seconds": time.perf_counter() - begin}
