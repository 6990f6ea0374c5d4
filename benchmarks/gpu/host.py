"""Whole training steps of a GPT with AdamW's state on the host: what of the copies and of the update runs
beside forward and backward.
"""

from __future__ import annotations

import gc
import statistics
from typing import Any

import torch

from benchmarks.common import paired, rounds_within
from benchmarks.gpu.rows import Row, Where
from benchmarks.gpu.training import case_of, flash_alone, placed
from lowtide import measure_links, meter
from lowtide.accelerator import synchronize
from lowtide.optim import HostOptimizer

WARM_UP = 4

OPTIONS: dict[str, dict[str, Any]] = {
    "gradients streamed": {"stream_gradients": True, "overlap_update": True},
    "after backward": {},
    "one step late": {"delayed": True, "delay_after": 1},
}


class HostSteps:
    """One model on a device, and ways to update it.

    Args:
        where: on what.
    """

    def __init__(self, where: Where) -> None:
        flash_alone()
        self.where, self.device = where, torch.device(where.device)
        self.model, self.batch = placed(case_of("gpt", where, batch=4), where)
        links = measure_links("host", device=where.device) if where.device == "cuda" else {}
        self.link = links.get("host")

    def row(self, name: str) -> Row:
        """One way to update: ``on the device``, or a name of `OPTIONS`."""
        parameters = list(self.model.parameters())
        if name == "on the device":
            optimizer: Any = torch.optim.AdamW(parameters, lr=1e-6)
        else:
            optimizer = HostOptimizer(torch.optim.AdamW, parameters, lr=1e-6, host="memory", **OPTIONS[name])
        moves = optimizer.link if isinstance(optimizer, HostOptimizer) else None

        def compute() -> None:
            self.model.zero_grad(set_to_none=True)
            self.model(**self.batch).loss.backward()
            synchronize(self.device)

        def step() -> None:
            self.model(**self.batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            synchronize(self.device)

        for _ in range(WARM_UP):
            step()
        before = (moves.bytes_down, moves.bytes_up) if moves else (0, 0)
        step()
        down, up = (moves.bytes_down - before[0], moves.bytes_up - before[1]) if moves else (0, 0)
        peak = meter.measure(step, timeline=False).peak_bytes
        seconds = paired([step], rounds_within([step], self.where.seconds, least=3, most=31))[0]
        if isinstance(optimizer, HostOptimizer):
            optimizer.finish()
            optimizer.close()
        gc.collect()
        alone = paired([compute], 3)[0]
        self.model.zero_grad(set_to_none=True)
        link = self.link
        copies = down / link.write_bytes_per_second + up / link.read_bytes_per_second if link else 0.0
        return {
            "seconds": statistics.median(seconds),
            "compute_seconds": statistics.median(alone),
            "copy_seconds": copies,
            "moved_bytes": down + up,
            "peak_bytes": peak,
        }
