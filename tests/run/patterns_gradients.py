"""What is asked of autograd: hooks, graphs of gradients, custom functions, checkpoints, errors in between."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from compare import Limit
from loops import STEPS, Patterns, data, loop, mlp, sgd
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

PATTERNS = Patterns()


@PATTERNS.add
def gradient_penalty(limit: Limit) -> Iterator[Any]:
    model = limit(mlp(outputs=1, act=nn.Tanh))
    optimizer = sgd(model)
    for number in range(STEPS):
        optimizer.zero_grad()
        x = data(number).requires_grad_()
        score = model(x)
        (slope,) = torch.autograd.grad(score.sum(), x, create_graph=True)
        loss = score.mean() + (slope.norm(dim=1) - 1).square().mean()
        loss.backward()
        yield model, loss, slope
        optimizer.step()


@PATTERNS.add
def double_backward_through_parameters(limit: Limit) -> Iterator[Any]:
    model = limit(mlp(act=nn.Softplus))
    optimizer = sgd(model)
    for number in range(STEPS):
        optimizer.zero_grad()
        loss = model(data(number)).square().mean()
        grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        (loss + sum(g.square().sum() for g in grads)).backward()
        yield model, loss
        optimizer.step()


@PATTERNS.add
def checkpoint_sequential_inside(limit: Limit) -> Iterator[Any]:
    class Segments(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(
                *(nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.1)) for _ in range(4))
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint_sequential(self.body, 2, x, use_reentrant=False)

    yield from loop(limit(Segments()))


class Blocks(nn.Module):
    """Blocks under torch's own checkpointing."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.1)) for _ in range(3)
        )
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.reentrant:
            x = x.requires_grad_()
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=self.reentrant)
        return x


@PATTERNS.add
def checkpoint_inside(limit: Limit) -> Iterator[Any]:
    yield from loop(limit(Blocks(reentrant=False)))


@PATTERNS.add
def reentrant_checkpoint_inside(limit: Limit) -> Iterator[Any]:
    yield from loop(limit(Blocks(reentrant=True)))


@PATTERNS.add
def checkpoint_around(limit: Limit) -> Iterator[Any]:
    model, head = limit(mlp(outputs=16)), nn.Linear(16, 4)
    optimizer = sgd(model, head)
    for number in range(STEPS):
        optimizer.zero_grad()
        loss = head(checkpoint(model, data(number).requires_grad_(), use_reentrant=False)).square().mean()
        loss.backward()
        yield model, head, loss
        optimizer.step()


@PATTERNS.add
def forward_hooks(limit: Limit) -> Iterator[Any]:
    model, seen = mlp(), []
    model[1].register_forward_hook(lambda module, args, output: output * 2)
    model[2].register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    model.register_forward_hook(lambda module, args, output: seen.append(output.detach().sum().item()))
    for things in loop(limit(model)):
        yield things, list(seen)


@PATTERNS.add
def backward_hooks(limit: Limit) -> Iterator[Any]:
    model, seen = mlp(), []
    model[2].register_full_backward_hook(lambda module, grads, outputs: seen.append(outputs[0].sum().item()))
    model[4].register_full_backward_pre_hook(lambda module, outputs: (outputs[0] * 0.5,))
    for things in loop(limit(model)):
        yield things, list(seen)


@PATTERNS.add
def hooks_on_tensors(limit: Limit) -> Iterator[Any]:
    class Hooked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.seen = nn.Linear(16, 32), nn.Linear(32, 4), []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.one(x).tanh()
            if h.requires_grad:
                h.register_hook(lambda grad: self.seen.append(grad.norm().item()))
                h.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
            return self.two(h)

    model = limit(Hooked())
    for things in loop(model):
        yield things, model.seen[-1:]


