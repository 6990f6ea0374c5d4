"""Every test that starts ranks has a twin over NCCL, in which each rank computes on a card of its own; what
holds for collectives on cards alone.
"""

from __future__ import annotations

import ast
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import BACKEND, backends, on_each_backend, on_ranks, seeded

from lowtide.parallel import collectives
from lowtide.parallel.collectives import Pending

TESTS = Path(__file__).parents[1]

THEIR_OWN = {
    "integrations/test_lightning.py": "Lightning starts them",
}
"""Files that start ranks in another way, too, and why."""


def test_whoever_starts_ranks_has_a_twin() -> None:
    without, others = [], set[str]()
    for file in TESTS.rglob("*.py"):
        name, text = str(file.relative_to(TESTS)), file.read_text()
        calls = {
            node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.Call)
        }
        if "on_ranks" in calls and "on_each_backend" not in text:
            without.append(name)
        if "start_processes" in calls and name != "parallel/ranks.py":
            others.add(name)
    assert not without
    assert others == set(THEIR_OWN)


def where() -> tuple[str, int, str, int]:
    """Where a rank makes tensors, modules and random numbers."""
    made = torch.randn(3, generator=seeded(1)), *torch.nn.Linear(2, 2).parameters()
    (place,) = {tensor.device for tensor in made}
    dist.all_reduce(total := torch.ones(1))
    return place.type, place.index or 0, dist.get_backend_config(), int(total)


@on_each_backend
def test_each_rank_computes_on_a_device_of_its_own(group_backend: str) -> None:
    kind, over = ("cuda", "nccl") if group_backend == "nccl" else ("cpu", "gloo")
    found = on_ranks(2, where)
    assert [one[:2] for one in found] == [(kind, rank * (kind == "cuda")) for rank in range(2)]
    assert all(f"{kind}:{over}" in one[2] for one in found)
    assert [one[3] for one in found] == [2, 2]


def test_too_few_cards_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [one.values for one in backends()] == [("gloo",), ("nccl",)]
    monkeypatch.setenv(BACKEND, "nccl")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(pytest.skip.Exception, match="a card for each of 2 ranks, and there are 1"):
        on_ranks(2, where)


def test_collectives_that_may_start_late_are_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product that is launched behind one may take the whole card before it begins."""
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (9, 0))
    on_card: Any = SimpleNamespace(device=torch.device("cuda", 0))
    for given, times in (("1", 0), ("8", 1), (None, 1)):
        if given is None:
            monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS")
        else:
            monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", given)
        collectives._tell_of_queues.cache_clear()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            Pending(torch.ones(1))
            Pending(on_card, running=False)
            assert not told
            Pending(on_card)
            Pending(on_card)
        assert ["MAX_CONNECTIONS=1" in str(one.message) for one in told] == [True] * times
    collectives._tell_of_queues.cache_clear()
