"""Traces of steps whose tensors lie on several devices, or whose memory fake tensors do not show."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_step import N, batch, make, names
from torch import nn

import lowtide
from lowtide import TraceError, private
from lowtide.graph import StepGraph
from lowtide.ops import Call
from lowtide.run.profile import costs
from lowtide.run.profile.profiler import Profiler
from lowtide.trace.clock import Clock
from lowtide.trace.fake import FakeTracer


@pytest.fixture
def no_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of a step on a GPU is read off events, which only a GPU has."""
    monkeypatch.setattr("lowtide.accelerator.timed_event", lambda device: 0.0)


@pytest.mark.usefixtures("no_events")
def test_tensors_of_the_host_beside_a_gpu_count_no_bytes_and_are_not_evicted() -> None:
    profiler = Profiler(None, torch.device("cuda"))
    profiler.costs = costs.CostMeter(torch.device("cpu"))
    with profiler:
        assert not profiler.tracer.packs(torch.ones(100).exp())[1]
    graph = profiler.graph()
    assert [o.name for o in graph.operations] == ["aten.ones.default", "aten.exp.default"]
    assert [s.bytes for s in graph.storages] == [0, 0]
    assert [s.droppable for s in graph.saved] == [False]


def test_fake_tensors_of_two_devices() -> None:
    tracer = FakeTracer(None, torch.device("meta"))
    with tracer.forward(), tracer, private.fake_mode():
        tensors = [torch.ones(100, device=device).exp() for device in ("meta", "cpu")]
        assert [tracer.packs(tensor)[1] for tensor in tensors] == [True, False]
    graph = tracer.graph()
    assert [s.bytes for s in graph.storages] == [400, 400, 0, 0]
    assert [s.droppable for s in graph.saved] == [True, False]


@pytest.mark.usefixtures("no_events")
def test_scratch_is_read_by_the_meter_of_the_steps_device(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.device] = []

    @contextmanager
    def peak(device: torch.device, _: bool) -> Iterator[SimpleNamespace]:
        asked.append(device)
        yield SimpleNamespace(peak_bytes=1000, live_bytes=400)

    monkeypatch.setattr(costs, "peaks", lambda device: partial(peak, device))
    profiler = Profiler(None, torch.device("cuda"))
    profiler.costs.clock = Clock(torch.device("cpu"))
    with profiler:
        torch.ones(2).exp()
    assert asked == [torch.device("cuda")] * 2
    assert [o.scratch_bytes for o in profiler.graph().operations] == [600, 600]


@pytest.mark.parametrize("name", ["mkldnn_rnn_layer", "_cudnn_rnn", "miopen_rnn"])
def test_what_fake_tensors_reserve_nothing_for_is_run_for_real(name: str) -> None:
    func = getattr(torch.ops.aten, name).default
    tracer = FakeTracer()
    with pytest.raises(TraceError, match="run the step for real"):
        tracer.run(Call(func, (), {}))


def test_fake_and_real_traces_agree() -> None:
    model = make()
    fake, real = (lowtide.trace(model, batch(), fake=fake, costs=False) for fake in (True, False))
    for phase in ("forward", "backward"):
        assert names(fake, phase) == names(real, phase)
    for a, b in zip(fake.operations, real.operations, strict=True):
        assert described(fake, a.reads) == described(real, b.reads), a.name
        assert described(fake, a.writes) == described(real, b.writes), a.name
    assert [(s.droppable, s.shape, s.module) for s in fake.saved] == [
        (s.droppable, s.shape, s.module) for s in real.saved
    ]
    assert sorted(s.bytes for s in fake.storages) == sorted(s.bytes for s in real.storages)
    assert fake.resident_bytes == real.resident_bytes


def test_what_fake_tensors_cannot_do_says_so() -> None:
    model = make()

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x)
        return loss if loss.item() > 0 else -loss

    with pytest.raises(TraceError, match="leave fake=True out"):
        lowtide.trace(step, batch(), costs=False, fake=True)
    assert lowtide.trace(step, batch(), costs=False).operations


def test_an_unknown_trainable_tensor_says_so() -> None:
    hidden = {"weight": nn.Parameter(torch.ones(N))}
    with pytest.raises(TraceError, match="model="):
        lowtide.trace(lambda: (hidden["weight"] * 2).sum(), costs=False, fake=True)


def test_a_model_far_larger_than_the_machine() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(1 << 16, 1 << 16) for _ in range(8)])
    graph = lowtide.trace(lambda: model(torch.empty(4, 1 << 16, device="meta")).sum(), costs=False, fake=True)
    assert graph.resident_bytes > 100 << 30


def described(graph: StepGraph, values: tuple[int, ...]) -> list[Any]:
    """What operations read or wrote, without the numbers by which each trace calls it."""
    found = [graph.values[v] for v in values]
    rows = [(graph.storages[v.storage], v.version, v.producer or -1) for v in found]
    return sorted(
        (s.bytes, s.name if s.producer is None else "", version, producer) for s, version, producer in rows
    )
