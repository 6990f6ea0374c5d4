"""Writes to what a replay starts from that are easily overlooked: of another thread, to a tensor without a
version counter, by an operation that moves the counter before it writes. The gradients are the plain step's.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import lowtide

N = 48


@torch.library.custom_op("lowtide_test_written::halve_", mutates_args={"x"})
def halve_(x: torch.Tensor) -> None:
    x.mul_(0.5)


@torch.library.custom_op("lowtide_test_written::halve_and_sum", mutates_args={"x"})
def halve_and_sum(x: torch.Tensor) -> torch.Tensor:
    x.mul_(0.5)
    return x.sum()


class Net(nn.Module):
    """Adds a table in each of its layers, whose sum no other tensor replaces.

    Attributes:
        between: called between two of its layers.
    """

    table: torch.Tensor

    def __init__(self, inference: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(N, N) for _ in range(3))
        with torch.inference_mode(inference):
            self.register_buffer("table", torch.rand(N, N))
        self.between: Callable[[], object] = lambda: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = (layer(x) + self.table).sin().exp().tanh()
            self.between()
        return x.square().sum()


def in_place(table: torch.Tensor) -> None:
    table.mul_(0.5)


def through_data(table: torch.Tensor) -> None:
    table.data.mul_(0.5)


def as_output(table: torch.Tensor) -> None:
    torch.mul(table, 0.5, out=table.data)


def all_at_once(table: torch.Tensor) -> None:
    torch._foreach_mul_([table.data], 0.5)  # pyright: ignore


def filled(table: torch.Tensor) -> None:
    table.data.copy_(torch.full((N, N), float(table.sum())).sin())


def in_inference(table: torch.Tensor) -> None:
    with torch.inference_mode():
        table.mul_(0.5)


def by_custom(table: torch.Tensor) -> None:
    halve_(table)


def by_custom_with_result(table: torch.Tensor) -> None:
    halve_and_sum(table)


def on_another(call: Callable[[], object]) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


def at_once(call: Callable[[], object]) -> None:
    call()


def gradients(
    model: Net, change: Callable[[torch.Tensor], None], when: str, run: Callable[..., None]
) -> list[torch.Tensor]:
    """Of four steps."""
    found: list[torch.Tensor] = []
    noise = torch.Generator().manual_seed(1)

    def write(*_: object) -> None:
        run(lambda: change(model.table))

    if when == "in_forward":
        model.between = write
    for _ in range(4):
        model.zero_grad()
        loss = model(torch.rand(N, N, generator=noise))
        if when == "between":
            write()
        if when == "in_backward":
            loss.register_hook(write)
        loss.backward()
        found += [one.grad for one in model.parameters() if one.grad is not None]
    return found


def check(change: Callable[[torch.Tensor], None], when: str, run: Callable[..., None], **limit: Any) -> None:
    inference = change is in_inference
    limited = Net(inference)
    lowtide.limit_memory(limited, **limit)
    expected, own = gradients(Net(inference), change, when, run), gradients(limited, change, when, run)
    assert len(expected) == 24 and all(map(torch.equal, expected, own))


WHEN = ["in_forward", "between", "in_backward"]


@pytest.mark.parametrize("limit", ["min", "policy"])
@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("change", [in_place, through_data, as_output, all_at_once, filled, in_inference])
def test_another_thread_writes(change: Any, when: str, limit: str, everything: Any) -> None:
    check(change, when, on_another, **({"budget": "min"} if limit == "min" else {"policy": everything}))


@pytest.mark.parametrize("limit", ["min", "policy"])
@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("change", [in_inference, by_custom, by_custom_with_result])
def test_a_write_without_a_counter_of_its_own_or_before_it(
    change: Any, when: str, limit: str, everything: Any
) -> None:
    check(change, when, at_once, **({"budget": "min"} if limit == "min" else {"policy": everything}))


def test_another_thread_writes_while_a_replay_reads(everything: Any) -> None:
    """As a prefetch thread does that fills a buffer as soon as the forward is over."""
    library = torch.library.Library("lowtide_test_slow", "DEF")
    library.define("add(Tensor x, Tensor y) -> Tensor")
    reading, in_backward, replays = threading.Event(), threading.Event(), list[int]()

    def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if in_backward.is_set():
            replays.append(1)
            reading.set()
            time.sleep(0.1)
        return x + y

    library.impl("add", add, "CPU")

    class Slow(nn.Module):
        table: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(N, N)
            self.register_buffer("table", torch.rand(N, N))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                scale = torch.ops.lowtide_test_slow.add(x, self.table).sin()
            return (self.layer(x) * scale).sum()

    def steps(model: Slow) -> list[torch.Tensor]:
        found = []
        noise = torch.Generator().manual_seed(1)
        for _ in range(3):
            model.zero_grad()
            loss = model(torch.rand(N, N, generator=noise))
            in_backward.set()

            def write() -> None:
                reading.wait(5)
                model.table.data.zero_().add_(1)

            thread = threading.Thread(target=write)
            thread.start()
            loss.backward()
            reading.set()
            thread.join()
            reading.clear()
            in_backward.clear()
            assert model.layer.weight.grad is not None
            found.append(model.layer.weight.grad)
        return found

    limited = Slow()
    lowtide.limit_memory(limited, policy=everything)
    expected = steps(Slow())
    assert not replays
    own = steps(limited)
    assert replays and all(map(torch.equal, expected, own))
