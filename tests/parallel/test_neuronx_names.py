"""What neuronx-distributed's layers do beside splitting (uncollected outputs, padding to a multiple, padded
heads, convolutions, models that move), against unsharded twins: outputs, gradients, norms, steps,
checkpoints, and limits.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint  # once, before processes are made
from neuronx_models import MODELS, Blocks, Convolutions, Features
from ranks import on_each_backend, on_ranks
from shared_models import make as make_gpt
from shared_models import step
from test_layers import gathered
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import lowtide
from lowtide import parallel as lp
from lowtide.parallel.module import ParallelModule

pytestmark = on_each_backend
MOST = 0.01


def twins(make: Any) -> tuple[Any, Any]:
    """A shared model and the twin with its weights."""
    torch.manual_seed(5)
    whole = make(False, dist.get_world_size())
    shared = make(True, dist.get_world_size())
    lp.load_whole_state_dict(shared, whole.state_dict())
    return shared, whole


def near(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool((a - b).norm() <= 1e-12 * b.norm().clamp_min(1))


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Of a shared model the whole ones; padding without a gradient of zero fails."""
    found: dict[str, Tensor] = {}
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.grad is not None:
                grad = parameter.grad.detach().clone()
                is_cut = isinstance(module, ParallelModule)
                found[f"{prefix}.{name}"] = gathered(module, name, grad) if is_cut else grad
    return found


def backward(model: nn.Module, given: Tensor) -> tuple[Tensor, Tensor | None]:
    x = given.clone().requires_grad_(given.is_floating_point())
    out = model(x)
    out.sin().sum().backward()
    return out.detach(), x.grad


def against_twins() -> list[str]:
    faults = []
    for make in MODELS:
        for batch in (1, 3):
            shared, whole = twins(make)
            (own, own_grad), (other, other_grad) = (
                backward(model, whole.example(batch)) for model in (shared, whole)
            )
            found, expected = gradients(shared), gradients(whole)
            same = {
                "output": near(own, other),
                "input": own_grad is None or (other_grad is not None and near(own_grad, other_grad)),
                "parameters": found.keys() == expected.keys() and len(found) > 0,
                **{name: near(found[name], gradient) for name, gradient in expected.items()},
            }
            faults += [f"{make.__name__} of {batch}: {what}" for what, is_near in same.items() if not is_near]
    return faults


@pytest.mark.parametrize("size", [1, 2])
def test_outputs_and_gradients_are_a_twins(size: int) -> None:
    assert on_ranks(size, against_twins) == [[]] * size


def clipped(model: nn.Module, way: str) -> Tensor:
    if way == "lowtide":
        return lp.clip_grad_norm(model.parameters(), MOST)
    return nn.utils.clip_grad_norm_(model.parameters(), MOST)


def trained(folder: str) -> list[str]:
    """Norms and steps are a twin's, the padding stays zero, and the checkpoint is the twin's."""
    faults = []
    for make in MODELS:
        models = twins(make)
        optimizers = [torch.optim.AdamW(model.parameters(), 1e-2, eps=1e-4) for model in models]
        for way in ("lowtide", "torch", "lowtide"):
            norms = []
            for model, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()
                backward(model, models[1].example(2))
                norms.append(clipped(model, way).double())
                optimizer.step()
            if abs(norms[0] / norms[1] - 1) > 1e-12:
                faults.append(f"{make.__name__}: {way} norm {norms[0]} {norms[1]}")
        faults += [f"{make.__name__}: step {name}" for name in differ(*models)]
        own = [m for m in models[0].modules() if isinstance(m, ParallelModule)]
        for module in own:
            for name, parameter in module.named_parameters(recurse=False):
                gathered(module, name, parameter)  # fails if padding was trained
        lp.save_checkpoint(f"{folder}/{make.__name__}", models[0], optimizers[0])
    return faults


def differ(shared: nn.Module, whole: nn.Module) -> list[str]:
    found, expected = lp.whole_state_dict(shared), whole.state_dict()
    assert found.keys() == expected.keys()
    return [name for name in found if not (found[name] - expected[name]).abs().max() <= 1e-12]


def resumed(folder: str) -> list[str]:
    """A shared model, and a plain one, go on from the checkpoint alike."""
    faults = []
    for make in MODELS:
        models = twins(make)
        for model in models:
            optimizer = torch.optim.AdamW(model.parameters(), 1e-3, eps=1e-4)
            lp.load_checkpoint(f"{folder}/{make.__name__}", model, optimizer)
            backward(model, models[1].example(2))
            optimizer.step()
            loaded = [parameter.clone() for parameter in model.parameters()]
            model.load_state_dict(model.state_dict())
            optimizer.load_state_dict(optimizer.state_dict())
            assert all(map(torch.equal, loaded, model.parameters()))
        faults += [f"{make.__name__}: resumed {name}" for name in differ(*models)]
    return faults


def test_norms_steps_and_checkpoints_are_a_twins(tmp_path: Path) -> None:
    for size, other in ((2, 1), (1, 2)):
        folder = str(tmp_path / str(size))
        assert on_ranks(size, trained, folder) == [[]] * size
        assert on_ranks(other, resumed, folder) == [[]] * other


