"""What is said of a step that no plan fits, and when CUDA runs out of memory in a limited step. What the
allocator says is given by hand here; `tests/gpu` waits for the real one.
"""

from __future__ import annotations

import warnings

import pytest
import torch
from small_model import batch, small

import lowtide
from lowtide import BudgetError, LowtideWarning, private
from lowtide.graph import StepGraph
from lowtide.remedies import PARAMETERS, STANDING, UPDATE
from lowtide.run.limit.entry import Entry, Traits
from lowtide.run.limit.key import StepKey
from lowtide.run.limit.refusal import OPTIMIZER_TOO, Demand, OutOfMemory, Shortage, in_words
from lowtide.run.messages import OWN_OFF


def told(observer: OutOfMemory) -> list[str]:
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        observer.warn(0, 3 << 30)
    return [str(one.message) for one in shown if issubclass(one.category, LowtideWarning)]


def test_it_says_what_holds_most_and_what_would_help(monkeypatch: pytest.MonkeyPatch) -> None:
    attached = []
    monkeypatch.setattr(private, "on_cuda_out_of_memory", attached.append)
    observer, model = OutOfMemory(), small()
    handle = lowtide.limit_memory(model, "80%")
    limiter = model.__dict__["forward"]
    for _ in range(2):
        observer.follow(limiter)
    assert attached == [observer.warn], "PyTorch cannot take one away: attached once"
    assert told(observer) == [], "nothing is planned yet"
    model(batch()).backward()
    (text,) = told(observer)
    assert text.startswith("CUDA device 0 has no 3 GiB more, in a process with a model limited to ")
    assert text.count("\n  - ") == 3 and "frees about" in text
    handle.remove()
    assert told(observer) == []
    del limiter, handle, model
    assert told(observer) == []


def test_on_a_cpu_nobody_is_attached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private, "on_cuda_out_of_memory", lambda _: pytest.fail("there is no CUDA here"))
    model = small()
    lowtide.limit_memory(model, "80%")
    for _ in range(2):
        model(batch()).backward()
    assert not torch.cuda.is_initialized()


# ---- a refused step -------------------------------------------------------------------------------


def refused(step_bytes: int, update_bytes: int | None) -> BudgetError:
    """The refusal of a step whose plans take so much, with an optimizer's own step that takes so much."""
    model = torch.nn.Linear(2, 2)
    parts = {PARAMETERS: 24, UPDATE: (update_bytes or 0) - 24}
    shortage = Shortage(100, parts) if update_bytes is not None else None
    demand = Demand(StepGraph((), (), (), (), (), resident_bytes=1 << 30), 100, 0, 0, None, shortage)
    entry = Entry(StepKey(((64, 2),), (), "", 0, (), 0, 0, 1), traits=Traits(checkpoints=1))
    planners = BudgetError("", step_bytes, budget_bytes=100, parts={STANDING: step_bytes})
    return in_words(planners, entry, model, 0, demand)


def test_the_planners_facts_get_names_and_what_the_entry_knows() -> None:
    alone = refused(1000, None)
    assert alone.parts == {PARAMETERS: 24, STANDING: 976}, "what stands has a name as far as that goes"
    assert alone.remedies[0] == OWN_OFF and OPTIMIZER_TOO not in alone.detail
    assert 1000 <= (alone.smallest_bytes or 0) < 1200


def test_the_budget_that_is_named_does_for_the_step_and_for_the_optimizers_own() -> None:
    of_step, of_optimizer = refused(5000, 2000), refused(1000, 9000)
    assert "optimizer.step()" not in of_step.args[0] and OPTIMIZER_TOO in of_step.detail
    assert "optimizer.step()" in of_optimizer.args[0] and of_optimizer.smallest_bytes == 9000
    assert "fused=True" in of_optimizer.detail


def test_an_error_without_facts_keeps_its_words() -> None:
    error = BudgetError("nothing is left", 5, "of it", budget_bytes=3, remedies=["give more"])
    entry = Entry(StepKey(((64, 2),), (), "", 0, (), 0, 0, 1))
    assert str(in_words(error, entry, torch.nn.Linear(2, 2), 0, None)).startswith("nothing is left\nWhat to")
