"""A step as a memory snapshot, in the form that PyTorch's memory viewer reads (pytorch.org/memory_viz).

The form is that of ``torch.cuda.memory._snapshot()``, which torch/cuda/_memory_viz.py describes: a pickled
dictionary of plain values. Every block of memory is an allocation whose stack names the operation, the module
and what the block is. Addresses are laid out so that blocks that live at once do not overlap; a real
allocator would choose others.
"""

from __future__ import annotations

from typing import Any

from lowtide.plan.layout.offsets import find
from lowtide.report.timeline import Span, Timeline

_BASE = 1 << 32
_ALIGN = 512  # bytes, as PyTorch's allocator on CUDA has it
_LAYOUT_SECONDS = 0.5
_CATEGORIES = {"optimizer": "optimizer_state", "recomputed": "activation", "moved": "unknown"}
"""Kinds of spans that the viewer, which colours allocations by category, calls otherwise."""


def snapshot(line: Timeline) -> dict[str, Any]:
    """The snapshot of a step, for example `Report.planned`: one segment, the trace of one device. Pickled, it
    is what ``pytorch.org/memory_viz`` and ``python torch/cuda/_memory_viz.py`` read.
    """
    spans = line.spans
    born_at, gone_at, sizes = [s.born for s in spans], [s.gone for s in spans], [s.bytes for s in spans]
    laid = find(born_at, gone_at, sizes, align=_ALIGN, seconds=_LAYOUT_SECONDS)
    address = [_BASE + int(offset) for offset in laid.offsets]
    frames = [_frames(span) for span in spans]

    def entry(action: str, number: int, tick: int) -> dict[str, Any]:
        when = line.ticks[tick].seconds if tick < len(line.ticks) else line.seconds
        return {
            "action": action,
            "addr": address[number],
            "size": spans[number].bytes,
            "stream": 0,
            "time_us": round(when * 1e6),
            "frames": frames[number],
            "category": _CATEGORIES.get(spans[number].kind, spans[number].kind),
        }

    born: dict[int, list[int]] = {}
    gone: dict[int, list[int]] = {}
    for number, span in enumerate(spans):
        born.setdefault(span.born, []).append(number)
        gone.setdefault(span.gone, []).append(number)
    about = {"stream": 0, "time_us": 0, "frames": []}
    trace: list[dict[str, Any]] = [{"action": "segment_alloc", "addr": _BASE, "size": laid.height, **about}]
    for tick in range(len(line.ticks)):
        for number in gone.get(tick, ()):
            trace += [entry(action, number, tick) for action in ("free_requested", "free_completed")]
        trace += [entry("alloc", number, tick) for number in born.get(tick, ())]
    left = sorted(
        (n for n, span in enumerate(spans) if span.gone >= len(line.ticks)), key=address.__getitem__
    )
    return {"segments": [_segment(laid.height, [(address[n], spans[n].bytes, frames[n]) for n in left])],
            "device_traces": [trace]}  # fmt: skip


def _segment(height: int, blocks: list[tuple[int, int, list[dict[str, Any]]]]) -> dict[str, Any]:
    """The memory as it is at the step's end: what still stands, and what is free between."""
    found: list[dict[str, Any]] = []
    place, end = _BASE, _BASE + height
    for address, size, frames in blocks:
        if place < address:
            found.append(_free(place, address))
        found.append(
            {
                "address": address,
                "size": size,
                "requested_size": size,
                "state": "active_allocated",
                "frames": frames,
            }
        )
        place = address + size
    if place < end:
        found.append(_free(place, end))
    used = sum(size for _, size, _ in blocks)
    return {
        "device": 0,
        "address": _BASE,
        "total_size": height,
        "allocated_size": used,
        "active_size": used,
        "stream": 0,
        "segment_type": "large",
        "frames": [],
        "blocks": found,
    }


def _free(start: int, end: int) -> dict[str, Any]:
    return {"address": start, "size": end - start, "requested_size": 0, "state": "inactive", "frames": []}


def _frames(span: Span) -> list[dict[str, Any]]:
    """What the viewer shows as the stack of an allocation: who wrote it, where, and what it is."""
    about = ", ".join(filter(None, (span.kind, span.form, span.decision)))
    lines = (span.name, span.module or "the model itself", about)
    return [{"name": text, "filename": "lowtide", "line": 0} for text in lines]
