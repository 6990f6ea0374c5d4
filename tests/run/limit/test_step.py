"""One step of a limited model: two forwards before one backward, several outputs, and steps that take more
than their budget, which is said each time.
"""

from __future__ import annotations

import copy
import gc
import random
import warnings
from collections.abc import Callable

import pytest
import torch
from small_model import N, batch, needs_meter, small
from torch import nn
from torch.nn.functional import softplus

import lowtide
from lowtide.interception import interceptors
from lowtide.meter import peak, resident_bytes
from lowtide.run.limit.limiter import Limiter
from lowtide.run.profile.profiler import Profiler


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
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*still needed")
        limited = losses(model)
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
    loss.backward()
    assert handle.plan is None
    with pytest.warns(lowtide.LowtideWarning, match="ran without the limit.*still held"):
        model(torch.randn(1024, 32)).sum().backward()
    assert handle.plan is not None and handle.plan.replayed and held.grad_fn is not None


@pytest.mark.parametrize("way", ["bound again", "detached"])
def test_steps_whose_first_forward_no_backward_comes_through_are_planned_for(way: str) -> None:
    """The first is taken for one that was given up. Profiles of all were thrown away without a word."""
    model = normed(lambda layer: layer)
    handle = lowtide.limit_memory(model, "90%", progress=False)

    def step() -> None:
        model.zero_grad()
        first = model(torch.randn(1024, 32))
        if way == "bound again":
            first = model(torch.randn(1024, 32))  # only now is the earlier one let go of
            first.sum().backward()
            assert not any(isinstance(one, Profiler) for one in interceptors())
        else:
            (model(torch.randn(1024, 32)) * first.detach()).sum().backward()

    step()
    with pytest.warns(lowtide.LowtideWarning, match="ran without the limit"):
        step()
    assert handle.plannings == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error", lowtide.LowtideWarning)
        warnings.filterwarnings("ignore", message="the budget of .* from now on")
        step()
        step()
    assert handle.plannings == 1


