"""What a step does, by how the book has it run, and in which state that leaves its entry."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from small_model import batch, needs_meter, small
from torch import nn

import lowtide
from lowtide.run.limit.entry import How, State


class Gated(nn.Module):
    """Layers of which the step says how many run."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 64), nn.GELU()) for _ in range(4))
        self.back = nn.Linear(64, 16)

    def forward(self, x: torch.Tensor, count: int = 4) -> torch.Tensor:
        for layer in self.layers[:count]:  # pyright: ignore
            x = x + self.back(layer(x))
        return x.square().mean()


def ways(model: nn.Module, *given: Any, step: Any = None) -> tuple[list[How], list[State]]:
    """How steps of a limited model run, one for each of ``given``, and the state after each."""
    limiter: Any = model.__dict__["forward"]
    found, begin = list[How](), limiter.book.begin

    def noted(*args: Any, **kwargs: Any) -> How:
        found.append(begin(*args, **kwargs))
        return found[-1]

    limiter.book.begin, states = noted, list[State]()
    for one in given:
        model.zero_grad()
        x, *more = one if isinstance(one, tuple) else (one,)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", lowtide.LowtideWarning)
            (step or (lambda *a: model(*a).backward()))(x, *more)
        states.append(next(reversed(limiter.book.known.values())).state)
    return found, states


def test_the_first_step_is_listened_to_and_the_next_follows_its_plan() -> None:
    lowtide.limit_memory(model := small(), "70%")
    hows, states = ways(model, *[batch()] * 3)
    assert hows == [How.LISTEN, How.FOLLOW, How.FOLLOW] and set(states) == {State.PLANNED}


def test_a_step_that_fits_by_a_tenth_passes_as_it_is() -> None:
    handle: Any = lowtide.limit_memory(model := small(), "10MiB")
    hows, _ = ways(model, *[batch()] * 3)
    assert hows == [How.LISTEN, How.PASS, How.PASS]
    assert handle._limiter.local.step.recorder is None


def test_a_step_that_may_run_other_operations_is_recorded_though_it_fits() -> None:
    lowtide.limit_memory(model := Gated(), "10MiB")
    hows, _ = ways(model, *[(torch.ones(100, 16), 2)] * 2)
    assert hows == [How.LISTEN, How.FOLLOW]


def test_after_the_first_third_and_seventh_step_that_no_plan_foresees_the_next_is_listened_to() -> None:
    """The plan in force is that of the step that was written down last, and foresees those with as many
    layers. A step that is written down is none that no plan foresees.
    """
    lowtide.limit_memory(model := Gated(), 500_000)
    listened = {0: 1, 2: 4, 5: 3, 11: 4}
    others = {1: 4, 3: 3, 4: 2, 6: 4, 7: 2, 8: 1, 9: 3, 10: 2, 12: 4, 13: 1, 14: 2, 15: 3, 16: 1}
    counts = sorted((listened | others).items())
    hows, states = ways(model, *[(torch.ones(400, 16), count) for _, count in counts])
    assert {step for step, how in enumerate(hows) if how is How.LISTEN} == listened.keys()
    assert set(hows) == {How.LISTEN, How.FOLLOW} and set(states) == {State.PLANNED}


@needs_meter
def test_a_larger_step_of_a_known_kind_is_governed_before_it_has_a_plan() -> None:
    handle = lowtide.limit_memory(model := small(dropout=0.0), 150_000)
    hows, states = ways(model, batch(50), batch(50), batch(60))
    assert hows == [How.LISTEN, How.FOLLOW, How.GOVERN] and states[-1] is State.NEW
    assert handle.measured_peak_bytes is not None and handle.measured_peak_bytes <= 150_000


def test_a_smaller_step_has_the_plan_of_a_larger_one() -> None:
    handle = lowtide.limit_memory(model := small(), "70%")
    hows, _ = ways(model, batch(100), batch(50))
    assert hows == [How.LISTEN, How.FOLLOW] and len(handle._limiter.book.known) == 1


def test_without_a_budget_each_shape_has_its_plan() -> None:
    handle = lowtide.limit_memory(model := small(), policy="full")
    hows, _ = ways(model, batch(10), batch(20), batch(30))
    assert hows == [How.LISTEN] * 3 and len(handle.plans) == 3


def test_a_budget_that_nothing_holds_is_refused_and_another_plans_what_was_seen() -> None:
    handle = lowtide.limit_memory(model := small(), "1KiB")
    with pytest.raises(lowtide.BudgetError):
        ways(model, batch())
    (entry,) = handle._limiter.book.known.values()
    assert entry.state is State.REFUSED and entry.graph is not None and entry.planned is None
    handle.set_budget("10MiB")
    hows, states = ways(model, batch())
    assert states == [State.PLANNED] and hows[-1] is How.PASS


def test_what_was_planned_for_another_budget_is_followed_no_longer() -> None:
    handle = lowtide.limit_memory(model := small(), "10MiB")
    ways(model, batch())
    handle.set_budget("1KiB")
    for _ in range(2):
        with pytest.raises(lowtide.BudgetError):
            ways(model, batch())
        (entry,) = handle._limiter.book.known.values()
        assert entry.state is State.REFUSED and entry.planned is None


def test_a_step_of_lowtide_s_own_is_written_down_before_one_that_cannot_be() -> None:
    first, second = small(), small()
    for model in (first, second):
        lowtide.limit_memory(model, "80%")
    limiter: Any = second.__dict__["forward"]
    found, begin = list[How](), limiter.book.begin
    limiter.book.begin = lambda *a, **k: found.append(begin(*a, **k)) or found[-1]
    (first(batch()) * second(batch())).backward()
    assert found[0] is How.ASIDE and limiter.book.latest is not None


def test_the_least_recently_used_entry_goes_where_there_are_too_many() -> None:
    from lowtide.run.limit.book import MOST_ENTRIES

    handle = lowtide.limit_memory(model := small(layers=1), policy="full")
    ways(model, *[batch(rows) for rows in range(2, MOST_ENTRIES + 4)])
    known = [key.shapes[0][0] for key in handle._limiter.book.known]
    assert len(known) == MOST_ENTRIES and known[-1] == MOST_ENTRIES + 3 and 2 not in known
