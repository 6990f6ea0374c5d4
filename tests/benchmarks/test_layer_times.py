"""The benchmark of the 22B model's layer runs, and what its layers keep is table 2 of arXiv 2205.05198 for a
rank of eight.
"""

from __future__ import annotations

import pytest
import torch
from benchmarks.layer_times import RANKS, Shape, layer_rows

from benchmarks import layer_times
from lowtide import meter

SHAPE = Shape(width=64, heads=8, sequence=32, batch=2, dtype=torch.bfloat16)
SCALARS = 8 + 2
"""The factor of the scores, which autograd keeps as a double, and the loss in bfloat16."""


@pytest.mark.skipif(not meter.available(), reason="needs a C++ compiler for the counting allocator")
def test_what_each_layer_keeps_is_the_formula() -> None:
    rows = {row["layer"]: row for row in layer_rows(SHAPE, "cpu", 0.0, least=2)}
    assert list(rows) == ["plain", "full", "selective", "torch.utils.checkpoint"]
    sbh = SHAPE.sequence * SHAPE.batch * SHAPE.width
    core = 5 * SHAPE.heads * SHAPE.sequence / SHAPE.width
    norms = 2 * 2 * SHAPE.sequence * SHAPE.batch * SHAPE.dtype.itemsize
    assert rows["plain"]["held_bytes"] == sbh * (10 + 24 / RANKS + core / RANKS) + norms + SCALARS
    assert rows["selective"]["held_bytes"] == sbh * (10 + 24 / RANKS) + norms + SCALARS
    assert rows["full"]["held_bytes"] == sbh * 2 + SCALARS
    for row in rows.values():
        assert row["rounds"] == 2 and row["forward_seconds"] > 0 and row["backward_seconds"] > 0
    assert rows["plain"]["extra"] == 0


def test_a_run_for_the_smoke_writes_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shapes: list[Shape] = []

    def rows(shape: Shape, device: str, seconds: float, least: int = 11) -> list[dict[str, str]]:
        shapes.append(shape)
        return [{"layer": f"{device} {seconds} {least}"}]

    saved: list[str] = []
    monkeypatch.setattr(layer_times, "layer_rows", rows)
    monkeypatch.setattr(layer_times, "save", lambda name, *_, **__: saved.append(name))
    layer_times.main(smoke=True)
    assert shapes == [layer_times.SMOKE] and not saved and "0.0 2" in capsys.readouterr().out
    layer_times.main()
    assert len(saved) == 1 and saved[0].startswith("layer_times_")
