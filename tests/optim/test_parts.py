"""The pieces, and what is refused."""

from __future__ import annotations

import copy
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.throttled_link import ThrottledLink
from hypothesis import given
from hypothesis import strategies as st
from runs import ADAMW, batch, model

from lowtide.extensions.moves.store.disk import file_system
from lowtide.optim import HostOptimizer, OptimError, Speeds
from lowtide.optim.balance import choose
from lowtide.optim.layout import cuts, spans
from lowtide.optim.pipeline import Task, batches
from lowtide.optim.slots import Part, Slot
from lowtide.optim.tensors import dense, flat, flat_gradient


@given(st.lists(st.integers(0, 500), max_size=8), st.floats(0, 1), st.sampled_from([16, 32]))
def test_cuts(sizes: list[int], fraction: float, step: int) -> None:
    kept = cuts(sizes, [step] * len(sizes), fraction)
    wanted = sum(sizes) - round(sum(sizes) * fraction)
    assert all(0 <= keep <= size for keep, size in zip(kept, sizes, strict=True))
    assert wanted - step < sum(kept) <= wanted
    split = [keep for keep, size in zip(kept, sizes, strict=True) if 0 < keep < size]
    assert len(split) <= 1
    assert all(keep % step == 0 for keep in split)
    if fraction == 1:
        assert sum(kept) == 0
    if fraction == 0:
        assert kept == sizes


@given(
    st.lists(st.tuples(st.integers(1, 300), st.integers(0, 1)), min_size=1, max_size=8),
    st.sampled_from([32, 64, 160]),
)
def test_batches_cover_everything_once_and_in_order(sizes: list[tuple[int, int]], most: int) -> None:
    groups: list[dict[str, Any]] = [{"lr": 0}, {"lr": 1}]
    tasks = []
    for size, group in sizes:
        slot = Slot(torch.zeros(size), 0)
        slot.host = Part(0, size, True, {}, torch.zeros(()), None)
        tasks.append(Task(slot, slot.host, groups[group], torch.zeros(size)))
    seen: dict[int, int] = {}
    for some in batches(tasks, most):
        assert sum(stretch.stop - stretch.start for stretch in some) <= most
        assert len({id(stretch.task.group) for stretch in some}) == 1
        for stretch in some:
            assert stretch.start % 32 == 0
            assert seen.get(id(stretch.task), 0) == stretch.start
            seen[id(stretch.task)] = stretch.stop
    assert [seen[id(task)] for task in tasks] == [size for size, _ in sizes]


def test_flat_views() -> None:
    tensor = torch.arange(24.0).view(2, 3, 2, 2).contiguous(memory_format=torch.channels_last)
    assert dense(tensor)
    assert not dense(torch.zeros(4, 4)[:, :2])
    assert not dense(torch.zeros(4, 1).expand(4, 4))
    assert flat(tensor).data_ptr() == tensor.data_ptr()
    gradient = torch.randn(2, 3, 2, 2)
    assert torch.equal(flat_gradient(gradient, tensor).as_strided(tensor.shape, tensor.stride()), gradient)
    assert list(spans(0, 5, 2)) == [(0, 2), (2, 4), (4, 5)]


@given(
    st.floats(0.1, 10),
    st.floats(0.1, 10),
    st.floats(0.1, 10),
    st.floats(0.1, 10),
    st.booleans(),
    st.booleans(),
    st.floats(0, 1),
)
def test_auto_is_the_best_share_that_fits(
    device: float, host: float, down: float, up: float, parallel: bool, streamed: bool, least: float
) -> None:
    speeds = Speeds(device, host, down, up, parallel, streamed, chunk_elements=10)
    found = choose(speeds, 1000, least)
    assert least <= found.host_fraction <= 1
    best = min(speeds.step_seconds(1000, least + (1 - least) * k / 1000) for k in range(1001))
    assert found.step_seconds <= best * 1.05 + 1e-9


def test_auto_fits_the_budget() -> None:
    """8 bytes of AdamW's state an element: what the device keeps is within the budget, and no less than it
    has to give up.
    """
    net = model()
    count = sum(p.numel() for p in net.parameters() if p.requires_grad)
    optimizer = HostOptimizer(
        torch.optim.AdamW,
        net.parameters(),
        host_fraction="auto",
        device_budget=8 * count // 2,
        host="memory",
        **ADAMW,
    )
    net(batch(0)).backward()
    optimizer.step()
    assert optimizer.balance is not None
    assert optimizer.device_elements * 8 <= 8 * count // 2
    assert abs(optimizer.balance.least_fraction - 0.5) < 0.01
    assert optimizer.host_elements == count - optimizer.device_elements


