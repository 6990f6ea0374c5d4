"""The default on a card: keep, recompute or move to main memory, whichever adds less time."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from moving_steps import FAST, SLOW, Net, graph_of

import lowtide
from lowtide import budget, meter, policies
from lowtide.errors import BudgetError, PlanError
from lowtide.extensions.moves import auto, mixed
from lowtide.extensions.moves.auto import Auto, settled
from lowtide.extensions.moves.extension import Moves
from lowtide.extensions.moves.plans import waiting_notes
from lowtide.extensions.moves.simulate import Transfers, with_moves
from lowtide.extensions.moves.store.tier import StoreError
from lowtide.graph import StepGraph
from lowtide.plan.data import Link, Plan
from lowtide.plan.simulate.simulator import simulator_of

CARD = torch.device("cuda")


@pytest.fixture(autouse=True)
def small_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values of these tests may move."""
    monkeypatch.setattr(auto, "_MIN_BYTES", 1)


def at(graph: StepGraph, share: float) -> int:
    return int(share * lowtide.plan.plain(graph).peak_bytes)


def over(link: Link, host_budget: str | int = "1GiB") -> Any:
    return policies.auto(links={"host": link}, host_budget=host_budget)


@pytest.mark.parametrize("share", [0.9, 0.6])
def test_over_a_fast_link_values_move_and_over_a_slow_one_the_step_recomputes(share: float) -> None:
    graph = graph_of(8)
    alone = policies.optimal()(graph, at(graph, share))
    fast = over(FAST)(graph, at(graph, share))
    assert fast.policy == "auto" and fast.moves and not fast.replayed
    assert fast.predicted_extra < 0.001 < alone.predicted_extra
    assert fast.predicted_peak_bytes <= at(graph, share)
    slow = over(SLOW)(graph, at(graph, share))
    assert not slow.moves and (slow.stored, slow.program) == (alone.stored, alone.program)
    assert slow.predicted_peak_bytes == alone.predicted_peak_bytes
    assert any("nothing moves to main memory: over its link (1e-06 GB/s)" in note for note in slow.notes)


@pytest.mark.parametrize("seconds", [None, 0.3])
@pytest.mark.parametrize("speed", [1e12, 3e6])
def test_a_plan_moves_no_more_than_main_memory_may_hold_and_is_never_slower_than_recomputing(
    speed: float, seconds: float | None
) -> None:
    graph = graph_of(8)
    for share in (0.9, 0.6, 0.5):
        alone = policies.optimal()(graph, at(graph, share)).predicted_extra_seconds
        for most in (10 << 10, 40 << 10):
            policy = over(Link(speed, speed), most)
            plan = (policy if seconds is None else policy.hurried(seconds, "cpu"))(graph, at(graph, share))
            assert sum(m.bytes for m in plan.moves) <= most
            assert plan.predicted_peak_bytes <= at(graph, share)
            assert plan.predicted_extra_seconds <= alone
            said = any(f"at most {budget.format_bytes(most)} (host_budget)" in note for note in plan.notes)
            assert said == bool(plan.moves)


def test_a_plan_says_where_the_step_waits_for_the_link() -> None:
    graph = graph_of(8)
    links = {"host": Link(3e6, 3e6)}
    plan = over(links["host"])(graph, at(graph, 0.5))
    sim = simulator_of(graph)
    transfers = sim.simulate(plan.stored, with_moves(sim, plan.moves, plan.window_bytes, links)).transfers
    assert isinstance(transfers, Transfers)
    assert sum(transfers.waits.values()) == pytest.approx(plan.transfer_seconds) and plan.transfer_seconds > 0
    (note,) = waiting_notes(transfers)
    assert note in plan.notes and " ".join(note.split()) in " ".join(str(plan).split())
    assert "in backward in" in note


def test_what_needs_nothing_done_is_left_alone() -> None:
    graph = graph_of(2)
    plan = over(FAST)(graph, at(graph, 1.0))
    assert plan.changes_nothing and not plan.notes


def test_without_a_budget_and_below_all_plans_the_least_memory_counts() -> None:
    graph = graph_of(6)
    least = over(FAST)(graph).predicted_peak_bytes
    assert least <= min(policies.optimal()(graph).predicted_peak_bytes, at(graph, 0.6))
    with pytest.raises(BudgetError) as refusal:
        over(FAST)(graph, 1)
    assert refusal.value.smallest_bytes == least
    assert over(FAST)(graph, least).predicted_peak_bytes <= least


def steps(model: torch.nn.Module, x: torch.Tensor, forwards: int = 1) -> list[torch.Tensor]:
    model.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    sum(model(x) for _ in range(forwards)).backward()  # type: ignore[union-attr]
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("link", [FAST, SLOW])
def test_a_limited_step_has_the_same_bits_and_its_predicted_peak(link: Link) -> None:
    torch.manual_seed(0)
    plain, limited = Net(8), Net(8)
    limited.load_state_dict(plain.state_dict())
    x = torch.randn(64, 24)
    handle = lowtide.limit_memory(limited, "75%", policy=over(link, "64KiB"))
    for _ in range(3):
        assert all(map(torch.equal, steps(plain, x), steps(limited, x)))
    plan = handle.plan
    assert plan is not None and plan.budget_bytes is not None
    assert bool(plan.moves) == (link is FAST)
    limited.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    measured = meter.measure(lambda: limited(x).backward(), timeline=False)
    resident = meter.resident_bytes(limited) - sum(p.nbytes for p in limited.parameters())
    peak = resident + x.nbytes + plan.slab_bytes + measured.peak_bytes
    assert peak <= plan.budget_bytes
    assert peak == pytest.approx(plan.predicted_peak_bytes, abs=256)


