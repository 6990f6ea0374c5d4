"""What autograd saves of tensors that hold others comes back whole: nested, masked and sharded ones."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import Limit, check
from loops import data, mlp
from torch import nn

import lowtide
from lowtide.errors import PlanError

BUDGETS = ["100%", "60%"]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_without_a_layout() -> None:
    class Ragged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(16, 32), nn.Linear(32, 4)

        def forward(self, rows: list[torch.Tensor]) -> torch.Tensor:
            x = torch.nested.as_nested_tensor(rows)  # PyTorch aborts the process where its shape is asked for
            return torch.nested.to_padded_tensor(self.two(self.one(x).relu()), 0.0)

    def pattern(limit: Limit) -> Iterator[Any]:
        model = limit(Ragged())
        for number in range(3):
            model.zero_grad()
            loss = model([data(number, rows=rows) for rows in (9, 30, 21)]).square().mean()
            loss.backward()
            yield model, loss

    check(pattern, "100%")


@pytest.mark.parametrize("place", ["input", "inside"])
@pytest.mark.parametrize("budget", BUDGETS)
def test_jagged_nested_tensors(place: str, budget: str) -> None:
    class Ragged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(16, 32), nn.Linear(32, 4)

        def forward(self, x: Any) -> torch.Tensor:
            if place == "inside":
                x = torch.nested.as_nested_tensor(list(x), layout=torch.jagged)
            return self.two(F.gelu(self.one(x))).values()

    def pattern(limit: Limit) -> Iterator[Any]:
        model = limit(Ragged())
        for number in range(3):
            model.zero_grad()
            rows = [data(number * 4 + at, rows=rows) for at, rows in enumerate((9, 30, 21, 4))]
            x = torch.nested.nested_tensor(rows, layout=torch.jagged) if place == "input" else rows
            loss = model(x).square().mean()
            loss.backward()
            yield model, loss

    check(pattern, budget)


class Attention(nn.Module):
    """Attention of one head over rows of several lengths: as jagged tensors, padded with a mask, or one row
    after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def of(self, x: Any, attn_mask: torch.Tensor | None = None) -> Any:
        query, key, value = (part(x).unflatten(-1, [1, 16]).transpose(1, 2) for part in self.parts)
        y = F.scaled_dot_product_attention(query, key, value, attn_mask=attn_mask)
        return y.transpose(1, 2).flatten(-2)

    def forward(self, x: Any, how: str) -> torch.Tensor:
        if how == "rows":
            return torch.cat([self.of(row[None])[0] for row in x.unbind()])
        if how == "padded":
            padded, lengths = x.to_padded_tensor(0.0), torch.tensor([len(row) for row in x.unbind()])
            there = torch.arange(padded.shape[1]) < lengths[:, None]
            return self.of(padded, there[:, None, None])[there]
        return self.of(x).values()


class OverRows(nn.Module):
    """An attention over rows of several lengths, and an MLP."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.attention, self.net = how, Attention(), mlp()

    def forward(self, rows: list[torch.Tensor]) -> torch.Tensor:
        x = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
        return self.net(self.attention(x, self.how))


@pytest.mark.filterwarnings("ignore:a planned step took", "ignore:this step")
@pytest.mark.parametrize("how", ["jagged", "padded", "rows"])
def test_attention_on_jagged_tensors_is_refused_with_remedies_that_work(how: str) -> None:
    """On a CPU PyTorch computes it on nested tensors whose bytes no plan sees."""
    rows = [data(at, rows=rows) for at, rows in enumerate((90, 30, 41))]
    model = OverRows(how)
    handle = lowtide.limit_memory(model, "70%" if how == "jagged" else "min")
    if how == "jagged":
        for _ in range(2):
            with pytest.raises(PlanError, match=r"module 'attention'.*(?s:.*)to_padded_tensor.*unbind"):
                model(rows).square().mean().backward()
        handle.set_budget("100%")
    for _ in range(3):
        model(rows).square().mean().backward()
    assert handle.plan is not None and handle.plan.changes_nothing == (how == "jagged")
    if how != "jagged":
        assert handle.measured_peak_bytes is not None and handle.plan.budget_bytes is not None
        assert handle.measured_peak_bytes <= handle.plan.budget_bytes


@pytest.fixture
def mesh() -> Iterator[Any]:
    """A mesh of this process alone."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore  # no threads that outlive the test

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("budget", BUDGETS)
def test_a_dtensor_among_the_outputs(mesh: Any, budget: str) -> None:
    from torch.distributed.tensor import DTensor, Shard

    class Sharded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def forward(self, x: torch.Tensor) -> Any:
            h = self.net(x)
            return {"logits": DTensor.from_local(h, mesh, [Shard(0)]), "norm": h.norm()}

    def pattern(limit: Limit) -> Iterator[Any]:
        model = limit(Sharded())
        for number in range(3):
            model.zero_grad()
            outputs = model(data(number))
            (outputs["logits"].to_local().square().mean() + outputs["norm"]).backward()
            yield model, outputs["logits"].to_local()

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
