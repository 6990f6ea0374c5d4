"""Mappings and their conjugates, random streams, the guard of partial gradients, and what the layers refuse,
on two real processes.
"""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import on_each_backend, on_ranks, seeded
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import lowtide
from lowtide import parallel as lp

pytestmark = on_each_backend
TWO = 2


def dot(a: Tensor, b: Tensor) -> Tensor:
    """The inner product over all ranks."""
    total = (a * b).sum()
    dist.all_reduce(total)
    return total


def conjugates() -> list[str]:
    """A linear map A and the map B that its backward applies are conjugates: <A x, y> = <x, B y> over all
    ranks.
    """
    rank, faults = dist.get_rank(), []
    generator = seeded(rank)
    maps: dict[str, Any] = {
        "scatter": lp.scatter_to_tensor_model_parallel_region,
        "gather": lp.gather_from_tensor_model_parallel_region,
    }
    for dimension in (0, 1):
        maps[f"reduce-scatter {dimension}"] = lambda x, d=dimension: (
            lp.reduce_scatter_to_sequence_parallel_region(x, d)
        )
        maps[f"gather to model {dimension}"] = lambda x, d=dimension: lp.gather_from_sequence_parallel_region(
            x, d
        )
    for name, function in maps.items():
        x = torch.randn(4, 6, 8, generator=generator, dtype=torch.float64, requires_grad=True)
        out = function(x)
        y = torch.randn(out.shape, generator=generator, dtype=torch.float64)
        # its input is shared out and its output the same everywhere, so is the output's gradient
        replicated = name == "gather"
        if name == "scatter":
            dist.broadcast(x.data, 0)
            out = function(x)
        if replicated:
            dist.broadcast(y, 0)
        out.backward(y)
        assert x.grad is not None
        left, right = dot(out.detach(), y), dot(x.detach(), x.grad)
        if replicated:
            left = left / TWO
        if name == "scatter":
            right = right / TWO
        if not torch.allclose(left, right, rtol=1e-12, atol=1e-10):
            faults.append(f"{name}: {left} {right}")
    return faults


def values() -> bool:
    rank = dist.get_rank()
    x = torch.arange(16.0).view(4, 4).requires_grad_()
    before = x.detach().clone()
    assert torch.equal(lp.copy_to_tensor_model_parallel_region(x), x)
    assert torch.equal(lp.scatter_to_tensor_model_parallel_region(x), x[:, 2 * rank : 2 * rank + 2])
    assert torch.equal(
        lp.gather_from_tensor_model_parallel_region(lp.scatter_to_tensor_model_parallel_region(x)), x
    )
    assert torch.equal(lp.reduce_from_tensor_model_parallel_region(x), 2 * x)
    for dimension in (0, 1):
        piece = x.narrow(dimension, 2 * rank, 2)
        assert torch.equal(lp.scatter_to_sequence_parallel_region(x, dimension), piece)
        assert torch.equal(lp.reduce_scatter_to_sequence_parallel_region(x, dimension), 2 * piece)
        back = lp.gather_from_sequence_parallel_region(
            lp.scatter_to_sequence_parallel_region(x, dimension), dimension
        )
        assert torch.equal(back, x)
    lp.copy_to_tensor_model_parallel_region(x).sum().backward()
    assert torch.equal(x.grad, torch.full((4, 4), 2.0)) and torch.equal(x.detach(), before), (
        "the argument was written"
    )  # type: ignore[arg-type]
    # sums in a wider dtype: 256 + 1 rounds away in bfloat16, twice over
    wide = torch.tensor([256.0, 1.0][rank]).to(torch.bfloat16).expand(2).contiguous()
    assert (
        lp.reduce_from_tensor_model_parallel_region(wide, reduce_dtype=torch.float32).dtype is torch.bfloat16
    )
    with pytest.raises(lp.ParallelError, match=r"length 3 .*2 ranks: pad it by 1 to 4"):
        lp.scatter_to_sequence_parallel_region(torch.zeros(3, 2))
    with pytest.raises(lp.ParallelError, match="sequence_dimension=2"):
        lp.scatter_to_sequence_parallel_region(torch.zeros(3, 2), 2)
    return True


def test_mappings() -> None:
    assert on_ranks(TWO, conjugates) == [[], []]
    assert all(on_ranks(TWO, values))


