"""torch.distributed does what `lowtide.private.distributed` says."""

from __future__ import annotations

import pytest
import torch

from lowtide import private


def test_waiting_for_a_collective_on_fake_tensors_makes_no_copy() -> None:
    with private.fake_mode():
        fake = torch.ones(3)
    assert private.wait_for_collective(fake) is fake
    real = torch.ones(3)
    assert torch.equal(private.wait_for_collective(real), real)


def test_an_assertion_on_the_device_raises() -> None:
    private.assert_on_device(torch.tensor(True), "fine")
    with pytest.raises(RuntimeError, match="not fine"):
        private.assert_on_device(torch.tensor(False), "not fine")


def test_collectives_among_ranks_that_are_not_there() -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group("fake", rank=0, world_size=4, store=private.fake_store())
    try:
        group = dist.group.WORLD
        assert group is not None and private.process_group_named(group.group_name) is group
        found = private.collectives().all_gather_into_tensor(torch.ones(2, 3), 4, group.group_name)
        assert private.wait_for_collective(found).shape == (8, 3)
        whole = torch.arange(8.0)
        mesh = DeviceMesh("cpu", list(range(4)))
        sharded = distribute_tensor(whole, mesh, [Shard(0)])
        assert private.is_distributed(sharded) and not private.is_distributed(whole)
        assert private.local_tensor(sharded).shape == (2,) and private.local_tensor(whole) is whole
        piece = torch.ones(2)
        like = private.distributed_like(piece, sharded)
        assert like.shape == (8,) and private.local_tensor(like) is piece
        assert like.placements == sharded.placements
        sharded.requires_grad_()
        assert private.own_part(sharded * 2).grad_fn is not None and private.own_part(whole) is whole
        gather = torch.ops._c10d_functional.all_gather_into_tensor.default
        assert private.process_group_of(gather, (piece, 4, group.group_name), {}) is group
        assert private.process_group_of(gather, (piece, 4), {"group_name": group}) is group
    finally:
        dist.destroy_process_group()


def test_who_averages_the_gradients() -> None:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    class Asks(torch.nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            self.found = private.replicated_by(self), private.replicated_by(torch.nn.Linear(1, 1))
            return super().forward(input)

    inner = Asks(2, 2)
    inner(torch.ones(2))
    assert inner.found == (None, None)
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        wrapped = DistributedDataParallel(inner)
        wrapped(torch.ones(2))
        assert inner.found == (dist.group.WORLD, None)
        assert not private.has_new_buckets(wrapped) and not private.has_new_buckets(inner)
        for _ in range(2):
            wrapped(torch.ones(2)).sum().backward()
        assert private.has_new_buckets(wrapped)
        assert private.replicated_by(wrapped) is dist.group.WORLD and private.replicated_by(inner) is None
    finally:
        dist.destroy_process_group()


def test_a_group_that_is_not_there() -> None:
    with pytest.raises((RuntimeError, ValueError, LookupError)):
        private.process_group_named("nobody's")
