"""Which options go together."""

from __future__ import annotations

from typing import Any, Literal

from lowtide.errors import expect, is_count
from lowtide.optim.errors import OptimError
from lowtide.optim.placed import PlacedOptimizer


def fraction_of(given: Any) -> float | Literal["auto"]:
    """A share from 0 to 1, or ``"auto"``.

    Raises:
        OptimError: it is neither.

    >>> fraction_of(1), fraction_of("auto")
    (1.0, 'auto')
    """
    if given == "auto":
        return "auto"
    if isinstance(given, bool) or not isinstance(given, int | float) or not 0 <= given <= 1:
        raise OptimError(
            f"host_fraction={given!r}: a number from 0 (all on the device) to 1 (all on the host), or "
            "'auto', is needed"
        )
    return float(given)


def check_modes(optimizer: PlacedOptimizer, host: str, device_budget: Any, chunk_bytes: int) -> None:
    """Refuse options that cannot take effect, alone or together.

    Raises:
        OptimError: with the way out.
    """
    if host not in ("auto", "memory", "disk"):
        raise OptimError(f"host={host!r} is not known: use 'memory', 'disk', or 'auto'")
    if device_budget is not None and optimizer.host_fraction != "auto":
        raise OptimError(
            f"device_budget= is for host_fraction='auto', not {optimizer.host_fraction}: give one of the two"
        )
    if optimizer.overlap_update and not optimizer.stream_gradients:
        raise OptimError(
            "overlap_update=True updates as gradients arrive, which they do only with stream_gradients=True"
        )
    if optimizer.overlap_update and optimizer.delayed:
        raise OptimError(
            "overlap_update and delayed exclude each other: the first is done before step() returns, the "
            "second after"
        )
    if optimizer.reversible and optimizer.delayed:
        raise OptimError(
            "reversible and delayed exclude each other: a delayed update is under way when rollback() would "
            "undo it"
        )
    delay = optimizer.delay_after
    expect(is_count(delay), "HostOptimizer(delay_after=)", delay, "a number of steps, 0 or more", OptimError)
    whole = is_count(chunk_bytes, 4096)
    expect(whole, "HostOptimizer(chunk_bytes=)", chunk_bytes, "a whole number, 4096 or more", OptimError)
