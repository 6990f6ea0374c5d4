"""The host optimizer on devices whose streams run late: training ends as on a CPU, where nothing is late."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from late_scenarios import Run, check, scenario
from moving_net import same
from torch import Tensor, nn

from lowtide.optim import HostOptimizer

WIDTH = 40


def _small(device: str, dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)), nn.Linear(WIDTH, 4 * WIDTH)).to(
        device, dtype
    )


def _train(
    device: str,
    dtype: torch.dtype,
    options: dict[str, Any],
    steps: int = 3,
    micro: int = 2,
    clip: bool = True,
    saved: bool = False,
    finished: bool = False,
    undone: bool = False,
) -> list[Tensor]:
    model = _small(device, dtype)

    def made() -> HostOptimizer:
        return HostOptimizer(
            torch.optim.AdamW, model.parameters(), host="memory", chunk_bytes=1 << 12, lr=0.01, **options
        )

    optimizer = made()
    for number in range(steps):
        optimizer.zero_grad()
        for turn in range(micro):
            x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * number + turn))
            x = x.to(device, dtype, non_blocking=True)
            if turn + 1 < micro:
                with optimizer.accumulating():
                    model(x).square().mean().backward()
            else:
                model(x).square().mean().backward()
        if clip:
            optimizer.clip_grad_norm_(0.5)
        optimizer.step()
        if undone and number < 2:
            optimizer.rollback()
        if finished and number == 1:
            optimizer.finish()
        if saved and number == 0:
            file = io.BytesIO()
            torch.save([model.state_dict(), optimizer.state_dict()], file)
            file.seek(0)
            optimizer.close()
            weights, state = torch.load(file, map_location="cpu", weights_only=True)
            model = _small(device, dtype)
            model.load_state_dict(weights)
            optimizer = made()
            optimizer.load_state_dict(state)
    if optimizer.delayed:
        optimizer.finish()
    optimizer.close()
    return [p.detach().cpu() for p in model.parameters()]


def _optimizer(dtype: torch.dtype = torch.float32, device: str = "cuda:0", **given: Any) -> Run:
    names = ("steps", "micro", "clip", "saved", "finished", "undone")
    shape = {name: given.pop(name) for name in names if name in given}
    wanted = _train("cpu", dtype, given, **shape)

    def run(seed: int) -> None:
        found = _train(device, dtype, given, **shape)
        check(same(wanted, found), "other parameters than on the CPU")

    return run


def _streamed(device: str, gradients: Callable[[nn.Module, HostOptimizer, int], None]) -> list[Tensor]:
    """Three steps with streamed gradients, which ``gradients`` makes for the step of that number."""
    model = _small(device, torch.float32)
    optimizer = _adam(model, stream_gradients=True)
    for number in range(3):
        gradients(model, optimizer, number)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()
    return _values(model)


@scenario
def optimizer_on_host() -> Run:
    """Gradients go down and parameters up within `step`."""
    return _optimizer(host_fraction=1.0)


@scenario
def optimizer_split() -> Run:
    """The device updates its own part meanwhile; 16-bit parameters have masters."""
    return _optimizer(torch.bfloat16, host_fraction=0.4, device="cuda:1")


@scenario
def gradients_streamed() -> Run:
    """Gradients leave as backward makes them; those of a second micro-batch are added on the host."""
    return _optimizer(host_fraction=0.6, stream_gradients=True)


@scenario
def rolled_back() -> Run:
    """The first updates are undone; the gradients of the next backward leave as it makes them."""
    return _optimizer(host_fraction=1.0, stream_gradients=True, reversible=True, undone=True)


@scenario
def updated_beside_backward() -> Run:
    """Each update begins when its gradient has arrived."""
    return _optimizer(torch.bfloat16, stream_gradients=True, overlap_update=True, clip=False)


@scenario
def updated_late() -> Run:
    """The host's update runs beside the next step."""
    return _optimizer(host_fraction=0.7, delayed=True, delay_after=1, stream_gradients=True, finished=True)


@scenario
def updated_late_from_grad() -> Run:
    """The same with gradients that stay in ``.grad``."""
    return _optimizer(host_fraction=1.0, delayed=True, delay_after=1)


@scenario
def checkpoints() -> Run:
    """A run is saved and loaded after its first step."""
    return _optimizer(torch.bfloat16, host_fraction=0.6, stream_gradients=True, saved=True)


def _adam(model: nn.Module, **options: Any) -> HostOptimizer:
    return HostOptimizer(
        torch.optim.AdamW, model.parameters(), host="memory", chunk_bytes=1 << 12, lr=0.01, **options
    )


def _backward(model: nn.Module, number: int) -> None:
    first = next(model.parameters())
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(number))
    model(x.to(first.device, first.dtype)).square().mean().backward()


def _same_on_cpu(train: Callable[[str], list[Tensor]], device: str = "cuda:0") -> Run:
    """What is trained on the device ends as on the CPU, for which nothing is ever late."""
    wanted = train("cpu")

    def run(seed: int) -> None:
        check(same(wanted, train(device)), "other parameters than on the CPU")

    return run


