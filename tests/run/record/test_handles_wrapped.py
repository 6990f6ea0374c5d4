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
