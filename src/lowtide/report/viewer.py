"""A step as a memory snapshot, in the form that PyTorch's memory viewer reads (pytorch.org/memory_viz).

The form is that of ``torch.cuda.memory._snapshot()``, which torch/cuda/_memory_viz.py describes: a pickled
dictionary of plain values. Every block of memory is an allocation whose stack names the operation, the module
and what the block is. Each has an address of its own, and there are no segments: no allocator has placed
them.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from lowtide.report.timeline import Span, Timeline

_CATEGORIES = {"optimizer": "optimizer_state", "recomputed": "activation", "moved": "unknown"}
"""Kinds of spans that the viewer, which colours allocations by category, calls otherwise."""


def snapshot(line: Timeline) -> dict[str, Any]:
    """The snapshot of a step, for example `Report.planned`: the trace of one device. Pickled, it is what
    ``pytorch.org/memory_viz`` and ``python torch/cuda/_memory_viz.py`` read.
    """
    seconds = [*(tick.seconds for tick in line.ticks), line.seconds]
    addresses = accumulate((span.bytes for span in line.spans), initial=0)
    events: list[tuple[int, bool, int, dict[str, Any]]] = []
    for number, (span, address) in enumerate(zip(line.spans, addresses, strict=False)):
        about = {
            "addr": address,
            "size": span.bytes,
            "stream": 0,
            "frames": _frames(span),
            "category": _CATEGORIES.get(span.kind, span.kind),
        }
        events.append((span.born, True, number, {"action": "alloc", **about}))
        if span.gone < len(line.ticks):  # what goes at a tick is gone before what comes
            actions = ("free_requested", "free_completed")
            events += [(span.gone, False, number, {"action": action, **about}) for action in actions]
    ordered = sorted(events, key=lambda event: event[:3])
    return {
        "segments": [],
        "device_traces": [
            [{**entry, "time_us": round(seconds[tick] * 1e6)} for tick, _, _, entry in ordered]
        ],
    }


def _frames(span: Span) -> list[dict[str, Any]]:
    """What the viewer shows as the stack of an allocation: who wrote it, where, and what it is."""
    about = ", ".join(filter(None, (span.kind, span.form, span.decision)))
    lines = (span.name, span.module or "the model itself", about)
    return [{"name": text, "filename": "lowtide", "line": 0} for text in lines]
