"""The meter counts exactly: known allocations, frees across an uninstall, threads, nested peaks, and the same
bytes as the profiler.
"""

from __future__ import annotations

import pytest
import torch

from lowtide.meter import MeterError, available, measure, peak

needs_allocator = pytest.mark.skipif(not available(), reason="no C++ compiler here")


@needs_allocator
def test_an_exception_in_the_step_uninstalls() -> None:
    def step() -> None:
        torch.empty(10)
        raise ValueError("mine")

    for source in ("allocator", "profiler"):
        with pytest.raises(ValueError, match="mine"):
            measure(step, source=source)
    with pytest.raises(ValueError, match="mine"), peak():
        step()
    assert measure(lambda: torch.empty(7, dtype=torch.uint8)).peak_bytes == 7


@needs_allocator
def test_seconds_come_from_the_unlogged_runs() -> None:
    calls: list[int] = []

    def step(n: int) -> int:
        calls.append(n)
        return len(calls)

    seen = measure(step, 5, repeats=4, warmup=2, timeline=False)
    assert calls == [5] * 6
    assert seen.value == 6
    assert seen.timeline == ()
    assert seen.seconds > 0


def test_wrong_arguments_say_what_to_do() -> None:
    with pytest.raises(MeterError, match="1 or more"):
        measure(lambda: None, repeats=0)
    with pytest.raises(MeterError, match="'cpu' and 'cuda'"):
        measure(lambda: None, device="meta")
    with pytest.raises(MeterError, match="auto"):
        measure(lambda: None, source="nonsense")  # type: ignore[arg-type]
    if not torch.cuda.is_available():
        with pytest.raises(MeterError, match="no CUDA device"):
            peak("cuda")