@needs_meter
@pytest.mark.parametrize("budget", ["60%", "min"])
@pytest.mark.parametrize("kind", ["pairs", "reference", "cell", "two backwards", "backwards turned"])
def test_forwards_before_a_backward_are_one_step(kind: str, budget: str) -> None:
    """Each was a step of its own: the smallest budget of a pair was nearly three times what it took."""

    def steps(limit: bool) -> tuple[list[torch.Tensor], list[float], lowtide.Handle | None]:
        torch.manual_seed(0)
        model = nn.Sequential(
            *(nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in "abc")
        )
        reference = copy.deepcopy(model).requires_grad_(False)
        handle = lowtide.limit_memory(model, budget, progress=False) if limit else None
        found, used = [], []
        for _ in range(4):
            x, y = torch.randn(2, 400, 32).unbind()
            if kind == "cell":
                for _ in range(3):
                    x = x + model(x)
                terms = [x.square().mean()]
            else:
                terms = [model(x).exp().mean(), model(y).square().mean()]
                if kind == "reference":
                    terms = [(terms[0] - reference(x).mean()) * (terms[1] - reference(y).mean())]
                elif kind == "pairs":
                    terms = [terms[0] * terms[1]]
            model.zero_grad()  # gradients exist before the second step, and none before the first
            for term in terms if kind != "backwards turned" else reversed(terms):
                term.backward()
            if handle is not None and handle.plan is not None and handle.measured_peak_bytes:
                used.append(handle.measured_peak_bytes / (handle.budget_bytes or 1))
            # copies: the next step frees the gradients themselves
            found += [term.detach() for term in terms] + [
                p.grad.clone() for p in model.parameters() if p.grad is not None
            ]
        return found, used, handle

    plain = steps(limit=False)[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error", lowtide.LowtideWarning)
        warnings.filterwarnings("ignore", message="the budget of .* from now on")
        limited, used, handle = steps(limit=True)
    assert all(torch.equal(one, other) for one, other in zip(plain, limited, strict=True))
    assert handle is not None and handle.plan is not None and handle.plan.replayed
    assert 0.9 < min(used[2:]) <= max(used[2:]) <= 1


@needs_meter
def test_a_forward_that_is_larger_than_planned_for_is_held() -> None:
    """It ran under the plan of a smaller one, and took 1.8 times the budget."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in "abc"))
    handle, plain = lowtide.limit_memory(model, "60%", progress=False), copy.deepcopy(model)
    lowtide.handle_of(plain).remove()  # type: ignore[union-attr]
    for rows in (200, 300, 100):
        x, y = torch.randn(200, 32), torch.randn(rows, 32)
        for one in (model, plain):
            one.zero_grad()
            (one(x).exp().mean() * one(y).square().mean()).backward()
        pairs = zip(model.parameters(), plain.parameters(), strict=True)
        assert all(torch.equal(a.grad, b.grad) for a, b in pairs)  # pyright: ignore
        if rows == 300:
            assert handle.plan is not None and handle.measured_peak_bytes is not None
            assert handle.measured_peak_bytes <= handle.budget_bytes  # type: ignore


@needs_meter
def test_a_forward_between_two_backwards_is_held_beside_what_waits() -> None:
    """Each had the budget for itself."""

    def steps(model: nn.Module) -> list[int]:
        found = []
        for _ in range(4):
            model.zero_grad()
            x, y, z = torch.randn(3, 1024, 32).unbind()
            resident = resident_bytes(model) + x.untyped_storage().nbytes()
            with peak("cpu") as seen:
                first, second = model(x).exp().mean(), model(y).sin().mean()
                first.backward()
                third = model(z).exp().mean()
                second.backward()
                third.backward()
                del first, second, third
            found.append(resident + seen.peak_bytes)
        return found

    budget = int(0.8 * max(steps(normed(lambda layer: layer))))
    model = normed(lambda layer: layer)
    handle = lowtide.limit_memory(model, budget, progress=False)
    with pytest.warns(lowtide.LowtideWarning, match="Both forwards are held to the budget"):
        assert max(steps(model)) <= budget
    assert handle.measured_peak_bytes is None, "it would be that of two steps"


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


class Towers(nn.Module):
    """Two towers and a scale, as CLIP returns them: the loss over all pairs is its caller's."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Sequential(*(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(4)))
            for _ in "ab"
        )
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.first(x), self.second(x), self.scale.exp()


@needs_meter
def test_a_scale_beside_features_is_not_taken_for_the_loss() -> None:
    """The trace went back from the scale alone, and every step took twice what was promised."""
    torch.manual_seed(0)
    model = Towers()
    handle = lowtide.limit_memory(model, "90%")
    for _ in range(3):
        model.zero_grad()
        gc.collect()
        x, resident = batch(200), resident_bytes(model)
        with peak("cpu") as seen:
            first, second, scale = model(x)
            (first @ second.T * scale).logsumexp(1).mean().backward()
            del first, second, scale
        plan = handle.plan
        assert plan is not None
        assert plan.budget_bytes is not None
        assert seen.peak_bytes + resident + x.nbytes <= plan.budget_bytes


