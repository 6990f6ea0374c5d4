"""Budgets are read exactly, and what is not understood is said with the forms that are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from lowtide import budget as budgets
from lowtide import limit_memory, private
from lowtide.budget import parse, resolve
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
    with pytest.raises(BudgetError, match=r"leaves 256 MiB .* free, and only 1 MiB are free"):
        resolve("auto")
    monkeypatch.setattr("lowtide.meter.free_main_memory", lambda: None)
    with pytest.raises(BudgetError, match="the system does not report: give bytes"):
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