def streams() -> tuple[Tensor, Tensor, Tensor, bool]:
    """A shared draw, an own draw, a shared draw after it, and whether recomputation finds both streams
    again.
    """
    tracker = lp.RandomTracker()
    torch.manual_seed(100 + dist.get_rank())
    tracker.synchronize()
    first = torch.rand(4)
    with tracker.per_rank():
        own = torch.rand(4)
    with tracker.shared():
        second = torch.rand(4)
    sharded, replicated = lp.ParallelDropout(0.5, sharded=True), lp.ParallelDropout(0.5)
    weight = torch.ones(64, requires_grad=True)

    def body(x: Tensor) -> Tensor:
        return (replicated(x) * sharded(x)).exp()

    torch.manual_seed(5)
    body(weight).sum().backward()
    expected, weight.grad = weight.grad, None
    torch.manual_seed(5)
    torch.utils.checkpoint.checkpoint(body, weight, use_reentrant=False).sum().backward()
    same = torch.equal(expected, weight.grad)  # type: ignore[arg-type]
    weight.grad = None
    torch.manual_seed(5)
    with lowtide.checkpointing():
        out = body(weight)
    out.sum().backward()
    return first, own, second, same and torch.equal(expected, weight.grad)  # type: ignore[arg-type]


def test_random_streams() -> None:
    (first, own, second, same), (first1, own1, second1, same1) = on_ranks(TWO, streams)
    assert torch.equal(first, first1) and torch.equal(second, second1) and not torch.equal(own, own1)
    assert not torch.equal(first, second) and not torch.equal(first, own) and same and same1


def test_one_rank_draws_as_if_there_were_no_group() -> None:
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    with lp.RandomTracker().per_rank():
        assert torch.equal(torch.rand(3), expected)


def sequence_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        lp.LayerNorm(8, sequence_parallel_enabled=True),
        lp.ColumnParallelLinear(8, 16, gather_output=False, sequence_parallel_enabled=True),
        nn.GELU(),
        lp.RowParallelLinear(16, 8, input_is_parallel=True, sequence_parallel_enabled=True),
    )


def batch() -> Tensor:
    return lp.scatter_to_sequence_parallel_region(torch.randn(4, 2, 8, generator=seeded(2)))


def guard() -> bool:
    forgotten = "call lowtide.parallel.allreduce_sequence_parallel_gradients"
    model = sequence_model()
    optimizer = torch.optim.AdamW(model.parameters())
    assert len(lp.partial_gradients(model.parameters())) == 3 and model[3].bias.sequence_parallel_enabled
    model(batch()).sum().backward()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(lp.ParallelError, match=forgotten):
        optimizer.step()
    assert all(
        torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True)
    ), "a refused step moved a weight"
    assert lp.allreduce_sequence_parallel_gradients(optimizer) == 3
    assert lp.allreduce_sequence_parallel_gradients(optimizer) == 0, "a second call sums nothing twice"
    optimizer.step()
    optimizer.zero_grad()

    # accumulation: one call after the last backward; a backward on top of a finished sum is refused
    model(batch()).sum().backward()
    model(batch()).sum().backward()
    lp.allreduce_sequence_parallel_gradients(optimizer)
    optimizer.step()
    model(batch()).sum().backward()
    with pytest.raises(lp.ParallelError, match="has added to it since"):
        lp.allreduce_sequence_parallel_gradients(optimizer)
    with pytest.raises(lp.ParallelError, match=forgotten):
        optimizer.step()
    # both ways of zeroing make a fresh start
    for none in (True, False):
        fresh = sequence_model()
        optimizer = torch.optim.SGD(fresh.parameters(), 0.1)
        for _ in range(3):
            optimizer.zero_grad(set_to_none=none)
            fresh(batch()).sum().backward()
            assert lp.allreduce_sequence_parallel_gradients(optimizer) == 3
            optimizer.step()

    # copies and pickles are guarded as well
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for twin in (copy.deepcopy(model), torch.load(buffer, weights_only=False)):
        optimizer = torch.optim.SGD(twin.parameters(), 0.1)
        optimizer.zero_grad()
        twin(batch()).sum().backward()
        with pytest.raises(lp.ParallelError, match=forgotten):
            optimizer.step()
        assert lp.allreduce_sequence_parallel_gradients(optimizer) == 3
        optimizer.step()

    # a parameter that is trained only later
    late = sequence_model().requires_grad_(False)
    late[0].weight.requires_grad_()
    optimizer = torch.optim.SGD(late.parameters(), 0.1)
    late(batch()).sum().backward()
    with pytest.raises(lp.ParallelError, match=forgotten):
        optimizer.step()
    assert lp.allreduce_sequence_parallel_gradients(optimizer) == 1
    return True


