"""A loss in pieces on several ranks: DDP, FSDP2, and an output layer that the ranks share."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from chunked import batch, build, gradients
from ranks import on_each_backend, on_ranks
from shared_models import make, tokens
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import lowtide
from lowtide import parallel as lp
from lowtide.extensions.tiles.stand_in import Logits

pytest.importorskip("transformers")
pytestmark = [on_each_backend, pytest.mark.usefixtures("quiet_transformers")]


def full(gradient: Any) -> Tensor:
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient


def same(ours: list[Tensor], theirs: list[Tensor], within: float = 2e-5) -> None:
    assert len(ours) == len(theirs) > 0
    own, other = (torch.cat([one.flatten() for one in each]) for each in (ours, theirs))
    assert (own - other).norm() <= within * other.norm(), (own - other).norm() / other.norm()


def share(model: Any, how: str) -> Any:
    """The model, wrapped or sharded."""
    if how.startswith("DDP"):
        return DistributedDataParallel(model, find_unused_parameters=how == "DDP that looks for unused")
    mesh = init_device_mesh(torch.get_default_device().type, (dist.get_world_size(),))
    low: list[Any] = [{}, {}]
    if how == "FSDP2 in bfloat16":
        both = torch.bfloat16, torch.float32
        low = [{"mp_policy": MixedPrecisionPolicy(*both, kind)} for kind in (None, torch.float32)]
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, **low[0])
    return fully_shard(model, mesh=mesh, **low[1])


def loss_of(model: Any, given: dict[str, Tensor], outside: bool) -> Tensor:
    if not outside:
        return model(**given).loss
    logits = model(given["input_ids"]).logits[:, :-1]
    rows = -torch.log_softmax(logits, -1).gather(-1, given["labels"][:, 1:, None].clamp(min=0))
    return rows.squeeze(-1).mul(given["labels"][:, 1:] != -100).sum() / 50


def step(how: str, outside: bool, limit: str | None) -> None:
    found = []
    for chunked in (False, True):
        model = build().to(torch.get_default_device())
        if chunked:
            lowtide.chunked_loss(model, 4)
        model = share(model, how)
        if chunked and limit:
            lowtide.limit_memory(model, limit, progress=False)
        given = {name: one[2 * dist.get_rank() :][:2] for name, one in batch(4, 64).items()}
        given = {name: one.contiguous().to(torch.get_default_device()) for name, one in given.items()}
        losses = []
        for _ in range(3 if chunked and limit else 1):
            loss = loss_of(model, given, outside)
            losses.append((loss.detach(), [full(one) for one in gradients(model, loss)]))
            del loss
        assert not chunked or isinstance(model(given["input_ids"]).logits, Logits)
        found.append(losses)
    within = 2e-2 if "bfloat16" in how else 2e-6
    ((their_loss, theirs),) = found[0]
    for our_loss, ours in found[1]:
        assert torch.allclose(our_loss, their_loss, within / 2, within / 2)
        assert our_loss.dtype == their_loss.dtype
        same(ours, theirs, within)


def steps(how: str) -> None:
    for outside, limit in ((False, None), (True, None), (False, "min")):
        step(how, outside, limit)


@pytest.mark.parametrize("how", ["DDP that looks for unused", "FSDP2", "FSDP2 in bfloat16"])
def test_ranks_with_data_of_their_own(how: str) -> None:
    on_ranks(2, steps, how)


def head_of_its_own() -> None:
    mesh = init_device_mesh(torch.get_default_device().type, (dist.get_world_size(),))
    model = build().to(torch.get_default_device())
    lowtide.chunked_loss(model, 4)
    fully_shard(model.lm_head, mesh=mesh)
    fully_shard(model, mesh=mesh)
    given = {name: one.to(torch.get_default_device()) for name, one in batch(3, 20).items()}
    with pytest.warns(lowtide.LowtideWarning, match="the unit of the whole model"):
        assert type(model(**given).logits) is Tensor


def test_an_output_layer_that_is_a_unit_of_its_own_runs_as_without() -> None:
    on_ranks(2, head_of_its_own)


def shared_head(sequence_parallel: bool, limit: str | None) -> None:
    """A model of transformers that `parallelize` shares, its output layer with it."""
    plain = build(vocab_size=321).double()  # ranks pad it
    chunked = lp.parallelize(build(vocab_size=321).double(), dist.group.WORLD, sequence_parallel)
    handle = lowtide.chunked_loss(chunked, 4)
    if limit:
        lowtide.limit_memory(chunked, limit, progress=False)
    given = {name: one.to(torch.get_default_device()) for name, one in batch(3, 20).items()}
    for outside in (False, True):
        plain.zero_grad()
        theirs = loss_of(plain, given, outside)
        theirs.backward()
        for _ in range(3 if limit else 1):
            chunked.zero_grad()
            ours = loss_of(chunked, given, outside)
            ours.backward()
            lp.allreduce_sequence_parallel_gradients(chunked)
            assert torch.allclose(ours, theirs, 1e-12)
            head = chunked.lm_head
            where = head.partitions["weight"]
            begin = dist.get_rank() * head.weight.shape[0]
            whole = plain.lm_head.weight.grad[begin : begin + where.valid]
            assert torch.allclose(head.weight.grad[: where.valid], whole, 1e-10)
            norms = [one.model.layers[0].input_layernorm.weight.grad for one in (chunked, plain)]
            assert torch.allclose(*norms, 1e-10)
    assert isinstance(chunked(given["input_ids"]).logits, Logits)
    real = chunked(given["input_ids"]).logits.real()
    assert torch.allclose(real, plain(given["input_ids"]).logits, 1e-12)
    handle.remove()
    assert type(chunked(given["input_ids"]).logits) is Tensor


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("limit", [None, "min"], ids=["without a limit", "limited"])
def test_an_output_layer_that_ranks_share(sequence_parallel: bool, limit: str | None) -> None:
    on_ranks(2, shared_head, sequence_parallel, limit)


def own_loss(sequence_parallel: bool) -> None:
    """lowtide's own model, and cross entropy of logits of which each rank has its part."""
    found = []
    for pieces in (0, 3):
        model: Any = make("llama", dist.group.WORLD, sequence_parallel, tied=False)
        if pieces:
            lowtide.chunked_loss(model, pieces)
        losses = [model(tokens(), tokens().roll(-1, 1)).loss]
        hidden = model.norm(model.run_blocks(model.embed(tokens())))
        logits = model.head(hidden)
        assert isinstance(logits, Logits) == bool(pieces)
        options: dict[str, Any] = {"vocabulary": 37, "label_smoothing": 0.1}
        rows = lp.parallel_cross_entropy(
            logits, tokens(), **options, tensor_model_parallel_group=dist.group.WORLD
        )
        losses.append((rows * rows).mean())
        model.zero_grad()
        sum(losses).backward()
        lp.allreduce_sequence_parallel_gradients(model)
        found.append((losses, [p.grad for p in model.parameters()]))
    (theirs, their_gradients), (ours, our_gradients) = found
    assert all(torch.allclose(a, b, 1e-12) for a, b in zip(ours, theirs, strict=True))
    same(our_gradients, their_gradients, 1e-12)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_vocabulary_that_ranks_share(sequence_parallel: bool) -> None:
    on_ranks(2, own_loss, sequence_parallel)
