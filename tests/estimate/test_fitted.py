"""What is fitted to published runs: where it comes from, and that files and docs say the same."""

from __future__ import annotations

import json

import pytest
from published_runs import check_speed, name

from benchmarks import estimate_published as published
from lowtide.estimate.devices import DEVICES
from lowtide.estimate.fitted import fitted
from lowtide.estimate.speed import efficiencies


@pytest.mark.parametrize("run", published.read("2205.05198"), ids=name)
def test_iteration_times_of_the_paper(run: published.Run) -> None:
    """Table 5: all eight within 15 %, four of which are fitted to."""
    check_speed(run, ())


def test_the_paper_s_gain() -> None:
    """Table 5: what sequence parallelism and selective recomputation gain together, within 18 points."""
    runs = published.read("2205.05198")
    for full, fast in zip(runs[::2], runs[1::2], strict=True):
        assert full.tokens_per_second and fast.tokens_per_second
        told = fast.tokens_per_second / full.tokens_per_second
        assert fast.predicted_speed() / full.predicted_speed() == pytest.approx(told, abs=0.18)


def test_every_device_has_efficiencies() -> None:
    for kind in DEVICES.values():
        known = efficiencies()[kind.measured]
        assert 0 < known.attention < known.products < 1


def test_the_result_file_and_the_docs_are_of_these_efficiencies() -> None:
    data = json.loads((published.ROOT / "benchmarks" / "results" / "estimate_published.json").read_text())
    runs = [run for source in published.SOURCES for run in published.read(source)]
    assert data["rows"] == published.rows(runs)
    assert data["efficiencies"] == fitted()
    text = published.DOCS.read_text(encoding="utf-8")
    for cells in (*published.summary(data["rows"]), *published.misses(data["rows"])):
        assert f"| {' | '.join(cells)} |" in text


def test_what_is_reserved_beside_what_is_allocated() -> None:
    """nanotron's runs print both: those that nothing was fitted to are within 5 %."""
    import csv

    share = 1 + fitted()["reserved"]["plain"]
    with open(published.PUBLISHED / "reserved_nanotron.csv", encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["use"] == "test"]
    assert len(rows) >= 4
    for row in rows:
        assert float(row["allocated_mib"]) * share == pytest.approx(float(row["reserved_mib"]), rel=0.05), row


@pytest.mark.slow
def test_the_fit_gives_these_efficiencies() -> None:
    runs = [run for source in published.SOURCES for run in published.read(source)]
    found = published.fit(runs, sorted(efficiencies()))
    for device, known in efficiencies().items():
        for part in known.__slots__:
            assert getattr(found[device], part) == pytest.approx(getattr(known, part), rel=0.01, abs=1e-3), (
                part
            )
