"""A warm process neither plans nor compiles, and its handle knows the plan."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from step_once import step
from torch._inductor.utils import clear_caches as clear_inductor_caches

from lowtide.compiled.choose_cuts import ROUNDS, Asked
from lowtide.compiled.moving import Way
from lowtide.compiled.planning import Beside
from lowtide.compiled.shelf import Shelf, cache_key, facts_of, ways_in
from lowtide.plan.data import Offload, Plan
from lowtide.private import inductor

ONCE = {"TORCHINDUCTOR_VEC_ISA_OK": "0", "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0"}
"""Kernels without vectors, and headers as they are. What Inductor compiles for a new folder takes longer than
the step: ten files that ask which vectors there are, and the headers.
"""

BUDGETS = {"open": "90%", "fixed": "90%", "broken": "800KiB"}
"""Bytes, for which cuts of a recorded step are compiled before they are priced."""


@pytest.mark.parametrize("sizes", ["open", "broken", pytest.param("fixed", marks=pytest.mark.slow)])
def test_what_was_compiled_before_is_neither_planned_nor_compiled(
    sizes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dynamo forgets, as in a new process. A setting that nothing reads here makes the entry on the disk a
    new one; kernels are shared with other tests.
    """
    found = []
    folder = inductor.cache_folder
    monkeypatch.setattr(inductor, "cache_folder", lambda: folder() and tmp_path)
    with torch._inductor.config.patch({"fx_graph_cache": True, "autoheuristic_log_path": str(tmp_path)}):
        for _ in range(2):
            torch._dynamo.reset()
            clear_inductor_caches()
            found.append(step(BUDGETS[sizes], sizes))
    check(*found, sizes)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", ["open", "fixed", "broken"])
def test_a_warm_process_neither_plans_nor_compiles(sizes: str, tmp_path: Path) -> None:
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), **ONCE}
    found = []
    for _ in range(2):
        ran = subprocess.run(
            [sys.executable, str(Path(__file__).parent / "step_once.py"), BUDGETS[sizes], sizes],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert ran.returncode == 0, ran.stderr
        found.append(json.loads(ran.stdout.splitlines()[-1]))
    check(*found, sizes)


def check(cold: dict[str, Any], warm: dict[str, Any], sizes: str) -> None:
    assert 0 < cold["asked"] <= (1 if sizes == "open" else ROUNDS)  # guesses may be refused
    assert (warm["asked"], warm["hits"]) == (0, 2 if sizes == "broken" else 1)
    assert cold["timed"] and not warm["timed"]
    assert cold["at_once"] == warm["at_once"] == [sizes != "open"]  # it is part of PyTorch's key
    assert cold["plan"] == warm["plan"] is not None
    assert all(cold[one] == warm[one] for one in ("predicted", "measured", "gradient"))


def plan(seconds: float) -> Plan:
    return Plan("g", "p", 7, {}, frozenset(), (), 9, 8, 1.0, seconds, 0.0, 0)


def test_plans_and_cuts_are_found_where_a_step_takes_as_much(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path / "new")
    ways = [Way(None), Way(frozenset({"add", "mm"}), (("mm", Offload("disk", "folder")),), 9)]
    large = replace(plan(1.0), budget_bytes=1 << 20)
    for _ in range(2):
        assert ways_in(shelf.find("step"), [1000, 2000]) is None
        shelf.keep("step", facts_of(large, ways, [1000, 2000]))
        assert ways_in(shelf.find("step"), [1000, 2024]) == (large, ways)
        assert ways_in(shelf.find("step"), [1000, 20000]) is None
        assert ways_in(shelf.find("step"), [1000]) is None
        assert ways_in(shelf.find("other"), [1000, 2000]) is None
        for file in (tmp_path / "new").iterdir():
            file.write_bytes(b"damaged")


def test_keys_tell_apart_what_plans_follow_from() -> None:
    def key(budget: str = "60%", options: dict | None = None, resident: int = 0, after: int = 0) -> str:
        return cache_key(
            budget, options or {}, resident, Beside(Asked(budget), options, resident, after).facts
        )

    keys = {key(), key("70%"), key(options={"max_autotune": True}), key(resident=1), key(after=1)}
    assert len(keys) == 5 and key() in keys
