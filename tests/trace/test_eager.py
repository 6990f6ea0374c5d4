"""`lowtide.trace`: what the step graph says, and that tracing leaves everything as it was."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lowtide
from lowtide import TraceError, meter
from lowtide.graph import StepGraph
from lowtide.interception import interceptors
from lowtide.plan.simulate import Simulator, plain
from lowtide.run.profile.costs import Cost, Costs

torch.set_num_threads(1)
N = 16


class Model(nn.Module):
    """Caches a tensor on itself, counts in a buffer, draws random numbers, normalizes over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(N, 4 * N), nn.Linear(4 * N, N)
        self.norm, self.drop = nn.BatchNorm1d(4 * N), nn.Dropout(0.3)
        self.register_buffer("count", torch.zeros(()))
        self.cache: torch.Tensor | None = None
        self.log: list[int] = []
        self.table = {"scale": torch.full((N,), 2.0)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self.cache = x.detach() * 2
        h = self.drop(F.gelu(self.norm(self.first(x))))
        return (self.last(h) * self.table["scale"] + torch.randn(N)).square().mean()


def make() -> Model:
    torch.manual_seed(0)
    return Model()


def batch() -> torch.Tensor:
    return torch.randn(8, N, generator=torch.Generator().manual_seed(3))


def names(graph: StepGraph, phase: str) -> list[str]:
    return [o.name.removeprefix("aten.").split(".")[0] for o in graph.operations if o.phase == phase]


# ---- it leaves no trace --------------------------------------------------------------------------


@pytest.mark.parametrize("fake", [False, True])
@pytest.mark.parametrize("with_gradients", [False, True])
def test_everything_is_as_before(fake: bool, with_gradients: bool) -> None:
    model = make()
    if with_gradients:
        model(batch()).backward()
    model.cache = torch.ones(3)
    expected = copy.deepcopy(model.state_dict())
    grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    identities = [(id(p), id(p.grad), p.data_ptr(), p._version) for p in model.parameters()]
    attributes = {m: dict(m.__dict__) for m in model.modules()}
    cache = model.cache
    state = torch.get_rng_state()
    lowtide.trace(model, batch(), fake=fake, costs=False)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(expected[k], v) for k, v in model.state_dict().items())
    for parameter, grad in zip(model.parameters(), grads, strict=True):
        assert (grad is None and parameter.grad is None) or torch.equal(grad, parameter.grad)
    assert [
        (id(p), id(p.grad), p.data_ptr(), p._version) for p in model.parameters()
    ] == identities or not fake
    assert [id(p) for p in model.parameters()] == [i[0] for i in identities]
    for module, before in attributes.items():
        for name, item in before.items():
            if fake or name not in ("cache", "_buffers"):
                assert module.__dict__[name] is item, name
    assert all(type(b) is torch.Tensor for b in model.buffers())
    assert model.cache is cache
    assert interceptors() == []


@pytest.mark.parametrize("fake", [False, True])
def test_everything_is_as_before_when_it_fails(fake: bool) -> None:
    model = make()
    state, expected = torch.get_rng_state(), copy.deepcopy(model.state_dict())
    hooks = len(torch.nn.modules.module._global_forward_pre_hooks)

    def step(x: torch.Tensor) -> torch.Tensor:
        model(x)
        raise KeyError("on the way")

    with pytest.raises((KeyError, TraceError), match="on the way"):
        lowtide.trace(step, batch(), fake=fake, costs=False)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(expected[k], v) for k, v in model.state_dict().items())
    assert all(type(p) is nn.Parameter and p.grad is None for p in model.parameters())
    assert len(torch.nn.modules.module._global_forward_pre_hooks) == hooks
    assert interceptors() == [] and torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    model(batch()).backward()


@pytest.mark.parametrize("own_backward", [False, True])
@pytest.mark.parametrize("with_gradients", [False, True])
def test_gradients_of_tensors_in_no_module_are_as_before(own_backward: bool, with_gradients: bool) -> None:
    class Weights:
        """No module, so nobody finds its tensors but who sees them used."""

        def __init__(self) -> None:
            self.seen_as_view = torch.randn(4 * N, N, requires_grad=True)
            self.table = {"last": torch.randn(4 * N, requires_grad=True)}
            self.all = [self.seen_as_view, *self.table.values()]

        def step(self, x: torch.Tensor) -> torch.Tensor | None:
            loss = ((x @ self.seen_as_view.t()).relu() @ self.table["last"]).square().mean()
            return loss.backward() if own_backward else loss

    weights = Weights()
    if with_gradients:
        for tensor in weights.all:
            tensor.grad = torch.ones_like(tensor)
    given = [tensor.grad for tensor in weights.all]
    graph = lowtide.trace(weights.step, batch(), costs=False)
    assert names(graph, "backward")
    for tensor, gradient in zip(weights.all, given, strict=True):
        assert tensor.grad is gradient
        assert gradient is None or torch.equal(gradient, torch.ones_like(tensor))


