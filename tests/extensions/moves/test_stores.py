"""Sharded checkpoints on two and four Gloo processes: the bytes of each rank, the collectives, the same
gradients, and what is refused.
"""

from __future__ import annotations

import os
import random
import signal
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from faults import before_each, gathered
from ranks import on_each_backend, on_ranks, seeded
from torch import nn

import lowtide
from lowtide import meter, policies
from lowtide.errors import PlanError
from lowtide.extensions.moves.store import stores
from lowtide.extensions.moves.store.host import Host
from lowtide.extensions.moves.store.stores import Stores
from lowtide.extensions.moves.store.tier import Tier
from lowtide.plan.data import Link, Shard, form_and_tier
from lowtide.plan.data.decisions import TIERS

pytestmark = on_each_backend
ROWS, WIDTH, LAYERS = 33, 21, 3  # 693 elements: neither two nor four divide them


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = (
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.Linear(4 * WIDTH, WIDTH),
            nn.Dropout(0.1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(torch.nn.functional.gelu(self.up(x))))


class Net(nn.Module):
    """Blocks and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.h = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.h:
            x = block(x)
        return x.square().mean()


def step(model: nn.Module, x: torch.Tensor, seed: int) -> list[torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(seed)
    loss = model(x)
    loss.backward()
    return [loss.detach().clone(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def run_case(
    group: dist.ProcessGroup, size: int, then: lowtide.Offload | None, values: str
) -> dict[str, Any]:
    torch.manual_seed(0)
    plain = Net()
    torch.manual_seed(0)
    limited = Net()
    x = torch.randn(ROWS, WIDTH, generator=seeded(1))
    untouched = x.clone()
    stores = lowtide.Stores(groups={"tp": group})
    policy = policies.partition("tp", size, values=values, min_bytes=1, then=then)
    handle = lowtide.limit_memory(limited, policy=policy, stores=stores)
    same, slabs = True, set[Any]()
    for seed in range(3):
        same &= all(
            torch.equal(a, b) for a, b in zip(step(plain, x, seed), step(limited, x, seed), strict=True)
        )
        slabs.add(stores.slab)
    plan = handle.plan
    assert plan is not None
    limited.zero_grad(set_to_none=True)
    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as patch:
        sizes = gathered(patch)
        measured = meter.measure(lambda: limited(x).backward(), timeline=False)
    gradients = sum(p.numel() * p.element_size() for p in limited.parameters())
    resident = meter.resident_bytes(limited) - gradients + x.nbytes + plan.slab_bytes
    return {
        "same": same and torch.equal(x, untouched),
        "whole": [m.bytes for m in plan.moves],
        "part": [m.encoded_bytes for m in plan.moves],
        "sharded": all(isinstance(form_and_tier(m.decision)[0], Shard) for m in plan.moves),
        "gathers": len(sizes),
        "peak": resident + measured.peak_bytes,
        "predicted": plan.predicted_peak_bytes,
        "left": [t.arena.taken_bytes for t in stores.tiers.values()],
        "slab": (
            plan.slab_bytes,
            stores.slab.memory.nbytes if stores.slab is not None else 0,
            len(slabs - {None}),
        ),
        "unplaced": stores.unplaced,
    }


def mixed_case(group: dist.ProcessGroup, share: float, link: Link | None) -> dict[str, Any]:
    """The planner chooses between recomputing, shards and the disk; with a shard's speed given or
    measured.
    """
    torch.manual_seed(0)
    plain, limited = Net(), Net()
    limited.load_state_dict(plain.state_dict())
    x = torch.randn(ROWS, WIDTH, generator=seeded(1))
    ways = (Shard("tp", 2), lowtide.Offload("disk"))
    stores = lowtide.Stores(groups={"tp": group})
    links = lowtide.measure_links(*ways, stores=stores)
    used = {"tp": link or links["tp"], "disk": Link(10.0, 10.0)}
    mixed = policies.mixed(*ways, links=used, min_bytes=1)

    def policy(graph: lowtide.StepGraph, budget: int | None = None) -> lowtide.Plan:
        """Operations are dear, so that nothing rests on timings."""
        return mixed(
            replace(graph, operations=tuple(replace(op, seconds=0.1) for op in graph.operations)), budget
        )

    handle = lowtide.limit_memory(limited, budget=f"{share:.0%}", policy=policy, stores=stores)
    same = True
    for seed in range(3):
        same &= all(
            torch.equal(a, b) for a, b in zip(step(plain, x, seed), step(limited, x, seed), strict=True)
        )
    plan = handle.plan
    assert plan is not None
    return {
        "same": same,
        "speed": links["tp"].read_bytes_per_second,
        "kinds": [m.decision.kind for m in plan.moves],
        "values": [m.value for m in plan.moves],
        "within": plan.predicted_peak_bytes <= (plan.budget_bytes or 0),
        "bound": plan.bound_extra_seconds <= plan.predicted_extra_seconds,
    }


def delayed(group: dist.ProcessGroup, size: int, then: lowtide.Offload | None) -> dict[str, Any]:
    """Every transfer and every gather begins late, on each rank by times of its own: a hunt for races."""
    source = random.Random(100 + dist.get_rank())
    kinds: set[str] = set()

    def fault(kind: str) -> None:
        kinds.add(kind)
        time.sleep(source.random() * 0.002)

    torch.manual_seed(0)
    plain, limited = Net(), Net()
    limited.load_state_dict(plain.state_dict())
    x = torch.randn(ROWS, WIDTH, generator=seeded(1))
    stores = lowtide.Stores(groups={"tp": group})
    policy = policies.partition("tp", size, values="all", min_bytes=1, then=then)
    lowtide.limit_memory(limited, policy=policy, stores=stores, verify="always")
    with pytest.MonkeyPatch.context() as patch:
        before_each(patch, fault)
        same = all(
            torch.equal(a, b)
            for seed in range(5)
            for a, b in zip(step(plain, x, seed), step(limited, x, seed), strict=True)
        )
    stores.close()
    return {"same": same, "kinds": kinds}


def refused(group: dist.ProcessGroup, rank: int) -> str:
    """What each rank has is its own: a sequence-parallel input."""
    torch.manual_seed(0)
    model = Net()
    x = torch.randn(ROWS, WIDTH, generator=seeded(rank))
    lowtide.limit_memory(
        model, policy=policies.partition("tp", 4, min_bytes=1), stores=lowtide.Stores(groups={"tp": group})
    )
    try:
        for seed in range(2):
            step(model, x, seed)
    except PlanError as error:
        return str(error)
    return ""


THEN = {"device": None, "disk": lowtide.Offload("disk"), "host": lowtide.Offload("host")}


def shares(size: int) -> dict[str, Any]:
    """Every tier behind shards over so many of the ranks, for some values and for all."""
    group = dist.new_group(list(range(size)))
    if dist.get_rank() >= size:
        return {}
    assert group is not None
    return {
        f"{values} {name}": run_case(group, size, then, values)
        for values in ("checkpoints", "all")
        for name, then in THEN.items()
    }


def work() -> dict[str, Any]:
    rank = dist.get_rank()
    pair = dist.new_group([0, 1])
    four = dist.new_group([0, 1, 2, 3])
    assert pair is not None and four is not None
    found: dict[str, Any] = {}
    for name, then in THEN.items():
        found[f"delayed {name}"] = delayed(four, 4, then)
    if rank < 2:
        found["mixed fast"] = mixed_case(pair, 0.98, Link(1e15, 1e15))
        found["mixed slow"] = mixed_case(pair, 0.98, Link(1e2, 1e2))
        found["mixed measured"] = mixed_case(pair, 0.98, None)
    return {**found, "refused": refused(four, rank)}


@pytest.fixture(scope="module")
def found(group_backend: str) -> list[dict[str, Any]]:
    return on_ranks(4, work)


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def shared(request: pytest.FixtureRequest, group_backend: str) -> list[dict[str, Any]]:
    return on_ranks(request.param, shares, request.param)


@pytest.mark.parametrize("values", ["checkpoints", "all"])
@pytest.mark.parametrize("then", ["device", "disk", "host"])
def test_each_rank_keeps_its_part(shared: list[dict[str, Any]], then: str, values: str) -> None:
    size = len(shared)
    for ranks in shared:
        case = ranks[f"{values} {then}"]
        assert case["same"]
        assert case["sharded"] and len(case["whole"]) >= LAYERS
        for whole, part in zip(case["whole"], case["part"], strict=True):
            assert part == -(-(whole // 4) // size) * 4  # 1/n, padded by less than one element a rank
        assert case["gathers"] == len(case["whole"])  # one more gather a checkpoint, no more
        # Gloo's thread lets go of its copies when it gets to it: at most one gather's are late
        late = (size + 1) * max(case["part"]) + 4 * size * len(case["whole"])
        assert case["predicted"] - 2 * late <= case["peak"] <= case["predicted"] + late
        assert not any(case["left"])
        planned, there, allocations = case["slab"]
        # the parts come together in a slab that was allocated once,
        assert planned == there > 0 and allocations == 1
        assert case["unplaced"] == 0  # and in nothing else: no step allocated for them


@pytest.mark.parametrize("then", ["device", "disk", "host"])
def test_no_race_shows_when_every_transfer_and_gather_is_late(found: list[dict[str, Any]], then: str) -> None:
    for rank in range(4):
        case = found[rank][f"delayed {then}"]
        assert case["same"] and case["kinds"] == (
            {"gather"} if then == "device" else {"gather", "write", "read"}
        )


def test_the_planner_shards_where_the_group_is_fast(found: list[dict[str, Any]]) -> None:
    one, other = (({k: row[f"mixed {k}"] for k in ("fast", "slow", "measured")}) for row in found[:2])
    for case in (one, other):
        assert all(row["same"] and row["within"] and row["bound"] for row in case.values())
    assert "shard" in one["fast"]["kinds"] and "shard" not in one["slow"]["kinds"]
    for name, row in one.items():  # one plan for the ranks that share the values, and one speed
        assert row["values"] == other[name]["values"] and row["speed"] == other[name]["speed"] > 0


def test_a_groups_speed_is_asked_for() -> None:
    graph = lowtide.trace(lambda: Net()(torch.randn(ROWS, WIDTH)))
    with pytest.raises(PlanError, match="measure_links"):
        policies.mixed(Shard("tp", 2))(graph)


def test_what_is_sharded_already_is_refused_with_the_reason(found: list[dict[str, Any]]) -> None:
    for rank in range(4):
        assert "differs between the ranks" in found[rank]["refused"]
        assert "sharded already" in found[rank]["refused"]


def test_a_group_that_nobody_gave_is_asked_for() -> None:
    torch.manual_seed(0)
    model = Net()
    lowtide.limit_memory(model, policy=policies.partition("tp", 2, min_bytes=1))
    with pytest.raises(PlanError, match="a group 'tp' that was not given"):
        model(torch.randn(ROWS, WIDTH)).backward()
        model(torch.randn(ROWS, WIDTH))


def dies(rank: int, folder: str, when: str) -> None:
    """Rank 1 is killed as it would begin a gather of its second step under the plan; the others say what they
    saw.
    """
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=3, timeout=timedelta(seconds=30)
    )
    seen = []

    def fault(kind: str) -> None:
        seen.append(kind)
        if rank == 1 and seen.count("gather") == LAYERS + (1 if when == "first" else LAYERS):
            os.kill(os.getpid(), signal.SIGKILL)

    assert dist.group.WORLD is not None
    before_each(pytest.MonkeyPatch(), fault)
    stores = lowtide.Stores(groups={"tp": dist.group.WORLD})
    torch.manual_seed(0)
    model = Net()
    x = torch.randn(ROWS, WIDTH, generator=seeded(1))
    lowtide.limit_memory(model, policy=policies.partition("tp", 3, min_bytes=1), stores=stores)
    weights = [p.detach().clone() for p in model.parameters()]
    try:
        for seed in range(3):
            step(model, x, seed)
        said = "nothing"
    except lowtide.LowtideError as error:
        said = f"{type(error).__name__}: {error}"
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
    Path(folder, f"said{rank}").write_text(said)
    os._exit(0)


@pytest.mark.parametrize("when", ["first", "last"])
def test_a_rank_that_dies_in_a_gather_ends_the_others_with_an_error(tmp_path: Path, when: str) -> None:
    context = mp.get_context("fork")
    processes = [context.Process(target=dies, args=(rank, str(tmp_path), when)) for rank in range(3)]
    began = time.monotonic()
    for process in processes:
        process.start()
    for process in processes:
        process.join(max(0.0, began + 45 - time.monotonic()))
    hanging = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for process in processes:
        if process.is_alive():
            process.kill()
            process.join()
    assert not hanging and processes[1].exitcode == -signal.SIGKILL
    for rank in (0, 2):
        said = (tmp_path / f"said{rank}").read_text()
        assert (
            "StoreError: the parts of a saved value could not be gathered over the ranks 0, 1, 2: one of "
            "them has ended" in said
        )
        assert "start the ranks again" in said


def test_every_tier_that_a_plan_may_name_can_be_opened(tmp_path: Path) -> None:
    with Stores() as stores:
        opened = {name: stores.tier(name, str(tmp_path), torch.device("cpu")) for name in TIERS}
    assert {name: tier.name for name, tier in opened.items()} == {name: name for name in TIERS}


def test_a_device_with_and_without_its_number_has_one_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a plan for ``cuda`` reserves is where the values of ``cuda:1`` go, if that is the current one."""
    opened: list[torch.device] = []

    def opening(path: str, device: torch.device) -> Tier:
        opened.append(device)
        return Host()

    monkeypatch.setitem(stores._OPEN, "host", opening)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 1)
    with Stores() as ours:
        assert ours.tier("host", "", torch.device("cuda")) is ours.tier("host", "", torch.device("cuda:1"))
        assert ours.tier("host", "", torch.device("cuda:0")) is not ours.tier(
            "host", "", torch.device("cuda")
        )
    assert opened == [torch.device("cuda:1"), torch.device("cuda:0")]
