"""What `lowtide.private.fsdp` asks of FSDP2, on one rank without a network."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lowtide import private

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed")


@pytest.fixture
def model() -> Iterator[Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("fake", store=private.fake_store(), rank=0, world_size=2)
    try:
        made = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        mesh = init_device_mesh("cpu", (2,))
        fully_shard(made[0], mesh=mesh)
        yield fully_shard(made, mesh=mesh)
    finally:
        dist.destroy_process_group()


def test_units_are_found(model: Any) -> None:
    assert private.may_shard()
    assert private.units(model) == [model, model[0]]
    assert private.is_root(model) and private.is_root(model[0]), "nobody has called it yet"
    model(torch.ones(2, 4))
    assert private.is_root(model) and not private.is_root(model[0])
    assert not private.is_unit(model[1]) and not private.is_first_fsdp(model)
    assert private.is_sharded(model) and not private.is_sharded(model[1])
    assert len(private.process_groups(model)) == 1


def test_units_are_gathered_and_freed_once(model: Any) -> None:
    private.gather_once(model)
    found = dict(private.gathered(model))
    assert set(found) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert all(tensor.untyped_storage().nbytes() == 0 for tensor in found.values())
    private.gather_once(nn.Linear(2, 2))  # no FSDP, nothing to gather


def test_gathered_storages_are_empty_between_steps(model: Any) -> None:
    assert list(private.gathered(model)) == []
    before = private.settings(model)
    model(torch.ones(2, 4)).sum().backward()
    found = dict(private.gathered(model))
    assert set(found) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert all(tensor.untyped_storage().nbytes() == 0 and tensor.numel() for tensor in found.values())
    assert private.settings(model) == before, "a first step changes none"
    assert private.weight_in(found["0.weight"].untyped_storage()) == "0.weight"
    assert private.weight_in(torch.ones(1).untyped_storage()) == ""


def test_settings_and_gradients_that_wait_whole_are_told_apart(model: Any) -> None:
    before = private.settings(model)
    model.set_requires_gradient_sync(False)
    assert private.settings(model) != before
    model(torch.ones(2, 4)).sum().backward()
    waiting = [gradient for gradient in private.unsharded_gradients(model) if gradient is not None]
    assert sorted(gradient.numel() for gradient in waiting) == [4, 4, 16, 16]
    assert all(parameter.grad is None for parameter in model.parameters())
    own = private.settings(model)
    model.set_reshard_after_backward(False)
    assert private.settings(model) != own


def test_units_begin_and_end_whatever_method_calls_them(model: Any) -> None:
    from torch.distributed.fsdp import register_fsdp_forward_method

    model(torch.ones(2, 4))
    type(model[0]).other = nn.Linear.forward
    register_fsdp_forward_method(model[0], "other")
    seen: list[tuple[str, bool]] = []

    def filled(when: str) -> None:
        weights = [t for name, t in private.gathered(model) if name == "0.weight"]
        seen.append((when, bool(weights[0].untyped_storage().nbytes())))

    with private.around_units(model, lambda *_: filled("begins"), lambda *_: filled("ended")):
        model[0].other(torch.ones(2, 4))
        model[0](torch.ones(2, 4))
    model[0].other(torch.ones(2, 4))
    assert seen == [("begins", True), ("ended", False)] * 2


def test_a_call_goes_where_it_is_sent_hooks_and_all(model: Any) -> None:
    seen: list[str] = []

    def call(*args: Any) -> Any:
        seen.append("in")
        return private.own_call(model, *args)

    model.register_forward_pre_hook(lambda *_: seen.append("hook"))
    private.called_by(model, call)
    model(torch.ones(2, 4))
    private.called_by(model, None)
    model(torch.ones(2, 4))
    assert seen == ["in", "hook", "hook"]


def test_the_work_that_a_collective_returns_is_waited_for(model: Any) -> None:
    seen: list[Any] = []

    class Sees(private.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func(*args, **(kwargs or {})))
            return seen[-1]

    with Sees():
        dist.all_reduce(torch.ones(3))
    found = [result for result in seen if isinstance(result, tuple)]
    assert isinstance(found[-1][-1], torch.ScriptObject)
    assert private.wait_for_work(found[-1]) is found[-1]
