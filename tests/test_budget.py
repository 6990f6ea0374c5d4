"""Budgets are read exactly, and what is not understood is said with the forms that are."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lowtide import budget as budgets
from lowtide import limit_memory, private
from lowtide.budget import parse, resolve, rounded_up, too_small
from lowtide.errors import BudgetError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("600MiB", 600 * 2**20),
        (" 6 GiB ", 6 * 2**30),
        ("1.5GB", 1_500_000_000),
        ("1.5gib", 3 * 2**29),
        ("0.1KiB", 102),
        ("1000", 1000),
        ("1_000 B", 1000),
        ("12 bytes", 12),
        (".5MB", 500_000),
        (4096, 4096),
        (4096.0, 4096),
        ("2TiB", 2**41),
    ],
)
def test_sizes(text: Any, expected: int) -> None:
    assert parse(text) == expected


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (60, "'60%' or '60GiB'"),
        (60.0, "'60%' or '60GiB'"),
        ("60", "'60%' or '60GiB'"),
        (0.6, "'60%'"),
        ("60 ", "'60%' or '60GiB'"),
    ],
)
def test_a_number_whose_unit_was_forgotten_is_no_budget_of_a_step(given: Any, meant: str) -> None:
    with pytest.raises(BudgetError, match=rf"the budget '?{str(given).strip()} ?'? .*did you mean {meant}\?"):
        limit_memory(torch.nn.Linear(2, 2), given)


def test_percentages() -> None:
    assert parse("60%", 1000) == 600
    assert parse("33.3 %", 1000) == 333
    assert parse("100%", 12345678901234567) == 12345678901234567
    assert parse("120%", 1000) == 1200
    with pytest.raises(BudgetError, match=r"'60%'.*plain step's peak"):
        parse("60%")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "abc",
        "6Gb/s",
        "-5MiB",
        "0",
        0,
        -3,
        "0%",
        1.5,
        float("nan"),
        float("inf"),
        True,
        None,
        "1.5",
        "6 elephants",
        "1e9",
        "60",
    ],
)
def test_malformed_budgets_quote_the_text_and_list_the_forms(text: Any) -> None:
    with pytest.raises(BudgetError) as caught:
        parse(text, 1000)
    assert repr(text) in str(caught.value)
    assert "600MiB" in str(caught.value)
    assert caught.value.smallest_bytes is None


GIB = 1 << 30
PARTS = {
    "parameters": 6 * GIB,
    "gradients": 6 * GIB,
    "optimizer state": 12 * GIB,
    "least activations": 2 * GIB,
}


@pytest.mark.parametrize("word", ["min", " MIN "])
def test_min_is_the_smallest_with_room_for_what_no_trace_shows(word: str) -> None:
    asked: list[int] = []

    def smallest() -> int:
        asked.append(1)
        return 400_000

    assert resolve("60%", 1000, smallest) == 600 and not asked, "a search that nobody needs is not made"
    found = resolve(word, None, smallest)
    assert 400_000 < found <= 400_500 and found - budgets.slack_bytes(found) >= 400_000
    assert resolve(word, None, 10 * GIB) == 10 * GIB + budgets.SLACK_BYTES
    with pytest.raises(BudgetError, match="'min' is the smallest that works, which is not known here"):
        resolve(word)


def test_auto_is_what_the_device_has_less_a_reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowtide.meter.free_main_memory", lambda: 10 * GIB)
    assert resolve("auto") == 9 * GIB
    assert resolve("auto", resident_bytes=10 * GIB) == 18 * GIB, (
        "what is resident is counted by the budget, and is not free"
    )
    monkeypatch.setattr("lowtide.meter.free_main_memory", lambda: GIB)
    assert resolve("auto") == GIB - budgets.RESERVE_BYTES
    monkeypatch.setattr("lowtide.meter.free_main_memory", lambda: 1 << 20)
    with pytest.raises(BudgetError, match=r"leaves 256 MiB .* in reserve, and 1 MiB are free"):
        resolve("auto")
    monkeypatch.setattr("lowtide.meter.free_main_memory", lambda: None)
    with pytest.raises(BudgetError, match="the system does not say: give bytes"):
        resolve("auto")


def test_auto_divides_main_memory_among_the_ranks_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowtide.meter.free_main_memory", lambda: 40 * GIB)
    dist.init_process_group("fake", store=private.fake_store(), rank=0, world_size=4)
    try:
        assert resolve("auto") == 9 * GIB
        assert resolve("auto", resident_bytes=10 * GIB) == 18 * GIB
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")  # the others run elsewhere
        assert resolve("auto") == 18 * GIB
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(("fraction", "has"), [(1.0, 10), (0.125, 8), (0.1, 6)])
def test_auto_leaves_out_tensors_beside_the_model_on_cuda(
    fraction: float, has: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """5 GiB are free, 4 are reserved without a tensor; of the 3 that tensors take, 1 is the model's. Who may
    have an eighth of the card, 10 GiB, may take 3 of those that are free.
    """
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (5 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 7 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 3 * GIB)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", {1: fraction}.get)
    assert resolve("auto", device="cuda:1", resident_bytes=GIB) == pytest.approx(0.9 * has * GIB, rel=1e-6)


def test_a_refusal_says_what_it_takes_then_what_to_do_then_the_detail() -> None:
    error = too_small(
        25 * GIB, 26 * GIB + 1, PARTS, plain_peak_bytes=52 * GIB, detail="Its peak is at the loss."
    )
    assert str(error).splitlines() == [
        "the budget of 25.0 GiB is too small: parameters 6.0, gradients 6.0, optimizer state 12.0, least "
        "activations 2.0 take 26.0 GiB",
        "What to do, any one of these:",
        "  - give a budget of 26.01GiB or more (27917287425 bytes, 50.1% of the plain step's peak), the "
        "smallest that works",
        "  - make the batch or the sequences at least 51 % smaller, and keep the budget at 25GiB (a "
        "percentage shrinks with them)",
        "  - keep 9% or more of the optimizer's state on the host: lowtide.optim.HostOptimizer(..., "
        "host_fraction=0.09)",
        "Its peak is at the loss.",
    ]
    assert (error.budget_bytes, error.smallest_bytes, error.parts) == (25 * GIB, 26 * GIB + 1, PARTS)
    twin = pickle.loads(pickle.dumps(error))
    assert str(twin) == str(error) and twin.parts == error.parts, "ranks tell each other"


def test_only_what_helps_is_proposed() -> None:
    def remedies(missing: int, **parts: int) -> str:
        known = {budgets.PARAMETERS: 6 * GIB, **parts}
        return "\n".join(too_small(sum(known.values()) - missing, sum(known.values()), known).remedies)

    loss, activations, state = (
        {name: 2 * GIB} for name in (budgets.LOSS, budgets.ACTIVATIONS, budgets.STATE)
    )
    assert "chunks" in remedies(GIB, **loss) and "chunks" not in remedies(GIB, **activations)
    assert "batch" in remedies(GIB, **activations) and "make the batch" not in remedies(
        3 * GIB, **activations
    )
    assert "make the batch" not in remedies(int(1.9 * GIB), **activations), "95 % smaller is no batch"
    assert "host_fraction=0.5" in remedies(GIB, **state) and "HostOptimizer" not in remedies(3 * GIB, **state)
    assert "share the model among devices" in remedies(3 * GIB, **activations)
    policy = too_small(GIB, 2 * GIB, {budgets.PARAMETERS: 2 * GIB}, policy="full")
    assert "for the policy 'full'" in str(policy) and "use the policy 'optimal'" in str(policy)


@pytest.mark.parametrize(
    ("budget", "needed", "said"),
    [
        (4 << 20, 6 << 20, "budget of 4.0 MiB is too small: parameters 6.0 take 6.0 MiB"),
        (1 << 10, 6 << 20, "budget of 1 KiB is too small"),
        (600 << 20, 2 << 30, "budget of 0.6 GiB is too small: parameters 2.0 take 2.0 GiB"),
        ((6 << 20) - 40_000, 6 << 20, "budget of 5.96 MiB is too small: parameters 6.00 take 6.00 MiB"),
        (100, 2000, "budget of 100 B is too small: parameters 2.0 take 2.0 KiB"),
    ],
)
def test_units_fit_the_size_and_digits_tell_the_two_apart(budget: int, needed: int, said: str) -> None:
    assert said in str(too_small(budget, needed, {"parameters": needed}))


@pytest.mark.parametrize("count", [1, 1023, 1024, 5_067_477, (6 << 20) + 1, 12_345_678_901])
def test_a_budget_that_is_proposed_is_enough(count: int) -> None:
    assert count <= parse(rounded_up(count)) <= 1.01 * count + 1024
