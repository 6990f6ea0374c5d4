"""Values are evicted when memory is short, and gradients stay the same."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from lowtide.run.record.cpp_recorder import AnyProgram, cpp_recorder
from torch import nn

from lowtide.run.record.directors import PlanDirector
from lowtide.run.record.recorder import Recorder
from lowtide.run.record.values import LiveValue, Node

RATES: dict[int | None, float] = {None: 1e-9}
pytestmark = pytest.mark.skipif(cpp_recorder() is None, reason="needs a C++ compiler")


def on_demand_of(live_bytes: int, program: AnyProgram) -> Any:
    """What evicts where so many bytes are live, of a MiB that may be."""
    return cpp_recorder().OnDemand(lambda: live_bytes, 1 << 20, RATES, program.learn)


class Net(nn.Module):
    """Plain operations, random ones, writes in place, running statistics and views."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 32), nn.Linear(32, 8)
        self.norm, self.drop = nn.BatchNorm1d(32), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.first(x))
        h = (torch.relu_(h.sin() + 1) + 1).mul_(2)
        left, right = self.drop(h).chunk(2, 1)
        h = torch.cat([left.cos(), right.exp()], 1)
        out = self.second(h.tanh())
        h.add_(1e-3)
        return (out + self.second(h.sin())).square().mean()


def gradients(live_bytes: int | None, in_cpp: bool = True, **more: Any) -> list[torch.Tensor]:
    """Of the net on demand, where so many bytes are live; ``in_cpp`` says whether C++ records what it can."""
    net, x = Net(), torch.randn(16, 8, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(2)
    if live_bytes is None:
        net(x).backward()
        return [p.grad for p in net.parameters() if p.grad is not None]
    program = AnyProgram()
    for _ in range(2):  # what comes first, Python records
        torch.manual_seed(2)
        net.zero_grad()
        net.norm.reset_running_stats()
        on_demand = on_demand_of(live_bytes, program)
        known = program.compiled if in_cpp else None
        with Recorder(PlanDirector(()), on_demand=on_demand, program=known, **more).recording():
            loss = net(x)
        loss.backward()
    return [p.grad for p in net.parameters() if p.grad is not None]


@pytest.mark.parametrize("live_bytes", [0, 1 << 20, 1 << 40])
@pytest.mark.parametrize("in_cpp", [False, True])
def test_gradients_are_those_of_the_plain_step(live_bytes: int, in_cpp: bool) -> None:
    found, expected = gradients(live_bytes, in_cpp), gradients(None)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_what_is_verified_is_right_as_well() -> None:
    found, expected = gradients(1 << 40, check=True), gradients(None)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("in_cpp", [False, True])
def test_a_copy_is_let_go_before_others_write_to_its_bytes(in_cpp: bool) -> None:
    """Between forward and backward: a plain step's saved tensor shows what was written, a replay does not."""

    def step(limited: bool) -> list[torch.Tensor]:
        w = torch.arange(1.0, 9.0, requires_grad=True)
        on_demand = on_demand_of(0, program := AnyProgram())
        for _ in range(2):
            w.grad = None
            known = program.compiled if in_cpp else None
            recorder = Recorder(PlanDirector(()), on_demand=on_demand, program=known)
            with recorder.recording() if limited else torch.enable_grad():
                a = w * 2
                b = a.sin()
                c = b * b
            del b
            on_demand.evict(1 << 20)  # all copies but those of a and c, which the program has
            a.data.add_(1)
            c.sum().backward()
        assert w.grad is not None
        return [w.grad]

    assert torch.equal(step(True)[0], step(False)[0])


def chain(sizes: list[int]) -> list[LiveValue]:
    """Values, each made of the one before it, all of them with a copy."""
    values: list[LiveValue] = []
    for order, size in enumerate(sizes):
        node = Node(torch.ops.aten.sin.default, order, torch.device("cpu"))
        node.inputs = values[-1:]
        value = LiveValue(node, size)
        value.cached = torch.empty(size, dtype=torch.uint8)
        node.outputs = [(0, weakref.ref(value))]
        values.append(value)
    return values


def seconds_of(value: LiveValue) -> int:
    """Nanoseconds to bring a value of a chain back without its copy: each operation takes one for a byte."""
    source = value.node.inputs[0] if value.node is not None and value.node.inputs else None
    if source is None:
        return value.nbytes
    return value.nbytes + source.nbytes + (seconds_of(source) if source.cached is None else 0)


@pytest.mark.parametrize("nbytes", [1, 100, 400, 1000, 10_000])
def test_the_cheapest_for_their_bytes_and_age_are_dropped_first(nbytes: int) -> None:
    dropped = []
    for compute in (True, False):
        values = chain([64, 256, 16, 64, 512, 128, 32, 64])
        program = values[3].cached  # others hold it
        on_demand = on_demand_of(0, AnyProgram())
        for value in (*values, *values, LiveValue(None, 8)):
            on_demand.note_cached(value)
        for part in (nbytes // 2, nbytes - nbytes // 2):
            if compute:
                on_demand.evict(part)
                continue
            left = part
            newest = max((v.node.order for v in values if v.node and v.cached is not None), default=0)
            while left > 0 and (free := [v for v in values if v.cached is not None and v is not values[3]]):
                price = {
                    id(v): seconds_of(v) / v.nbytes / (newest - v.node.order + 1) for v in free if v.node
                }
                cheapest = min(free, key=lambda v: price[id(v)])
                cheapest.cached = None
                left -= cheapest.nbytes
        dropped.append([value.cached is None for value in values])
        assert program is not None and values[3].cached is program
    assert dropped[0] == dropped[1]


def test_rates_go_by_the_operation() -> None:
    """An operation that is slow for its bytes is brought back last."""
    left = []
    for rate in (1e-12, 1.0):
        values = chain([8])
        other = Node(torch.ops.aten.cos.default, 1, torch.device("cpu"))
        values.append(LiveValue(other, 8))
        values[1].cached = torch.empty(8, dtype=torch.uint8)
        rates = {None: 1e-9, id(torch.ops.aten.cos.default): rate}
        on_demand = cpp_recorder().OnDemand(lambda: 0, 1 << 20, rates)
        for value in values:
            on_demand.note_cached(value)
        on_demand.evict(8)
        left.append([value.cached is not None for value in values])
    assert left == [[True, False], [False, True]]


def values() -> set[int]:
    """Of all steps that there are."""
    return {id(one) for one in gc.get_objects() if type(one) is LiveValue}


def test_nothing_is_left_when_a_step_has_gone() -> None:
    net, x = Net(), torch.randn(16, 8)
    on_demand = on_demand_of(0, AnyProgram())
    with Recorder(PlanDirector(()), on_demand=on_demand).recording():
        loss = net(x)
    before = values()
    assert before
    loss.backward()
    del loss
    gc.collect()
    assert not values() & before