def test_a_step_on_partial_gradients_is_refused() -> None:
    assert all(on_ranks(TWO, guard))


def buffers() -> tuple[int, int, bool]:
    """How many sums of how many bytes at most for gradients of many shapes, and whether they are right."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Sums(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.bytes: list[int] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.namespace == "_c10d_functional" and "all_reduce" in str(func):
                self.bytes.append(args[0].nbytes)
            return func(*args, **(kwargs or {}))

    parameters = [nn.Parameter(torch.zeros(n)) for n in (5, 1, 300, 64, 7)] + [
        nn.Parameter(torch.zeros(6, 9).t())
    ]
    for number, parameter in enumerate(parameters):
        lp.mark_partial_gradient(parameter)
        (parameter * (number + 1) * (dist.get_rank() + 1)).sum().backward()
    optimizer = torch.optim.SGD(parameters, 0.1)
    with Sums() as sums:
        lp.allreduce_sequence_parallel_gradients(optimizer, buffer_bytes=4 * 100)
    right = all((p.grad == 3 * (number + 1)).all() for number, p in enumerate(parameters))  # type: ignore
    return len(sums.bytes), max(sums.bytes), right


def test_buffers_have_a_constant_size() -> None:
    elements = 5 + 1 + 300 + 64 + 7 + 54
    assert on_ranks(TWO, buffers) == [(-(-elements // 100), 400, True)] * TWO


def groups() -> bool:
    mesh = init_device_mesh(torch.get_default_device().type, (2,))
    named = init_device_mesh(torch.get_default_device().type, (1, 2), mesh_dim_names=("dp", "tp"))
    for group in (None, mesh, named, named["tp"], mesh.get_group(), dist.group.WORLD, lp.tensor_group(mesh)):
        found = lp.tensor_group(group)
        assert (found.rank, found.size) == (dist.get_rank(), 2)
        layer = lp.ColumnParallelLinear(4, 6, gather_output=False, tensor_model_parallel_group=group)
        assert layer(torch.ones(1, 4)).shape == (1, 3)
    assert lp.tensor_group(named["dp"]).size == 1
    with pytest.raises(lp.ParallelError, match="call one of them 'tp'"):
        lp.tensor_group(init_device_mesh(torch.get_default_device().type, (1, 2)))
    with pytest.raises(lp.ParallelError, match="give a torch"):
        lp.tensor_group("tp")
    return True


def tied() -> nn.Module:
    """An output layer with the embedding's weight."""
    parts = {"table": lp.ParallelEmbedding(12, 4), "head": lp.ColumnParallelLinear(4, 12, bias=False)}
    parts["head"].weight = parts["table"].weight
    return nn.ModuleDict(parts)


