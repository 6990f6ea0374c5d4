"""Steps that add to gradients: what there is of these is within the budget."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from compiled_models import Broken, Model, gradients, squared
from torch import nn

import lowtide
from lowtide.meter import peak, resident_bytes


class Micro:
    """Micro-steps of a compiled model, with what each takes and bitwise the gradients of eager.

    Attributes:
        took: bytes at each one's peak, with what was resident before it.
        warned: texts of warnings in all.
    """

    def __init__(self, model: nn.Module, budget: str | int, **how: Any) -> None:
        self.model, self.twin = model, copy.deepcopy(model)
        self.compiled: Any = lowtide.compile(model, budget, backend="aot_eager", **how)
        self.handle: Any = lowtide.handle_of(self.compiled)
        self.took: list[int] = []
        self.warned: list[str] = []

    def step(self, xs: list[torch.Tensor]) -> None:
        """One step of so many micro-steps."""
        for one in (self.model, self.twin):
            one.zero_grad(set_to_none=True)
        for x in xs:
            resident = resident_bytes(self.model) + x.nbytes
            with warnings.catch_warnings(record=True) as caught, peak("cpu") as seen:
                warnings.simplefilter("always")
                squared(self.compiled(x)).backward()
            self.warned += [str(one.message) for one in caught]
            self.took.append(resident + seen.peak_bytes)
            squared(self.twin(x)).backward()
            both = zip(gradients(self.model), gradients(self.twin), strict=True)
            assert all(torch.equal(a, b) for a, b in both)


@pytest.mark.parametrize(
    ("kind", "how", "plans"),
    [(Model, {}, 2), (Broken, {}, 1), (Broken, {"regional": True}, 1)],
    ids=["one graph", "several", "blocks"],
)
def test_every_micro_step_is_within_the_budget(kind: type[Model], how: dict[str, Any], plans: int) -> None:
    x = torch.randn(1024, 32)
    micro = Micro(kind(layers=2), "min", **how)
    micro.step([x] * 3)
    compiled = [micro.handle.plannings, micro.handle.variants]
    micro.step([x] * 3)
    assert [micro.handle.plannings, micro.handle.variants] == compiled, "nothing compiles any more"
    first, second, third = micro.took[3:]
    stand = sum(p.nbytes for p in micro.model.parameters())
    if plans == 2:
        assert first == pytest.approx(micro.handle.plans[0].predicted_peak_bytes, abs=16)
    assert second == third == pytest.approx(micro.handle.predicted_peak_bytes, abs=16)
    assert first <= second <= micro.handle.budget_bytes and len(micro.handle.plans) == plans
    assert micro.handle.plain_peak_bytes > stand + 1.2 * second
    assert micro.took[1:3] == [second, third], "the first that adds to gradients, too"
    assert len(micro.warned) <= 1 and all("it compiled code" in text for text in micro.warned)


@pytest.mark.parametrize("kind", [Model, Broken])
def test_a_plan_with_room_for_gradients_compiles_once(kind: type[Model]) -> None:
    x = torch.randn(256, 32)
    micro = Micro(kind(layers=2), "1GiB")
    micro.step([x])
    codes = lambda: torch._dynamo.utils.counters["stats"]["unique_graphs"]  # noqa: E731
    before, graphs = micro.handle.predicted_peak_bytes, codes()
    micro.step([x] * 2)
    stand = sum(p.nbytes for p in micro.model.parameters())
    assert micro.handle.predicted_peak_bytes == before + stand == pytest.approx(micro.took[-1], abs=16)
    assert codes() == graphs and micro.handle.plannings == 1


def test_steps_without_gradients_keep_their_plan() -> None:
    x = torch.randn(1024, 32)
    micro = Micro(Model(layers=2), "min")
    micro.step([x])
    alone = micro.handle.plan
    micro.step([x] * 2)
    micro.step([x] * 2)
    assert micro.handle.plans[0] is alone and micro.took[1] == micro.took[3] < micro.took[2] == micro.took[4]


def test_sizes_that_vary_are_planned_for_with_gradients_and_without() -> None:
    sizes = (512, 640, 768, 700)
    micro = Micro(Model(layers=2), 1_700_000)
    for _ in range(2):
        for size in sizes:
            micro.step([torch.randn(size, 32)] * 2)
    assert max(micro.took[8:]) <= 1_700_000


def test_a_budget_without_room_for_gradients_is_refused_by_the_second() -> None:
    x = torch.randn(1024, 32)
    micro = Micro(Model(layers=2), "min")
    micro.step([x])
    least = micro.handle.budget_bytes
    micro = Micro(Model(layers=2), least)
    with pytest.raises(lowtide.BudgetError) as refused:
        micro.step([x] * 2)
    assert len(micro.took) == 1 and refused.value.smallest_bytes is not None
    micro.handle.set_budget(refused.value.smallest_bytes)
    micro.step([x] * 3)
    assert max(micro.took[-2:]) <= refused.value.smallest_bytes
