"""What a tape may read by reference, and what it notices: sparse tensors, and what the program overwrites."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import SLACK_BYTES, Limit, check, peak_of
from function_model import N, batch
from loops import data
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


class Overwritten(nn.Module):
    """Lets a test overwrite what was saved."""

    def __init__(self, when: str, what: str) -> None:
        super().__init__()
        self.linear = nn.Linear(N, N)
        self.when, self.what = when, what

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.linear(x)
        y = h.exp()  # saves its result
        z = y * h  # saves both
        self.kept = {"y": y, "h": h, "view of h": h[1:], "weight": self.linear.weight, "input": x}[self.what]
        if self.when == "forward":
            self.overwrite()
        return z.sum()

    def overwrite(self) -> None:
        with torch.no_grad():
            self.kept.add_(1.0)


@pytest.mark.parametrize("evict", [True, False], ids=["evicted", "kept"])
@pytest.mark.parametrize("what", ["y", "h", "view of h"])
@pytest.mark.parametrize("when", ["forward", "after"])
def test_overwriting_a_saved_tensor_raises_where_plain_does(
    everything: Any, when: str, what: str, evict: bool
) -> None:
    messages = []
    for limited in (False, True):
        torch.manual_seed(0)
        model = Overwritten(when, what)
        if limited:
            # half of the model is evicted at least, so that a recorder is there either way
            lowtide.limit_memory(model, policy=everything if evict else keep_most)
        for _ in range(2):
            loss = model(batch())
            if when == "after":
                model.overwrite()
            with pytest.raises(RuntimeError, match="modified by an inplace operation") as caught:
                loss.backward()
            messages.append(str(caught.value))
    assert all(message.startswith(messages[0][:40]) for message in messages)


def keep_most(graph: Any, budget: int | None = None) -> Any:
    from lowtide.plan.policies import make_plan

    saved = {s.value for s in graph.saved if s.droppable}
    return make_plan(graph, stored=sorted(saved)[1:], budget=budget)


def test_overwriting_what_is_not_needed_raises_nothing(twins: Any) -> None:
    def run(model: Any) -> torch.Tensor:
        loss = model(batch())
        model.kept.detach_().mul_(1)  # nothing backward needs
        return loss

    class Harmless(Overwritten):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.linear(x)
            z = h + 1  # saves nothing
            self.kept = z.detach().clone()
            return (z.exp() * h).sum()

    twins(Harmless("after", "y")).check(run)


def test_a_source_that_every_step_overwrites_is_kept() -> None:
    """The step that is looked at shows that the input of the addition is written to, so no plan replays from
    it.
    """

    class Adds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(N))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return ((x + 1) * self.scale).sum()

    model, x = Adds(), batch()
    lowtide.limit_memory(model, policy=lambda graph, budget=None: make_everything(graph))
    for _ in range(3):
        model.zero_grad()
        loss, expected = model(x), (x + 1).sum(tuple(range(x.dim() - 1)))
        x.add_(1)
        loss.backward()
        assert model.scale.grad is not None and torch.equal(model.scale.grad, expected)


def make_everything(graph: Any) -> Any:
    from lowtide.plan.policies import make_plan

    return make_plan(graph, stored=())
