"""Values are evicted when memory is short, and gradients stay the same."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from lowtide.run.record.cpp_recorder import AnyProgram, cpp_recorder
from lowtide.run.record.directors import PlanDirector
from lowtide.run.record.on_demand import OnDemand, seconds_to_replay
from lowtide.run.record.recorder import Recorder
from lowtide.run.record.tape import LiveValue, Node

RATES: dict[int | None, float] = {None: 1e-9}
needs_compiler = pytest.mark.skipif(cpp_recorder() is None, reason="needs a C++ compiler")


def on_demand_of(compiled: bool, live_bytes: int, program: AnyProgram) -> Any:
    """What evicts, in C++ or in Python."""
    kind = cpp_recorder().OnDemand if compiled else OnDemand
    return kind(lambda: live_bytes, 1 << 20, RATES, program.learn)


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


def gradients(live_bytes: int | None, compiled: bool = False, **more: Any) -> list[torch.Tensor]:
    """Of the net on demand; everything is evicted where so many bytes are live, or nothing."""
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
        on_demand = on_demand_of(compiled, live_bytes, program)
        known = program.compiled if compiled else None
        with Recorder(PlanDirector(()), on_demand=on_demand, program=known, **more).recording():
            loss = net(x)
        loss.backward()
    return [p.grad for p in net.parameters() if p.grad is not None]


@pytest.mark.parametrize("live_bytes", [0, 1 << 20, 1 << 40])
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=needs_compiler)])
def test_gradients_are_those_of_the_plain_step(live_bytes: int, compiled: bool) -> None:
    found, expected = gradients(live_bytes, compiled), gradients(None)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_what_is_verified_is_right_as_well() -> None:
    found, expected = gradients(1 << 40, check=True), gradients(None)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=needs_compiler)])
def test_a_copy_is_let_go_before_others_write_to_its_bytes(compiled: bool) -> None:
    """Between forward and backward: a plain step's saved tensor shows what was written, a replay does not."""

    def step(limited: bool) -> list[torch.Tensor]:
        w = torch.arange(1.0, 9.0, requires_grad=True)
        on_demand = on_demand_of(compiled, 0, program := AnyProgram())
        for _ in range(2):
            w.grad = None
            known = program.compiled if compiled else None
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


def test_what_lacks_its_inputs_takes_longer_to_bring_back() -> None:
    values = chain([4, 8, 16])
    assert seconds_to_replay(values[2], {None: 1.0}) == 16 + 8
    values[1].cached = None
    assert seconds_to_replay(values[2], {None: 1.0}) == 16 + 8 + 8 + 4
    assert seconds_to_replay(values[2], {None: 1.0, id(torch.ops.aten.sin.default): 0.5}) == 18


@pytest.mark.parametrize("nbytes", [1, 100, 400, 1000, 10_000])
@needs_compiler
def test_both_halves_evict_the_same(nbytes: int) -> None:
    left = []
    for compiled in (False, True):
        values = chain([64, 256, 16, 64, 512, 128, 32, 64])
        program = values[3].cached  # others hold it
        on_demand = on_demand_of(compiled, 0, AnyProgram())
        for value in (*values, *values, LiveValue(None, 8)):
            on_demand.note_kept(value)
        for part in (nbytes // 2, nbytes - nbytes // 2):
            on_demand.evict(part)
        left.append([value.cached is None for value in values])
        freed = sum(value.nbytes for value in values if value.cached is None)
        assert program is not None and values[3].cached is program
        assert freed >= min(nbytes, sum(value.nbytes for value in values) - 64)
    assert left[0] == left[1]


def values() -> set[int]:
    """Of all steps that there are."""
    return {id(one) for one in gc.get_objects() if type(one) is LiveValue}


def test_nothing_is_left_when_a_step_has_gone() -> None:
    net, x = Net(), torch.randn(16, 8)
    on_demand = OnDemand(lambda: 0, 1 << 20, RATES)
    with Recorder(PlanDirector(()), on_demand=on_demand).recording():
        loss = net(x)
    before = values()
    assert before
    loss.backward()
    del loss
    gc.collect()
    assert not values() & before
