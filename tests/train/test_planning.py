"""``lowtide plan --device h100``: a plan priced for a card that is not there."""

from __future__ import annotations

import re

import pytest

from lowtide.errors import BudgetError, LowtideError
from lowtide.estimate.devices import DEVICES
from lowtide.train.options import TrainOptions
from lowtide.train.planning import PlanOptions, make_plan

SMALL = dict(model="gpt-nano", batch=4, seq=128, dtype="bf16", budget="98%")


def test_seconds_are_the_card_s() -> None:
    plans = {name: make_plan(PlanOptions(device=name, **SMALL)) for name in ("a100", "b200")}  # type: ignore
    assert plans["a100"].plain_seconds > plans["b200"].plain_seconds > 0
    again = make_plan(PlanOptions(device="a100", **SMALL))  # type: ignore[arg-type]
    assert again.plain_seconds == plans["a100"].plain_seconds  # nothing is timed
    assert any("seconds are the a100's" in note for note in plans["a100"].notes)
    (held,) = [note for note in plans["a100"].notes if note.startswith("at the peak stand ")]
    assert held.count(" frees about ") == 3
    assert any("the plan counts no optimizer: AdamW's state takes" in note for note in plans["a100"].notes)
    assert plans["a100"].predicted_peak_bytes < plans["a100"].plain_peak_bytes


def test_auto_is_the_card_s_memory() -> None:
    plan = make_plan(PlanOptions(device="rtx4090", **SMALL | {"budget": "auto"}))  # type: ignore[arg-type]
    assert plan.budget_bytes is not None
    assert 0.9 < plan.budget_bytes / DEVICES["rtx4090"].memory_bytes < 0.96


def test_only_what_is_priced() -> None:
    with pytest.raises(LowtideError, match="pass --dtype bf16"):
        PlanOptions(device="h100", dtype="fp32")
    assert (PlanOptions(device="h100").precision, PlanOptions().precision) == ("bf16", "fp32")
    with pytest.raises(LowtideError, match=r"there is no such device.*or a card to price it for.*h100"):
        PlanOptions(device="h1000", dtype="bf16")


def test_what_pytorch_would_reserve_is_said_for_a_card() -> None:
    notes = make_plan(PlanOptions(device="h100", **SMALL)).notes  # type: ignore[arg-type]
    (note,) = [note for note in notes if "would reserve" in note]
    assert re.search(r"would reserve [\d.]+ MiB .*, [\d.]+ MiB with PYTORCH_ALLOC_CONF", note)
    on_cpu = make_plan(PlanOptions(device="cpu", **SMALL)).notes  # type: ignore[arg-type]
    assert not any("would reserve" in note for note in on_cpu)


def test_a_card_s_workspaces_are_counted() -> None:
    def plain_peak(device: str) -> int:
        options = SMALL | {"budget": "100%"}
        return make_plan(PlanOptions(device=device, **options)).plain_peak_bytes  # type: ignore[arg-type]

    more = {device: plain_peak(device) - plain_peak("cpu") for device in ("h100", "a100")}
    assert more == {device: DEVICES[device].workspaces_bytes for device in more}
    assert more["h100"] > more["a100"] > 0


@pytest.mark.parametrize("options", [PlanOptions, TrainOptions])
def test_a_budget_is_read_before_anything_is_traced(options: type[PlanOptions] | type[TrainOptions]) -> None:
    with pytest.raises(BudgetError, match="did you mean '60%' or '60GiB'"):
        options(budget="60")
    for right in ("min", "auto", "60%", "6GiB", None):
        assert options(budget=right).budget == right
