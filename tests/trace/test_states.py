"""Random states that a step keeps in main memory are in its graph, and the seam that sees them leaves nothing behind."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide import meter
from lowtide.plan.simulate import plain
from lowtide.trace.states import STATE, states_seen

torch.set_num_threads(1)
BYTES = torch.get_rng_state().nbytes


class Checkpointed(nn.Module):
    def __init__(self, layers: int, **options: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16)) for _ in range(layers)])
        self.options = options

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.layers[0][2].bias
        for layer in self.layers:
            x = checkpoint(layer, x, **self.options)  # pyright: ignore[reportAssignmentType]
        return x.square().mean()


def states(graph: lowtide.graph.StepGraph) -> list[Any]:
    return [s for s in graph.storages if s.name == STATE and s.bytes]


@pytest.mark.parametrize("real", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_every_call_keeps_one_until_its_backward(reentrant: bool, real: bool) -> None:
    model = Checkpointed(3, use_reentrant=reentrant)
    graph = lowtide.trace(model, torch.randn(4, 16), real=real, costs=False)
    found = states(graph)
    forward = [s for s in found if s.kind == "forward"]
    assert len(forward) == 3
    assert {s.bytes for s in found} == {BYTES}
    assert len(found) == 6  # backward keeps the state around each call while it sets the old one
    assert all(graph.operations[s.producer].phase == s.kind for s in found if s.producer is not None)


def test_who_does_without_keeps_none() -> None:
    model = Checkpointed(3, use_reentrant=False, preserve_rng_state=False)
    assert not states(lowtide.trace(model, torch.randn(4, 16), costs=False))


@pytest.mark.skipif(not meter.available(), reason="needs the counting allocator")
@pytest.mark.parametrize("reentrant", [False, True])
def test_the_plain_step_takes_what_is_predicted(reentrant: bool) -> None:
    model, x = Checkpointed(3, use_reentrant=reentrant), torch.randn(4, 16)
    graph = lowtide.trace(model, x, costs=True)
    twin = copy.deepcopy(model)
    measured = meter.measure(lambda: twin(x).backward(), timeline=False).peak_bytes
    assert measured + graph.resident_bytes == plain(graph).peak_bytes


def test_a_state_that_nothing_follows_takes_nothing() -> None:
    lin = nn.Linear(4, 4)

    def step() -> torch.Tensor:
        torch.get_rng_state()
        loss = lin(torch.ones(2, 4)).sum()
        torch.get_rng_state()
        return loss

    assert not states(lowtide.trace(step, model=lin, costs=False))


def test_the_seam_closes_in_any_order() -> None:
    own = torch.get_rng_state
    first, second = threading.Event(), threading.Event()

    def other() -> None:
        with states_seen():
            first.set()
            second.wait(10)

    thread = threading.Thread(target=other)
    with states_seen():
        thread.start()
        assert first.wait(10)
    assert torch.get_rng_state is not own
    second.set()
    thread.join()
    assert torch.get_rng_state is own
    assert torch.random.get_rng_state is own
