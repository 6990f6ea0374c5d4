"""What is written down of a step; steps that take gradients inside their forward, or all by themselves."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from small_step import N, batch, make, names
from torch import nn

import lowtide
from lowtide.meter import available
from lowtide.plan.simulate import Simulator


@pytest.mark.parametrize("fake", [False, True])
@pytest.mark.parametrize("own", [False, True])
def test_a_gradient_inside_the_step_is_not_its_backward(own: bool, fake: bool) -> None:
    """Forces are the energy's gradient, and the loss is made of both."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def step(x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        energy = model(x).sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        loss = energy + force.square().sum()
        if own:
            loss.backward(retain_graph=True)
        return loss

    graph = lowtide.trace(step, torch.randn(3, 4), model=model, costs=False, fake=fake)
    gone = {event.index for event in graph.events if event.kind == "free"}
    stay = Counter(s.bytes for s in graph.storages if s.kind == "backward" and s.id not in gone)
    assert Counter(p.nbytes for p in model.parameters()) <= stay  # and the gradient of x, perhaps
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_step_may_take_its_gradients_by_itself() -> None:
    model = nn.Linear(4, 1)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().sum()
        torch.autograd.grad(loss, list(model.parameters()))
        return loss

    graph = lowtide.trace(step, torch.randn(3, 4), model=model, costs=False)
    assert sum(o.name == "aten.pow.Tensor_Scalar" for o in graph.operations if o.phase == "backward") == 1