def test_main_memory_is_reserved_once_and_a_second_forward_takes_no_more() -> None:
    """What has no room there is kept or recomputed, within the budget."""
    torch.manual_seed(0)
    plain, limited = Net(8), Net(8)
    limited.load_state_dict(plain.state_dict())
    x = torch.randn(64, 24)
    handle = lowtide.limit_memory(limited, "150KiB", policy=over(FAST, "64KiB"), verify="never")
    for _ in range(3):
        assert all(map(torch.equal, steps(plain, x), steps(limited, x)))
    assert handle.plan is not None and handle.plan.moves
    (moves,) = [one for one in handle.extensions if isinstance(one, Moves)]
    (tier,) = moves.stores.tiers.values()
    reserved = tier.counts.slab_bytes
    assert 0 < reserved <= 64 << 10 and tier.counts.allocations == 1
    assert all(map(torch.equal, steps(plain, x, 2), steps(limited, x, 2)))
    assert tier.counts.slab_bytes <= 64 << 10


def test_on_a_cpu_nothing_changes_and_nothing_of_it_is_loaded() -> None:
    code = """
import sys, torch, lowtide
for policy in (None, "auto"):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.GELU())] * 4)
    handle = lowtide.limit_memory(model, "80%", policy=policy)
    model(torch.randn(64, 32)).sum().backward()
    assert handle.plan.policy == "optimal" and handle.plan.replayed and not handle.plan.notes, handle.plan
assert not [name for name in sys.modules if "extensions.moves" in name]
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"host_budget": "1GiB"}, "the model is on cpu"),
        ({"host_budget": "1GiB", "policy": "auto"}, "the model is on cpu"),
        ({"host_budget": "1GiB", "policy": "full"}, "the model is on cpu"),
        ({"host_budget": "many"}, "was given 'many': give bytes, as 8589934592 or '8GiB'"),
        ({"host_budget": 0}, "was given 0: give bytes"),
        ({"host_budget": "50%"}, "was given '50%': give bytes"),
    ],
)
def test_a_limit_on_a_cpu_takes_no_budget_of_main_memory(options: dict[str, Any], message: str) -> None:
    model = Net(1)
    with pytest.raises(PlanError, match=message.replace("(", r"\(")):
        lowtide.limit_memory(model, "80%", **options)
    assert lowtide.handle_of(model) is None


@pytest.mark.parametrize(
    ("policy", "given", "message"),
    [
        ("full", "1MiB", "'auto' and 'mixed', and the policy is full"),
        ("offload", "1MiB", "'auto' and 'mixed', and the policy is offload"),
        (lambda graph, budget=None: None, "1MiB", "the policy is <lambda>"),
        (policies.mixed("disk"), "1MiB", "moves nothing there"),
        (None, "900TiB", "of main memory are free: give less"),
    ],
)
def test_on_a_card_it_goes_with_what_moves_and_with_what_is_free(
    policy: Any, given: str, message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        settled(policy, given, CARD)


def test_on_a_card_the_link_is_measured_and_main_memory_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "_measured", lambda device: {"host": FAST})
    found = settled(None, None, CARD)
    assert isinstance(found, Auto) and found.links == {"host": FAST} and not found.given
    free = budget.available_bytes("cpu")
    assert free is not None and found.host_bytes == pytest.approx(free // 4, rel=0.2)
    told = settled("auto", "1MiB", CARD)
    assert isinstance(told, Auto) and told.host_bytes == 1 << 20 and told.given
    also = settled("mixed", "1MiB", CARD)
    assert isinstance(also, mixed.Mixed) and also.host_bytes == 1 << 20


def test_a_link_that_cannot_be_measured_leaves_recomputing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(device: str) -> Any:
        raise StoreError("CUDA refuses to page-lock")

    monkeypatch.setattr(auto, "_measured", refuse)
    found = settled(None, None, CARD)
    graph = graph_of(4)
    plan = found(graph, at(graph, 0.8))
    assert plan.policy == "optimal" and "its link cannot be measured (CUDA refuses" in plan.notes[-1]


def test_of_several_ranks_each_has_to_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "_measured", lambda device: {"host": FAST})
    monkeypatch.setattr(auto, "_several_ranks", lambda: True)
    graph = replace(graph_of(4), device="cuda")
    plan = settled(None, None, CARD)(graph, at(graph, 0.8))
    assert not plan.moves and "Give each the same host_budget=" in plan.notes[-1]
    assert settled(None, "1MiB", CARD)(graph, at(graph, 0.8)).moves


def test_a_model_that_goes_to_a_card_later_gets_the_default_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before its first step is profiled."""
    from lowtide import limits

    model = Net(6)
    handle = lowtide.limit_memory(model, "90%")
    monkeypatch.setattr(limits, "model_device", lambda model: CARD)
    monkeypatch.setattr(auto, "_measured", lambda device: {"host": FAST})
    handle.set_budget("70%")
    assert [one.name for one in handle.extensions].count("moves") == 1
    handle.set_budget("80%")
    assert [one.name for one in handle.extensions].count("moves") == 1
    model(torch.randn(64, 24)).backward()  # it is on the CPU after all
    assert isinstance(handle.plan, Plan) and not handle.plan.moves
