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


@torch.library.custom_op("lowtide_test_written::swap", mutates_args={"x", "y"})
def swap(x: torch.Tensor, y: torch.Tensor) -> None:
    before = x.clone()
    x.copy_(y)
    y.copy_(before)


class Net(nn.Module):
    """Adds a table in each of its layers, whose sum no other tensor replaces.

    Attributes:
        between: called between two of its layers.
        shown: what a layer has made.
    """

    table: torch.Tensor
    other: torch.Tensor

    def __init__(self, inference: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(N, N) for _ in range(3))
        with torch.inference_mode(inference):
            self.register_buffer("table", torch.rand(N, N))
            self.register_buffer("other", torch.rand(N, N))
        self.between: Callable[[], object] = lambda: None
        self.shown = torch.empty(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = (layer(x) + self.table).sin().exp()
            self.shown = x
            x = x.tanh() + x.detach().mean()
            self.between()
        return x.square().sum()


Change = Callable[[Net], None]


def in_place(model: Net) -> None:
    model.table.mul_(0.5)


def through_data(model: Net) -> None:
    model.table.data.mul_(0.5)


def as_output(model: Net) -> None:
    torch.mul(model.table, 0.5, out=model.table.data)


def all_at_once(model: Net) -> None:
    torch._foreach_mul_([model.table.data, model.other.data], 0.5)  # pyright: ignore


def by_halves(model: Net) -> None:
    model.table[: N // 2] = model.other[: N // 2]
    model.table.data[N // 2 :].fill_(0.5)


def other_storage(model: Net) -> None:
    model.table.set_(model.other * 0.5)  # type: ignore[call-overload]


def filled(model: Net) -> None:
    model.table.data.copy_(torch.full((N, N), float(model.table.sum())).sin())


def in_inference(model: Net) -> None:
    with torch.inference_mode():
        model.table.mul_(0.5)


def made(model: Net) -> None:
    model.shown.data.mul_(0.5)


def by_custom(model: Net) -> None:
    halve_(model.table)


def by_custom_with_result(model: Net) -> None:
    halve_and_sum(model.table)


def by_custom_of_two(model: Net) -> None:
    swap(model.table, model.other)


def at_once(call: Callable[[], object]) -> None:
    call()


def on_another(call: Callable[[], object]) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


def gradients(model: Net, change: Change, when: str, run: Callable[..., None]) -> list[torch.Tensor]:
    """Of four steps."""
    found: list[torch.Tensor] = []
    noise = torch.Generator().manual_seed(1)

    def write(*_: object) -> None:
        run(lambda: change(model))

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


def check(change: Change, when: str, run: Callable[..., None], **limit: Any) -> None:
    inference = change is in_inference
    limited = Net(inference)
    lowtide.limit_memory(limited, **limit)
    expected, own = gradients(Net(inference), change, when, run), gradients(limited, change, when, run)
    assert len(expected) == 24 and all(map(torch.equal, expected, own))


WHEN = ["in_forward", "between", "in_backward"]
SEEN = [in_place, through_data, as_output, all_at_once, by_halves, other_storage, filled, in_inference, made]


@pytest.mark.parametrize("limit", ["min", "policy"])
@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("change", SEEN)
def test_another_thread_writes(change: Any, when: str, limit: str, everything: Any) -> None:
    check(change, when, on_another, **({"budget": "min"} if limit == "min" else {"policy": everything}))


@pytest.mark.parametrize("limit", ["min", "policy"])
@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("change", [in_inference, by_custom, by_custom_with_result, by_custom_of_two])
def test_a_write_without_a_counter_of_its_own_or_behind_it(
    change: Any, when: str, limit: str, everything: Any
) -> None:
    check(change, when, at_once, **({"budget": "min"} if limit == "min" else {"policy": everything}))


class Slow(nn.Module):
    """Reads a table twice in an operation that takes a while."""

    table: torch.Tensor

    def __init__(self, add: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.add = add
        self.layer = nn.Linear(N, N)
        self.register_buffer("table", torch.rand(N, N))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            scale = self.add(self.add(x, self.table).sin(), self.table).sin()
        return (self.layer(x) * scale).sum()


def test_other_threads_write_while_a_replay_reads(everything: Any) -> None:
    """As prefetch threads do that fill a buffer as soon as the forward is over, each a part of it. The second
    one comes when the first waits, and the tape knows of that.
    """
    library = torch.library.Library("lowtide_test_slow", "DEF")
    library.define("add(Tensor x, Tensor y) -> Tensor")
    reading, in_backward, replays = threading.Event(), threading.Event(), list[int]()

    def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if in_backward.is_set():
            replays.append(1)
            reading.set()
            time.sleep(0.1)
            torch.empty(8).untyped_storage().resize_(0)  # the tape is told
        return x + y

    library.impl("add", add, "CPU")

    def steps(model: Slow) -> list[torch.Tensor]:
        found = []
        noise = torch.Generator().manual_seed(1)
        for step in range(3):
            model.zero_grad()
            loss = model(torch.rand(N, N, generator=noise))
            in_backward.set()

            def write(part: int, value: int = step) -> None:
                reading.wait(5)
                time.sleep(0.15 * part)
                model.table.data[part::2].zero_().add_(value)

            threads = [threading.Thread(target=write, args=(part,)) for part in range(2)]
            for thread in threads:
                thread.start()
            loss.backward()
            reading.set()
            for thread in threads:
                thread.join()
            reading.clear()
            in_backward.clear()
            assert model.layer.weight.grad is not None
            found.append(model.layer.weight.grad)
        return found

    operation = torch.ops.lowtide_test_slow.add
    limited = Slow(operation)
    lowtide.limit_memory(limited, policy=everything)
    expected = steps(Slow(operation))
    assert not replays
    own = steps(limited)
    assert replays and all(map(torch.equal, expected, own))


def test_another_thread_fills_a_buffer_again_and_again(everything: Any) -> None:
    """It is waited for before the table is read, as a plain step has to."""

    def steps(model: Net) -> list[torch.Tensor]:
        found, wanted, ready = [], threading.Semaphore(0), threading.Semaphore(0)
        noise, values = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)

        def fill() -> None:
            for _ in range(30):
                wanted.acquire()
                model.table.data.copy_(torch.rand(N, N, generator=values))
                ready.release()

        thread = threading.Thread(target=fill)
        thread.start()
        for _ in range(30):
            model.zero_grad()
            loss = model(torch.rand(N, N, generator=noise))
            wanted.release()  # the next one is filled beside backward
            loss.backward()
            ready.acquire()
            found += [one.grad for one in model.parameters() if one.grad is not None]
        thread.join()
        return found

    limited = Net()
    lowtide.limit_memory(limited, policy=everything)
    expected, own = steps(Net()), steps(limited)
    assert len(own) == 180 and all(map(torch.equal, expected, own))


@pytest.mark.parametrize("run", [at_once, on_another])
@pytest.mark.parametrize("change", [in_place, through_data, other_storage])
def test_scopes_within_scopes_start_from_what_they_read(change: Change, run: Callable[..., None]) -> None:
    class Nest(Net):
        scope: Callable[..., Any] = staticmethod(lambda call, *given: call(*given))

        def part(self, number: int, x: torch.Tensor) -> torch.Tensor:
            return (self.layers[number](x) + self.table).sin().exp().tanh()

        def outer(self, x: torch.Tensor) -> torch.Tensor:
            return self.part(2, self.scope(self.part, 1, self.part(0, x)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.scope(self.outer, x).square().sum()

    found = []
    for scope in (Nest.scope, lowtide.checkpoint):
        model, x = Nest(), torch.rand(N, N, generator=torch.Generator().manual_seed(1))
        model.scope = scope
        loss = model(x)
        run(lambda: change(model))  # noqa: B023
        loss.backward()
        found.append([one.grad for one in model.parameters()])
    assert all(map(torch.equal, *found))
