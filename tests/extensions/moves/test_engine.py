"""Plans that move values: bitwise the same steps, the predicted bytes to the byte, whatever the delays."""

from __future__ import annotations

import copy
import json
import random
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from faults import before_each
from moving_net import LOSSLESS, X, both, net, same, step
from torch import nn

import lowtide
from lowtide import meter, policies
from lowtide.errors import PlanError
from lowtide.extensions.moves.engine import TransferEngine
from lowtide.extensions.moves.store import stores as stores_module
from lowtide.extensions.moves.store.codec import Codec, CodecError, Form
from lowtide.extensions.moves.store.host import Host
from lowtide.graph import StepGraph
from lowtide.plan.data import Chain, Compress, Keep, Link, Offload, Plan, Shard
from lowtide.policies import Policy


@pytest.mark.parametrize("relu", [False, True], ids=["gelu", "relu"])
@pytest.mark.parametrize("policy", LOSSLESS.values(), ids=LOSSLESS.keys())
def test_lossless_stores_give_the_same_bits(policy: Any, relu: bool) -> None:
    plain, limited = net(relu=relu), net(relu=relu)
    handle = lowtide.limit_memory(limited, policy=policy)
    for seed in range(4):
        assert same(step(plain, seed=seed), step(limited, seed=seed))
    assert handle.plan is not None and handle.plan.moves
    handle.remove()


@pytest.mark.parametrize("name", ["disk", "host", "full, then disk and host"])
@pytest.mark.parametrize("window", [1, 30_000, 200_000])
def test_the_peak_and_the_traffic_are_as_predicted_to_the_byte(name: str, window: int) -> None:
    model = net()
    base: Any = LOSSLESS[name]

    def policy(graph: StepGraph, budget: int | None = None) -> Plan:
        first = base(graph, budget)
        moves = {m.value: m.decision for m in first.moves}
        return policies.make_plan(graph, stored=first.stored, moves=moves, window_bytes=window)

    handle = lowtide.limit_memory(model, policy=policy)
    for _ in range(2):
        step(model)
    model.zero_grad(set_to_none=True)
    torch.manual_seed(0)
    before = {k: copy.copy(t.counts) for k, t in handle._limiter.extensions[0].stores.tiers.items()}
    measured = meter.measure(lambda: model(X).backward(), timeline=False)
    plan = handle.plan
    assert plan is not None
    gradients = sum(p.numel() * p.element_size() for p in model.parameters())
    resident = meter.resident_bytes(model) - gradients + X.nbytes
    assert resident + plan.slab_bytes + measured.peak_bytes == plan.predicted_peak_bytes
    for key, tier in handle._limiter.extensions[0].stores.tiers.items():
        planned = sum(
            m.bytes for m in plan.moves if isinstance(m.decision, Offload) and m.decision.tier == key[0]
        )
        assert tier.counts.written_bytes - before[key].written_bytes == planned
        assert tier.counts.read_bytes - before[key].read_bytes == planned
        assert tier.counts.allocations == 1  # none after the first step
        assert tier.arena.taken_bytes == 0
    handle.remove()


def test_no_race_shows_under_random_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    source = random.Random(7)
    before_each(monkeypatch, lambda _: time.sleep(source.random() * 0.002))
    stores = lowtide.Stores()
    plain, limited = net(layers=3), net(layers=3)
    lowtide.limit_memory(limited, policy=both("full"), stores=stores, verify="always")
    for seed in range(30):
        assert same(step(plain, seed=seed), step(limited, seed=seed))
    stores.close()


def test_many_steps_of_training_stay_the_same() -> None:
    plain, limited = net(layers=2), net(layers=2)
    handle = lowtide.limit_memory(limited, policy=LOSSLESS["disk"])
    for model in (plain, limited):
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        for seed in range(40):
            step(model, seed=seed)
            optimizer.step()
    assert same([p.detach() for p in plain.parameters()], [p.detach() for p in limited.parameters()])
    (tier,) = handle._limiter.extensions[0].stores.tiers.values()
    assert tier.counts.allocations == 1 and tier.arena.taken_bytes == 0


def test_shapes_that_change_and_forwards_that_overlap() -> None:
    plain, limited = net(layers=2), net(layers=2)
    lowtide.limit_memory(limited, policy=LOSSLESS["disk"])
    for rows in (200, 64, 200, 64):
        assert same(step(plain, X[:rows]), step(limited, X[:rows]))
    grads = []
    for model in (plain, limited):
        model.zero_grad()
        torch.manual_seed(3)
        first, second = model(X[:64]), model(X[64:128])
        second.backward()
        first.backward()
        grads.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert same(*grads)


