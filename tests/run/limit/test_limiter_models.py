"""What raised in 0.1.0 where the plain step runs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import SLACK_BYTES, Limit, check, differences, run_limited, snapshot
from loops import data, loop, mlp
from torch import distributions, nn

import lowtide

BUDGETS = ["100%", "60%"]


def normal(h: torch.Tensor) -> distributions.Distribution:
    """A normal distribution for each number."""
    return distributions.Normal(h[:, :2], F.softplus(h[:, 2:4]))


DISTRIBUTIONS: dict[str, Callable[[torch.Tensor], distributions.Distribution]] = {
    "normal": normal,
    "independent normal": lambda h: distributions.Independent(normal(h), 1),
    "squashed normal": lambda h: distributions.TransformedDistribution(
        normal(h), [distributions.TanhTransform(cache_size=1)]
    ),
    "mixture": lambda h: distributions.MixtureSameFamily(
        distributions.Categorical(logits=h[:, :2]), distributions.Normal(h[:, 2:4], F.softplus(h[:, :2]))
    ),
    "multivariate": lambda h: distributions.MultivariateNormal(
        h[:, :2], scale_tril=torch.diag_embed(F.softplus(h[:, 2:4]))
    ),
}


class Policy(nn.Module):
    """A model that returns a distribution."""

    def __init__(self, kind: str, nested: bool) -> None:
        super().__init__()
        self.net, self.kind, self.nested = mlp(), kind, nested

    def forward(self, x: torch.Tensor) -> Any:
        h = self.net(x)
        made = DISTRIBUTIONS[self.kind](h)
        return {"policy": (made, h.sum())} if self.nested else made


@pytest.mark.parametrize("nested", [False, True], ids=["alone", "in a dict"])
@pytest.mark.parametrize("kind", DISTRIBUTIONS)
@pytest.mark.parametrize("budget", BUDGETS)
def test_distributions_among_the_outputs(kind: str, nested: bool, budget: str) -> None:
    def pattern(limit: Limit) -> Iterator[Any]:
        model = limit(Policy(kind, nested))
        for number in range(3):
            model.zero_grad()
            made = model(data(number))
            made = made["policy"][0] if nested else made
            drawn = made.rsample() if made.has_rsample else made.sample()
            loss = made.log_prob(drawn).mean() + (drawn.square().mean() if drawn.requires_grad else 0)
            loss.backward()
            yield model, loss, drawn

    check(pattern, budget)


def test_actor_and_critic_in_one_step_are_both_planned_for() -> None:
    class Critic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x)

    actor, critic = Policy("independent normal", nested=False), Critic()
    limits = [lowtide.limit_memory(model, "100%") for model in (actor, critic)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lowtide.LowtideWarning)  # several limits in one step
        for number in range(2):
            critic(actor(data(number)).rsample()).mean().backward()
    assert all(handle.plans for handle in limits)


@pytest.mark.parametrize("how", ["script", "trace"])
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torchscript_submodules(how: str, budget: str) -> None:
    def pattern(limit: Limit) -> Iterator[Any]:
        inner = nn.Sequential(nn.Linear(16, 16), nn.GELU())
        made = torch.jit.script(inner) if how == "script" else torch.jit.trace(inner, torch.zeros(128, 16))
        yield from loop(limit(nn.Sequential(mlp(outputs=16), made, nn.Linear(16, 4))))

    check(pattern, budget)


class Decorated(nn.Module):
    """A teacher that switches gradients off itself."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    @torch.no_grad()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


class Inferring(Decorated):
    """A teacher that runs in inference mode."""

    @torch.inference_mode()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


@pytest.mark.parametrize("budget", BUDGETS)
def test_a_teacher_in_inference_mode(budget: str) -> None:
    class Cloning(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student, self.teacher = mlp(), Inferring()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.mse_loss(self.student(x), self.teacher(x).clone())

    check(lambda limit: loop(limit(Cloning()), loss=lambda value: value), budget)


class Distilled(nn.Module):
    """A student beside its teacher."""

    def __init__(self, teacher: nn.Module) -> None:
        super().__init__()
        self.student, self.teacher = mlp(), teacher

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.student(x), self.teacher(x))


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("place", ["inside", "limited itself", "limited as a pair", "alone"])
@pytest.mark.parametrize("budget", BUDGETS)
def test_a_teacher_under_its_own_no_grad(place: str, frozen: bool, budget: str) -> None:
    def pattern(limit: Limit) -> Iterator[Any]:
        teacher = Decorated().requires_grad_(not frozen)
        if place in ("inside", "limited as a pair"):
            if place == "limited as a pair":
                limit(teacher)
            yield from loop(limit(Distilled(teacher)), loss=lambda value: value)
            return
        student = limit(mlp()) if place == "limited itself" else mlp()
        limit(teacher)
        for number in range(3):
            student.zero_grad()
            loss = F.mse_loss(student(data(number)), teacher(data(number)))
            loss.backward()
            yield student, teacher, loss

    check(pattern, budget, planned=False)


