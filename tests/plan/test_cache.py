"""Decisions kept across runs: read back equal, written whole, bounded, and never a reason to fail."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from synthetic import transformer

import lowtide.plan
from lowtide.plan import cache as caches
from lowtide.plan.cache import Cache, folder
from lowtide.plan.simulate import plain


def planned(layers: int, share: float = 0.7) -> tuple[lowtide.StepGraph, lowtide.Plan, int]:
    """A step, a plan for it, and the plan's budget."""
    graph = transformer(layers)
    budget = int(plain(graph).peak_bytes * share)
    return graph, lowtide.plan.make(graph, budget), budget


def test_what_is_kept_is_read_back_for_the_same_step_and_budget(tmp_path: Path):
    graph, plan, budget = planned(2)
    assert Cache(tmp_path).of(graph, budget) == []
    Cache(tmp_path).keep(graph, budget, plan.stored)
    timed = replace(graph, plain_seconds=9.0)
    assert (
        Cache(tmp_path).of(timed, budget)
        == [plan.stored]
        == Cache(tmp_path).of(graph, budget + budget // 2000)
    )
    larger = replace(graph, storages=tuple(replace(s, bytes=2 * s.bytes) for s in graph.storages))
    for other, room in ((larger, budget), (graph, budget + budget // 500), (transformer(3), budget)):
        assert Cache(tmp_path).of(other, room) == []
    Cache(None).keep(graph, budget, plan.stored)
    assert Cache(None).of(graph, budget) == []


def test_the_newest_come_first_and_one_for_each_budget_stays(tmp_path: Path):
    graph, _, budget = planned(2)
    for more in (*range(20), 5):
        Cache(tmp_path).keep(graph, budget + more, frozenset([more]))
    assert [set(one) for one in Cache(tmp_path).of(graph, budget)] == [
        {k} for k in (5, 19, 18, 17, 16, 15, 14, 13)
    ]


def test_values_that_the_step_has_not_are_left_out(tmp_path: Path):
    graph, plan, budget = planned(1)
    Cache(tmp_path).keep(graph, budget, plan.stored | {-1, 10**9})
    assert Cache(tmp_path).of(graph, budget) == [plan.stored]


@pytest.mark.parametrize("damage", ["", "[", "{}", "7", "[7]", '[[["x"],7]]', '[[[1],"x"]]', None, "\udcff"])
def test_what_is_damaged_is_as_good_as_nothing(tmp_path: Path, damage: str | None):
    graph, plan, budget = planned(1)
    Cache(tmp_path).keep(graph, budget, plan.stored)
    (path,) = tmp_path.iterdir()
    whole = path.read_text()
    path.write_bytes(
        (whole[: len(whole) // 2] if damage is None else damage).encode(errors="surrogateescape")
    )
    assert Cache(tmp_path).of(graph, budget) == []
    Cache(tmp_path).keep(graph, budget, plan.stored)
    assert len(Cache(tmp_path).of(graph, budget)) == 1


def test_a_folder_that_cannot_be_written_is_as_good_as_none(tmp_path: Path):
    graph, plan, budget = planned(1)
    place = tmp_path / "a file"
    place.write_text("")
    for root in (place, place / "below"):
        Cache(root).keep(graph, budget, plan.stored)
        assert Cache(root).of(graph, budget) == []


def test_a_full_disk_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    graph, plan, budget = planned(1)
    Cache(tmp_path).keep(graph, budget, plan.stored)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(caches.os, "replace", full)
    Cache(tmp_path).keep(graph, budget + 1, frozenset())
    assert Cache(tmp_path).of(graph, budget) == [plan.stored]
    assert len(list(tmp_path.iterdir())) == 1


def test_processes_that_write_at_once_leave_a_whole_file(tmp_path: Path):
    graph, plan, budget = planned(1)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda k: Cache(tmp_path).keep(graph, budget + k, plan.stored), range(40)))
    assert Cache(tmp_path).of(graph, budget)
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"]


def test_the_least_recently_used_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(caches, "_MOST_FILES", 2)
    steps = [planned(layers) for layers in (1, 2, 3)]
    for age, (graph, plan, budget) in enumerate(steps[:2]):
        before = set(tmp_path.iterdir())
        Cache(tmp_path).keep(graph, budget, plan.stored)
        (path,) = set(tmp_path.iterdir()) - before
        os.utime(path, (1000 + age, 1000 + age))
    assert Cache(tmp_path).of(steps[0][0], steps[0][2])  # used, so it is young again
    Cache(tmp_path).keep(steps[2][0], steps[2][2], steps[2][1].stored)
    assert [bool(Cache(tmp_path).of(graph, budget)) for graph, _, budget in steps] == [True, False, True]


def test_it_is_turned_off(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("LOWTIDE_CACHE", raising=False)
    assert folder() == tmp_path / "lowtide" / "plans"
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path / "here"))
    assert folder() == tmp_path / "here"
    monkeypatch.setenv("LOWTIDE_CACHE", "off")
    assert folder() is None
