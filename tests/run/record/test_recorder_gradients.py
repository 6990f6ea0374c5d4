"""What was wrong or lost in 0.1.0: gradients, moves, a whole process."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import Limit, check, differences, run_limited, run_plain
from loops import data, loop
from torch import nn

import lowtide
from lowtide import policies

BUDGETS = ["100%", "60%"]


class Sequences(nn.Module):
    """A recurrent layer under a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTM(8, 12), nn.Linear(12, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.cell(x)[0]).square().mean()


class Speech(nn.Module):
    """A linear layer under CTC."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        targets = torch.arange(x.shape[1] * 2).view(-1, 2) % 5 + 1
        lengths = torch.full((x.shape[1],), x.shape[0]), torch.full((x.shape[1],), 2)
        return F.ctc_loss(self.net(x).log_softmax(-1), targets, *lengths)


@pytest.mark.parametrize("kind", [Sequences, Speech])
@pytest.mark.parametrize("budget", BUDGETS)
def test_gradients_of_a_leaf_input_are_not_doubled(kind: type[nn.Module], budget: str) -> None:
    def pattern(limit: Limit) -> Iterator[Any]:
        model = limit(kind())
        for number in range(3):
            x = data(number, rows=24, width=8).view(6, 4, 8).requires_grad_()
            model(x).backward()
            yield model, x.grad

    check(pattern, budget)


@pytest.mark.parametrize("kind", [Sequences, Speech])
@pytest.mark.parametrize("budget", BUDGETS)
def test_the_second_half_of_a_network(kind: type[nn.Module], budget: str) -> None:
    def pattern(limit: Limit) -> Iterator[Any]:
        encoder, model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 8)), limit(kind())
        for number in range(3):
            model(encoder(data(number, rows=24, width=5).view(6, 4, 5))).backward()
            yield encoder, model

    check(pattern, budget)


class Classifier(nn.Module):
    """A small model under a weighted, smoothed cross entropy that ignores some targets."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.random = torch.Generator().manual_seed(seed)
        self.classes = int(torch.randint(3, 40, (), generator=self.random))
        width = int(torch.randint(4, 40, (), generator=self.random))
        self.net = nn.Sequential(nn.Linear(16, width), nn.GELU(), nn.Linear(width, self.classes))
        self.register_buffer("weight", torch.rand(self.classes, generator=self.random) + 0.1)

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.net(x), targets, weight=self.weight, label_smoothing=0.1, ignore_index=1)


@pytest.mark.parametrize(
    "seeds", [range(6), pytest.param(range(6, 60), marks=pytest.mark.slow)], ids=["6", "54"]
)
def test_weighted_smoothed_cross_entropy(seeds: range) -> None:
    wrong = []
    for seed in seeds:

        def pattern(limit: Limit, seed: int = seed) -> Iterator[Any]:
            model = Classifier(seed)
            classes = model.classes
            limit(model)
            rows = 20 + seed
            for number in range(3):
                model.zero_grad()
                targets = torch.randint(classes, (rows,), generator=torch.Generator().manual_seed(number))
                loss = model(data(number, rows=rows), targets)
                loss.backward()
                yield loss, [p.grad for p in model.parameters()]

        wrong += [seed] if differences(run_plain(pattern), run_limited(pattern, "80%").steps) else []
    assert not wrong, f"{len(wrong)} of {len(seeds)} models differ: {wrong}"


