"""A device as three numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from call_specs import aten

from lowtide import accelerator
from lowtide.trace.costs import roofline
from lowtide.trace.costs.roofline import calibrate


def test_a_roofline_takes_a_quarter_of_what_an_accelerator_has_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card that the model nearly fills has room for its measurement, too; no other card is asked."""
    taken: list[tuple[torch.device, int]] = []
    for name, found in {"is_present": True, "free_bytes": 30 << 20, "unused_bytes": 2 << 20}.items():
        monkeypatch.setattr(accelerator, name, lambda *_, found=found: found)
    monkeypatch.setattr(
        "lowtide.trace.costs.roofline._calibrate", lambda *given: taken.append((given[0], 2 * given[-1]))
    )
    calibrate("cuda:1")
    calibrate("cuda:1", memory_limit_bytes=3 << 20)
    monkeypatch.setattr(accelerator, "free_bytes", lambda _: 80 << 30)
    calibrate("cuda:1")
    assert taken == [(torch.device("cuda:1"), count << 20) for count in (8, 2, 256)]


def test_calibration_is_sensible_and_cached() -> None:
    line = calibrate()
    assert 1e8 < line.flops_per_second < 1e15
    assert 1e8 < line.bytes_per_second < 1e13
    assert 0 < line.overhead_seconds < 1
    assert calibrate() is line


@pytest.mark.parametrize(("rate", "largest"), [(1e15, 4096), (2e12, 2048), (3e9, 512)])
def test_a_slow_devices_product_is_a_small_one(
    rate: float, largest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """4096 squared in double precision takes a gaming card a second, and a stand-in five."""
    sides: list[int] = []

    class Timed:
        def __init__(self, _: object) -> None: ...

        def time(self, call: Any) -> tuple[None, Callable[[], float]]:
            side = call.args[0].shape[0] if call.func is aten.mm.default else 0
            sides.append(side)
            return None, lambda: 1e-6 + 2 * side**3 / rate

    monkeypatch.setattr(roofline, "Clock", Timed)
    monkeypatch.setattr(roofline, "_SIDE", {"cpu": 4096})
    found = roofline._calibrate.__wrapped__(torch.device("cpu"), torch.float32, 1, 1 << 10)
    assert max(sides) == largest
    assert found.flops_per_second == pytest.approx(rate, rel=0.2)
