"""Decisions kept across runs: read back equal, written whole, bounded, and never a reason to fail."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from random_graphs import random_graph
from synthetic import transformer

import lowtide.plan
from lowtide.plan import cache as caches
from lowtide.plan.cache import Cache, Decisions, folder
from lowtide.plan.carry import CARRIED, carried
from lowtide.plan.carry import keep as keep_plan
from lowtide.plan.search.planner import planner_of
from lowtide.plan.simulate import plain


def keep(cache: Cache, graph: lowtide.StepGraph, plan: lowtide.Plan, budget: int) -> None:
    cache.keep(graph, Decisions(tuple(sorted(plan.stored)), budget, plan.plain_peak_bytes, plan.gap))


def planned(layers: int, share: float = 0.7) -> tuple[lowtide.StepGraph, lowtide.Plan, int]:
    """A step, a plan for it, and the plan's budget."""
    graph = transformer(layers)
    budget = int(plain(graph).peak_bytes * share)
    return graph, lowtide.plan.make(graph, budget), budget


def test_what_is_kept_is_read_back_by_another_process(tmp_path: Path):
    graph, plan, budget = planned(2)
    assert Cache(tmp_path).of(graph) == []
    keep(Cache(tmp_path), graph, plan, budget)
    (found,) = Cache(tmp_path).of(graph)
    assert frozenset(found.stored) == plan.stored and found.budget_bytes == budget
    assert (found.plain_peak_bytes, found.gap) == (plan.plain_peak_bytes, plan.gap)
    assert Cache(None).of(graph) == [] == Cache(tmp_path).of(transformer(3))


def test_the_newest_come_first_and_one_for_each_budget_stays(tmp_path: Path):
    graph, plan, budget = planned(2)
    cache = Cache(tmp_path)
    for more in (*range(20), 5):
        keep(cache, graph, plan, budget + more)
    kept = [one.budget_bytes - budget for one in Cache(tmp_path).of(graph)]
    assert kept == [5, 19, 18, 17, 16, 15, 14, 13]


def test_digests_tell_programs_apart_and_not_their_sizes_and_times():
    graph = random_graph(3)
    larger = tuple(replace(s, bytes=2 * s.bytes) for s in graph.storages)
    other = replace(graph, plain_seconds=9.0, storages=larger)
    assert graph.fingerprint(sizes=False) == other.fingerprint(sizes=False)
    operations = (replace(graph.operations[0], name="another"), *graph.operations[1:])
    others = [replace(graph, operations=operations), random_graph(4)]
    assert len({g.fingerprint(sizes=False) for g in (graph, *others)}) == 3


def test_digests_are_the_same_in_every_process():
    code = "from synthetic import transformer; print(transformer(1).fingerprint(sizes=False))"
    told = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert told.stdout.strip() == transformer(1).fingerprint(sizes=False)


@pytest.mark.parametrize(
    "damage", ["", "[", "{}", "7", "[7]", '[{"stored": [1]}]', None, "stored", "gap", "\udcff"]
)
def test_what_is_damaged_is_as_good_as_nothing(tmp_path: Path, damage: str | None):
    graph, plan, budget = planned(1)
    keep(Cache(tmp_path), graph, plan, budget)
    (path,) = tmp_path.iterdir()
    whole = path.read_text()
    if damage == "stored":
        damage = whole.replace('"stored":[', '"stored":["x",')
    elif damage == "gap":
        damage = whole.replace('"gap":', '"gap":"x","more":')
    path.write_bytes(
        (whole[: len(whole) // 2] if damage is None else damage).encode(errors="surrogateescape")
    )
    assert Cache(tmp_path).of(graph) == []
    keep(Cache(tmp_path), graph, plan, budget)
    assert len(Cache(tmp_path).of(graph)) == 1


def test_a_folder_that_cannot_be_written_is_as_good_as_none(tmp_path: Path):
    graph, plan, budget = planned(1)
    place = tmp_path / "a file"
    place.write_text("")
    for root in (place, place / "below"):
        cache = Cache(root)
        keep(cache, graph, plan, budget)
        assert len(cache.of(graph)) == 1 and Cache(root).of(graph) == []


def test_a_full_disk_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    graph, plan, budget = planned(1)
    keep(Cache(tmp_path), graph, plan, budget)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(caches.os, "replace", full)
    keep(Cache(tmp_path), graph, plan, budget + 1)
    assert [one.budget_bytes for one in Cache(tmp_path).of(graph)] == [budget]
    assert len(list(tmp_path.iterdir())) == 1


def test_processes_that_write_at_once_leave_a_whole_file(tmp_path: Path):
    graph, plan, budget = planned(1)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda k: keep(Cache(tmp_path), graph, plan, budget + k), range(40)))
    assert Cache(tmp_path).of(graph)
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"]


