"""How a loop goes: accumulation, mixed precision, modes, what is cleared or frozen between steps."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from compare import Limit
from loops import STEPS, Patterns, data, loop, mlp, sgd
from torch import nn

PATTERNS = Patterns()


class LossInside(nn.Module):
    """A model that returns its loss."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).square().mean()


@PATTERNS.add
def the_plain_loop(limit: Limit) -> Iterator[Any]:
    yield from loop(limit(mlp()))


@PATTERNS.add
def loss_inside(limit: Limit) -> Iterator[Any]:
    yield from loop(limit(LossInside(mlp())), loss=lambda value: value)


@PATTERNS.add
def inference_only(limit: Limit) -> Iterator[Any]:
    model = limit(mlp())
    for number in range(STEPS):
        with torch.inference_mode():
            yield model(data(number))


@PATTERNS.add
def accumulation(limit: Limit) -> Iterator[Any]:
    model = limit(mlp())
    optimizer = sgd(model)
    for number in range(STEPS):
        optimizer.zero_grad()
        for micro in range(3):
            (model(data(10 * number + micro)).square().mean() / 3).backward()
            yield model
        optimizer.step()


@PATTERNS.add
def autocast_bfloat16(limit: Limit) -> Iterator[Any]:
    model = limit(mlp())
    optimizer = sgd(model)
    for number in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(data(number)).float().square().mean()
        loss.backward()
        yield model, loss
        optimizer.step()


@PATTERNS.add
def autocast_inside(limit: Limit) -> Iterator[Any]:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = mlp(outputs=32), nn.Linear(32, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                h = self.body(x)
            return self.head(h.float())

    yield from loop(limit(Mixed()))


@PATTERNS.add
def grad_scaler(limit: Limit) -> Iterator[Any]:
    model = limit(mlp())
    optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)
    for number in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = model(data(number)).float().square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        yield model, loss
        scaler.step(optimizer)
        scaler.update()


def averaged(model: nn.Module, average: torch.optim.swa_utils.AveragedModel) -> Iterator[Any]:
    """The plain loop, with an average of the weights that is used beside the model."""
    for things in loop(model):
        average.update_parameters(model)
        with torch.no_grad():
            target = average(data(99))
        yield things, list(average.module.parameters()), target


@PATTERNS.add
def exponential_moving_average(limit: Limit) -> Iterator[Any]:
    model = mlp()
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    limit(model)
    yield from averaged(model, average)


@PATTERNS.add
def averaged_after_the_limit(limit: Limit) -> Iterator[Any]:
    model = limit(mlp())
    average = torch.optim.swa_utils.AveragedModel(model)  # copies the model, limit and all
    yield from averaged(model, average)


@PATTERNS.add
def sharpness_aware_two_passes(limit: Limit) -> Iterator[Any]:
    model = limit(mlp())
    optimizer = sgd(model)
    for number in range(STEPS):
        optimizer.zero_grad()
        model(data(number)).square().mean().backward()
        with torch.no_grad():
            steps = [0.05 * p.grad / (p.grad.norm() + 1e-12) for p in model.parameters()]
            torch._foreach_add_(list(model.parameters()), steps)
        optimizer.zero_grad()
        model(data(number)).square().mean().backward()
        with torch.no_grad():
            torch._foreach_sub_(list(model.parameters()), steps)
        yield model
        optimizer.step()


@PATTERNS.add
def closure_of_lbfgs(limit: Limit) -> Iterator[Any]:
    model = limit(mlp())
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4, lr=0.1)
    for number in range(STEPS):

        def closure(number: int = number) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(data(number)).square().mean()
            loss.backward()
            return loss

        loss = optimizer.step(closure)
        yield model, loss


@PATTERNS.add
def distributed_data_parallel(limit: Limit) -> Iterator[Any]:
    """The test has begun a process group."""
    yield from loop(limit(nn.parallel.DistributedDataParallel(mlp())))


