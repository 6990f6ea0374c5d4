"""What every extension keeps to: attached to the limit of a plain model, it changes no bits and no peak, goes
with a copy, leaves nothing of a failed step, and nothing at all when the limit is removed.

A case is a function from a model to the arguments of `limit_memory` that bring the extension, and what to do
before the next step. It also says whether the limit of a copy has the extension.
"""

from __future__ import annotations

import copy
import gc
import pickle
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from small_model import batch, needs_meter, small

import lowtide
from lowtide import limits
from lowtide.extension import Extension
from lowtide.extensions.advice import out_of_memory
from lowtide.extensions.reserved.reserved import Reserved
from lowtide.meter import peak
from lowtide.plan.data import Link, Plan
from lowtide.run.limit.handle import Handle


class Plain(Extension):
    """Overrides nothing."""

    name = "plain"

    def copied(self) -> Plain:
        return Plain()


class Noting(Plain):
    """Notes which of its methods the core calls."""

    name = "noting"

    def __init__(self) -> None:
        self.calls: list[str] = []

    def copied(self) -> Noting:
        return Noting()

    def __getattribute__(self, name: str) -> Any:
        if name in vars(Extension) and not name.startswith("_") and callable(getattr(Extension, name)):
            object.__getattribute__(self, "calls").append(name)
        return object.__getattribute__(self, name)


@dataclass
class Case:
    """How an extension comes to a limit.

    Attributes:
        name: of the extension.
        options: from a model to the arguments of `limit_memory` that bring it.
        also: extensions that are attached beside those.
        copies: whether a copy of the model has it.
        within: a context that it needs.
    """

    name: str
    options: Callable[[torch.nn.Module], dict[str, Any]] = lambda model: {}
    also: Callable[[], Extension] | None = None
    copies: bool = True
    within: Callable[[], AbstractContextManager[None]] = nullcontext


@contextmanager
def one_rank() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


FAST = Link(1e15, 1e15)
MIXED = lowtide.policies.mixed("host", links={"host": FAST}, min_bytes=1)
CASES = [
    Case("plain", also=Plain),
    Case("noting", also=Noting),
    Case("moves", lambda model: {"policy": MIXED}),
    Case("plans", lambda model: {"plans": tempfile.mkdtemp()}),
    Case("ranks", within=one_rank),
    Case("tiles", lambda model: {"tiles": "auto"}),
    Case("reserved", also=lambda: Reserved(None)),
    Case("optimizer", lambda model: {"optimizer": torch.optim.AdamW(model.parameters())}, copies=False),
]


@pytest.fixture(params=CASES, ids=lambda case: case.name)
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    """One extension, which every limit of the test has."""
    found: Case = request.param
    also = found.also
    if also is None:
        with found.within():
            yield found
        return

    def missing(self: Any, limiter: Any, budget: Any) -> list[Extension]:
        return [] if any(one.name == found.name for one in limiter.extensions) else [also()]

    with patch.object(limits.Face, "missing", missing):
        yield found


def limited(case: Case, budget: str | int = "60%") -> tuple[torch.nn.Module, Handle]:
    model = small()
    handle = lowtide.limit_memory(model, budget, **case.options(model))
    assert has(handle, case.name)
    return model, handle


def has(handle: Handle, name: str) -> bool:
    return name in [extension.name for extension in handle.extensions]


def train(model: torch.nn.Module, seed: int) -> list[torch.Tensor]:
    """The loss and the gradients of a step."""
    model.zero_grad()
    torch.manual_seed(seed)
    loss = model(batch())
    loss.backward()
    return [
        loss.detach(),
        *(parameter.grad for parameter in model.parameters() if parameter.grad is not None),
    ]


def same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


@needs_meter
def test_bits_and_peak_are_those_that_were_promised(case: Case) -> None:
    plain, (model, handle) = small(), limited(case)
    for seed in range(4):
        assert same(train(model, seed), train(plain, seed))
    plan = handle.plan
    assert plan is not None and plan.budget_bytes is not None and not plan.changes_nothing
    assert plan.predicted_peak_bytes <= plan.budget_bytes
    to_come = handle._limiter.maker.claim.to_come_bytes  # the state of an optimizer that has not stepped
    assert abs((handle.measured_peak_bytes or 0) - (plan.predicted_peak_bytes - to_come)) <= 1 << 14


def test_a_copy_trains_under_a_limit_of_its_own(case: Case) -> None:
    model, handle = limited(case)
    train(model, 0)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    assert bool(said) is not case.copies, "what a copy lacks is said"
    for twin in copies:
        of_twin = lowtide.handle_of(twin)
        assert of_twin is not None and of_twin is not handle and has(of_twin, case.name) is case.copies
        assert same(train(twin, 1), train(model, 1))
        assert of_twin.plan is not None and all(one.model is twin for one in of_twin.extensions)


@needs_meter
def test_a_failed_step_leaves_nothing(case: Case) -> None:
    model, handle = limited(case)
    for seed in range(3):
        train(model, seed)

    def fails(*_: Any) -> None:
        raise ValueError("stopped")

    model.zero_grad()
    gc.collect()
    with peak(torch.device("cpu")) as seen:
        before = seen.live_bytes
        for stop in (model.layers[2].register_forward_hook, model.layers[0].register_full_backward_hook):  # type: ignore
            hook = stop(fails)
            with pytest.raises(ValueError, match="stopped"):
                model(batch()).backward()
            hook.remove()
            model.zero_grad()
        gc.collect()
        until = time.monotonic() + 10
        while seen.live_bytes - before > 1 << 14 and time.monotonic() < until:
            time.sleep(0.01)  # a thread that moves a value ends what it has begun
        assert seen.live_bytes - before <= 1 << 14
    assert same(train(model, 5), train(small(), 5))
    assert isinstance(handle.plan, Plan)


def test_a_removed_limit_leaves_the_model_as_it_was(case: Case) -> None:
    plain, (model, handle) = small(), limited(case)
    train(model, 0)
    handle.remove()
    assert vars(model).keys() == vars(plain).keys()
    assert same(train(model, 1), train(plain, 1)) and lowtide.handle_of(model) is None


def test_ranks_that_come_after_the_limit_take_part_from_the_next_profiled_step_on() -> None:
    model = small()
    handle = lowtide.limit_memory(model, "60%")
    with one_rank():
        train(model, 0)
        assert has(handle, "ranks")
        assert same(train(model, 1), train(small(), 1))


def test_the_core_calls_all_that_it_says(tmp_path: Path) -> None:
    with patch.object(limits.Face, "missing", lambda *_: ()):
        model = small()
        # which asks what others keep, and what other ranks choose
        handle = lowtide.limit_memory(model, "60%", plans=tmp_path, tiles="auto")
    noting = Noting()
    handle._limiter.maker.extend(noting)
    for seed in range(3):
        train(model, seed)
    copy.deepcopy(model)
    assert "CUDA device 0" in out_of_memory._out_of_memory_text(
        handle._limiter.book.latest, handle._limiter.maker, 0, 1
    )
    handle.set_budget("1KiB")
    with pytest.raises(lowtide.BudgetError):
        train(model, 3)
    handle.remove()
    methods = {name for name in vars(Extension) if callable(getattr(Extension, name)) and name[0] != "_"}
    assert set(noting.calls) == methods