def test_the_least_recently_used_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(caches, "_MOST_FILES", 2)
    graphs = [planned(layers) for layers in (1, 2, 3)]
    for age, (graph, plan, budget) in enumerate(graphs[:2]):
        keep(Cache(tmp_path), graph, plan, budget)
        os.utime(tmp_path / f"{graph.fingerprint(sizes=False)}.json", (1000 + age, 1000 + age))
    assert Cache(tmp_path).of(graphs[0][0])  # used, so it is young again
    keep(Cache(tmp_path), *graphs[2])
    assert [bool(Cache(tmp_path).of(graph)) for graph, _, _ in graphs] == [True, False, True]


def test_it_is_turned_off(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("LOWTIDE_CACHE", raising=False)
    assert folder() == tmp_path / "lowtide" / "plans"
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path / "here"))
    assert folder() == tmp_path / "here" / "plans"
    monkeypatch.setenv("LOWTIDE_CACHE", "off")
    assert folder() is None


# ---- beginning from what is known ----------------------------------------------------------------


def known_of(graph: lowtide.StepGraph, plan: lowtide.Plan, budget: int) -> Cache:
    cache = Cache(None)
    keep_plan(cache, graph, plan, budget)
    return cache


def test_a_plan_that_is_known_is_found_without_a_search():
    graph, plan, budget = planned(4)
    cache = known_of(graph, plan, budget)
    planner_of.cache_clear()
    found = carried(graph, budget, cache.of(graph), budget)
    assert found is not None and found.predicted_peak_bytes <= budget and CARRIED in found.notes
    assert found.predicted_extra_seconds <= plan.predicted_extra_seconds + 1e-9
    assert found.bound_extra_seconds > 0 and found.gap <= cache.of(graph)[0].gap + 0.005
    assert not {"paths", "smallest"} & vars(planner_of(graph)).keys()


def test_decisions_for_another_size_are_made_to_fit():
    graph, plan, budget = planned(4)
    larger = replace(graph, storages=tuple(replace(s, bytes=s.bytes * 102 // 100) for s in graph.storages))
    planner = planner_of(larger)
    assert planner.search.candidate(plan.stored).simulation.peak_bytes > budget
    found = planner.begun([plan.stored], budget, good=1.0)
    assert found is not None and found.simulation.peak_bytes <= budget
    assert planner.begun([plan.stored], plain(graph).peak_bytes // 4, good=1.0) is None


def test_decisions_that_are_far_from_the_best_are_not_taken():
    graph, _, budget = planned(4)
    poor = lowtide.plan.make(graph, None, "full")
    assert poor.predicted_peak_bytes <= budget
    cache = known_of(graph, poor, budget - 1)
    found = carried(graph, budget, cache.of(graph), budget)
    assert found is None or found.gap <= 0.0025


def test_nonsense_is_survived():
    graph, _, budget = planned(2)
    nonsense = [
        Decisions(stored, budget, 0, gap)
        for stored, gap in (((), 9.0), ((-1, 10**9), 0.0), (tuple(range(len(graph.values))), float("nan")))
    ]
    found = carried(graph, budget, nonsense, budget)
    assert found is None or (found.predicted_peak_bytes <= budget and found.gap <= 0.0025)
