"""A program with one mistake, for each that devices whose streams run late are to show."""

from __future__ import annotations

from functools import partial

import torch
from late_scenarios import SCENARIOS, Run, check

from lowtide.extensions.moves.store.host import host_bytes


def mistaken(kind: str) -> Run:
    """Copies out, in and between streams, with or without one mistake."""

    def has(mistake: str) -> bool:
        return kind == mistake

    def run(seed: int) -> None:
        side, current = torch.cuda.Stream(), torch.cuda.current_stream()
        x = torch.arange(3000, device="cuda", dtype=torch.float32)
        memory = host_bytes(4 * 3000, pin=torch.device("cuda:0")).view(torch.float32)
        y = x * 2
        if not has("no wait before a copy out"):
            side.wait_stream(current)
        with torch.cuda.stream(side):
            memory.copy_(y, non_blocking=True)
            out = torch.cuda.Event()
            out.record(side)
        if has("no wait before memory is used again"):
            del y
            z = x * 3
        if not has("no wait before the program reads"):
            out.synchronize()
        check(torch.equal(memory, torch.arange(3000) * 2.0), "read too early")
        memory.mul_(2)
        with torch.cuda.stream(side):
            back = torch.empty_like(x)
            back.copy_(memory, non_blocking=True)
        if has("a write to what is being copied"):
            memory.zero_()
        if not has("no wait before a read"):
            current.wait_stream(side)
        z = back + 1
        if not has("nothing recorded on the stream that reads"):
            back.record_stream(current)
        del back
        with torch.cuda.stream(side):
            other = torch.zeros_like(x)
        if has("page-locked memory goes too early"):
            other.copy_(memory, non_blocking=True)
            del memory
        torch.cuda.synchronize()
        check(torch.equal(z.cpu(), torch.arange(3000) * 4.0 + 1), "another value")

    return run


MISTAKES = (
    "none", "no wait before a read", "no wait before a copy out", "no wait before the program reads",
    "no wait before memory is used again", "nothing recorded on the stream that reads",
    "page-locked memory goes too early", "a write to what is being copied",
)  # fmt: skip
SCENARIOS.update({f"mistake: {kind}": partial(mistaken, kind) for kind in MISTAKES})
