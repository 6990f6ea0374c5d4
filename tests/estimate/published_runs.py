"""A published run's figure beside ours."""

from __future__ import annotations

from collections.abc import Collection

from benchmarks.estimate_published import MEMORY_WITHIN, SPEED_WITHIN, Run, read

FARTHEST = 0.32
"""No run is predicted worse than this, the known misses included, where a source's test says no other."""


def unfitted(source: str) -> list[Run]:
    """The runs of a source that nothing was fitted to."""
    found = [run for run in read(source) if not run.fit]
    assert found
    return found


def name(run: Run) -> str:
    """The run's id."""
    return f"{run.device} {run.name}".replace(" ", "_")


def check_speed(run: Run, missed: Collection[str], farthest: float = FARTHEST) -> None:
    """Tokens a second are within 15 %, unless the run is a known miss."""
    if run.tokens_per_second is not None:
        _check(run, run.predicted_speed(), run.tokens_per_second, SPEED_WITHIN, missed, farthest)


def check_memory(run: Run, missed: Collection[str]) -> None:
    """Reserved memory is within 5 %, unless the run is a known miss."""
    if run.memory_gib is not None:
        _check(run, run.predicted_memory(), run.memory_gib, MEMORY_WITHIN, missed, FARTHEST)


def _check(
    run: Run, ours: float, published: float, within: float, missed: Collection[str], farthest: float
) -> None:
    off = ours / published - 1
    told = f"{name(run)}: {published:g} published, {ours:g} here, {100 * off:+.1f} %"
    if name(run) in missed:
        assert within < abs(off) < farthest, f"{told}: no longer a miss, or a worse one; correct the list"
    else:
        assert abs(off) <= within, told