def _values(model: nn.Module) -> list[Tensor]:
    return [p.detach().cpu() for p in model.parameters()]


@scenario
def gradients_zeroed_in_place() -> Run:
    """``zero_grad(set_to_none=False)`` writes to what may be on its way, or is about to be added to."""

    def train(device: str, **options: Any) -> list[Tensor]:
        model = _small(device, torch.float32)
        optimizer = _adam(model, **options)
        for number in range(3):
            _backward(model, 10 * number)
            optimizer.zero_grad(set_to_none=False)
            _backward(model, 10 * number + 1)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        if optimizer.delayed:
            optimizer.finish()
        optimizer.close()
        return _values(model)

    runs = [
        _same_on_cpu(lambda device: train(device, delayed=True, delay_after=0)),
        _same_on_cpu(lambda device: train(device, stream_gradients=True)),
    ]
    return lambda seed: runs[seed % 2](seed)


@scenario
def gradients_forgotten() -> Run:
    """Gradients are dropped while they are on their way, and others come in their place."""

    def gradients(model: nn.Module, optimizer: HostOptimizer, number: int) -> None:
        for micro in range(2):
            _backward(model, 10 * number + micro)
        optimizer.zero_grad()
        _backward(model, 10 * number + 7)

    return _same_on_cpu(lambda device: _streamed(device, gradients))


@scenario
def clipped_then_more() -> Run:
    """A norm is known before its gradient has arrived; another micro-batch follows the clipping."""

    def gradients(model: nn.Module, optimizer: HostOptimizer, number: int) -> None:
        _backward(model, 10 * number)
        optimizer.clip_grad_norm_(0.01)
        _backward(model, 10 * number + 1)

    return _same_on_cpu(lambda device: _streamed(device, gradients))


@scenario
def updates_that_fail() -> Run:
    """A step that fails half-way, then a checkpoint: nothing that was under way lands on what is loaded."""

    def train(device: str, streamed: bool) -> list[Tensor]:
        model = _small(device, torch.bfloat16)
        optimizer = _adam(model, stream_gradients=streamed)
        _backward(model, 0)
        optimizer.step()
        weights = [p.detach().clone() for p in model.parameters()]
        state = copy.deepcopy(optimizer.state_dict())
        optimizer.zero_grad()
        _backward(model, 1)
        compute, calls = optimizer._updater._compute, []

        def failing(*given: Any) -> None:
            calls.append(1)
            if len(calls) == 2:
                raise ZeroDivisionError
            compute(*given)

        optimizer._updater._compute = failing  # type: ignore[method-assign]
        try:
            optimizer.step()
        except ZeroDivisionError:  # which holds what was under way
            optimizer._updater._compute = compute  # type: ignore[method-assign]
            for p, weight in zip(model.parameters(), weights, strict=True):
                p.data.copy_(weight)
            optimizer.load_state_dict(state)
        optimizer.zero_grad()
        _backward(model, 1)
        optimizer.step()
        optimizer.close()
        return _values(model)

    runs = [_same_on_cpu(partial(train, streamed=streamed)) for streamed in (False, True)]
    return lambda seed: runs[seed % 2](seed)


@scenario
def loaded_while_updating() -> Run:
    """A checkpoint is loaded while a delayed update runs."""

    def train(device: str) -> list[Tensor]:
        model = _small(device, torch.float32)
        optimizer = _adam(model, delayed=True, delay_after=0)
        _backward(model, 0)
        optimizer.step()
        optimizer.finish()
        weights = [p.detach().clone() for p in model.parameters()]
        state = copy.deepcopy(optimizer.state_dict())
        optimizer.zero_grad()
        _backward(model, 1)
        optimizer.step()
        with torch.no_grad():
            for p, weight in zip(model.parameters(), weights, strict=True):
                p.copy_(weight)
        optimizer.load_state_dict(state)
        optimizer.zero_grad()
        _backward(model, 2)
        optimizer.step()
        optimizer.finish()
        optimizer.close()
        return _values(model)

    return _same_on_cpu(train)


@scenario
def gradients_in_flight() -> Run:
    """However slow the way down is, gradients take no more of the device than may be in flight."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(14))).cuda()
    one = WIDTH * (WIDTH + 1) * 4
    most = 4 * 4096 + 4 * one  # in flight; what backward itself holds

    def run(seed: int) -> None:
        for parameter in model.parameters():
            parameter.grad = None
        optimizer = _adam(model, stream_gradients=True)
        optimizer._place()
        for micro in range(2):
            x = torch.ones(4, WIDTH, device="cuda")
            loss = model(x).square().mean()
            before = torch.cuda.memory_stats_as_nested_dict(0)["requested_bytes"]["all"]["current"]
            torch.cuda.reset_peak_memory_stats(0)
            loss.backward()
            found = torch.cuda.memory_stats_as_nested_dict(0)["requested_bytes"]["all"]["peak"] - before
            check(found <= most, f"gradients in flight took {found} bytes in micro-batch {micro}, not {most}")
        optimizer.zero_grad()
        optimizer.close()

    return run
