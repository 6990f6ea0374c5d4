"""A warm process neither plans nor compiles, and its handle knows the plan."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from lowtide.compiled.partitioner import Partitioner
from lowtide.compiled.stored import ANY, Shelf, Sizes, key_of
from lowtide.plan.data import Plan


@pytest.mark.parametrize("sizes", ["open", "fixed"])
def test_a_warm_process_neither_plans_nor_compiles(sizes: str, tmp_path: Path) -> None:
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    found = []
    for _ in range(2):
        ran = subprocess.run(
            [sys.executable, str(Path(__file__).parent / "step_once.py"), "90%", sizes],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert ran.returncode == 0, ran.stderr
        found.append(json.loads(ran.stdout.splitlines()[-1]))
    cold, warm = found
    assert cold["asked"] == 1 or (sizes == "fixed" and cold["asked"] == 2)  # a guess may be refused
    assert (warm["asked"], warm["hits"]) == (0, 1)
    assert cold["plan"] == warm["plan"] is not None
    assert (cold["predicted"], cold["gradient"]) == (warm["predicted"], warm["gradient"])


def plan(seconds: float) -> Plan:
    return Plan("g", "p", 7, {}, frozenset(), (), 9, 8, 1.0, seconds, 0.0, 0)


def test_plans_are_found_by_their_sizes(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path / "new")
    assert shelf.find("k", {}) == []
    one, other = plan(1.0), plan(2.0)
    shelf.keep("k", Sizes({}, {"s": 10}), [one])
    shelf.keep("k", Sizes({"s": 10}, {"s": 20}, 20), [other, one])
    assert shelf.find("k", {"s": 10}) == [one]
    assert shelf.find("k", {"s": 20}) == [other, one]
    assert shelf.find("k", {"s": 21}) == shelf.find("other", {"s": 1}) == []
    (tmp_path / "new" / "k").write_bytes(b"damaged")
    assert shelf.find("k", {"s": 10}) == []
    shelf.keep("k", ANY, [one])
    assert shelf.find("k", {}) == [one]


def test_sizes_that_two_serve() -> None:
    both = Sizes({"s": 3}, {"s": 9}) & Sizes({}, {"s": 7, "t": 5}, 30)
    assert both == Sizes({"s": 3}, {"s": 7, "t": 5}, 30)
    assert {"s": 6, "t": 5} in both and {"s": 7, "t": 5} not in both


def test_keys_tell_apart_what_plans_follow_from() -> None:
    def key(budget: str = "60%", width: int = 4, options: dict | None = None, standing: int = 0) -> str:
        module = torch.fx.symbolic_trace(nn.GELU())
        facts = Partitioner(budget, (lambda: standing), options or {}).uuid()
        return key_of(module, [torch.ones(2, width)], facts)

    keys = {key(), key("70%"), key(width=5), key(options={"max_autotune": True}), key(standing=1)}
    with torch.autocast("cpu", torch.bfloat16):
        keys.add(key())
    with torch.no_grad():
        keys.add(key())
    assert len(keys) == 7 and key() in keys