def sharded_once_more() -> list[str]:
    """FSDP2 shards what tensor-parallel ranks hold: norms and steps are those of a twin with both batches."""
    faults = []
    mesh = init_device_mesh(torch.get_default_device().type, (2, 2), mesh_dim_names=("dp", "tp"))
    for make in MODELS:
        torch.manual_seed(5)
        whole, shared = make(False, 2), make(True, 2, mesh["tp"])
        lp.load_whole_state_dict(shared, whole.state_dict())
        fully_shard(shared, mesh=mesh["dp"])
        lp.mark_partial_gradients(shared)
        given: Any = whole.example(4)
        models = {shared: given.chunk(2)[mesh["dp"].get_local_rank()], whole: given}
        for way in ("lowtide", "torch"):
            norms = []
            for model, own in models.items():
                model.zero_grad()
                (model(own).sin().sum() / len(own)).backward()
                norm: Any = clipped(model, way)
                norms.append(float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))
                torch.optim.SGD(model.parameters(), 1.0).step()
            if abs(norms[0] / norms[1] - 1) > 1e-12:
                faults.append(f"{make.__name__}: {way} norm {norms[0]} {norms[1]}")
        faults += [f"{make.__name__}: step {name}" for name in differ(shared, whole)]
    return faults


@pytest.mark.slow
def test_fsdp2_shards_them_once_more() -> None:
    assert on_ranks(4, sharded_once_more) == [[]] * 4


def compiled() -> list[str]:
    """``torch.compile`` takes a model in one graph."""
    faults = []
    for make in (Features, Blocks, Convolutions):
        model, _ = twins(make)
        given = model.example(3)
        expected = backward(model, given)[0], *(p.grad for p in model.parameters())
        model.zero_grad(set_to_none=True)
        one: Any = torch.compile(model, backend="aot_eager", fullgraph=True)
        found = backward(one, given)[0], *(p.grad for p in model.parameters())
        if not all(map(torch.equal, found, expected)):
            faults.append(make.__name__)
    return faults


@pytest.mark.slow
def test_one_graph_holds_a_model() -> None:
    assert on_ranks(2, compiled) == [[]] * 2


def steps(model: nn.Module, given: Tensor) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    found = []
    for _ in range(3):
        optimizer.zero_grad()
        out, _ = backward(model, given)
        found += [out, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        optimizer.step()
    return found


LIMITED = [MODELS[:1] + MODELS[2:-1], MODELS[1:2], MODELS[-1:]]
"""Models one behind the other: first those from tokens to vectors of a width, and between these."""


class Wide(nn.Module):
    """What makes a step large of which a limit can evict 40 %."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([x] * 4, -1)
        for _ in range(10):
            x = nn.functional.gelu(x)
        return x


def limited() -> list[str]:
    """At 60 % of the step's memory, and at the least, what a step without a limit computes, to the bit."""
    warnings.simplefilter("ignore", lowtide.LowtideWarning)
    faults = []
    for makes in LIMITED:
        plain, *others = (nn.Sequential(*(twins(make)[0] for make in makes), Wide()) for _ in range(3))
        given: Any = plain[0]
        given = given.example(64)
        expected = steps(plain, given)
        for budget, model in zip(("60%", "min"), others, strict=True):
            handle = lowtide.limit_memory(model, budget)
            found = steps(model, given)
            assert handle.plan is not None and handle.plan.budget_bytes is not None
            if len(found) != len(expected) or not all(map(torch.equal, found, expected)):
                faults.append(f"{makes[0].__name__} at {budget}: other bits")
            if handle.plan.predicted_peak_bytes > handle.plan.budget_bytes:
                faults.append(f"{makes[0].__name__} at {budget}: above its budget")
    return faults


def test_limits_compute_the_same_bits() -> None:
    assert on_ranks(2, limited) == [[]] * 2


def moved(replaced: bool) -> list[str]:
    """A model with padding, a tied weight and partial gradients moves, and trains on as its twin. PyTorch
    replaces the parameters of a model that moves, if it is told to.
    """
    place = torch.get_default_device()
    with torch.device("cpu"):
        whole, shared = (make_gpt("gpt", *given, hidden_width=90) for given in ((), (dist.group.WORLD, True)))
    lp.load_whole_state_dict(shared, whole.state_dict())
    partial = len(lp.partial_gradients(shared.parameters()))
    count = len(list(shared.parameters()))
    torch.__future__.set_overwrite_module_params_on_conversion(replaced)
    lp.move_model_to_device(shared, place)
    torch.__future__.set_overwrite_module_params_on_conversion(False)
    whole.to(place)
    models = shared, whole
    optimizers = [torch.optim.SGD(model.parameters(), 0.1, momentum=0.9) for model in models]
    faults = []
    for number in range(3):
        losses = [step(model, optimizer) for model, optimizer in zip(models, optimizers, strict=True)]
        norms = [float(lp.get_grad_norm(model.parameters())) for model in models]
        if abs(losses[0] - losses[1]) > 1e-12 or abs(norms[0] / norms[1] - 1) > 1e-12:
            faults.append(f"step {number}: {losses} {norms}")
    if len(lp.partial_gradients(shared.parameters())) != partial or not partial:
        faults.append("other gradients are parts of a sum")
    if len(list(shared.parameters())) != count or {p.device for p in shared.parameters()} != {place}:
        faults.append("another number of parameters, or elsewhere")
    return faults + differ(shared, whole)


@pytest.mark.parametrize("replaced", [False, True])
def test_a_model_that_moves_trains_as_its_twin(replaced: bool) -> None:
    assert on_ranks(2, moved, replaced) == [[]] * 2