def test_a_second_limit_replaces_the_first() -> None:
    torch.manual_seed(0)
    plain, model = mlp(width=64), mlp(width=64)
    model.load_state_dict(plain.state_dict())
    own = model.forward
    first = lowtide.limit_memory(model, "100%")
    model(data(0, rows=512)).square().mean().backward()
    assert first.plan is not None
    second = lowtide.limit_memory(model, "90%")
    for number in range(3):
        for one in (plain, model):
            one.zero_grad()
            one(data(number, rows=512)).square().mean().backward()
        assert not differences([snapshot(plain)], [snapshot(model)])
    assert (
        second.plan is not None
        and second.plan.budget_bytes is not None
        and first.plan.budget_bytes is not None
    )
    assert second.plan.budget_bytes < first.plan.budget_bytes
    first.remove()  # the second stands
    assert model.forward != own
    second.remove()
    assert model.forward == own


class Accelerated(torch.optim.Optimizer):
    """An optimizer around another, as accelerate has it: `Optimizer.__init__` is not called, and all that it
    shows is the inner one's.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def state(self) -> Any:
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: Any) -> None:
        self.optimizer.param_groups = groups

    @property
    def defaults(self) -> Any:
        return self.optimizer.defaults

    @defaults.setter
    def defaults(self, defaults: Any) -> None:
        self.optimizer.defaults = defaults

    def state_dict(self) -> Any:
        return self.optimizer.state_dict()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("budget", BUDGETS)
def test_an_optimizer_around_another(kind: type[torch.optim.Optimizer], budget: str) -> None:
    def pattern(limit: Limit, wrap: Callable[[Any], Any] = Accelerated) -> Iterator[Any]:
        model = mlp()
        optimizer = wrap(kind(model.parameters(), lr=0.01))
        limit(model, optimizer=optimizer)
        for number in range(3):
            optimizer.zero_grad()
            model(data(number)).square().mean().backward()
            optimizer.step()
            yield model

    bytes_counted = [
        run.handles[0].plan.predicted_peak_bytes
        for run in (
            check(pattern, budget),
            run_limited(lambda limit: pattern(limit, lambda inner: inner), budget),
        )
        if run.handles[0].plan is not None
    ]
    # the inner one's state counts all the same
    assert len(bytes_counted) == 2 and bytes_counted[0] == bytes_counted[1]


@pytest.mark.parametrize("budget", BUDGETS)
def test_lazy_modules(budget: str) -> None:
    def pattern(limit: Limit) -> Iterator[Any]:
        model = limit(nn.Sequential(nn.LazyLinear(32), nn.LazyBatchNorm1d(), nn.GELU(), nn.LazyLinear(4)))
        for number in range(3):
            torch.manual_seed(number)
            model.zero_grad()
            loss = model(data(number)).square().mean()
            loss.backward()
            yield model, loss

    check(pattern, budget)


def works_or_says(pattern: Callable[[Limit], Iterator[Any]], budget: str, *words: str) -> None:
    """The same bits, or an error of lowtide's own that names what it is about."""
    try:
        check(pattern, budget, planned=False)
    except lowtide.LowtideError as error:
        assert any(word in str(error) for word in words), f"the error does not name {words}: {error}"


@pytest.mark.parametrize("budget", BUDGETS)
def test_torch_cond(budget: str) -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(16, 4), nn.Linear(16, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cond(x.sum() > 0, lambda x: self.one(x).sin(), lambda x: self.two(x).cos(), (x,))

    def pattern(limit: Limit) -> Iterator[Any]:
        model = limit(Branches())
        for number in range(4):
            model.zero_grad()
            loss = model(data(number)).square().mean()
            loss.backward()
            yield model, loss

    works_or_says(pattern, budget, "cond", "higher-order", "higher order")


@pytest.mark.parametrize("what", ["vmap", "gradients of each row", "jacobian", "forward mode"])
@pytest.mark.parametrize("budget", BUDGETS)
def test_function_transforms_over_a_limited_model(what: str, budget: str) -> None:
    def pattern(limit: Limit) -> Iterator[Any]:
        model = limit(mlp(act=nn.Tanh))
        weights = dict(model.named_parameters())

        def loss(weights: Any, row: torch.Tensor) -> torch.Tensor:
            return torch.func.functional_call(model, weights, (row[None],)).square().mean()

        for number in range(3):
            model.zero_grad()
            x = data(number, rows=32)
            if what == "vmap":
                torch.vmap(model)(x.view(4, 8, 16)).square().mean().backward()
                yield model
            elif what == "gradients of each row":
                yield torch.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, x)
            elif what == "jacobian":
                yield torch.func.jacrev(lambda x: torch.func.functional_call(model, weights, (x,)))(x[0])
            else:
                yield torch.func.jvp(
                    lambda x: torch.func.functional_call(model, weights, (x,)), (x,), (torch.ones_like(x),)
                )

    works_or_says(pattern, budget, "vmap", "torch.func", "functorch", "transform")