class Departs(nn.Module):
    """Runs other operations where it is told to, which no argument shows."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = (nn.Linear(16, 16, bias=False) for _ in range(3))
        self.wide = nn.Parameter(torch.randn(32, 32))
        self.low = nn.Parameter(torch.randn(256, 16, dtype=torch.bfloat16))
        self.departure = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.departure == "another operation":
            x = x.sin()
        elif self.departure == "another shape":
            x = x[:100]
        elif self.departure == "another dtype":
            x = x.double()
        w = [layer.weight.to(x.dtype) for layer in (self.one, self.two, self.three)]
        if self.departure == "another shape of the same bytes":
            h = (x.view(64, 32) @ self.wide).view(128, 16)
        elif self.departure == "another dtype of the same bytes":
            w = [self.low[at : at + 16] for at in (0, 16, 32)]
            h = self.low @ w[0]
        else:
            h = x @ w[0]
        return F.gelu(F.gelu(h) @ w[1]).mul(2).matmul(w[2]).square().mean()


@pytest.mark.parametrize(
    "departure",
    [
        "another operation",
        "another shape",
        "another shape of the same bytes",
        "another dtype",
        "another dtype of the same bytes",
    ],
)
def test_a_departing_step_is_given_no_lossy_moves(departure: str) -> None:
    torch.manual_seed(0)
    plain, limited = Departs(), Departs()
    limited.load_state_dict(plain.state_dict())
    handle = lowtide.limit_memory(limited, policy=policies.compress("int8", min_bytes=1))
    grads: list[list[torch.Tensor]] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lowtide.LowtideWarning)
        for number in range(4):
            plain.departure = limited.departure = departure if number == 3 else ""
            for model in (plain, limited):
                model.zero_grad()
                model(data(number)).backward()
                grads.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert handle.plan is not None and handle.plan.moves
    assert any(not torch.equal(a, b) for a, b in zip(grads[4], grads[5], strict=True)), (
        "the plan's codec loses nothing"
    )
    assert all(torch.equal(a, b) for a, b in zip(grads[6], grads[7], strict=True))


@pytest.mark.parametrize("budget", BUDGETS)
def test_the_mixed_policy_on_one_linear_layer(budget: str) -> None:
    def pattern(limit: Limit) -> Iterator[Any]:
        yield from loop(limit(nn.Linear(16, 4), policy="mixed"))

    check(pattern, budget)


MASKED = """
import sys
sys.path[:0] = [{here!r}]
import warnings
import torch
from compare import check
from torch import nn
from torch.masked import as_masked_tensor
warnings.simplefilter("ignore")
torch.set_num_threads(1)

class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(64, 16))

    def forward(self, x):
        h = x * self.scale  # its gradient is masked, too, which few formulas take
        m = as_masked_tensor(h, torch.arange(h.numel()).view_as(h) % 3 > 0)
        return ((m * m).sin() * m).get_data().square().mean()

def pattern(limit):
    model = limit(Masked())
    for number in range(3):
        model.zero_grad()
        x = torch.randn(64, 16, generator=torch.Generator().manual_seed(number))
        loss = model(x)
        loss.backward()
        yield loss, model.scale.grad.get_data(), model.scale.grad.get_mask()

for budget in {budgets!r}:
    check(pattern, budget)
    print("the same bits at", budget)
"""


def test_wrapper_subclasses_that_cannot_be_flattened() -> None:
    script = MASKED.format(here=str(Path(__file__).parents[1]), budgets=BUDGETS)
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "PYTHONWARNINGS": "ignore",
    }
    done = subprocess.run(
        [sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode >= 0, f"killed by signal {-done.returncode}"
    for budget in BUDGETS:
        assert f"the same bits at {budget}" in done.stdout, done.stderr[-1500:]


@pytest.mark.parametrize("limited", [False, True], ids=["alone", "in a limited model"])
def test_a_scopes_rule_is_called_once_for_each_operation(limited: bool) -> None:
    asked: list[str] = []

    def every_other_product(name: str) -> bool:
        asked.append(name)
        return name == "aten.mm.default" and asked.count(name) % 2 == 0

    class Scoped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList(torch.randn(16, 16) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with lowtide.checkpointing(every_other_product):
                for weight in self.weights:
                    x = (x @ weight).tanh()
            return x.square().mean()

    model = Scoped()
    if limited:
        lowtide.limit_memory(model, "100%")
    for number in range(2):
        asked.clear()
        model(data(number)).backward()
        assert asked.count("aten.mm.default") == 4 and asked.count("aten.tanh.default") == 4
