"""What the planner sees of a step of compiled graphs has the bytes of the recorded one, at every moment."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
from compiled_models import Behind, Broken, Embedded, Handed, Model, Open, squared
from torch import nn

import lowtide
from lowtide.compiled import planning, price
from lowtide.compiled.choose_cuts import Choice, choice_of
from lowtide.plan.simulate import Simulator

SHARES = 0.0, 0.3, 0.6, 0.8, 1.0
"""Of the values that a plan decides about, how many are stored; which ones is drawn at random."""


class Tied(nn.Module):
    """An embedding that is the head, too, and a loss in another graph."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(64, 32)
        self.body = nn.Sequential(nn.Linear(32, 96), nn.GELU(), nn.Linear(96, 32))

    def forward(self, x: torch.Tensor) -> Any:
        logits = self.body(self.tokens(x)).tanh() @ self.tokens.weight.t()
        torch._dynamo.graph_break()
        return nn.functional.cross_entropy(logits.flatten(0, -2), x.flatten()), logits


class Held(nn.Module):
    """Both graphs save what the first one returns."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, other = self.first(x).relu(), self.first(x).tanh()
        torch._dynamo.graph_break()
        return (self.second(one + other).relu() * self.second(one * other)).square().sum()


def once(model: Any, x: torch.Tensor) -> None:
    result = model(x)
    squared(result[0] if isinstance(result, tuple) else result).backward()


def twice(model: Any, x: torch.Tensor) -> None:
    (squared(model(x)) + squared(model(x + 1))).backward()


def in_turn(model: Any, x: torch.Tensor) -> None:
    first, second = squared(model(x)), squared(model(x + 1))
    first.backward()
    second.backward()


def holding(model: Any, x: torch.Tensor) -> None:
    loss, logits = model(x)
    loss.backward()
    logits.detach().sum()


Step = Callable[[Any, torch.Tensor], None]


def recorded(model: nn.Module, x: torch.Tensor, step: Step, **how: Any) -> Choice:
    """The step as it is recorded, and the candidate cuts of its graphs."""
    found: list[Choice] = []

    def seen(*args: Any) -> Choice:
        found.append(choice_of(*args))
        return found[-1]

    with mock.patch.object(planning, "choice_of", seen):
        step(lowtide.compile(model, "100%", backend="aot_eager", **how), x)
    return found[0]


def disagreements(choice: Choice) -> list[str]:
    """Moments at which the planner's graph has other bytes than the timeline, under the same cuts.

    Where something runs again, the planner keeps what that begins from until all that depends on it is asked
    for; a cut lets go of it with its last reader. So there the planner may count what a backward alone holds
    for longer, and never for less.
    """
    step, cuts, moments = choice.step, choice.candidates, choice.timeline.moments
    sim, draw, found = Simulator(step.graph), random.Random(0), []
    for share in SHARES:
        stored = sim.close(value for value in sim.droppable if draw.random() < share)
        simulation = sim.simulate(stored)
        chosen = [one.candidate(frozenset(step.keys_of(stored, n))) for n, one in enumerate(cuts)]
        events = pairwise([0, *step.ends])
        told = [int(simulation.top_bytes[begin:end].max()) for begin, end in events]
        for moment, planned, takes in zip(moments, told, choice.peaks(chosen), strict=True):
            more = sum(cuts[moment.call or 0].joint.bytes[key] for key in moment.own)
            if not takes <= planned <= takes + (more if simulation.replayed else 0):
                found.append(f"{share} {moment.kind} {moment.call}: planned {planned}, takes {takes}")
    return found


@pytest.fixture(autouse=True)
def quickly() -> Iterator[None]:
    """What a call costs in time is of no interest here."""
    costs_of = functools.partial(price.costs_of, time_budget=0.05)
    with mock.patch.object(price, "costs_of", costs_of):
        yield


CASES: dict[str, tuple[Callable[[], nn.Module], Step]] = {
    "a graph break": (lambda: Broken(layers=2, dropout=0.1), once),
    "a loss outside, two forwards": (lambda: Open(layers=2), twice),
    "two losses in turn": (lambda: Open(layers=2), in_turn),
    "two forwards of two graphs": (lambda: Broken(layers=2), twice),
    "eager layers before": (lambda: Behind(layers=2), once),
    "an input that dies early": (Handed, once),
    "a value that both graphs save": (Held, once),
    "tied weights": (Tied, once),
    "logits that are held": (Tied, holding),
    "blocks one by one": (lambda: Embedded(layers=2), once),
}


@pytest.mark.parametrize("name", CASES)
def test_the_planners_graph_has_the_bytes_of_the_recorded_step(name: str) -> None:
    build, step = CASES[name]
    model = build()
    x = torch.randint(64, (256,)) if isinstance(model, (Tied, Embedded)) else torch.randn(256, 32)
    how = {"regional": True} if isinstance(model, Embedded) else {}
    assert not disagreements(recorded(model, x, step, **how))


@pytest.mark.parametrize("name", ["a graph break", "two losses in turn"])
def test_so_it_has_where_gradients_stand_already(name: str) -> None:
    build, step = CASES[name]
    model = build()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    assert not disagreements(recorded(model, torch.randn(256, 32), step))


def test_and_where_the_step_is_one_graph() -> None:
    found: list[Choice] = []
    init = Choice.__init__

    def made(choice: Choice, *args: Any, **kwargs: Any) -> None:
        init(choice, *args, **kwargs)
        found.append(choice)

    with mock.patch.object(Choice, "__init__", made):
        once(lowtide.compile(Model(layers=2), "100%", backend="aot_eager"), torch.randn(256, 32))
    (choice,) = found
    assert not disagreements(choice)