@PATTERNS.add
def retained_gradients(limit: Limit) -> Iterator[Any]:
    class Retains(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.hidden = nn.Linear(16, 32), nn.Linear(32, 4), None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.hidden = self.one(x).sigmoid()
            if self.hidden.requires_grad:
                self.hidden.retain_grad()
            return self.two(self.hidden)

    model = limit(Retains())
    for things in loop(model):
        yield things, model.hidden.detach(), model.hidden.grad


@PATTERNS.add
def hooks_after_accumulation(limit: Limit) -> Iterator[Any]:
    model, optimizers = mlp(), {}
    for parameter in model.parameters():
        optimizers[parameter] = torch.optim.SGD([parameter], lr=0.1)

        def step(parameter: torch.Tensor) -> None:
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        parameter.register_post_accumulate_grad_hook(step)
    limit(model)
    for number in range(STEPS):
        loss = model(data(number)).square().mean()
        loss.backward()
        yield model, loss


@PATTERNS.add
def hooks_on_parameters(limit: Limit) -> Iterator[Any]:
    model = mlp()
    model[0].weight.register_hook(lambda grad: grad * 0.5)
    yield from loop(limit(model))


@PATTERNS.add
def inputs_that_require_gradients(limit: Limit) -> Iterator[Any]:
    model = limit(mlp())
    x = data(0).requires_grad_()
    optimizer = torch.optim.SGD([x], lr=0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        yield model, x, x.grad
        optimizer.step()


@PATTERNS.add
def detached_parts(limit: Limit) -> Iterator[Any]:
    class Quantized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enc, self.dec, self.codes = mlp(outputs=8), nn.Linear(8, 16), nn.Embedding(10, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            z = self.enc(x)
            nearest = self.codes(torch.cdist(z.detach(), self.codes.weight.detach()).argmin(1))
            commit = F.mse_loss(z, nearest.detach()) + F.mse_loss(nearest, z.detach())
            return F.mse_loss(self.dec(z + (nearest - z).detach()), x) + commit

    yield from loop(limit(Quantized()), loss=lambda value: value)


@PATTERNS.add
def branch_without_gradients(limit: Limit) -> Iterator[Any]:
    class Teaches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student, self.teacher = mlp(), mlp()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                target = self.teacher(x)
            return F.mse_loss(self.student(x), target)

    yield from loop(limit(Teaches()), loss=lambda value: value)


@PATTERNS.add
def functional_call(limit: Limit) -> Iterator[Any]:
    model = limit(mlp())
    weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    for number in range(STEPS):
        loss = torch.func.functional_call(model, weights, (data(number),)).square().mean()
        grads = torch.autograd.grad(loss, list(weights.values()))
        yield loss, grads
        weights = {
            name: (w - 0.1 * g).detach().requires_grad_()
            for (name, w), g in zip(weights.items(), grads, strict=True)
        }


@PATTERNS.add
def maml_inner_step(limit: Limit) -> Iterator[Any]:
    model = limit(mlp(act=nn.Tanh))
    optimizer = sgd(model)
    for number in range(STEPS):
        optimizer.zero_grad()
        weights = dict(model.named_parameters())
        inner = torch.func.functional_call(model, weights, (data(number),)).square().mean()
        grads = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
        fast = {name: w - 0.1 * g for (name, w), g in zip(weights.items(), grads, strict=True)}
        loss = torch.func.functional_call(model, fast, (data(number + 50),)).square().mean()
        loss.backward()
        yield model, loss
        optimizer.step()


class Swish(torch.autograd.Function):
    """x * sigmoid(x), which saves its input and keeps a note beside it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.scale = scale
        return x * torch.sigmoid(scale * x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(ctx.scale * x)
        return grad * (s + ctx.scale * x * s * (1 - s)), None


@PATTERNS.add
def custom_function(limit: Limit) -> Iterator[Any]:
    class Act(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Swish.apply(x, 1.5)

    yield from loop(limit(mlp(act=Act)))


@PATTERNS.add
def custom_function_that_keeps_attributes(limit: Limit) -> Iterator[Any]:
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.x = x  # not save_for_backward: many do it so
            return x * x

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return 2 * ctx.x * grad

    class Act(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Square.apply(x.tanh())

    yield from loop(limit(mlp(act=Act)))


@PATTERNS.add
def straight_through_and_gumbel(limit: Limit) -> Iterator[Any]:
    class Picks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.codes = mlp(outputs=8), nn.Linear(8, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.codes(F.gumbel_softmax(self.body(x), hard=True))

    yield from loop(limit(Picks()))


class Fails(nn.Module):
    """Raises in forward or in backward where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.fail = (
            mlp(outputs=16),
            nn.Sequential(nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 4)),
            "",
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.body(x)
        if self.fail == "forward":
            raise ValueError("on purpose")
        if h.requires_grad:
            h.register_hook(self._backward)
        return self.head(h)

    def _backward(self, grad: torch.Tensor) -> torch.Tensor:
        if self.fail == "backward":
            raise ValueError("on purpose")
        return grad


def _failing(limit: Limit, where: str, steps: tuple[int, ...]) -> Iterator[Any]:
    model = limit(Fails())
    optimizer = sgd(model)
    for number in range(STEPS + 2):
        model.fail = where if number in steps else ""
        optimizer.zero_grad()
        torch.manual_seed(number)
        try:
            model(data(number)).square().mean().backward()
            failed = False
        except ValueError as error:
            failed = str(error) == "on purpose"
        yield model, failed, torch.rand(1)
        optimizer.step()


@PATTERNS.add
def exception_in_the_first_forward(limit: Limit) -> Iterator[Any]:
    yield from _failing(limit, "forward", (0,))


@PATTERNS.add
def exception_in_a_later_forward(limit: Limit) -> Iterator[Any]:
    yield from _failing(limit, "forward", (2,))


@PATTERNS.add
def exception_in_the_first_backward(limit: Limit) -> Iterator[Any]:
    yield from _failing(limit, "backward", (0,))


@PATTERNS.add
def exception_in_a_later_backward(limit: Limit) -> Iterator[Any]:
    yield from _failing(limit, "backward", (1, 3))


@PATTERNS.add
def exception_in_the_callers_loss(limit: Limit) -> Iterator[Any]:
    model = limit(mlp())
    optimizer = sgd(model)
    for number in range(STEPS + 2):
        optimizer.zero_grad()
        try:
            output = model(data(number))
            (output @ output if number in (0, 2) else output.square().mean()).backward()  # shapes do not fit
        except RuntimeError:
            pass
        yield model
        optimizer.step()


@PATTERNS.add
def forward_without_backward(limit: Limit) -> Iterator[Any]:
    model = limit(mlp())
    for number in range(STEPS):
        yield model(data(number)).detach()
        yield model(data(number)).sum().item()
    yield from loop(model)


@PATTERNS.add
def retained_graph(limit: Limit) -> Iterator[Any]:
    model = limit(mlp())
    optimizer = sgd(model)
    for number in range(STEPS):
        optimizer.zero_grad()
        output = model(data(number))
        output.square().mean().backward(retain_graph=True)
        output.abs().mean().backward()
        yield model
        optimizer.step()


@PATTERNS.add
def several_losses(limit: Limit) -> Iterator[Any]:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.one, self.two = mlp(outputs=32), nn.Linear(32, 4), nn.Linear(32, 1)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            h = self.body(x).relu()
            return {"one": self.one(h), "two": self.two(h), "unused": h.exp()}

    model = limit(Heads())
    optimizer = sgd(model)
    for number in range(STEPS):
        optimizer.zero_grad()
        outputs = model(data(number))
        first, second = outputs["one"].square().mean(), outputs["two"].abs().mean()
        first.backward(retain_graph=True)
        second.backward()
        yield model, first, second
        optimizer.step()


@PATTERNS.add
def gradients_of_some_by_autograd_grad(limit: Limit) -> Iterator[Any]:
    model = limit(mlp())
    for number in range(STEPS):
        x = data(number).requires_grad_()
        loss = model(x).square().mean()
        yield torch.autograd.grad(loss, [x, model[2].weight])
        with torch.no_grad():
            model[2].weight.mul_(0.9)


@PATTERNS.add
def backward_of_a_vector(limit: Limit) -> Iterator[Any]:
    model = limit(mlp())
    for number in range(STEPS):
        model.zero_grad()
        output = model(data(number))
        output.backward(output.detach().sign())
        yield model


@PATTERNS.add
def jacobian_rows(limit: Limit) -> Iterator[Any]:
    model = limit(mlp(outputs=3, act=nn.Tanh))
    for number in range(STEPS):
        x = data(number).requires_grad_()
        output = model(x)
        yield [torch.autograd.grad(output[:, at].sum(), x, retain_graph=at < 2)[0] for at in range(3)]


@PATTERNS.add
def anomaly_detection(limit: Limit) -> Iterator[Any]:
    with torch.autograd.detect_anomaly(check_nan=True):
        yield from loop(limit(mlp()))
