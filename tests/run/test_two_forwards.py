"""Two forwards of one model before one backward, as a discriminator's loss has them."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.functional import softplus

import lowtide


def normed(norm: Callable[[nn.Module], nn.Module]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        norm(nn.Linear(32, 64)),
        nn.LeakyReLU(0.2),
        norm(nn.Linear(64, 64)),
        nn.LeakyReLU(0.2),
        nn.Linear(64, 1),
    )


def losses(model: nn.Sequential, steps: int = 3) -> list[torch.Tensor]:
    optimizer = torch.optim.Adam(model.parameters())
    found = []
    for step in range(steps):
        torch.manual_seed(step)
        real, made = torch.randn(1024, 32), torch.randn(1024, 32)
        loss = softplus(-model(real)).mean() + softplus(model(made)).mean()
        loss.backward()
        found += [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *model.state_dict().values()]


@pytest.mark.parametrize("budget", ["95%", "80%", "min"])
@pytest.mark.parametrize("norm", [nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm])
def test_state_that_each_forward_overwrites(norm: Callable[[nn.Module], nn.Module], budget: str) -> None:
    plain, model = losses(normed(norm)), normed(norm)
    handle = lowtide.limit_memory(model, budget)
    with pytest.warns(lowtide.LowtideWarning, match="what an earlier one saved is still needed") as told:
        limited = losses(model)
    assert (
        sum("still needed" in str(warning.message) and warning.filename == __file__ for warning in told) == 1
    )
    assert handle.plan is not None and handle.plan.replayed
    assert all(torch.equal(one, other) for one, other in zip(plain, limited, strict=True))


def test_forwards_one_after_the_other_are_said_nothing_of() -> None:
    model = normed(lambda layer: layer)
    lowtide.limit_memory(model, "90%", loss_fn=torch.sum)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*still to come")
        for _ in range(4):
            output = model(torch.randn(1024, 32))
            output.sum().backward()
            model(torch.randn(1024, 32))  # nobody waits for its backward
            del output


def test_a_step_beside_one_that_was_abandoned_is_said_to_be_without_a_limit() -> None:
    model = normed(lambda layer: layer)
    handle = lowtide.limit_memory(model, "90%")
    held = model(torch.randn(1024, 32)).sum()  # an error between forward and backward, and the loss is kept
    loss = model(torch.randn(1024, 32)).sum()
    with pytest.warns(lowtide.LowtideWarning, match="ran without the limit.*still held"):
        loss.backward()
    assert handle.plan is None
    for _ in range(2):
        model(torch.randn(1024, 32)).sum().backward()
    assert handle.plan is not None and handle.plan.replayed and held.grad_fn is not None


def test_so_it_is_where_the_name_is_bound_again() -> None:
    model = normed(lambda layer: layer)
    lowtide.limit_memory(model, "90%")
    loss = model(torch.randn(1024, 32)).sum()
    loss = model(torch.randn(1024, 32)).sum()  # only now is the first let go of
    with pytest.warns(lowtide.LowtideWarning, match="ran without the limit"):
        loss.backward()


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = normed(lambda layer: layer), normed(lambda layer: layer)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.first(x), self.second(x)


def test_an_output_that_no_loss_uses_is_not_awaited() -> None:
    """What it saved goes with it, after backward and before the next forward."""
    model = TwoHeads()
    handle = lowtide.limit_memory(model, "100%")

    def step() -> None:
        first, _unused = model(torch.randn(1024, 32))
        first.sum().backward()

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*still needed")
        for _ in range(3):
            step()
    assert handle.plan is not None