class Terms(nn.Module):
    """Two losses over one trunk."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.first, self.second = (
            nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in "abc"
        )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.trunk(x)
        return self.first(h).square().mean(), self.second(h).abs().mean()


@needs_meter
@pytest.mark.parametrize("way", ["two backwards", "one that is retained"])
def test_two_backwards_of_one_forward_keep_to_the_budget(way: str) -> None:
    torch.manual_seed(0)

    def steps(budget: int) -> None:
        model = Terms()
        lowtide.limit_memory(model, budget)
        for _ in range(4):
            model.zero_grad()
            first, second = model(batch(400, 32))
            if way == "two backwards":
                first.backward(retain_graph=True)
                second.backward()
            else:
                (first + second).backward(retain_graph=True)
            del first, second

    with pytest.raises(lowtide.BudgetError) as caught:
        steps(101)
    assert caught.value.smallest_bytes is not None
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        steps(caught.value.smallest_bytes)
    assert not any("a planned step took" in str(one.message) for one in told), (
        "both backwards belong to the step that was looked at"
    )


class Recycled(nn.Module):
    """A forward of several passes of which only the last has gradients, as a structure predictor's."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([small().layer(N, 0.0) for _ in range(3)])

    def forward(self, x: torch.Tensor, passes: int) -> torch.Tensor:
        for left in reversed(range(passes)):
            with torch.set_grad_enabled(left == 0):
                out = x
                for block in self.blocks:
                    out = out + block(out)
            x = x + out.detach() if left else out
        return x.square().mean()


def messages(caught: list[warnings.WarningMessage]) -> list[str]:
    return [str(one.message) for one in caught if issubclass(one.category, lowtide.LowtideWarning)]


def total(gradients: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return torch.stack([one.square().sum() for one in gradients]).sum()


@needs_meter
def test_what_the_program_itself_holds_is_said_once() -> None:
    """The steps vary as well, which is said nothing of: they are held."""
    model, x, drawn = Recycled(), batch(), random.Random(0)
    handle = lowtide.limit_memory(model, 160_000, progress=False)
    held: list[torch.Tensor] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for step in range(24):
            model.zero_grad()
            held.clear()
            loss = model(x, drawn.randint(1, 4))
            if step % 3 == 2:
                loss.register_hook(lambda _: held.append(torch.zeros(1 << 20)))
            loss.backward()
            assert handle.measured_peak_bytes is not None and handle.budget_bytes is not None
            assert (handle.measured_peak_bytes > handle.budget_bytes) == (step % 3 == 2)
    texts = [text.partition(": ")[2].split()[0] for text in messages(caught)]
    assert 0 < len(texts) < 8 and len(set(texts)) == len(texts), "each operation once"


@needs_meter
def test_the_refusal_of_a_step_that_makes_a_graph_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a governor holds such a step with less than any plan, it goes on."""
    monkeypatch.setattr(Limiter, "_governor", lambda *_: None)
    model, x = small(dropout=0.0), batch()
    parameters = list(model.parameters())
    lowtide.limit_memory(model, "40%", progress=False)
    first = torch.autograd.grad(model(x), parameters, create_graph=True)
    with pytest.raises(lowtide.BudgetError, match="create_graph=True"):
        torch.autograd.grad(total(first), parameters)


class AsksThrice(torch.autograd.Function):
    """Each look at ``ctx.saved_tensors`` unpacks all of them once more."""

    @staticmethod
    def forward(ctx, x):
        sine, cosine = x.sin(), x.cos()
        ctx.save_for_backward(x, sine, cosine)
        return sine

    @staticmethod
    def backward(ctx, gradient):
        x, cosine = ctx.saved_tensors[0], ctx.saved_tensors[2]
        return gradient * cosine + 0 * ctx.saved_tensors[1] + 0 * x


class AskingBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + AsksThrice.apply(self.mlp(x))


@needs_meter
@pytest.mark.filterwarnings("ignore:the first step, from which lowtide plans")
def test_a_function_that_looks_at_its_saved_tensors_again_takes_what_was_predicted() -> None:
    """What it holds of a profiled step is live beside what the next one brings back."""
    torch.manual_seed(0)
    model, x = nn.Sequential(*(AskingBlock() for _ in range(3))), torch.randn(512, 32)
    handle = lowtide.limit_memory(model, "min")
    for step in range(3):
        model(x).square().mean().backward()
        model.zero_grad()
        if step:
            plan = handle.plan
            assert plan is not None and plan.replayed
            assert abs(handle.measured_peak_bytes - plan.predicted_peak_bytes) < 4096  # type: ignore
