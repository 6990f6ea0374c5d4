"""What the eager executor adds to a step: measured on a tiny model, where there is little else, with cold
caches.

Between the kernels of a real step, which stream through megabytes, Python finds nothing of its own in the
caches and takes several times as long as it does alone. So something as large is written between the
operations here, with and without the executor.

What others do on the machine meanwhile is no part of it: the thread's own clock is read, which stands still
while it waits for a processor, and the least of several rounds counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from lowtide import private
from lowtide.interception import Interceptor, alone, proceed
from lowtide.native import builds_paused
from lowtide.ops import tensors_of
from lowtide.plan.data import ProgramStep
from lowtide.run.record.directors import PlanDirector
from lowtide.run.record.native import compiled, compiled_program
from lowtide.run.record.recorder import Recorder

_LAYERS = 6
_OPERATIONS_OF_A_LAYER = 6
_ROUNDS = 8
_STREAMED = 1 << 19  # float32 numbers that are written between two operations


@dataclass(frozen=True, slots=True)
class Overhead:
    """Seconds of Python beside the kernels.

    Attributes:
        passing_seconds: for each operation of the forward, its views and saved tensors included.
        replayed_seconds: beyond that, for each operation that is recorded and runs again.
    """

    passing_seconds: float
    replayed_seconds: float


class _Names(Interceptor):
    """Lists the operations that run, and how many tensors each returns."""

    def __init__(self) -> None:
        self.found: list[tuple[str, int]] = []

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run and list it."""
        result = proceed(func, args, kwargs)
        self.found.append((str(func), sum(1 for _ in tensors_of(result))))
        return result


def executor_overhead() -> Overhead:
    """Measured once per process and recorder (some tenths of a second), on the forward and backward of a
    model of 8 features on the CPU. It is the host's time; what of it hides behind a GPU's see
    `lowtide.run.limit.hidden_costs`.
    """
    in_cpp = compiled() is not None
    with builds_paused():
        return _measured(in_cpp)


@lru_cache(maxsize=2)
def _measured(in_cpp: bool) -> Overhead:
    with private.without_fake_mode(), alone(), torch.enable_grad(), torch.random.fork_rng(devices=[]):
        weights = [torch.full((8, 8), 0.1, requires_grad=True) for _ in range(_LAYERS)]
        x = torch.full((2, 2, 8), 0.5)
        streamed = np.zeros(_STREAMED, dtype=np.float32)

        def stream(_: Any = None) -> None:
            np.add(streamed, 1, out=streamed)

        def cold(made: torch.Tensor) -> torch.Tensor:
            stream()
            if made.requires_grad:
                made.register_hook(stream)
            return made

        def forward(cold: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
            h = cold(x)
            for weight in weights:
                heads = (
                    cold(functional.linear(cold(functional.layer_norm(h, (8,))), weight))
                    .view(2, 2, 2, 4)
                    .transpose(1, 2)
                )
                h = cold(h + cold(cold(functional.gelu(cold(heads * 0.5))).transpose(1, 2).reshape(2, 2, 8)))
            return h.sum()

        def seconds(around: AbstractContextManager[Any]) -> float:
            begin = time.thread_time()
            with around:
                loss = forward(cold)
            torch.autograd.grad(loss, weights)
            return time.thread_time() - begin

        def kernels_alone() -> float:
            begin = time.thread_time()
            forward(lambda made: made)
            return time.thread_time() - begin

        names = _Names()
        seconds(names)

        def under(replayed: bool) -> AbstractContextManager[Any]:
            return Recorder(PlanDirector(programs[replayed]), program=known[replayed]).recording()

        programs = [
            tuple(ProgramStep(name, again, (not again,) * count) for name, count in names.found)
            for again in (False, True)
        ]
        known = [compiled_program(steps) if in_cpp else None for steps in programs]
        plain, passing, replaying, kernels = [], [], [], []
        for _ in range(_ROUNDS):
            plain.append(seconds(nullcontext()))
            kernels.append(kernels_alone())
            passing.append(seconds(under(False)))
            replaying.append(seconds(under(True)))
    count = _LAYERS * _OPERATIONS_OF_A_LAYER
    base, idle = min(plain), min(passing)
    again = min(replaying) - idle - min(kernels)
    return Overhead(max(0.0, idle - base) / count, max(0.0, again) / count)