def refusals() -> bool:
    column, row = lp.ColumnParallelLinear, lp.RowParallelLinear
    sp = {"sequence_parallel_enabled": True}
    for call, words in [
        (lambda: column(4, 5), "output_size=5 .* 2 ranks: pass pad=True, or choose 6"),
        (lambda: row(5, 4), "input_size=5"),
        (lambda: column(4, 8, **sp), "pass gather_output=False"),
        (lambda: row(4, 8, **sp), "needs input_is_parallel=True"),
        (lambda: row(4, 8, True, True, reduce_output=False, **sp), "contradicts"),
        (lambda: row(4, 8, reduce_output=False), "every rank would add the bias"),
        (lambda: column(4, 8, sequence_dimension=0), "does nothing without"),
        (lambda: column(4, 8, False, False, sequence_dimension=2, **sp), "sequence_dimension=2"),
        (lambda: column(4, 8, stride=2), "interleaved by rank"),
        (lambda: column(4, 9, True, False, stride=2), "output_size=9"),
        (lambda: column(4, 10, stride=2, pad=True), "padding between them"),
        (lambda: column(4, 8, pad_alignment_size_per_rank=8), "does nothing without pad=True"),
        (lambda: column(4, 8, pad=True, pad_alignment_size_per_rank=0), "was given 0"),
        (lambda: lp.ParallelEmbedding(6, 4, collect_output=False, **sp), "contradicts"),
        (lambda: lp.OutputChannelParallelConv2d(4, 5, 3), "out_channels=5 .*: pass partition_pad=True"),
        (lambda: lp.InputChannelParallelConv2d(5, 4, 3), "in_channels=5 .*: pass partition_pad=True"),
        (lambda: lp.InputChannelParallelConv2d(4, 4, 3, groups=2), r"groups=\) was given 2"),
        (lambda: lp.InputChannelParallelConv2d(4, 4, (3, 3, 3)), r"kernel_size=\) was given"),
        (lambda: lp.OutputChannelParallelConv2d(4, 4, 3)(torch.ones(2, 3, 5, 5)), "4, height, width"),
        (lambda: lp.gather_from_tensor_model_parallel_region(torch.ones(2), dimension=1), "dimension="),
        (lambda: lp.pad_model(column(4, 10, pad=True), 2, 3), "are not 3 equal heads"),
        (lambda: lp.pad_model(column(4, 6), 3, 3), "2 ranks share"),
        (lambda: lp.pad_model(lp.SharedHeadsLinear(4, 1, 2), 2, 3), "whose heads several ranks share"),
        (lambda: lp.pad_model(nn.ModuleList([column(4, 6), row(12, 4)]), 2, 6), "n_key_value_heads="),
        (lambda: lp.pad_model(column(4, 6), 2, 3, n_key_value_heads=2), "a divisor of n_heads=3"),
        (lambda: lp.pad_model(tied(), 2, 3), "table has the weight"),
        (lambda: lp.pad_model(nn.Linear(4, 6), 2, 3), r"pad_model\(model=\) was given 'Linear'"),
        (lambda: lp.pad_model(nn.ModuleList([column(4, 6)]), 2, 3, [nn.Linear]), "in these classes"),
        (lambda: column(4, 8, stride=0), r"stride=\) was given 0"),
        (lambda: row(4, 8, stride=2), "needs input_is_parallel=True"),
        (lambda: column(4, 8, reduce_dtype=torch.bfloat16), "narrower"),
        (lambda: lp.ParallelEmbedding(5, 4), "num_embeddings=5"),
        (lambda: lp.ParallelEmbedding(6, 5, shard_across_embedding=True), "embedding_dim=5"),
        (lambda: lp.ParallelEmbedding(6, 4, padding_idx=6), r"padding_idx=\) was given 6"),
        (lambda: lp.ParallelEmbedding(6, 4, max_norm=1.0, shard_across_embedding=True), "whole vectors"),
        (lambda: lp.ParallelEmbedding(6, 4, sequence_dimension=1), "does nothing without"),
        (lambda: lp.ParallelDropout(1.0), "probability=1.0"),
    ]:  # fmt: skip
        with pytest.raises(lp.ParallelError, match=words):
            call()
    return True


def test_groups_and_refusals() -> None:
    assert all(on_ranks(TWO, groups))
    assert all(on_ranks(TWO, refusals))


def initial(size_only: bool = False) -> dict[str, Tensor]:
    torch.manual_seed(7)
    column = lp.ColumnParallelLinear(8, 12, gather_output=False, stride=3)
    row = lp.RowParallelLinear(12, 8)
    table = lp.ParallelEmbedding(10, 8, padding_idx=0, pad=True)
    draws = {"after": torch.rand(3)}
    for name, module in (("column", column), ("row", row), ("table", table)):
        for key, parameter in module.named_parameters():
            where = module.partitions[key]
            full = torch.zeros(where.shape)
            at = 0
            for start, stop in where.slices():
                dimension = where.dimension or 0
                full.narrow(dimension, start, stop - start).copy_(
                    parameter.detach().narrow(dimension, at, stop - start)
                )
                at += stop - start
            if where.dimension is not None and dist.get_world_size() > 1:
                dist.all_reduce(full)
            draws[f"{name}.{key}"] = full
    return draws


def test_the_same_initial_weights_at_every_size() -> None:
    (alone,) = on_ranks(1, initial)
    torch.manual_seed(7)
    column, row = nn.Linear(8, 12), nn.Linear(12, 8)
    assert torch.equal(alone["column.weight"], column.weight) and torch.equal(
        alone["column.bias"], column.bias
    )
    assert torch.equal(alone["row.weight"], row.weight) and torch.equal(alone["row.bias"], row.bias)
    assert not alone["table.weight"][0].any() and alone["table.weight"][1:].all()
    for size in (2, 4):
        for found in on_ranks(size, initial):
            assert found.keys() == alone.keys() and all(torch.equal(found[key], alone[key]) for key in alone)