def test_timing_operations_changes_nothing_either() -> None:
    model = make()
    state, expected = torch.get_rng_state(), copy.deepcopy(model.state_dict())
    graph = lowtide.trace(model, batch())
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(expected[k], v) for k, v in model.state_dict().items())
    assert graph.plain_seconds > 0 and all(o.seconds > 0 for o in graph.operations)


# ---- what it says --------------------------------------------------------------------------------


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


def described(graph: StepGraph, values: tuple[int, ...]) -> list[Any]:
    """What operations read or wrote, without the numbers by which each trace calls it."""
    found = [graph.values[v] for v in values]
    rows = [(graph.storages[v.storage], v.version, v.producer or -1) for v in found]
    return sorted(
        (s.bytes, s.name if s.producer is None else "", version, producer) for s, version, producer in rows
    )


def test_two_traces_are_equal() -> None:
    model = make()
    first, second = (lowtide.trace(model, batch(), costs=False) for _ in range(2))
    assert first.fingerprint() == second.fingerprint()
    assert StepGraph.from_json(first.to_json()).fingerprint() == first.fingerprint()


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


@pytest.mark.parametrize("what", ["loss", "object", "dict", "tuple", "own backward"])
def test_where_the_loss_is(what: str) -> None:
    model = make()

    class Output:
        def __init__(self, loss: torch.Tensor) -> None:
            self.loss = loss

    def step(x: torch.Tensor) -> Any:
        loss = model(x)
        if what == "own backward":
            loss.backward()
            return None
        return {"loss": loss, "object": Output(loss), "dict": {"loss": loss, "x": x}, "tuple": (loss, x)}[
            what
        ]

    graph = lowtide.trace(step, batch(), costs=False)
    assert names(graph, "backward")
    assert all(p.grad is None for p in model.parameters())


def test_a_step_without_a_loss() -> None:
    model = make()
    with pytest.raises(TraceError, match="loss"):
        lowtide.trace(lambda x: model.first(x), batch(), costs=False)


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
    standing = sum(p.nbytes for p in model.parameters()) + x.nbytes
    assert (
        abs(plain(graph).peak_bytes - standing - measure(step).peak_bytes) <= 0.01 * measure(step).peak_bytes
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


def test_buffers_that_come_and_go_beside_a_collective_are_not_its_scratch() -> None:
    """Its threads hold a copy of the input a while longer, and let go of that of an earlier one."""
    pytest.importorskip("torch.distributed")
    import torch.distributed._functional_collectives

    held: list[torch.Tensor] = []

    def call(last: bool) -> torch.Tensor:
        if last:
            held.clear()
        held.append(torch.empty(64))
        return torch.empty(8)

    for func, expected in (
        (torch.ops._c10d_functional.reduce_scatter_tensor.default, 256),
        (torch.ops.aten.mm.default, 0),  # what is left of another operation is counted elsewhere
    ):
        costs, cost = Costs(torch.device("cpu")), Cost(is_collective="c10d" in str(func))
        for last in (False, True):
            costs.measured(cost, lambda last=last: call(last))
        assert cost.scratch_bytes == expected
        held.clear()


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


def test_a_few_runs_of_what_costs_the_same_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of thousands of equal operations is not slowed down by thousands of meters."""
    opened = 0
    peak = meter.peak

    def counted(*args: Any) -> Any:
        nonlocal opened
        opened += 1
        return peak(*args)

    monkeypatch.setattr("lowtide.run.profile.costs.peak", counted)
    weight = torch.ones(16, requires_grad=True)

    def chain(x: torch.Tensor) -> torch.Tensor:
        for _ in range(60):
            x = torch.sin(x * weight)
        return x.sum()

    graph = lowtide.trace(chain, torch.ones(4, 16))
    kinds = {op.name for op in graph.operations}
    assert len(graph.operations) > 200 and opened <= 15 * len(kinds)
    assert len({op.seconds for op in graph.operations if op.name == "aten.sin.default"}) == 1
