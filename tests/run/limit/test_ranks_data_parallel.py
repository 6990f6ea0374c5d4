"""DistributedDataParallel and FSDP2: limited models train bit by bit as without lowtide, or an error
says what to do.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import on_each_backend, on_ranks
from sharded_step_models import watched
from torch import nn

import lowtide

pytestmark = on_each_backend

N = 16


class Block(nn.Module):
    def __init__(self, width: int = N) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(torch.nn.functional.gelu(self.up(self.norm(x)))))


class Model(nn.Module):
    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, N)
        self.blocks = nn.ModuleList([Block() for _ in range(layers)])
        self.head = nn.Linear(N, 32)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens.roll(-1, 1).flatten())


def make() -> Model:
    torch.manual_seed(0)
    return Model()


def tokens(rank: int, step: int, length: int = 16) -> torch.Tensor:
    return torch.randint(0, 32, (8, length), generator=torch.Generator().manual_seed(100 * rank + step))


def train(model: nn.Module, rank: int, steps: int = 3, length: int = 16) -> list[torch.Tensor]:
    """Gradients, losses and parameters of a few steps."""
    found: list[torch.Tensor] = []
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(steps):
        optimizer.zero_grad()
        torch.manual_seed(step)
        loss = model(tokens(rank, step, length))
        loss.backward()
        found.append(loss.detach().clone())
        found += [local(p.grad).clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
    return found + [local(p.detach()).clone() for p in model.parameters()]


def local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# ---- two processes -------------------------------------------------------------------------------


def as_rank(body: Callable[[int], None]) -> None:
    body(dist.get_rank())


def ddp(rank: int) -> None:
    from torch.nn.parallel import DistributedDataParallel as Wrap

    expected = train(Wrap(make()), rank)

    inner = make()
    before = lowtide.limit_memory(inner, "90%")
    assert equal(expected, train(Wrap(inner), rank)), "limited, then wrapped"
    assert before.plan is not None and before.plan.replayed

    wrapped = Wrap(make())
    after = lowtide.limit_memory(wrapped, "90%")
    assert equal(expected, train(wrapped, rank)), "wrapped, then limited"
    assert after.plan is not None and after.plan.replayed

    for options in (
        {"gradient_as_bucket_view": True},
        {"static_graph": True},
        {"find_unused_parameters": True},
    ):
        expected = train(Wrap(make(), **options), rank)
        inner = make()
        lowtide.limit_memory(inner, policy="full")
        assert equal(expected, train(Wrap(inner, **options), rank)), options


def ddp_by_value(rank: int) -> None:
    """Models that look at their numbers or ask for an address: the first step is an ordinary one, and the
    reducer hears of it once.
    """
    from torch.nn.parallel import DistributedDataParallel as Wrap

    class Looks(Model):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            loss = super().forward(tokens)
            return loss if loss.item() < 1e9 else loss * 0

    class Locates(Model):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            loss = super().forward(tokens)
            return loss if loss.data_ptr() else loss * 0

    for kind in (Looks, Locates):

        def make(kind: type[Model] = kind) -> Model:
            torch.manual_seed(0)
            return kind()

        expected = train(Wrap(make()), rank)
        model = make()
        handle = lowtide.limit_memory(model, policy="full")
        assert equal(expected, train(Wrap(model), rank))
        assert handle.plan is not None and handle.plan.replayed


def ddp_no_sync(rank: int) -> None:
    import warnings

    from torch.nn.parallel import DistributedDataParallel as Wrap

    warnings.simplefilter("ignore", lowtide.LowtideWarning)
    results = []
    for limited in (False, True):
        model = make()
        if limited:
            lowtide.limit_memory(model, policy="full")
        wrapped = Wrap(model)
        torch.manual_seed(0)
        with wrapped.no_sync():
            wrapped(tokens(rank, 0)).backward()
            wrapped(tokens(rank, 1)).backward()
        wrapped(tokens(rank, 2)).backward()
        results.append([p.grad.clone() for p in model.parameters()])
    assert equal(*results)


def ddp_refused(rank: int) -> None:
    """What one rank refuses in its first step fails on all. A later kind of step that does not fit takes the
    least memory, since the others wait for it; no search takes longer than a step.
    """
    from torch.nn.parallel import DistributedDataParallel as Wrap

    wrapped = Wrap(make())
    lowtide.limit_memory(wrapped, "1KiB" if rank else "90%")
    with pytest.raises(lowtide.BudgetError, match=r"budget of 1 KiB"):
        wrapped(tokens(rank, 0)).backward()

    expected = Wrap(make())
    model = Wrap(make())
    handle = lowtide.limit_memory(model, "240KiB")
    told = 0
    for step, length in enumerate((16, *[64 if rank else 16] * 3)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", lowtide.LowtideWarning)
            for one in (expected, model):
                one.zero_grad()
                torch.manual_seed(step)
                one(tokens(rank, step, length)).backward()
        pairs = zip(expected.parameters(), model.parameters(), strict=True)
        assert all(torch.equal(a.grad, b.grad) for a, b in pairs)
        told += sum("the plan of the smallest peak" in str(one.message) for one in caught)
    assert told == rank
    limiter = handle._limiter
    (ranks,) = limiter.extensions
    assert ranks.replicas is not None
    assert handle.plan is not None and handle.plan.replayed
    assert (handle.plan.predicted_peak_bytes > 240 * 1024) is (rank == 1)


def sharded(model: Model, **options: Any) -> Model:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def fsdp_blocks(rank: int) -> None:
    """The limit on each sharded unit."""
    for options in ({}, {"reshard_after_forward": False}):
        expected = train(sharded(make(), **options), rank)
        model = sharded(make(), **options)
        for block in model.blocks:  # steps that limited models share are held by a governor alone
            lowtide.limit_memory(block, policy="full")
        assert equal(expected, train(model, rank)), options


def fsdp_whole(rank: int) -> None:
    """One limit for the whole step, given before or after sharding: no gather more, and what is predicted is
    what is measured.
    """
    long = {"length": 128}
    for options, budget, early in (({}, "min", True), ({"reshard_after_forward": False}, "80%", False)):
        with watched() as gathers:
            expected = train(sharded(make(), **options), rank, **long)
            asked = gathers[0]
            model = make() if early else sharded(make(), **options)
            handle = lowtide.limit_memory(model, budget)
            model = sharded(model, **options) if early else model
            found = train(model, rank, **long)
        assert equal(expected, found), options
        assert gathers[0] == 2 * asked, options
        plan, measured = handle.plan, handle.measured_peak_bytes
        assert plan is not None and plan.replayed and plan.budget_bytes and measured is not None
        assert measured <= plan.budget_bytes
        assert abs(measured - plan.predicted_peak_bytes) <= 0.01 * measured, (
            measured,
            plan.predicted_peak_bytes,
        )
        assert handle.graph is not None and len(handle.plans) == 1
        assert {"empty", "fill"} <= {event.kind for event in handle.graph.events}


def fsdp_refused(rank: int) -> None:
    """What one rank refuses fails on all; else all hold one plan."""
    model = sharded(make())
    lowtide.limit_memory(model, "1KiB" if rank else "90%")
    with pytest.raises(lowtide.BudgetError, match=r"budget of 1 KiB"):
        model(tokens(rank, 0)).backward()
    model = sharded(make())
    handle = lowtide.limit_memory(model, "80%")
    model(tokens(rank, 0)).backward()
    assert handle.plan is not None
    stored: list[Any] = [None, None]
    dist.all_gather_object(stored, handle.plan.stored)
    assert stored[0] == stored[1]


def fsdp_scopes(rank: int) -> None:
    """A scope inside each block."""

    class Scoped(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with lowtide.checkpointing():
                return super().forward(x)

    def with_scopes() -> Model:
        model = make()
        for k, block in enumerate(model.blocks):
            scoped = Scoped()
            scoped.load_state_dict(block.state_dict())
            model.blocks[k] = scoped
        return model

    expected = train(sharded(make()), rank)
    assert equal(expected, train(sharded(with_scopes()), rank))


@pytest.mark.parametrize("body", [ddp, ddp_by_value, ddp_no_sync, ddp_refused], ids=lambda f: f.__name__)
def test_data_parallel(body: Any) -> None:
    on_ranks(2, as_rank, body)


@pytest.mark.parametrize(
    "body", [fsdp_blocks, fsdp_whole, fsdp_refused, fsdp_scopes], ids=lambda f: f.__name__
)
def test_sharded(body: Any) -> None:
    on_ranks(2, as_rank, body)
