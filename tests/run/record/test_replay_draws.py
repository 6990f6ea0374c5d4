"""Random operations beside threads that draw from the same generator, and generators of the model's own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide.ops import op_info
from lowtide.run.record.special import with_generator


@contextmanager
def drawing_beside() -> Iterator[list[torch.Tensor]]:
    """In the block another thread draws from the default generator, and lists what."""
    stop, found = threading.Event(), []

    def work() -> None:
        while not stop.is_set():
            found.append(torch.rand(200))

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield found
    finally:
        stop.set()
        thread.join()


DRAWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dropout": lambda x: nn.functional.dropout(x, 0.5),
    "rand_like": lambda x: x * (torch.rand_like(x) > 0.5),
    "rand": lambda x: x * (torch.rand(x.shape) > 0.5),
    "bernoulli": lambda x: x * torch.bernoulli(torch.full_like(x, 0.5)),
}


@pytest.mark.parametrize("name", DRAWS)
def test_gradients_belong_to_the_numbers_of_the_forward_while_another_thread_draws(name: str) -> None:
    """A replay once drew from the shared generator, where the other thread's numbers came in between."""
    x = torch.ones(3000, requires_grad=True)
    with drawing_beside():
        for _ in range(100):
            x.grad = None
            with lowtide.checkpointing(verify="never"):
                y = DRAWS[name](x * 2)
            y.sum().backward()
            assert x.grad is not None
            assert torch.equal(x.grad != 0, y != 0)


def test_nothing_is_said_not_to_reproduce_while_another_thread_draws(
    recwarn: pytest.WarningsRecorder,
) -> None:
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Dropout(0.5)) for _ in range(4)), nn.Linear(32, 1)
    )
    lowtide.limit_memory(model, policy="full", verify="always")
    x = torch.randn(100, 32)
    with drawing_beside():
        for _ in range(10):
            model(x).sum().backward()
            model.zero_grad()
    assert not [str(w.message) for w in recwarn if issubclass(w.category, lowtide.LowtideWarning)]


def test_another_thread_gets_no_numbers_twice() -> None:
    """A replay once set the shared generator back for a moment."""
    x = torch.ones(3000, requires_grad=True)
    with drawing_beside() as found:
        for _ in range(100):
            with lowtide.checkpointing(verify="never"):
                y = nn.functional.dropout(x * 2, 0.5)
            y.sum().backward()
    firsts = [tuple(numbers[:4].tolist()) for numbers in found]
    # it may still draw in the microsecond between the comparison and the set
    assert len(firsts) - len(set(firsts)) <= 2


@pytest.mark.parametrize("name", DRAWS)
def test_the_generator_goes_on_as_in_a_plain_step(name: str) -> None:
    states, results = [], []
    for checkpointed in (False, True):
        torch.manual_seed(3)
        x = torch.randn(37, 11, requires_grad=True)
        with lowtide.checkpointing("full" if checkpointed else "keep_all"):
            y = DRAWS[name](x.tanh())
        after = torch.get_rng_state()
        y.sum().backward()
        assert torch.equal(torch.get_rng_state(), after), "a replay drew from the shared generator"
        states.append(after)
        results.append((y.detach(), x.grad))
    assert torch.equal(*states)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))  # pyright: ignore


def test_a_generator_given_by_position_or_name_goes_on_too() -> None:
    own = torch.Generator().manual_seed(1)
    x = torch.full((50,), 3.0, requires_grad=True)
    found = []
    for checkpointed in (False, True):
        own.manual_seed(1)
        x.grad = None
        with lowtide.checkpointing("full" if checkpointed else "keep_all"):
            y = x.exp() * torch.poisson(x.detach(), own) * torch.rand(50, generator=own)
        y.sum().backward()
        found.append((y.detach(), x.grad, own.get_state()))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))  # pyright: ignore


def test_an_operation_of_the_users_own_draws_from_the_generator_that_it_is_given() -> None:
    """Its author did not tag it as random: it ran twice in a first step, and drew twice."""
    library = torch.library.Library("lowtide_test_drawn", "DEF")
    library.define("noisy(Tensor x, Generator generator) -> Tensor")
    library.impl("noisy", lambda x, generator: x * torch.rand(x.shape, generator=generator), "CPU")
    noisy = torch.ops.lowtide_test_drawn.noisy

    class Noisy(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
            return noisy(x, generator)

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> Any:
            return grads[0], None

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.generator = nn.Linear(32, 32), torch.Generator().manual_seed(2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.gelu(Noisy.apply(self.linear(x), self.generator))  # pyright: ignore

    found = []
    for limited in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*(Layer() for _ in range(4)))
        handle = lowtide.limit_memory(model, policy="full") if limited else None
        for _ in range(3):
            model.zero_grad()
            model(torch.ones(64, 32)).square().sum().backward()
        assert handle is None or not handle.kept
        found.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))  # pyright: ignore


def test_what_draws_from_a_state_that_it_overwrites_runs_once(twins: Any) -> None:
    """As cuDNN's RNNs: the state's argument is not declared as written. A second run, to see that it
    reproduces, gave all steps that follow other masks than the plain step's.
    """
    library = torch.library.Library("lowtide_test_rnn", "DEF")
    library.define("mask(Tensor x, float dropout, bool train, Tensor? dropout_state) -> Tensor")

    def mask(x: torch.Tensor, dropout: float, train: bool, dropout_state: torch.Tensor) -> torch.Tensor:
        seed = torch.Generator().manual_seed(int(dropout_state))
        dropout_state.numpy()[()] += train
        return (torch.rand(x.shape, generator=seed) >= dropout).to(x)

    library.impl("mask", mask, "CPU")

    class Layer(nn.Module):
        def __init__(self, dropout: float) -> None:
            super().__init__()
            self.linear, self.dropout = nn.Linear(32, 32), dropout
            self.state = torch.zeros((), dtype=torch.int64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x, train = self.linear(x), self.dropout > 0
            return x * torch.ops.lowtide_test_rnn.mask(x.detach(), self.dropout, train, self.state)

    assert op_info(torch.ops.aten._cudnn_rnn.default).state_positions == (11, 12)
    assert op_info(torch.ops.aten.miopen_rnn.default).state_positions == (9, 10)
    pair = twins(nn.Sequential(Layer(0.5), Layer(0.0), Layer(0.5)))
    handle = pair.check(lambda model: model(torch.ones(64, 32)).square().sum())
    assert [layer.state.item() for layer in pair.limited] == [3, 0, 3]
    masks = [op for op in handle.graph.operations if op.name == "lowtide_test_rnn.mask.default"]
    assert [op.replayable for op in masks] == [False, True, False]
    assert not handle.kept


def test_overloads_that_take_a_generator() -> None:
    aten = torch.ops.aten
    assert with_generator(aten.bernoulli_.float) == (aten.bernoulli_.float, 2)
    assert with_generator(aten.randint.low) == (aten.randint.low_generator, 3)
    assert with_generator(aten.rand_like.default)[0] == aten.rand_like.generator
    assert with_generator(aten.native_dropout.default)[0] is None