@PATTERNS.add
def generative_adversarial(limit: Limit) -> Iterator[Any]:
    generator, critic = limit(mlp(outputs=16)), limit(mlp(outputs=1, act=nn.LeakyReLU))
    first, second = sgd(generator), sgd(critic)
    for number in range(STEPS):
        fake = generator(data(number))
        second.zero_grad()
        loss = F.softplus(critic(fake.detach())).mean() + F.softplus(-critic(data(number + 50))).mean()
        loss.backward()
        second.step()
        first.zero_grad()
        other = F.softplus(-critic(fake)).mean()
        other.backward()
        first.step()
        yield generator, critic, loss, other


@PATTERNS.add
def generative_adversarial_with_frozen_critic(limit: Limit) -> Iterator[Any]:
    generator, critic = limit(mlp(outputs=16)), limit(mlp(outputs=1))
    first, second = sgd(generator), sgd(critic)
    for number in range(STEPS):
        critic.requires_grad_(False)
        first.zero_grad()
        F.softplus(-critic(generator(data(number)))).mean().backward()
        first.step()
        critic.requires_grad_(True)
        second.zero_grad()
        with torch.no_grad():
            fake = generator(data(number))
        F.softplus(critic(fake)).mean().backward()
        second.step()
        yield generator, critic


@PATTERNS.add
def contrastive_two_forwards(limit: Limit) -> Iterator[Any]:
    model = limit(mlp(outputs=8))
    optimizer = sgd(model)
    for number in range(STEPS):
        optimizer.zero_grad()
        one, two = (
            F.normalize(model(data(number))),
            F.normalize(model(data(number) + 0.1 * data(number + 50))),
        )
        loss = F.cross_entropy(one @ two.t() / 0.1, torch.arange(len(one)))
        loss.backward()
        yield model, loss
        optimizer.step()


@PATTERNS.add
def momentum_contrast(limit: Limit) -> Iterator[Any]:
    student = mlp(outputs=8)
    teacher = copy.deepcopy(student).requires_grad_(False)
    limit(student)
    optimizer = sgd(student)
    for number in range(STEPS):
        optimizer.zero_grad()
        with torch.no_grad():
            target = teacher(data(number))
        loss = F.mse_loss(student(data(number) * 1.1), target)
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for mine, its in zip(teacher.parameters(), student.parameters(), strict=True):
                mine.lerp_(its, 0.1)
        yield student, teacher, loss


@PATTERNS.add
def evaluation_between_steps(limit: Limit) -> Iterator[Any]:
    model = limit(
        nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 4))
    )
    for things in loop(model):
        model.eval()
        with torch.no_grad():
            score = model(data(77)).sum()
        model.train()
        yield things, score


@PATTERNS.add
def changing_modes_with_gradients(limit: Limit) -> Iterator[Any]:
    model = limit(
        nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 4))
    )
    optimizer = sgd(model)
    for number in range(STEPS + 1):
        model.train(number % 2 == 0)
        optimizer.zero_grad()
        loss = model(data(number)).square().mean()
        loss.backward()
        yield model, loss
        optimizer.step()


def _clearing(limit: Limit, clear: Callable[[nn.Module, int], None]) -> Iterator[Any]:
    model = limit(mlp())
    optimizer = sgd(model)
    for number in range(STEPS + 1):
        clear(model, number)
        model(data(number)).square().mean().backward()
        yield model
        optimizer.step()


@PATTERNS.add
def gradients_set_to_zero(limit: Limit) -> Iterator[Any]:
    yield from _clearing(limit, lambda model, number: model.zero_grad(set_to_none=False))


@PATTERNS.add
def gradients_cleared_either_way(limit: Limit) -> Iterator[Any]:
    yield from _clearing(limit, lambda model, number: model.zero_grad(set_to_none=number % 2 == 0))