def test_many_steps_of_varying_shapes_leave_no_fragment() -> None:
    """Each kind of step has its static layout whenever its turn comes: the slab is the largest kind's, to the
    byte, and never grows again.
    """
    plain, limited = net(layers=1), net(layers=1)
    handle = lowtide.limit_memory(limited, policy=LOSSLESS["disk"])
    kinds, source = (33, 200, 64, 7, 151), random.Random(0)
    grown, needed = [], []
    with warnings.catch_warnings():
        warnings.simplefilter("error", lowtide.LowtideWarning)
        for number in range(80):
            rows = kinds[number // 2] if number < 2 * len(kinds) else source.choice(kinds)
            exact = step(plain, X[:rows], number) if number % 10 == 0 else None
            found = step(limited, X[:rows], number)
            assert exact is None or same(exact, found)
            if number < 2 * len(kinds) and number % 2 == 0:
                continue  # the plan is made from it
            (tier,) = handle._limiter.extensions[0].stores.tiers.values()
            grown.append(tier.counts.allocations)
            if number < 2 * len(kinds):
                assert handle.plan is not None
                layout = [
                    (m.born, max(m.gone, m.born + 1), -(-m.encoded_bytes // tier.align) * tier.align)
                    for m in handle.plan.moves
                ]
                events = sorted({at for low, high, _ in layout for at in (low, high)})
                needed.append(
                    max(sum(size for low, high, size in layout if low <= at < high) for at in events)
                )
            assert tier.arena.taken_bytes == 0
    # the second kind is the largest
    assert grown[: len(kinds)] == [1, 2, 2, 2, 2] and set(grown[len(kinds) :]) == {2}
    assert tier.counts.slab_bytes == tier.arena.static_bytes == max(needed)


def test_a_retained_graph_fetches_again() -> None:
    plain, limited = net(layers=2), net(layers=2)
    lowtide.limit_memory(limited, policy=both("full"))
    grads = []
    for model in (plain, limited):
        for _ in range(2):
            model.zero_grad()
            torch.manual_seed(3)
            loss = model(X)
            loss.backward(retain_graph=True)
            loss.backward()
            grads.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert same(grads[0], grads[2]) and same(grads[1], grads[3])


def test_offload_within_a_budget_moves_only_what_it_has_to() -> None:
    model = net()
    graph = lowtide.trace(lambda: model(X))
    plain = lowtide.plan(graph, policy="keep_all").predicted_peak_bytes
    few = policies.offload("disk", min_bytes=1)(graph, int(0.9 * plain))
    many = policies.offload("disk", min_bytes=1)(graph, int(0.7 * plain))
    assert 0 < len(few.moves) < len(many.moves)
    assert few.predicted_peak_bytes <= 0.9 * plain
    order = [m.value for m in many.moves]
    # the earliest first: those nearest the loss stay
    assert [m.value for m in few.moves] == order[: len(few.moves)]
    with pytest.raises(lowtide.BudgetError):
        policies.offload("disk", min_bytes=1)(graph, 1000)


@pytest.mark.parametrize("values", ["all", "checkpoints"])
@pytest.mark.parametrize("way", ["offload", "partition"])
def test_the_last_values_stay(way: str, values: str) -> None:
    """``keep_last`` values of the forward, which backward needs first, do not move; the bits are the same."""

    def policy(keep_last: int) -> Policy:
        if way == "offload":
            return policies.offload("disk", values=values, keep_last=keep_last, min_bytes=1)
        return policies.partition(
            "tp", 2, values=values, keep_last=keep_last, then=Offload("disk"), min_bytes=1
        )

    model = net()
    graph = lowtide.trace(lambda: model(X))
    every = [m.value for m in policy(0)(graph).moves]
    if values == "checkpoints":
        assert len(every) == len(model.h) - 1  # the first block's input was there before the step
        assert policy(0)(graph).replayed
    for keep_last in (1, 3):
        plan = policy(keep_last)(graph)
        assert [m.value for m in plan.moves] == every[:-keep_last]
        assert {plan.decisions[v] for v in every[-keep_last:] if v in plan.decisions} <= {Keep()}
        within = policy(keep_last)(graph, plan.predicted_peak_bytes)
        assert {m.value for m in within.moves} <= set(every[:-keep_last])
    if way == "offload":
        plain, limited = net(), net()
        lowtide.limit_memory(limited, policy=policy(2))
        assert all(same(step(plain, seed=seed), step(limited, seed=seed)) for seed in range(3))
        assert not policy(len(every))(graph).moves  # as many as there are, and all stay
    else:
        with pytest.raises(lowtide.BudgetError, match="lower min_bytes= or keep_last="):
            policy(len(every))(graph)
    with pytest.raises(PlanError, match=r"keep_last=.*0 or more"):
        policy(-1)
    with pytest.raises(PlanError, match="give 'checkpoints' or 'all'"):
        policies.offload(values="inputs")


def test_what_nobody_can_wait_for_never_moves() -> None:
    """A collective that only the program waits for may still be writing when it returns."""
    model = net(layers=1)
    graph = lowtide.trace(lambda: model(X))
    (move, *_) = LOSSLESS["disk"](graph).moves
    at = graph.values[move.value].producer
    assert at is not None
    operations = list(graph.operations)
    operations[at] = replace(operations[at], name="c10d.allreduce_.default")
    other = replace(graph, operations=tuple(operations))
    assert move.value not in {m.value for m in LOSSLESS["disk"](other).moves}
    with pytest.raises(PlanError, match="may still be writing it"):
        policies.make_plan(other, stored=(), moves={move.value: Offload("disk")})


def test_parameters_never_travel() -> None:
    model = net()
    graph = lowtide.trace(lambda: model(X))
    parameters = {v.id for v in graph.values if v.producer is None}
    for policy in LOSSLESS.values():
        assert not parameters & {m.value for m in policy(graph).moves}
    with pytest.raises(PlanError, match="parameters, buffers and inputs never move"):
        policies.make_plan(graph, stored=(), moves={min(parameters): Offload("host")})


def test_one_copy_however_many_tensors_view_a_value() -> None:
    width = 64

    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(width, 3 * width)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.qkv(x).split(width, dim=-1)
            return ((q * k) * v).sum()

    torch.manual_seed(0)
    model = Views()
    graph = lowtide.trace(lambda: model(torch.randn(32, width)))
    moves = policies.offload("disk", min_bytes=1, window_bytes=1)(graph).moves
    assert [m.bytes for m in moves].count(32 * 3 * width * 4) == 1


def test_a_plan_with_moves_survives_json() -> None:
    model = net(layers=2)
    graph = lowtide.trace(lambda: model(X))
    plan = policies.compress("int8", min_bytes=1, then=Offload("disk"))(graph)
    again = lowtide.Plan.from_json(plan.to_json())
    assert again == plan
    assert json.loads(plan.to_json())["moves"][0]["decision"]["kind"] == "chain"
    assert "codec int8, then disk" in str(plan)
    assert "bound  none is stated" in str(plan) and "could save" not in str(plan), "zero is not a bound"
    assert "could save" in str(policies.full()(graph)) and "could save" in str(policies.mixed()(graph))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Offload("tape"), "no such tier"),
        (lambda: Offload("host", "/x"), "the host tier has no path"),
        (lambda: Shard("tp", 0), "number of ranks"),
        (lambda: policies.compress("zip"), "there is no codec 'zip'"),
        (lambda: policies.partition("tp", 2, values="some"), "give 'checkpoints' or 'all'"),
    ],
)
def test_wrong_decisions_are_refused(make: Callable[[], Any], says: str) -> None:
    with pytest.raises(lowtide.LowtideError, match=says):
        make()


