"""A published run's figure beside ours."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.estimate_published import MEMORY_WITHIN, SPEED_WITHIN, Run, read


def unfitted(source: str) -> list[Run]:
    """The runs of a source that nothing was fitted to."""
    found = [run for run in read(source) if not run.fit]
    assert found
    return found


def name(run: Run) -> str:
    """The run's id."""
    return f"{run.device} {run.name}".replace(" ", "_")


def check_speed(run: Run, missed: Mapping[str, int]) -> None:
    """Tokens a second are within 15 %, or as many percent off as a known miss is."""
    if run.tokens_per_second is not None:
        _check(run, run.predicted_speed(), run.tokens_per_second, SPEED_WITHIN, missed)


def check_memory(run: Run, missed: Mapping[str, int]) -> None:
    """Memory is within 5 %, or as many percent off as a known miss is."""
    if run.memory_gib is not None:
        _check(run, run.predicted_memory(), run.memory_gib, MEMORY_WITHIN, missed)


def _check(run: Run, ours: float, published: float, within: float, missed: Mapping[str, int]) -> None:
    off = ours / published - 1
    told = f"{name(run)}: {published:g} published, {ours:g} here, {100 * off:+.1f} %"
    if name(run) in missed:
        assert within < abs(off), f"{told}: no longer a miss; take it off the list"
        assert abs(100 * off - missed[name(run)]) < 1, f"{told}: another miss than {missed[name(run)]:+d} %"
    else:
        assert abs(off) <= within, told
