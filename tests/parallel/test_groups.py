"""A model-parallel unit (``mpu``) in a group's place: the bits are those of its process group."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import on_each_backend, on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import gelu

import lowtide
import lowtide.parallel as lp
from lowtide.parallel.data import average_gradients

pytestmark = on_each_backend

GROUP, RANK, SIZE = (f"get_tensor_model_parallel_{what}" for what in ("group", "rank", "world_size"))
NONE_OF_TENSORS = dict.fromkeys((GROUP, RANK, SIZE))


def unit(without: Any = (), **other: Any) -> Any:
    """A unit of a world of two, whose ranks split tensors and nothing else."""
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    told = {GROUP: dist.group.WORLD, RANK: dist.get_rank(), SIZE: 2}
    told |= {"get_data_parallel_group": alone, "get_pipeline_model_parallel_group": alone}
    told |= {"get_model_parallel_group": alone}  # another group, where tensors have theirs
    functions = {name: staticmethod(lambda found=found: found) for name, found in (told | other).items()}
    return type("Unit", (), {name: made for name, made in functions.items() if name not in without})()


def units() -> list[Any]:
    """Today's names with and without rank and size, and the older ones."""
    world = dist.group.WORLD
    sliced = {"get_slice_parallel_group": world, "get_slice_parallel_rank": dist.get_rank()}
    oldest = {"get_model_parallel_group": world, "get_model_parallel_world_size": 2}
    return [
        unit(),
        unit([RANK, SIZE]),
        unit(NONE_OF_TENSORS, **sliced),
        unit(NONE_OF_TENSORS, **oldest),
    ]


def step(group: Any, whole: nn.Sequential, x: Tensor) -> list[Tensor]:
    up = lp.ColumnParallelLinear(4, 6, gather_output=False, tensor_model_parallel_group=group)
    down = lp.RowParallelLinear(6, 4, input_is_parallel=True, tensor_model_parallel_group=group)
    lp.load_whole_state_dict(up, whole[0].state_dict())
    lp.load_whole_state_dict(down, whole[1].state_dict())
    found = down(gelu(up(x)))
    found.square().sum().backward()
    return [found.detach(), *(p.grad for p in (*up.parameters(), *down.parameters()) if p.grad is not None)]


def layers() -> bool:
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
    x = torch.randn(3, 4)
    expected = step(dist.group.WORLD, whole, x)
    assert torch.allclose(expected[0], whole[1](gelu(whole[0](x))), atol=1e-6)
    for given in units():
        assert lp.tensor_group(given) == lp.tensor_group()
        assert all(map(torch.equal, step(given, whole, x), expected))
    split = lp.parallelize(nn.ModuleDict({"up": nn.Linear(4, 6)}), unit(), plan={"up": "colwise"})
    return sum(p.numel() for p in split.parameters()) == (4 * 6 + 6) // 2


def other_ranks() -> bool:
    """Where the batch is split, or layers are, a unit and a mesh mean the ranks that do."""
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.full((2,), float(dist.get_rank()))
    assert average_gradients([weight], unit()) == 0
    assert lp.get_grad_norm([weight], pipeline=unit()) == weight.grad.norm()
    mesh = init_device_mesh(torch.get_default_device().type, (2, 1), mesh_dim_names=("dp", "tp"))
    assert average_gradients([weight], mesh) == 1
    return torch.equal(weight.grad, torch.full((2,), 0.5))


def stores() -> bool:
    """A plan that shards over a unit's group."""

    def losses(group: Any) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(
            *(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(3))
        )
        policy = lowtide.policies.partition("tp", 2, min_bytes=1)
        lowtide.limit_memory(model, policy=policy, stores=lowtide.Stores(groups={"tp": group}))
        for _ in range(2):
            model(torch.ones(8, 16)).sum().backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    return all(map(torch.equal, losses(unit()), losses(dist.group.WORLD)))


def refusals() -> bool:
    here = dist.get_rank()
    for given, words in [
        (unit([GROUP]), f"Unit has {RANK}, but no {GROUP}: add this function"),
        (unit([GROUP, RANK]), f"Unit has {SIZE}, but no {GROUP}: add this function"),
        (unit(**{GROUP: None}), f"{GROUP} returned None: initialize its groups first"),
        (unit(**{RANK: 7}), f"{RANK} returned 7, but the process group of {GROUP} has {here}"),
        (unit(**{SIZE: 4}), f"{SIZE} returned 4, but the process group of {GROUP} has 2"),
        (object(), f"an object with {GROUP}"),
    ]:
        with pytest.raises(lp.ParallelError, match=words):
            lp.tensor_group(given)
    alone = unit(**{GROUP: None, RANK: 0, SIZE: 1})
    return lp.tensor_group(alone).size == 1


@pytest.mark.parametrize("body", [layers, other_ranks, stores, refusals])
def test_units(body: Any) -> None:
    assert on_ranks(2, body) == [True, True]
