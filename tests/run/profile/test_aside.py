"""`lowtide.trace` of a step that runs for real."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_step import N, batch, make
from torch import nn

import lowtide
from lowtide import TraceError
from lowtide.graph import StepGraph
from lowtide.plan.simulate import plain


def test_two_traces_are_equal() -> None:
    model = make()
    first, second = (lowtide.trace(model, batch(), costs=False) for _ in range(2))
    assert first.fingerprint() == second.fingerprint()
    assert StepGraph.from_json(first.to_json()).fingerprint() == first.fingerprint()


def test_existing_gradients_are_resident_and_new_ones_are_not() -> None:
    model = nn.Linear(N, N)
    before = lowtide.trace(lambda: model(batch()).sum(), costs=False)
    model(batch()).sum().backward()
    after = lowtide.trace(lambda: model(batch()).sum(), costs=False)
    grads = sum(p.nbytes for p in model.parameters())
    assert after.resident_bytes - before.resident_bytes == grads
    assert {s.kind for s in after.storages if s.kind == "gradient"} and not {
        s.kind for s in before.storages if s.kind == "gradient"
    }


def test_the_peak_is_the_meters() -> None:
    from lowtide.meter import available, measure

    if not available():
        pytest.skip("needs a C++ compiler for the counting allocator")
    model = nn.Sequential(
        nn.Linear(N, 64 * N), nn.GELU(), nn.Linear(64 * N, N), nn.Softmax(-1), nn.Dropout(0.1)
    )
    x = batch()
    graph = lowtide.trace(lambda: model(x).square().sum())

    def step() -> None:
        model.zero_grad()
        model(x).square().sum().backward()

    step()
    model.zero_grad()
    resident = sum(p.nbytes for p in model.parameters()) + x.nbytes
    assert (
        abs(plain(graph).peak_bytes - resident - measure(step).peak_bytes) <= 0.01 * measure(step).peak_bytes
    )


def test_scopes_mark_what_they_force() -> None:
    model = make()

    def step(x: torch.Tensor) -> torch.Tensor:
        with lowtide.checkpointing():
            h = torch.tanh(model.first(x))
            with lowtide.checkpointing(policy="keep_all"):
                h = torch.sigmoid(h)
        return model.last(h).exp().sum()

    graph = lowtide.trace(step, batch(), costs=False)

    def saved_by(name: str) -> list[Any]:
        values = {w for o in graph.operations if o.name == name for w in o.writes}
        return [s for s in graph.saved if s.value in values]

    assert all(s.forced and s.droppable for s in saved_by("aten.tanh.default")) and saved_by(
        "aten.tanh.default"
    )
    kept = saved_by("aten.sigmoid.default")
    assert kept and not kept[0].droppable
    assert all(not s.forced for s in saved_by("aten.exp.default"))


class Handed(nn.Module):
    """Two convolutions after a value that is cheap to bring back, in a step that fake tensors cannot
    follow.
    """

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList([nn.Conv2d(8, 8, 3, padding=1) for _ in range(2)])

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        h = F.interpolate(x, scale_factor=4, mode="bilinear")
        for conv in self.convs:
            h = conv(h).relu()
        chosen = h.mean(1)[labels > 0]
        return {"loss": chosen.square().sum() / torch.tensor(float(len(chosen.nonzero()) + 1))}


def test_a_real_trace_knows_how_long_backward_holds_what_it_was_handed() -> None:
    graph = lowtide.trace(
        Handed(), torch.randn(2, 8, 8, 8, requires_grad=True), torch.ones(2, 32, 32), costs=False
    )
    place = {event.index: at for at, event in enumerate(graph.events) if event.kind == "op"}
    ends = {event.index: at for at, event in enumerate(graph.events) if event.kind == "done"}
    handed = {event.index: at for at, event in enumerate(graph.events) if event.kind == "unpack"}
    released = {event.index: at for at, event in enumerate(graph.events) if event.kind == "release"}
    checked = 0
    for operation in graph.operations:
        if operation.name == "aten.convolution_backward.default":
            read = [
                s
                for s in graph.saved
                if s.value in operation.reads
                and s.droppable
                and handed.get(s.id, -1) < place[operation.index] < released[s.id]
            ]
            near = [s for s in read if place[operation.index] - handed[s.id] < 8]
            checked += len(near)
            assert near and all(place[operation.index] < ends[s.id] <= released[s.id] for s in near)
    assert checked >= 2


def test_a_step_that_cannot_be_called_is_no_matter_of_fake_tensors() -> None:
    with pytest.raises(TraceError, match="trace takes a function that runs one step, not NoneType"):
        lowtide.trace(None)  # type: ignore[arg-type]
    model = make()
    with pytest.raises(TraceError, match=r"a tensor of shape \(50, 16\) that does not require grad"):
        lowtide.trace(lambda: torch.zeros(50, 16), model=model)


def test_the_model_of_the_object_that_a_step_is_bound_to_is_found() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.model = make()

        def step(self) -> torch.Tensor:
            return self.model(batch()).sum()

        def __call__(self) -> torch.Tensor:
            return self.step()

    trainer = Trainer()
    for step in (trainer.step, trainer):
        graph = lowtide.trace(step, costs=False)
        assert {s.name for s in graph.storages if s.kind == "parameter"} <= {
            name for name, _ in trainer.model.named_parameters()
        }
        assert any(operation.module for operation in graph.operations)
        assert all(parameter.grad is None for parameter in trainer.model.parameters())
