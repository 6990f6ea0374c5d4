"""What is kept across runs: read back equal, written whole, bounded, and never a reason to fail."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from random_graphs import random_graph
from synthetic import transformer

import lowtide.plan
from lowtide.plan.cache import Cache, folder, graph_digest, machine_key, stable_key
from lowtide.plan.simulate import plain


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cache:
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path / "kept"))
    return Cache.open()


def test_what_is_kept_is_read_back(cache: Cache):
    graph = transformer(2)
    plan = lowtide.plan.make(graph, "80%")
    digest = graph_digest(graph)
    assert cache.graph("it") is cache.costs("it") is cache.plan(digest, plan.budget_bytes, "optimal") is None
    cache.keep_graph("it", graph)
    cache.keep_plan(digest, plan.budget_bytes, "optimal", plan)
    cache.keep_costs("it", {"a": {"seconds": 0.1, "scratch_bytes": 4}})
    cache.keep_costs("it", {"b": {"seconds": 0.2, "scratch_bytes": 0}})
    again = Cache.open()
    assert again.graph("it") == graph
    assert again.plan(digest, plan.budget_bytes, "optimal") == plan
    assert again.costs("it") == {
        "a": {"seconds": 0.1, "scratch_bytes": 4},
        "b": {"seconds": 0.2, "scratch_bytes": 0},
    }


def test_another_machine_budget_policy_or_step_finds_nothing(cache: Cache):
    graph = transformer(2)
    plan = lowtide.plan.make(graph, None, "full")
    digest = graph_digest(graph)
    cache.keep_plan(digest, None, "full", plan)
    assert cache.plan(digest, None, "full") == plan
    assert (
        cache.plan(digest, 7, "full")
        is cache.plan(digest, None, "sqrt")
        is cache.plan(digest + "0", None, "full")
        is None
    )
    assert Cache.open("2 threads").plan(digest, None, "full") is None


def test_digests_tell_steps_apart_and_not_their_times():
    graph = random_graph(3)
    assert graph_digest(graph) == graph_digest(replace(graph, plain_seconds=9.0))
    operations = (replace(graph.operations[0], scratch_bytes=12345), *graph.operations[1:])
    others = [
        replace(graph, resident_bytes=1),
        replace(graph, operations=operations),
        replace(graph, outputs=(0,)),
        random_graph(4),
    ]
    assert len({graph_digest(g) for g in (graph, *others)}) == 5


def test_digests_are_the_same_in_every_process():
    code = (
        "from lowtide.plan.cache import stable_key, machine_key; print(stable_key('mm', (1, 2.5), True), "
        "machine_key(2))"
    )
    for seed in ("1", "2"):
        told = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        )
        assert told.stdout.split() == [stable_key("mm", (1, 2.5), True), machine_key(2)]


@pytest.mark.parametrize("damage", [b"", b"no gzip", None])
def test_what_is_damaged_is_ignored_and_said(
    cache: Cache, damage: bytes | None, caplog: pytest.LogCaptureFixture
):
    cache.keep_graph("it", transformer(1))
    assert cache.root is not None
    (path,) = cache.root.iterdir()
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2] if damage is None else damage)
    with caplog.at_level(logging.WARNING, "lowtide.plan.cache"):
        assert cache.graph("it") is None
    assert "cannot be read" in caplog.text
    cache.keep_graph("it", transformer(1))
    assert cache.graph("it") == transformer(1)


def test_a_file_under_another_name_is_not_believed(cache: Cache):
    cache.keep_costs("a", {"x": {"seconds": 1.0}})
    (one,) = cache.root.iterdir()  # type: ignore[union-attr]
    cache.keep_costs("b", {"x": {"seconds": 2.0}})
    (other,) = set(cache.root.iterdir()) - {one}  # type: ignore[union-attr]
    os.replace(one, other)
    assert cache.costs("b") is None


def test_the_least_recently_used_go(cache: Cache):
    assert cache.root is not None
    cache.keep_graph("0", transformer(1))
    (first,) = cache.root.iterdir()
    small = replace(cache, most_bytes=int(2.5 * first.stat().st_size))
    for k in range(1, 4):
        small.keep_graph(str(k), transformer(1))
        for age, path in enumerate(sorted(cache.root.iterdir(), key=lambda p: -p.stat().st_mtime_ns)):
            os.utime(path, ns=((10 - age) * 10**9, (10 - age) * 10**9))
        assert small.graph("1") is not None  # used, so it is young again
    assert [k for k in range(4) if small.graph(str(k)) is not None] == [1, 3]
    tiny = replace(cache, most_bytes=1)
    tiny.keep_graph("4", transformer(1))
    assert len(list(cache.root.iterdir())) == 1 and tiny.graph("4") is not None


def test_it_is_turned_off(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("LOWTIDE_CACHE", raising=False)
    assert folder() == tmp_path / "lowtide" / "plans"
    monkeypatch.setenv("LOWTIDE_CACHE", "off")
    cache = Cache.open()
    cache.keep_costs("it", {"a": {}})
    assert cache.costs("it") is None and not list(tmp_path.iterdir())


def test_a_folder_that_others_may_write_to_is_not_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    place = tmp_path / "shared"
    place.mkdir()
    place.chmod(0o777)
    monkeypatch.setenv("LOWTIDE_CACHE", str(place))
    with caplog.at_level(logging.WARNING, "lowtide.plan.cache"):
        assert Cache.open().root is None
    assert "off" in caplog.text


def test_costs_are_plain_fields():
    from lowtide.trace.specs import OpCost

    cost = OpCost(0.5, 3, "scaled", "aten.mm.default", 10, 20)
    assert OpCost(**asdict(cost)) == cost


def test_a_cached_plan_is_as_good(cache: Cache):
    graph = transformer(2)
    plan = lowtide.plan.make(graph, None)
    cache.keep_plan(graph_digest(graph), None, "optimal", plan)
    found = cache.plan(graph_digest(graph), None, "optimal")
    assert found is not None and found.graph == graph.fingerprint()
    assert found.predicted_peak_bytes < plain(graph).peak_bytes