def test_auto_moves_more_to_a_faster_host() -> None:
    shares = []
    for host in (2e6, 20e6):
        net = torch.nn.Linear(256, 256)
        link = ThrottledLink(device_elements_per_second=4e6, host_elements_per_second=host)
        optimizer = HostOptimizer(
            torch.optim.AdamW, net.parameters(), host_fraction="auto", link=link, chunk_bytes=1 << 15
        )
        net(torch.ones(1, 256)).sum().backward()
        optimizer.step()
        assert optimizer.balance is not None
        shares.append(optimizer.balance.host_fraction)
        assert link.bytes_up == 4 * optimizer.host_elements  # measuring does not count
        optimizer.close()
    assert shares[0] < shares[1]


def test_a_throttled_link_takes_its_time() -> None:
    link = ThrottledLink(down_bytes_per_second=1e6)
    source, target = torch.randn(10_000), torch.empty(10_000)
    begin = time.perf_counter()
    for start in range(0, 10_000, 1000):
        link.down(target[start : start + 1000], source[start : start + 1000])
    link.synchronize()
    assert time.perf_counter() - begin >= 0.04 * 0.99
    assert torch.equal(source, target)
    assert [move.lane for move in link.log] == ["down"] * 10
    assert link.bytes_down == 40_000
    link.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"host_fraction": 1.5}, "from 0"),
        ({"host_fraction": True}, "from 0"),
        ({"host_fraction": "most"}, "'auto'"),
        ({"host": "cloud"}, "'memory', 'disk'"),
        ({"host": "memory", "host_folder": "/tmp"}, "host='disk'"),
        ({"host_folder": "/no/such/folder"}, "not a folder"),
        pytest.param(
            {"host_folder": "/dev/shm"},
            "lies in main memory: .* host='memory'",
            marks=pytest.mark.skipif(file_system(Path("/dev/shm")) != "tmpfs", reason="no tmpfs here"),
        ),
        ({"device_budget": "1GiB"}, "host_fraction='auto'"),
        ({"overlap_update": True}, "stream_gradients=True"),
        ({"overlap_update": True, "stream_gradients": True, "delayed": True}, "exclude"),
        ({"delay_after": -1}, "0 or more"),
        ({"chunk_bytes": 10}, "4096"),
        ({"foreach": True}, "leave foreach out"),
        ({"fused": False}, "leave fused out"),
        ({"capturable": True}, "leave capturable out"),
        ({"differentiable": True}, "leave differentiable out"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptimError, match=message):
        HostOptimizer(torch.optim.AdamW, model().parameters(), **options)


def test_other_refusals() -> None:
    with pytest.raises(OptimError, match="LBFGS"):
        HostOptimizer(torch.optim.LBFGS, model().parameters())
    with pytest.raises(ValueError, match="learning rate"):
        HostOptimizer(torch.optim.AdamW, model().parameters(), lr=-1.0)
    optimizer = HostOptimizer(torch.optim.AdamW, model().parameters())
    with pytest.raises(OptimError, match="state_dict"):
        copy.deepcopy(optimizer)
    with pytest.raises(OptimError, match="leave foreach out"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))], "foreach": True})
    odd = torch.nn.Parameter(torch.ones(4, 4)[:, :2])
    odd.grad = torch.ones(4, 2)
    with pytest.raises(OptimError, match="contiguous"):
        HostOptimizer(torch.optim.AdamW, [odd]).step()
    number = torch.nn.Parameter(torch.ones(3, dtype=torch.complex64))
    number.grad = torch.ones_like(number)
    with pytest.raises(OptimError, match="another optimizer"):
        HostOptimizer(torch.optim.AdamW, [number]).step()
    table = torch.nn.Embedding(10, 4, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(OptimError, match="SparseAdam"):
        HostOptimizer(torch.optim.AdamW, table.parameters()).step()


def test_checkpoints_that_do_not_fit_change_nothing() -> None:
    net = model()
    optimizer = HostOptimizer(torch.optim.AdamW, net.parameters(), host_fraction=0.5, **ADAMW)
    net(batch(0)).backward()
    optimizer.step()
    good = copy.deepcopy(optimizer.state_dict())
    other = copy.deepcopy(good)
    other["param_groups"][0]["params"].pop()
    wrong = copy.deepcopy(good)
    wrong["state"][0]["exp_avg"] = torch.zeros(3, 3)
    strange = copy.deepcopy(good)
    strange["state"][0]["momentum_buffer"] = torch.zeros_like(strange["state"][0]["exp_avg"])
    amsgrad = copy.deepcopy(good)
    amsgrad["param_groups"][0]["amsgrad"] = True
    for bad, message in (
        (other, "groups of"),
        (wrong, "shape"),
        (strange, "momentum_buffer"),
        (amsgrad, "same options"),
    ):
        with pytest.raises(OptimError, match=message):
            optimizer.load_state_dict(bad)
        now = optimizer.state_dict()
        assert all(
            torch.equal(now["state"][k][n], good["state"][k][n])
            for k in good["state"]
            for n in good["state"][k]
        )
        assert now["param_groups"] == good["param_groups"]
