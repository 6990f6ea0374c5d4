"""What raised in 0.1.0 where the plain step runs: tensors that are not strided, or not alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import SLACK_BYTES, Limit, check, peak_of
from loops import data, mlp
from torch import nn

import lowtide

BUDGETS = ["100%", "60%"]


LAYOUTS = ["coo", "csr"]


def adjacency(layout: str, nodes: int = 128) -> torch.Tensor:
    """A ring of nodes with weights."""
    at = torch.arange(nodes)
    rows, columns = torch.cat([at, at, at]), torch.cat([at, (at + 1) % nodes, (at + 7) % nodes])
    made = torch.sparse_coo_tensor(
        torch.stack([rows, columns]), torch.rand(3 * nodes), (nodes, nodes)
    ).coalesce()
    return made if layout == "coo" else made.to_sparse_csr()


class GraphConvolution(nn.Module):
    """Two layers that mix a node with its neighbours; the edges are a buffer or an input."""

    def __init__(self, edges: torch.Tensor | None) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(16, 32), nn.Linear(32, 4)
        self.register_buffer("edges", edges)

    def forward(self, x: torch.Tensor, edges: torch.Tensor | None = None) -> torch.Tensor:
        edges = self.edges if edges is None else edges
        return torch.sparse.mm(edges, self.two(torch.sparse.mm(edges, self.one(x)).relu()))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_products_with_sparse_tensors_are_run_again_within_the_budget(layout: str) -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(64 if at else 16, 64) for at in range(8))

        def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = F.gelu(edges @ layer(x))
            return x

    torch.manual_seed(0)
    model, edges, x = Deep(), adjacency(layout), data(0)
    handle = lowtide.limit_memory(model, "60%")
    for number in range(4):
        model.zero_grad()
        peak, _ = peak_of(lambda: model(x, edges).square().mean().backward(), [model], [x, edges])
        assert handle.plan is not None and handle.plan.budget_bytes is not None
        assert any(step.replayed and "mm" in step.name for step in handle.plan.program)
        assert number == 0 or peak <= handle.plan.budget_bytes + SLACK_BYTES


@pytest.mark.parametrize("place", ["buffer", "input"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_sparse_buffers_and_inputs(place: str, layout: str, budget: str) -> None:
    def pattern(limit: Limit) -> Iterator[Any]:
        edges = adjacency(layout)
        model = limit(GraphConvolution(edges if place == "buffer" else None))
        for number in range(3):
            model.zero_grad()
            output = model(data(number)) if place == "buffer" else model(data(number), edges)
            output.square().mean().backward()
            yield output, [p.grad for p in model.parameters()]

    check(pattern, budget)


@pytest.mark.parametrize("budget", BUDGETS)
def test_sparse_features(budget: str) -> None:
    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.head = nn.Parameter(torch.randn(128, 16)), nn.Linear(16, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(torch.sparse.mm(x, self.weight).tanh())

    def pattern(limit: Limit) -> Iterator[Any]:
        features = adjacency("coo")
        model = limit(Bag())
        for _ in range(3):
            model.zero_grad()
            loss = model(features).square().mean()
            loss.backward()
            yield model, loss

    check(pattern, budget)


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