@pytest.mark.parametrize(("codec", "error"), [("bfloat16", 0.01), ("int8", 0.03), ("int4", 0.4)])
@pytest.mark.parametrize("then", [None, Offload("disk")], ids=["device", "disk"])
def test_bounded_codecs_stay_near(codec: str, error: float, then: Offload | None) -> None:
    plain, limited = net(), net()
    handle = lowtide.limit_memory(limited, policy=policies.compress(codec, then=then))
    exact, looked, near = step(plain), step(limited), step(limited)
    assert same(exact, looked)  # from which the plan is made
    assert torch.equal(exact[0], near[0])  # the forward is untouched
    distance = torch.cat([(a - b).flatten() for a, b in zip(exact[1:], near[1:], strict=True)]).norm()
    assert 0 < distance < error * torch.cat([a.flatten() for a in exact[1:]]).norm()
    plan = handle.plan
    assert plan is not None and sum(m.encoded_bytes for m in plan.moves) < 0.6 * sum(
        m.bytes for m in plan.moves
    )


class Half(Codec):
    """A user's own codec."""

    name = "half"

    def encoded_bytes(self, form: Form) -> int:
        return 2 * form.elements if form.dtype == torch.float32 else form.bytes

    def encode(self, flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if flat.abs().max() > 60000:
            raise CodecError("too large")
        return (flat.half(),)

    def decode(self, parts: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
        out.copy_(parts[0])


def test_a_codec_of_ones_own_is_three_methods() -> None:
    limited = net()
    lowtide.limit_memory(limited, policy=policies.compress(Half()), stores=lowtide.Stores(codecs=[Half()]))
    exact, looked, near = step(net()), step(limited), step(limited)
    assert same(exact, looked)
    assert all(torch.allclose(a, b, atol=1e-2) for a, b in zip(exact, near, strict=True)) and not same(
        exact, near
    )
    other = net()
    lowtide.limit_memory(other, policy=policies.compress(Half()))
    with pytest.raises(CodecError, match="there is no codec 'half'"):
        for _ in range(2):
            step(other)


def test_what_does_not_fit_its_codec_is_kept_as_it_is() -> None:
    plain, limited = net(), net()
    # most values have more than two numbers
    lowtide.limit_memory(limited, policy=policies.compress("mask", min_bytes=1))
    exact = step(plain)
    assert same(exact, step(limited))
    with pytest.warns(lowtide.LowtideWarning, match="did not fit their codecs"):
        assert same(exact, step(limited))
    assert same(exact, step(limited))


def test_apply_moves_too() -> None:
    model = net(layers=2)
    graph = lowtide.trace(lambda: model(X))
    plan = policies.offload("disk", min_bytes=1)(graph)
    exact = step(net(layers=2))
    stepping = lowtide.apply(plan)
    for _ in range(2):
        model.zero_grad()
        torch.manual_seed(0)
        with stepping:
            loss = model(X)
        loss.backward()
        assert same(exact, [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])


def test_decisions_say_where_values_go() -> None:
    model = net(layers=2)
    plan = policies.offload("disk", min_bytes=1)(lowtide.trace(lambda: model(X)))
    assert {type(d) for d in plan.decisions.values()} == {lowtide.Keep, Offload}
    assert Chain(Compress("int8"), Offload("disk")) != Compress("int8")


def test_waiting_for_transfers_is_predicted() -> None:
    model = net()
    graph = lowtide.trace(lambda: model(X))
    speed = 1e6  # a slow link: the step is nothing beside it
    slow = policies.offload("disk", min_bytes=1, window_bytes=1, links={"disk": Link(speed, speed)})(graph)
    moved = sum(m.bytes for m in slow.moves)
    assert slow.transfer_seconds == pytest.approx(2 * moved / speed, rel=0.05)
    assert slow.predicted_extra_seconds >= slow.transfer_seconds
    free = policies.offload("disk", min_bytes=1, links={"disk": Link(1e15, 1e15)})(graph)
    assert free.transfer_seconds == pytest.approx(0, abs=1e-9)
    # what hides behind the operations between its ends costs nothing: with a window that holds all, only the
    # last has to be waited for
    hidden = policies.offload(
        "disk",
        min_bytes=1,
        window_bytes=1 << 30,
        links={"disk": Link(moved / graph.plain_seconds * 100, 1e15)},
    )(graph)
    assert hidden.transfer_seconds < 0.02 * graph.plain_seconds


def test_the_planner_picks_the_cheaper_mix() -> None:
    model = net()
    graph = lowtide.trace(lambda: model(X))
    # which is most of so small a step
    graph = replace(graph, overhead_seconds=0.0, replay_overhead_seconds=0.0)
    plain = lowtide.plan(graph, policy="keep_all").predicted_peak_bytes
    budget = int(0.6 * plain)
    fast = policies.mixed("disk", links={"disk": Link(1e15, 1e15)}, min_bytes=1)(graph, budget)
    slow = policies.mixed("disk", links={"disk": Link(1e3, 1e3)}, min_bytes=1)(graph, budget)
    assert fast.moves and not fast.replayed
    assert slow.replayed and not slow.moves
    for plan in (fast, slow):
        assert plan.predicted_peak_bytes <= budget
    alone = lowtide.plan(graph, budget=budget)
    assert fast.predicted_extra_seconds <= alone.predicted_extra_seconds
    assert slow.predicted_extra_seconds <= alone.predicted_extra_seconds * 1.0001


def test_tiers_are_laid_out_where_the_step_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan that was made on ``cuda:0`` (or says ``cuda``) and runs on ``cuda:1`` opens one tier, which is
    large enough before the first value goes there.
    """
    opened: list[torch.device] = []

    def opening(path: str, device: torch.device) -> Host:
        opened.append(device)
        return Host()

    monkeypatch.setitem(stores_module._OPEN, "host", opening)
    graph = lowtide.trace(lambda x: net(layers=2)(x).sum(), X)
    plan = lowtide.plan(graph, policy=policies.offload("host", min_bytes=1, slab=False))
    for device in ("cuda", "cuda:0"):
        opened.clear()
        stores = lowtide.Stores()
        engine = TransferEngine(replace(plan, device=device), stores, False, torch.device("cuda:1"))
        assert opened == [torch.device("cuda:1")]
        (tier,) = stores.tiers.values()
        assert tier.counts.allocations == 1 and tier.counts.slab_bytes >= max(m.bytes for m in plan.moves)
        del engine
        stores.close()