@pytest.mark.parametrize("why", ["inside a function transform", "not initialized yet"])
def test_a_step_that_runs_without_its_limit_says_why(why: str) -> None:
    if "transform" in why:
        model: Any = mlp(act=nn.Tanh)
        run: Callable[[], torch.Tensor] = lambda: torch.vmap(model)(data(0).view(4, -1, 16))  # noqa: E731
    else:
        model = nn.Sequential(nn.LazyLinear(32), nn.GELU(), nn.LazyLinear(4))
        run = lambda: model(data(0))  # noqa: E731
    lowtide.limit_memory(model, "80%")
    with pytest.warns(lowtide.LowtideWarning, match=why) as said:
        run().square().mean().backward()
    assert not [one for one in said if "has not engaged" in str(one.message)], "its forward ran"


class Fused(torch.autograd.Function):
    """A product that adds the weight's gradient to its ``main_grad`` and says so, as Megatron's does; where
    there is none, an activation's mark counts.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        assert type(weight) is nn.Parameter and weight.requires_grad
        weight.main_grad.add_(x.t() @ grad)  # type: ignore[operator]
        weight.added = getattr(weight, "added", 0) + 1  # type: ignore[attr-defined]
        return grad @ weight.t() * getattr(x, "mark", 1), None


@pytest.mark.parametrize("budget", ["100%", "50%"])
def test_what_a_custom_function_saved_comes_back_with_its_attributes(budget: str) -> None:
    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList(torch.randn(16, 16) for _ in range(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.requires_grad_()
            for weight in self.weights:
                x = F.gelu(x)
                x.mark = 3  # type: ignore[attr-defined]
                x = Fused.apply(x, weight)
            return x

    def pattern(limit: Limit) -> Iterator[Any]:
        model = Layers()
        for weight in model.weights:
            weight.main_grad = torch.zeros(16, 16)  # type: ignore[attr-defined]
        limit(model)
        for number in range(4):
            x = data(number)
            model(x).square().mean().backward()
            yield x.grad, [(weight.main_grad, weight.added) for weight in model.weights]

    run = check(pattern, budget)
    assert budget == "100%" or (run.handles[0].plan is not None and not run.handles[0].plan.changes_nothing)


class Named(torch.autograd.Function):
    """A custom function that calls what it notes as autograd calls its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, name: str) -> torch.Tensor:
        ctx.name = ctx._sequence_nr = name
        ctx.variable = x
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        assert ctx.name == ctx._sequence_nr == "sine"
        return grad * ctx.variable.cos(), None


@pytest.mark.parametrize("budget", BUDGETS)
def test_a_custom_function_that_notes_a_name(budget: str) -> None:
    class Waves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(16, 32), nn.Linear(32, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Named.apply(self.two(Named.apply(self.one(x), "sine")), "sine")

    check(lambda limit: loop(limit(Waves())), budget)


class Tangents(nn.Module):
    """A model with a derivative in forward mode in it; PyTorch finds the shapes of zero tangents on the meta
    device.
    """

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(outputs=16, act=nn.Tanh)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, slope = torch.func.jvp(self.net, (x,), (torch.ones_like(x),))
        return y * slope


class Shapes(nn.Module):
    """A model that asks the meta device for a shape."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = (x.to("meta") @ x.to("meta").T).exp().shape[0]
        return self.net(x) / rows


@pytest.mark.parametrize("kind", [Tangents, Shapes])
@pytest.mark.parametrize("budget", ["100%", "min"])
def test_meta_tensors_in_forward_have_no_bytes(kind: type[nn.Module], budget: str) -> None:
    run = check(lambda limit: loop(limit(kind())), budget)
    (handle,) = run.handles
    assert handle.plan is not None and handle.measured_peak_bytes is not None
    assert abs(handle.measured_peak_bytes - handle.plan.predicted_peak_bytes) <= SLACK_BYTES
