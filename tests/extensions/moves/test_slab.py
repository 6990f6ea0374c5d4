"""The slab into which values come back: allocated once, exact in the peak, and never written while somebody
still needs what lies there.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from moving_net import X, net, same, step

import lowtide
from lowtide import meter, policies
from lowtide.extensions.moves.layout import check, without_slab
from lowtide.extensions.moves.simulate import simulate_plan
from lowtide.extensions.moves.store.slab import Slab, hand_out
from lowtide.extensions.optimizer.need import missing_gradient_bytes, optimizer_need
from lowtide.plan.data import Chain, Compress, Offload, Plan
from lowtide.plan.simulate import Simulator

FORMS = {
    "disk": Offload("disk"),
    "host": Offload("host"),
    "encoded": Compress("int8"),
    "encoded on disk": Chain(Compress("int8"), Offload("disk")),
}


def policy_of(form: Any, recompute: str, window: int) -> Any:
    """All that stays with a recomputing policy moves, into a slab and back."""

    def policy(graph: lowtide.StepGraph, budget: int | None = None) -> Plan:
        kept = lowtide.plan(graph, policy=recompute).stored
        return policies.make_plan(
            graph, stored=kept, moves=dict.fromkeys(kept, form), window_bytes=window, budget=budget, slab=True
        )

    return policy


@pytest.mark.parametrize("recompute", ["keep_all", "full"])
@pytest.mark.parametrize("window", [1, 30_000, 200_000])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_nothing_is_allocated_after_the_first_step_and_the_peak_is_exact(
    form: Any, window: int, recompute: str
) -> None:
    plain, limited = net(layers=3), net(layers=3)
    handle = lowtide.limit_memory(limited, policy=policy_of(form, recompute, window))
    stores = handle._limiter.extensions[0].stores
    slabs: set[Any] = set()
    took = []
    for seed in range(3):
        exact, found = step(plain, seed=seed), step(limited, seed=seed)
        slabs.add(stores.slab)
        took.append(handle.measured_peak_bytes)
        assert same(exact, found) if isinstance(form, Offload) else torch.equal(exact[0], found[0])
    plan = handle.plan
    assert plan is not None and plan.slab_bytes and stores.slab is not None
    assert took[1] == took[2]  # the slab counts once, also in the step that it is made for
    assert slabs - {None} == {stores.slab} and stores.slab.memory.nbytes == plan.slab_bytes
    assert stores.unplaced == 0  # allocations for what comes back, in all steps
    limited.zero_grad(set_to_none=True)
    torch.manual_seed(0)
    measured = meter.measure(lambda: limited(X).backward(), timeline=False)
    resident = meter.resident_bytes(limited) - sum(p.nbytes for p in limited.parameters()) + X.nbytes
    if not isinstance(form, Offload):  # how much a codec allocates on the way is known as a bound
        assert resident + plan.slab_bytes + measured.peak_bytes <= plan.predicted_peak_bytes
    else:
        assert resident + plan.slab_bytes + measured.peak_bytes == plan.predicted_peak_bytes
    assert any(m.place >= 0 for m in plan.moves)
    handle.remove()
    assert stores.slab is None


def test_places_that_are_taken_at_once_do_not_overlap() -> None:
    model = net()
    graph = lowtide.trace(lambda: model(X))
    for window in (1, 100_000, 1 << 30):
        plan = policy_of(FORMS["encoded on disk"], "full", window)(graph, None)
        sim = Simulator(graph)
        spans = simulate_plan(sim, plan).transfers.spans
        rows = {m.value: m for m in plan.moves}
        sizes = [rows[v].encoded_bytes if arriving else rows[v].place_bytes for v, arriving in spans]
        places = [rows[v].arrival if arriving else rows[v].place for v, arriving in spans]
        assert min(places) >= 0 and len(places) == 2 * len(plan.moves)
        top = check([a for a, _ in spans.values()], [b for _, b in spans.values()], sizes, places)
        assert top <= plan.slab_bytes


def test_a_slab_is_taken_where_the_budget_has_room_for_it() -> None:
    model = net()
    graph = lowtide.trace(lambda: model(X))
    free = policies.offload("disk", min_bytes=1, slab=True)(graph)
    loose = policies.offload("disk", min_bytes=1, slab=False)(graph)
    assert free.slab_bytes and free.loose_peak_bytes == loose.predicted_peak_bytes and not loose.slab_bytes
    assert without_slab(free) == loose and without_slab(loose) is loose
    few = policies.make_plan(
        graph, stored=loose.stored, moves={m.value: m.decision for m in loose.moves[:4]}, slab=True
    )
    assert few.predicted_peak_bytes > few.loose_peak_bytes  # the peak is where nothing has come back
    for budget, slab in ((few.predicted_peak_bytes, True), (few.predicted_peak_bytes - 1, False)):
        plan = policies.make_plan(
            graph, stored=few.stored, moves={m.value: m.decision for m in few.moves}, budget=budget
        )
        assert (plan.slab_bytes > 0) is slab and plan.predicted_peak_bytes <= budget
    with pytest.raises(lowtide.BudgetError):
        policies.make_plan(
            graph,
            stored=few.stored,
            moves={m.value: m.decision for m in few.moves},
            budget=few.predicted_peak_bytes - 1,
            slab=True,
        )
    assert "allocated once" in str(few) and "memory of its own" in str(loose)
    assert lowtide.Plan.from_json(few.to_json()) == few


def test_an_optimizer_that_needs_the_room_goes_before_the_slab() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        *(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(4)),
        torch.nn.Linear(64, 1),
    )
    x = torch.randn(8, 64)

    def policy(graph: lowtide.StepGraph, budget: int | None = None) -> Plan:
        moves = {
            m.value: m.decision for m in policies.offload("host", min_bytes=1, window_bytes=1)(graph).moves
        }
        return policies.make_plan(graph, stored=moves, moves=moves, window_bytes=1 << 20, budget=budget)

    found = []
    for room in (2000, 1 << 20):
        one = copy.deepcopy(model)
        optimizer = torch.optim.AdamW(one.parameters(), 0.1, foreach=True)
        need = optimizer_need(optimizer)
        least = meter.resident_bytes(one) + missing_gradient_bytes(optimizer)
        least += need.state_bytes + need.step_bytes
        handle = lowtide.limit_memory(
            one, budget=least + room, policy=policy, optimizer=optimizer, loss_fn=lambda out: out.sum()
        )
        for _ in range(2):
            one(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert handle.plan is not None and handle.plan.moves
        found.append(handle.plan)
        assert least + handle.plan.slab_bytes <= least + room
    assert not found[0].slab_bytes and found[1].slab_bytes > 2000  # the step itself has room for either


def test_a_retained_graph_and_hooks_keep_what_they_hold() -> None:
    """What is still referred to is never written over: it comes back into other memory, which is counted."""
    plain, limited = net(layers=3), net(layers=3)
    handle = lowtide.limit_memory(limited, policy=policy_of(Offload("host"), "keep_all", 30_000))
    stores = handle._limiter.extensions[0].stores
    found: list[list[torch.Tensor]] = []
    for model in (plain, limited):
        rows = step(model)
        model.zero_grad()
        torch.manual_seed(3)
        loss = model(X)
        loss.backward(retain_graph=True)
        loss.backward()
        found.append([*rows, *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    assert same(*found)
    assert stores.unplaced == 0  # the second backward's find the places of the first's free
    assert same(step(plain), step(limited)) and stores.unplaced == 0

    class Leak(torch.autograd.Function):
        """Keeps what it saved."""

        seen: list[torch.Tensor] = []

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            y = x * 2
            ctx.save_for_backward(y)
            return y.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            (y,) = ctx.saved_tensors
            Leak.seen.append(y)
            return gradient * 2

    class Leaking(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.rest = torch.nn.Linear(48, 48), net(layers=2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.rest(Leak.apply(self.first(x)))

    torch.manual_seed(0)
    model = Leaking()
    leaking = lowtide.limit_memory(model, policy=policy_of(Offload("host"), "keep_all", 30_000))
    inner = leaking._limiter.extensions[0].stores
    step(model)
    Leak.seen.clear()  # the trace's, too
    for _ in range(4):
        step(model)
    kept, copies = Leak.seen, [t.clone() for t in Leak.seen]
    for _ in range(2):
        step(model)
    assert inner.unplaced > 0 and all(torch.equal(a, b) for a, b in zip(kept, copies, strict=False))
    assert len({t.data_ptr() for t in kept}) == len(kept)  # each step's is still its own
    before = inner.unplaced
    Leak.seen.clear()
    del kept
    step(model)
    assert inner.unplaced == before  # and the place is used again afterwards


def test_a_place_is_free_when_nobody_refers_to_it_and_nothing_is_written_there() -> None:
    slab = Slab(torch.device("cpu"), 4096)

    taken = slab.take(512, [1000, 8])
    assert taken is not None and [target.data_ptr() - slab.memory.data_ptr() for target in taken] == [
        512,
        1536,
    ]
    assert slab.take(0, [512]) is not None and slab.take(1543, [1]) is None and slab.take(4000, [97]) is None
    del taken[1]
    assert slab.take(1536, [8]) is None  # the parts hold the place together
    writer = taken[0].view(torch.int16)  # what a thread holds that is slow to let go
    tensor = hand_out(taken.pop())
    assert tensor.data_ptr() == writer.data_ptr() and tensor.untyped_storage().nbytes() == 1000
    part = tensor.view(torch.float32)[3:5]
    del tensor
    assert slab.take(512, [1024]) is None
    del part
    assert slab.take(512, [1024]) is not None
    other = slab.take(2048, [16])
    assert other is not None
    tensor, memory = hand_out(other.pop()), slab.memory.data_ptr()
    del slab
    tensor.fill_(7)  # what was handed out keeps the slab
    assert tensor.data_ptr() == memory + 2048 and int(tensor.sum()) == 112
    assert hand_out(tensor) is tensor
