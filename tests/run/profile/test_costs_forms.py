"""What C++ runs of a profiled step is written down, recorded and compared as Python does it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide.graph import StepGraph
from lowtide.run.profile.profiler import Profiler
from lowtide.trace.tracer import Tracer


class Loop(nn.Module):
    """The same few operations for each step: gates that overwrite parts of one storage, as in a GRU, views,
    numbers, and a state that two operations read. ``between`` is called with each round and the state.
    """

    def __init__(self, between: Callable[[int, torch.Tensor], object] = lambda *_: None) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.gates, self.out, self.between = nn.Linear(8, 24), nn.Linear(8, 8), between
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state, kept = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            reset, update, new = self.gates(x[:, t] + state).unsafe_chunk(3, 1)
            new.mul_(reset.sigmoid_())
            state = torch.tanh(new) * update.sigmoid() + 0.5 * state * self.scale
            self.between(t, state)
            kept.append(self.out(state))
        return torch.stack(kept, 1).square().mean()


def profiled(
    monkeypatch: pytest.MonkeyPatch, cpp: bool, model: nn.Module, rounds: int = 20
) -> tuple[StepGraph, list[torch.Tensor], int, Any]:
    """The step without times and blocks, its gradients, how many operations Python ran, and the handle."""
    ran: list[str] = []
    start, read_by = Profiler.start, Tracer.read_by

    def starts(profiler: Any) -> None:
        profiler.cpp = profiler.core if cpp else None  # without it Python runs all
        start(profiler)

    with monkeypatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(Profiler, "start", starts)
        patch.setattr(Tracer, "read_by", lambda *a: (ran.append(a[1].info.name), read_by(*a))[1])
        handle = lowtide.limit_memory(model, "100%", verify="first")
        torch.manual_seed(1)
        model(
            torch.randn(4, rounds, 8, requires_grad=True)
        ).backward()  # the gradient of each round is a slice's
    assert handle.graph is not None
    assert all(op.seconds > 0 for op in handle.graph.operations)
    free = {"seconds": 0.0, "blocks": ()}
    graph = handle.graph.with_operations(lambda op: replace(op, **free), plain_seconds=0.0)
    return graph, [p.grad for p in model.parameters() if p.grad is not None], len(ran), handle


def test_cpp_writes_a_step_down_as_python_does(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, gradients, all_of_it, _ = profiled(monkeypatch, False, Loop())
    same, others, few, handle = profiled(monkeypatch, True, Loop())
    assert same == graph and len(graph.operations) > 400
    assert all(map(torch.equal, gradients, others)) and len(gradients) == 5
    assert all_of_it >= len(graph.operations) and few == 0
    assert not handle.plan.notes


def test_what_is_read_is_compared_there_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def unseen(t: int, state: torch.Tensor) -> None:
        if t == 15:
            state.detach().numpy()[:] += 1

    model = Loop(unseen)
    graph, gradients, _, _ = profiled(monkeypatch, True, model)
    plain = Loop(unseen)
    torch.manual_seed(1)
    plain(torch.randn(4, 20, 8)).backward()
    expected = [p.grad for p in plain.parameters() if p.grad is not None]
    assert all(map(torch.equal, gradients, expected)) and len(expected) == 5
    assert any("does not see" in op.reason for op in graph.operations)


def test_operations_of_many_shapes_are_measured_and_verified_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scratch is measured alike."""

    class Widths(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.parts = nn.ModuleList(nn.Linear(8 + n, 9 + n) for n in range(12))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for part in self.parts:
                x = nn.functional.layer_norm(torch.tanh(part(x)), (part.out_features,))
                x = torch.where(x > 0, x, x.neg()).flip(0)
            return x.square().mean()

    graph, gradients, all_of_it, _ = profiled(monkeypatch, False, Widths())
    same, others, few, handle = profiled(monkeypatch, True, Widths())
    assert same == graph and any(op.scratch_bytes for op in graph.operations)
    assert all(map(torch.equal, gradients, others)) and len(gradients) == 24
    assert all_of_it and few == 0 and not handle.plan.notes


class Attends(nn.Module):
    """Attention, whose kernel leaves a part of its results unwritten where it drops nothing out."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.parts, self.dropout = nn.Linear(8, 24), dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            q, k, v = self.parts(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
            mixed = nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout)
            x = x + mixed.transpose(1, 2).flatten(2)
        return x.square().mean()


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("rows", [20, 16384])
def test_attention_and_large_tensors_are_written_down_there(
    monkeypatch: pytest.MonkeyPatch, rows: int, dropout: float
) -> None:
    model = Attends(dropout) if rows == 20 else nn.Sequential(nn.Linear(8, 8), nn.Dropout(dropout), Mean())
    graph, gradients, all_of_it, _ = profiled(monkeypatch, False, model, rows)
    model.zero_grad()
    same, others, few, handle = profiled(monkeypatch, True, model, rows)
    assert same == graph and all_of_it
    assert bool(few) is bool(dropout)  # what draws is Python's
    assert all(map(torch.equal, gradients, others)) and not handle.plan.notes


class Mean(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.exp() + 1).mul_(0.5).square().mean()


@pytest.mark.parametrize("in_place", [False, True])
def test_an_operation_that_does_not_reproduce_is_found_there(
    monkeypatch: pytest.MonkeyPatch, in_place: bool
) -> None:
    calls = [0]

    def noisy(x: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        return x.exp() - (1 + calls[0] * (calls[0] > 4))  # from the third call on: that is C++'s

    def noisy_(x: torch.Tensor) -> torch.Tensor:
        return x.copy_(noisy(x))

    class Noisy(Loop):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(4):
                x = self.gates(x)[..., :8]
                x = torch.expm1_(1 * x) if in_place else torch.expm1(x)
            return x.square().mean()

    library = torch.library.Library("aten", "IMPL")
    try:
        library.impl(
            "expm1_" if in_place else "expm1", noisy_ if in_place else noisy, "CPU", allow_override=True
        )
        _, _, _, handle = profiled(monkeypatch, True, Noisy())
    finally:
        library._destroy()
    name = f"aten.expm1{'_' * in_place}.default"
    assert list(handle.kept) == [name] and "other bytes" in handle.kept[name]
    assert calls[0] >= 8  # four twice, and again in backward
