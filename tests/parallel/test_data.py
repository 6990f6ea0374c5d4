"""DDP and FSDP2 outside the tensor group, on a mesh of two by two: losses and gradients of the single process
that has the whole batch.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import on_each_backend, on_ranks, seeded
from shared_models import distance, scoped
from shared_models import make as make_own
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F

import lowtide
from lowtide import parallel as lp
from lowtide.parallel.module import ParallelModule

pytestmark = on_each_backend
HUGGING_FACE = find_spec("transformers") is not None
STEPS = 3
VOCABULARY = 68
Case = tuple[str, str, str, torch.dtype]  # the model, what is outside, what each block does, and the dtype
FAST: list[Case] = [
    ("gpt", "ddp", "full", torch.float64),
    ("gpt", "fsdp", "scope", torch.float64),
    ("hf", "fsdp", "full", torch.float64),
]
REST: list[Case] = [
    (family, kind, how, dtype)
    for family in ("gpt", "llama", "hf")
    for kind in ("ddp", "fsdp")
    for how in ("", "scope", "full", "95%")
    for dtype in (torch.float64, torch.float32)
    if (family, kind, how, dtype) not in FAST
]


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    """The models' code is imported once, before the processes are made."""
    if HUGGING_FACE:
        make("hf", torch.float32)


def make(family: str, dtype: torch.dtype, group: Any = None) -> nn.Module:
    if family == "hf":
        from test_parallelize import make as make_hugging_face

        model = make_hugging_face("llama", vocab_size=VOCABULARY).to(dtype)
        return model if group is None else lp.parallelize(model, group, True)
    return make_own(family, group, group is not None, vocabulary=VOCABULARY).to(dtype)


def blocks(model: Any) -> list[nn.Module]:
    return list(model.model.layers if hasattr(model, "model") else model.blocks)


def tokens(step: int, length: int) -> Tensor:
    return torch.randint(VOCABULARY, (4, length), generator=seeded(step))


def whole(model: nn.Module, name: str, tensor: Any, group: Any) -> Tensor:
    """A gradient with every rank's part in its place, over data-parallel and over tensor-parallel ranks."""
    tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    owner = model.get_submodule(name.rpartition(".")[0])
    where = owner.partitions[name.rpartition(".")[2]] if isinstance(owner, ParallelModule) else None
    if where is None or where.dimension is None:
        return tensor
    full, at = tensor.new_zeros(where.shape), 0
    for start, stop in where.slices():
        full.narrow(where.dimension, start, stop - start).copy_(
            tensor.narrow(where.dimension, at, stop - start)
        )
        at += stop - start
    dist.all_reduce(full, group=group)
    return full


def train(
    model: nn.Module, inner: nn.Module, part: slice, length: int, mesh: DeviceMesh | None
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of some steps, and the gradients of the last, which follows its plan's script."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses, gradients = [], {}
    for step in range(STEPS):
        optimizer.zero_grad()
        batch = tokens(step, length)[part]
        logits = model(batch).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
        del logits
        loss.backward()
        lp.allreduce_sequence_parallel_gradients(optimizer)
        if step == STEPS - 1:
            group = None if mesh is None else mesh["tp"].get_group()
            gradients = {n: whole(inner, n, p.grad, group).clone() for n, p in inner.named_parameters()}
        optimizer.step()
        mean = loss.detach().clone()
        if mesh is not None:
            dist.all_reduce(mean, group=mesh["dp"].get_group())
            mean /= 2
        losses.append(mean.item())
    return losses, gradients


def sharded(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for block in blocks(model):
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return model


def composed(case: Case, mesh: DeviceMesh) -> list[str]:
    family, kind, how, dtype = case
    length = 48 if how.endswith("%") else 8
    alone = make(family, dtype)
    losses, gradients = train(alone, alone, slice(None), length, None)
    model = make(family, dtype, mesh["tp"])
    for block in blocks(model) if how == "scope" else []:
        block.forward = scoped(block.forward)
    if kind == "fsdp":
        outer = sharded(model, mesh)
        lp.mark_partial_gradients(model)
    else:
        outer = nn.parallel.DistributedDataParallel(model, process_group=mesh["dp"].get_group())
    handles = []
    if how == "full":
        handles = [lowtide.limit_memory(block, policy="full") for block in blocks(model)]
    elif how:
        handles = [] if how == "scope" else [lowtide.limit_memory(block, how) for block in blocks(model)]
    start = 2 * mesh["dp"].get_local_rank()
    found, parts = train(outer, model, slice(start, start + 2), length, mesh)
    faults = (
        []
        if all(handle.plan is not None and handle.plan.replayed for handle in handles)
        else ["nothing is recomputed"]
    )
    most = 1e-12 if dtype == torch.float64 else 1e-5
    faults += (
        [f"losses {found} {losses}"]
        if max(abs(a - b) for a, b in zip(found, losses, strict=True)) > most * 5
        else []
    )
    faults += [
        f"{name} {distance(parts[name], rival)}"
        for name, rival in gradients.items()
        if not distance(parts[name], rival) < most
    ]
    return [f"{case}: {fault}" for fault in faults]


def forgotten(mesh: DeviceMesh) -> list[str]:
    """Parameters that were replaced and not marked again are refused, not trained on parts of a sum."""
    model = sharded(make("gpt", torch.float64, mesh["tp"]), mesh)
    with pytest.raises(lp.ParallelError, match=r"call lowtide\.parallel\.mark_partial_gradients"):
        model(tokens(0, 8))
    return []


def on_a_mesh(*checks: Callable[[DeviceMesh], list[str]]) -> list[str]:
    warnings.simplefilter("ignore", UserWarning)
    mesh = init_device_mesh(torch.get_default_device().type, (2, 2), mesh_dim_names=("dp", "tp"))
    return [fault for check in checks for fault in check(mesh)]


def every(cases: list[Case]) -> list[str]:
    checks = [functools.partial(composed, case) for case in cases if case[0] != "hf" or HUGGING_FACE]
    return [fault for faults in on_ranks(4, on_a_mesh, *checks, forgotten) for fault in faults]


def test_outside_the_tensor_group() -> None:
    faults = every(FAST)
    assert not faults, "\n".join(faults)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt", "llama", "hf"])
def test_everything_outside_the_tensor_group(family: str) -> None:
    faults = every([case for case in REST if case[0] == family])
    assert not faults, "\n".join(faults)