@PATTERNS.add
def gradients_of_some_set_to_none(limit: Limit) -> Iterator[Any]:
    def clear(model: nn.Module, number: int) -> None:
        for parameter in list(model.parameters())[number:]:
            parameter.grad = None

    yield from _clearing(limit, clear)


@PATTERNS.add
def gradients_never_cleared(limit: Limit) -> Iterator[Any]:
    yield from _clearing(limit, lambda model, number: None)


@PATTERNS.add
def freezing_between_steps(limit: Limit) -> Iterator[Any]:
    model = limit(mlp())
    optimizer = sgd(model)
    for number in range(STEPS + 2):
        model[0].requires_grad_(number not in (1, 2))
        optimizer.zero_grad()
        model(data(number)).square().mean().backward()
        yield model
        optimizer.step()


@PATTERNS.add
def deepcopy_of_a_limited_model(limit: Limit) -> Iterator[Any]:
    model = limit(mlp())
    yield from loop(model)
    twin = copy.deepcopy(model)
    yield from loop(twin)
    yield from loop(model)


@PATTERNS.add
def state_loaded_between_steps(limit: Limit) -> Iterator[Any]:
    model = limit(mlp())
    kept = copy.deepcopy(model.state_dict())
    yield list(kept)
    for at, things in enumerate(loop(model)):
        yield things
        if at == 1:
            model.load_state_dict(kept)
            model.load_state_dict({name: tensor.clone() for name, tensor in kept.items()}, assign=True)
    yield model


@PATTERNS.add
def changing_batch_sizes(limit: Limit) -> Iterator[Any]:
    model = limit(mlp())
    optimizer = sgd(model)
    for number, rows in enumerate((128, 100, 128, 7, 1, 200)):
        optimizer.zero_grad()
        loss = model(data(number, rows=rows)).square().mean()
        loss.backward()
        yield model, loss
        optimizer.step()


@PATTERNS.add
def generator_of_data_beside(limit: Limit) -> Iterator[Any]:
    model = limit(nn.Sequential(mlp(outputs=16), nn.Dropout(0.5), nn.Linear(16, 4)))
    optimizer = sgd(model)
    for _ in range(STEPS):
        optimizer.zero_grad()
        # whoever draws too much or too little shifts the next batch
        loss = model(torch.randn(64, 16)).square().mean()
        loss.backward()
        yield model, loss, torch.rand(1)
        optimizer.step()


@PATTERNS.add
def nested_limits(limit: Limit) -> Iterator[Any]:
    inner = limit(mlp(outputs=16))
    yield from loop(limit(nn.Sequential(inner, nn.Tanh(), nn.Linear(16, 4))))


@PATTERNS.add
def two_limited_models_in_one_loss(limit: Limit) -> Iterator[Any]:
    one, two = limit(mlp()), limit(mlp(width=24))
    optimizer = sgd(one, two)
    for number in range(STEPS):
        optimizer.zero_grad()
        loss = (one(data(number)) * two(data(number))).mean()
        loss.backward()
        yield one, two, loss
        optimizer.step()


@PATTERNS.add
def optimizer_swapped_and_weights_written(limit: Limit) -> Iterator[Any]:
    model = limit(mlp())
    yield from loop(model)
    with torch.no_grad():
        model[0].weight.copy_(torch.ones_like(model[0].weight) * 0.01)
    model[2].weight = nn.Parameter(model[2].weight.detach() * 2)
    yield from loop(model)
    model.double()
    model.zero_grad()
    model(data(5).double()).square().mean().backward()
    yield model


@PATTERNS.add
def outputs_kept_by_the_caller(limit: Limit) -> Iterator[Any]:
    model, outputs = limit(mlp()), []
    optimizer = sgd(model)
    for number in range(STEPS):
        optimizer.zero_grad()
        outputs.append(model(data(number)))
        loss = sum(output.square().mean() for output in outputs)
        loss.backward(retain_graph=number == 0)
        outputs = [output.detach() for output in outputs]
        yield model, loss
        optimizer.step()
