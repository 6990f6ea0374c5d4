"""GPT and Llama shared by 1, 2 and 4 processes: logits, loss and every gradient of the model that one process
has.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import on_each_backend, on_ranks
from shared_models import distance, make, scoped, tokens
from torch import Tensor, nn

from lowtide import parallel as lp
from lowtide.models import ModelError
from lowtide.parallel.module import ParallelModule

pytestmark = on_each_backend


def whole(model: nn.Module, name: str, tensor: Tensor) -> Tensor:
    """A parameter's gradient, or the parameter, with every rank's part in its place."""
    owner = model.get_submodule(name.rpartition(".")[0])
    if not isinstance(owner, ParallelModule):
        return tensor
    where = owner.partitions[name.rpartition(".")[2]]
    if where.dimension is None:
        return tensor
    full, at = tensor.new_zeros(where.shape), 0
    for start, stop in where.slices():
        full.narrow(where.dimension, start, stop - start).copy_(
            tensor.narrow(where.dimension, at, stop - start)
        )
        at += stop - start
    dist.all_reduce(full)
    return full


def compare(family: str, sequence_parallel: bool, changes: dict[str, Any], scope: bool) -> list[str]:
    alone, shared = make(family, **changes), make(family, dist.group.WORLD, sequence_parallel, **changes)
    if scope:
        for block in shared.blocks:  # type: ignore[union-attr]
            block.forward = scoped(block.forward)
    faults = [
        f"initial {name}"
        for (name, parameter), rival in zip(shared.named_parameters(), alone.parameters(), strict=True)
        if not torch.equal(whole(shared, name, parameter.detach()), rival)
    ]
    logits, expected = shared(tokens()).logits, alone(tokens()).logits
    if distance(logits, expected) > 1e-12:
        faults.append(f"logits {distance(logits, expected)}")
    targets = tokens().roll(-1, 1)
    targets[0, 3] = targets[1] = -100
    loss, expected = shared(tokens(), targets).loss, alone(tokens(), targets).loss
    if abs(loss.item() - expected.item()) > 1e-12:
        faults.append(f"loss {loss.item()} {expected.item()}")
    loss.backward()
    expected.backward()
    lp.allreduce_sequence_parallel_gradients(shared)
    for (name, parameter), rival in zip(shared.named_parameters(), alone.parameters(), strict=True):
        assert parameter.grad is not None and rival.grad is not None
        gradient = whole(shared, name, parameter.grad)
        if not distance(gradient, rival.grad) < 1e-12:
            faults.append(f"gradient {name} {distance(gradient, rival.grad)}")
    return faults


def all_models() -> list[str]:
    faults = []
    for family in ("gpt", "llama"):
        for sequence_parallel in (False, True):
            for changes in (
                {},
                {"tied": False},
                {"loss_chunks": 4},
                {"key_value_heads": 1},
                {"fused_attention": False},
            ):
                if family == "gpt" and "key_value_heads" in changes:
                    continue
                if "loss_chunks" in changes:
                    changes = {**changes, "tied": False}
                for scope in (False, True) if not changes else (False,):
                    label = f"{family} sequence_parallel={sequence_parallel} {changes} scope={scope}"
                    faults += [
                        f"{label}: {fault}" for fault in compare(family, sequence_parallel, changes, scope)
                    ]
    return faults


@pytest.mark.parametrize("size", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_models(size: int) -> None:
    for faults in on_ranks(size, all_models):
        assert not faults, "\n".join(faults[:20])


def dropped() -> tuple[float, bool]:
    """The loss with dropout, and whether recomputation gives the same gradients bit by bit."""
    found: list[list[Tensor]] = []
    losses = []
    for scope in (False, True):
        model = make("gpt", dist.group.WORLD, True, dropout=0.3).float()
        if scope:
            for block in model.blocks:  # type: ignore[union-attr]
                block.forward = scoped(block.forward)
        torch.manual_seed(4)
        loss = model(tokens(), tokens()).loss
        loss.backward()
        losses.append(loss.item())
        found.append([p.grad for p in model.parameters() if p.grad is not None])
    return losses[0], losses[0] == losses[1] and all(map(torch.equal, *found))


def test_dropout_under_recomputation() -> None:
    (loss, same), (other, also) = on_ranks(2, dropped)
    assert loss == other and same and also


def refused() -> bool:
    with pytest.raises(ModelError, match="4 attention heads do not divide among 3 ranks"):
        make("gpt", dist.group.WORLD)
    with pytest.raises(ModelError, match="needs a group"):
        make("gpt", None, True)
    model = make("gpt", dist.group.WORLD, True, heads=6, width=48)
    with pytest.raises(lp.ParallelError, match="pad it by 1 to 9"):
        model(tokens())
    with pytest.raises(lp.ParallelError, match="2 key-value heads on 3 ranks"):
        make("llama", dist.group.WORLD, heads=6, width=48, key_value_heads=2)
    return True


def test_what_does_not_divide() -> None:
    assert all(on_ranks(3, refused))
