"""PyTorch's own clipping of models that ranks share: the norm is the whole gradient's, whoever wrote it."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.tensor  # once, before processes are made
from ranks import on_each_backend, on_ranks, seeded
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import lowtide
from lowtide import parallel as lp

pytestmark = on_each_backend
ORDERS = (2.0, 1.0, math.inf)
FOREACH = (None, True, False)
MOST = 0.5


class Feed(nn.Module):
    """Cut weights and biases, a padded vocabulary, and what every rank holds whole."""

    def __init__(self, group: Any = None) -> None:
        super().__init__()
        options: dict[str, Any] = {"dtype": torch.float64, "tensor_model_parallel_group": group}
        self.table = lp.ParallelEmbedding(7, 6, pad=True, **options)
        self.up = lp.ColumnParallelLinear(6, 8, gather_output=False, **options)
        self.down = lp.RowParallelLinear(8, 6, input_is_parallel=True, **options)
        self.norm = nn.LayerNorm(6, dtype=torch.float64)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.norm(self.down(self.up(self.table(tokens)).tanh()))


def made(group: Any = None) -> Feed:
    torch.manual_seed(0)
    return Feed(group)


def backward(model: nn.Module) -> Any:
    x = torch.randint(7, (3, 4), generator=seeded(1))
    target = torch.randn(3, 4, 6, generator=seeded(2), dtype=torch.float64)
    (model(x) - target).square().sum().backward()
    return model


def doubled(model: nn.Module) -> nn.Module:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad = parameter.grad * 2
    return model


def replaced(model: nn.Module) -> nn.Module:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    padding: Any = getattr(model, "table").weight  # noqa: B009
    if lp.tensor_group().rank == 1:
        padding.grad[-1] = 0.0  # a row of nobody
    return model


def of_autograd(model: nn.Module) -> nn.Module:
    parameters = list(model.parameters())
    x = torch.randint(7, (3, 4), generator=seeded(1))
    found = torch.autograd.grad(model(x).square().sum(), parameters)
    for parameter, gradient in zip(parameters, found, strict=True):
        parameter.grad = gradient
    return model


def as_parameters(model: nn.Module) -> nn.Module:
    for parameter in backward(model).parameters():
        kept = nn.Parameter(parameter.grad.detach().clone(), requires_grad=False)
        parameter.grad = kept
        assert type(kept) is nn.Parameter and torch.equal(parameter.grad, kept)
    return model


def made_anew(model: nn.Module) -> nn.Module:
    """``torch.nn.Parameter`` of each parameter, as weights are shared, and state dicts assigned."""
    for layer in model.modules():
        for name, parameter in layer.named_parameters(recurse=False):
            layer._parameters[name] = again = nn.Parameter(parameter)
            assert isinstance(again, nn.Parameter) and again.data_ptr() == parameter.data_ptr()
            assert type(parameter.detach()) is Tensor
            assert type(parameter.detach().clone()) is type(parameter + 1) is type(parameter.data) is Tensor
    return replaced(model)


def copied(model: nn.Module) -> nn.Module:
    return replaced(copy.deepcopy(model))


def copied_each(model: nn.Module) -> nn.Module:
    twin = copy.deepcopy(model)
    for layer, old in zip(twin.modules(), model.modules(), strict=True):
        for name, parameter in old.named_parameters(recurse=False):
            layer._parameters[name] = copy.deepcopy(parameter)
    return replaced(twin)


def pickled(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return replaced(torch.load(file, weights_only=False))


def converted(model: nn.Module) -> nn.Module:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        return replaced(model.to(torch.float32).double())
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def loaded(model: nn.Module) -> nn.Module:
    model.load_state_dict(copy.deepcopy(model).state_dict(keep_vars=True), assign=True)
    return replaced(model)


def unfrozen(model: nn.Module) -> nn.Module:
    model.requires_grad_(False)
    return replaced(model.requires_grad_(True))


def emptied(model: nn.Module) -> nn.Module:
    for parameter in backward(model).parameters():
        parameter.grad.zero_()
        parameter.grad += 1
        del parameter.grad
        assert parameter.grad is None
    return backward(model)


def wrapped(model: nn.Module) -> nn.Module:
    """DDP of one rank: its gradients are views of its buckets."""
    if lp.tensor_group().size == 1:
        return backward(model)
    mesh = init_device_mesh(torch.get_default_device().type, (1, 2), mesh_dim_names=("dp", "tp"))
    model = DistributedDataParallel(model, process_group=mesh.get_group("dp"), gradient_as_bucket_view=True)
    backward(model).zero_grad()
    return backward(model).module


WRITERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "backward": backward,
    "doubled": lambda model: doubled(backward(model)),
    **{
        one.__name__: one
        for one in (
            replaced,
            of_autograd,
            as_parameters,
            made_anew,
            copied,
            copied_each,
            pickled,
            converted,
            loaded,
            unfrozen,
            emptied,
            wrapped,
        )
    },
}


def clipped(model: nn.Module, order: float, foreach: bool | None) -> tuple[float, float, float]:
    """The norm by the call for gradients and by that for parameters, and the norm that clipping left."""
    gradients = [parameter.grad for parameter in model.parameters()]
    total = nn.utils.get_total_norm(gradients, order, foreach=foreach)  # type: ignore[arg-type]
    before = [gradient.detach().clone() for gradient in gradients]  # type: ignore[union-attr]
    nn.utils.clip_grads_with_norm_(model.parameters(), MOST, total, foreach=foreach)
    for parameter, gradient in zip(model.parameters(), before, strict=True):
        scaled = gradient * (MOST / (total + 1e-6)).clamp(max=1.0)
        torch.testing.assert_close(parameter.grad.detach(), scaled, rtol=1e-12, atol=0)  # type: ignore
    left = nn.utils.clip_grad_norm_(model.parameters(), 2 * MOST, order, foreach=foreach)
    for parameter, gradient in zip(model.parameters(), before, strict=True):
        parameter.grad.copy_(gradient)  # type: ignore[union-attr]
    return total.item(), nn.utils.clip_grad_norm_(model.parameters(), MOST, order).item(), left.item()


def norms() -> list[list[Any]]:
    return [
        [clipped(write(made()), order, foreach) for order in ORDERS for foreach in FOREACH]
        for write in WRITERS.values()
    ]


def test_whoever_wrote_the_gradients_pytorch_clips_by_the_whole_norm() -> None:
    alone = norms()
    for found in on_ranks(2, norms):
        for writer, mine, expected in zip(WRITERS, found, alone, strict=True):
            assert mine == [pytest.approx(one, rel=1e-12) for one in expected], writer


def sharded() -> list[list[Any]]:
    """The same, of a model that FSDP2 shards beside; gradients of backward, assigned and of a copy."""
    mesh = init_device_mesh(torch.get_default_device().type, (2, 2), mesh_dim_names=("dp", "tp"))
    found = []
    for assigned in (False, True):
        model = fully_shard(made(mesh["tp"]), mesh=mesh["dp"])
        backward(model)
        for parameter in model.parameters() if assigned else ():
            parameter.grad = parameter.grad * 2
        found.append([number(model, order, foreach) for order in ORDERS for foreach in FOREACH])
        nn.utils.clip_grad_norm_(model.parameters(), MOST)
        found.append([number(model, order, False) for order in ORDERS])
    return found


def number(model: nn.Module, order: float, foreach: bool | None) -> float:
    gradients: Any = [parameter.grad for parameter in model.parameters()]
    total: Any = nn.utils.get_total_norm(gradients, order, foreach=foreach)
    return (total.full_tensor() if hasattr(total, "full_tensor") else total).item()


def test_whoever_wrote_the_gradients_beside_fsdp() -> None:
    expected = []
    for assigned in (False, True):
        model = backward(made())
        if assigned:
            doubled(model)
        expected.append([number(model, order, foreach) for order in ORDERS for foreach in FOREACH])
        nn.utils.clip_grad_norm_(model.parameters(), MOST)
        expected.append([number(model, order, False) for order in ORDERS])
    for found in on_ranks(4, sharded):
        assert found == [pytest.approx(one, rel=1e-12) for one in expected]


def outlives() -> bool:
    """A gradient knows its norm after its model is gone; a norm that has no sum over ranks is refused."""
    model = backward(made())
    gradients = [parameter.grad for parameter in model.parameters()]
    norm = nn.utils.get_total_norm(gradients)
    del model
    assert nn.utils.get_total_norm(gradients) == norm
    with pytest.raises(lp.ParallelError, match=r"vector_norm\(ord=\)"):
        torch.linalg.vector_norm(gradients[0], 0)
    twin = copy.deepcopy(gradients)
    assert all(type(one) is Tensor for one in twin)
    return True


def test_gradients_that_outlive_their_model() -> None:
    assert all(on_ranks(2, outlives))


def moved() -> bool:
    """A model that was moved."""
    layer = lp.RowParallelLinear(4, 6, input_is_parallel=True, sequence_parallel_enabled=True)
    expected = torch.full((6,), 12.0, dtype=torch.float64)
    x = torch.ones(2, 3, 2, dtype=torch.float64)
    lp.move_model_to_device(layer.double(), torch.get_default_device())
    assert lp.partial_gradients(layer.parameters()) == [layer.bias]
    assert getattr(layer.weight, "tensor_model_parallel", False)
    layer(x).sum().backward()
    assert lp.allreduce_sequence_parallel_gradients(layer) == 1
    assert layer.bias is not None and layer.bias.grad is not None
    return torch.equal(layer.bias.grad.detach(), expected / 2)


def test_a_moved_model_knows_its_parts() -> None:
    assert all(on_ranks(2, moved))


def partial() -> bool:
    """What ``torch.autograd.grad`` makes of a piece of the sequence is a part of a sum, assigned or not."""
    layer = lp.RowParallelLinear(4, 6, input_is_parallel=True, sequence_parallel_enabled=True)
    optimizer = torch.optim.SGD(layer.parameters(), 1.0)
    x = torch.ones(2, 3, 2)

    def assign() -> None:
        found = torch.autograd.grad(layer(x).sum(), list(layer.parameters()))
        for parameter, gradient in zip(layer.parameters(), found, strict=True):
            parameter.grad = gradient

    assign()
    for wrong in (lambda: nn.utils.clip_grad_norm_(layer.parameters(), 1.0), optimizer.step):
        with pytest.raises(lp.ParallelError, match="allreduce_sequence_parallel_gradients"):
            wrong()
    assert lp.allreduce_sequence_parallel_gradients(optimizer) == 1
    torch.autograd.grad(layer(x).sum(), layer.weight)  # of no parameter that is a part of a sum
    layer.bias.grad = layer.bias.grad * 1  # type: ignore[operator]
    nn.utils.clip_grad_norm_(layer.parameters(), math.inf)
    assert torch.equal(layer.bias.grad.detach(), torch.full((6,), 6.0))
    optimizer.step()
    return True


def test_assigned_parts_of_a_sum_are_refused() -> None:
    assert all(on_ranks(2, partial))


def faked() -> bool:
    """What works out an optimizer's memory before its first step takes parameters into a fake mode."""
    layer = lp.ColumnParallelLinear(4, 6, gather_output=False)
    optimizer = torch.optim.AdamW(layer.parameters())
    handle = lowtide.limit_memory(layer, "100%", optimizer=optimizer)
    layer(torch.ones(2, 4)).sum().backward()
    return handle.optimizer_bytes >= 2 * sum(parameter.nbytes for parameter in layer.parameters())


def test_an_optimizers_memory_is_known_before_its_first_step() -> None:
    assert all(on_ranks(2, faked))
