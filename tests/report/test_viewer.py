"""The trace in the form of PyTorch's memory viewer: its own functions read it, and it has the plan's peak."""

from __future__ import annotations

import importlib
import pickle
from pathlib import Path
from typing import Any

import pytest

from lowtide.report import Report, save_report
from lowtide.report.viewer import snapshot

viz = importlib.import_module("torch.cuda._memory_viz")


@pytest.fixture(scope="module")
def data(report: Report, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    file: Path = tmp_path_factory.mktemp("viewer") / "step.pickle"
    save_report(report, file)
    return pickle.loads(file.read_bytes())


def test_the_viewers_own_functions_read_it(data: dict[str, Any]) -> None:
    told = viz.trace(data)
    assert f"{len(data['device_traces'][0])} entries" in told
    assert "Active Memory Timeline" in viz.trace_plot(data)


def test_its_highest_point_is_the_plans_peak(data: dict[str, Any], report: Report) -> None:
    live = most = 0
    for entry in data["device_traces"][0]:
        if entry["action"] in ("alloc", "free_completed"):
            live += entry["size"] if entry["action"] == "alloc" else -entry["size"]
            most = max(most, live)
    assert most == report.summary["predicted_peak_bytes"]


def test_what_is_freed_was_allocated_at_its_own_address(data: dict[str, Any]) -> None:
    alive, seen = dict[int, int](), set[int]()
    for entry in data["device_traces"][0]:
        if entry["action"] == "free_completed":
            assert alive.pop(entry["addr"]) == entry["size"]
        elif entry["action"] == "alloc":
            assert entry["addr"] not in seen
            seen.add(entry["addr"])
            alive[entry["addr"]] = entry["size"]


def test_stacks_say_who_and_where(report: Report) -> None:
    (trace,) = snapshot(report.plain)["device_traces"]
    found = {
        tuple(frame["name"] for frame in entry["frames"]) for entry in trace if entry["action"] == "alloc"
    }
    assert ("aten.addmm", "h.2.mlp.act", "activation") in {(a, b, c.split(",")[0]) for a, b, c in found}
    assert {"parameter", "activation", "gradient", "temporary"} <= {e.get("category") for e in trace}