class Messages(nn.Module):
    """Residual layers of a network for energies, with the forces in its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        h = x
        for layer in self.layers:
            h = h + torch.nn.functional.silu(layer(h * x))
        (force,) = torch.autograd.grad(h.sum(), x, create_graph=True)
        return h.square().mean() + force.square().mean()


@pytest.mark.skipif(not available(), reason="needs a C++ compiler for the counting allocator")
@pytest.mark.parametrize("budget", ["min", "100%"])
def test_gradients_that_add_up_within_the_forward_are_predicted(budget: str) -> None:
    """Autograd adds in place where nothing else holds a gradient; one that it saved is held."""
    model = Messages()
    handle = lowtide.limit_memory(model, budget)
    for _ in range(3):
        model(torch.randn(256, 32)).backward()
        model.zero_grad()
    assert handle.plan is not None and handle.measured_peak_bytes is not None
    assert abs(handle.plan.predicted_peak_bytes - handle.measured_peak_bytes) <= 4096


@pytest.mark.skipif(not available(), reason="needs a C++ compiler for the counting allocator")
def test_a_penalty_on_gradients_alone_is_measured_to_its_end() -> None:
    """Its backward never comes to the output, which is gone by then."""
    model = nn.Sequential(nn.Linear(32, 128), nn.SiLU(), nn.Linear(128, 128), nn.SiLU(), nn.Linear(128, 1))
    handle = lowtide.limit_memory(model, "min")

    def step() -> None:
        x = torch.randn(128, 32).requires_grad_()
        (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        (gradient.norm(dim=1) - 1).square().mean().backward()

    for _ in range(3):
        step()
        model.zero_grad()
    assert handle.plan is not None and handle.plan.replayed and handle.measured_peak_bytes is not None
    assert abs(handle.plan.predicted_peak_bytes - handle.measured_peak_bytes) <= 4096


def test_parameters_are_told_by_storage_and_are_not_droppable() -> None:
    model = nn.Sequential(nn.Linear(N, N), nn.Tanh(), nn.Linear(N, N))
    graph = lowtide.trace(lambda: model(batch()).sum(), costs=False)
    kinds = {s.name: s.kind for s in graph.storages if s.name and s.producer is None}
    assert set(kinds) == {"0.weight", "0.bias", "2.weight", "2.bias"} and set(kinds.values()) == {"parameter"}
    for saved in graph.saved:
        if graph.storages[graph.values[saved.value].storage].kind == "parameter":
            assert not saved.droppable
    droppable = [s for s in graph.saved if s.droppable]
    assert [s.shape for s in droppable] and all(s.module in ("1", "2", "0") for s in droppable)


def test_one_storage_saved_several_times_is_one_value() -> None:
    """The input of q, k and v."""
    heads = nn.ModuleList([nn.Linear(N, N) for _ in range(3)])

    def step(x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(x)
        return sum(head(h).square().sum() for head in heads)

    graph = lowtide.trace(step, batch().requires_grad_(), model=heads, costs=False)
    tanh = next(o for o in graph.operations if o.name == "aten.tanh.default")
    # thrice as an input, once as tanh's result
    assert sum(s.value == tanh.writes[0] for s in graph.saved) == 4


def test_in_place_operations_make_versions() -> None:
    w = nn.Parameter(torch.ones(N))

    def step() -> torch.Tensor:
        y = w * 2
        y.add_(1)
        y[1:].mul_(3)
        return y.sum()

    graph = lowtide.trace(step, model=None, costs=False)
    product = next(o for o in graph.operations if o.name == "aten.mul.Tensor")
    storage = graph.values[product.writes[0]].storage
    versions = [v for v in graph.values if v.storage == storage]
    assert [v.version for v in versions] == [0, 1, 2]
    assert [v.storable for v in versions] == [False, False, True]
    assert [graph.operations[v.producer].name for v in versions] == [
        "aten.mul.Tensor",
        "aten.add_.Tensor",
        "aten.mul_.Tensor",
    ]


def test_views_are_no_operations_and_expanded_tensors_have_their_storage_bytes() -> None:
    w = nn.Parameter(torch.ones(1, N))

    def step() -> torch.Tensor:
        return (w.exp().expand(100, N).t()[:, ::2].cos()).sum()

    graph = lowtide.trace(step, costs=False)
    # the last is what backward starts from
    assert names(graph, "forward") == ["exp", "cos", "sum", "ones_like"]
    saved = [s for s in graph.saved if s.shape == (N, 50)]
    assert saved and graph.storages[graph.values[saved[0].value].storage].bytes == N * 4


def test_random_and_batch_norm_operations() -> None:
    graph = lowtide.trace(make(), batch(), costs=False)
    by_name = {o.name: o for o in graph.operations if o.phase == "forward"}
    assert by_name["aten.bernoulli_.float"].random and by_name["aten.randn.default"].random
    norm = by_name["aten.native_batch_norm.default"]
    assert norm.replayable and not norm.random
    statistics = {v.id for v in graph.values if graph.storages[v.storage].name.startswith("norm.running")}
    assert not statistics.intersection(norm.reads)


def test_uninitialized_memory_cannot_be_replayed() -> None:
    w = nn.Parameter(torch.ones(N))

    def step() -> torch.Tensor:
        out = torch.empty(N)
        out[:4] = w[:4].exp()
        return (out[:4] * w[:4]).sum()

    graph = lowtide.trace(step, costs=False)
    empty = next(o for o in graph.operations if o.name == "aten.empty.memory_format")
    copy_ = next(o for o in graph.operations if o.name == "aten.copy_.default")
    assert not empty.replayable and empty.reason and not Simulator(graph).feasible[copy_.index]


def test_events_are_in_order() -> None:
    graph = lowtide.trace(make(), batch(), costs=False)
    order: dict[tuple[str, int], int] = {event: at for at, event in enumerate(map(tuple, graph.events))}
    assert [e.index for e in graph.events if e.kind == "op"] == [o.index for o in graph.operations]
    for saved in graph.saved:
        pack, release = order[("pack", saved.id)], order[("release", saved.id)]
        unpack = order.get(("unpack", saved.id))
        assert pack < release and (unpack is None or pack < unpack < release)
        assert (
            graph.values[saved.value].producer is None
            or order[("op", graph.values[saved.value].producer)] < pack
        )
    for storage in graph.storages:
        if storage.producer is not None and ("free", storage.id) in order:
            assert order[("op", storage.producer)] < order[("free", storage.id)]
    last_forward = max(
        at
        for at, e in enumerate(graph.events)
        if e.kind == "op" and graph.operations[e.index].phase == "forward"
    )
    first_backward = min(
        at
        for at, e in enumerate(graph.events)
        if e.kind == "op" and graph.operations[e.index].phase == "backward"
    )
    assert last_forward < first_backward


def test_modules_are_named_in_both_phases() -> None:
    graph = lowtide.trace(make(), batch(), costs=False)
    by_module: dict[str, set[str]] = {}
    for operation in graph.operations:
        by_module.setdefault(operation.module, set()).add(operation.phase)
    assert {"first", "norm", "drop", "last"} <= set(by_module)
    assert by_module["last"] == {"forward", "backward"}
