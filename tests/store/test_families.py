"""Bitwise the same step on every family of models, with a quarter each of what would be saved kept, recomputed, on disk and on the host."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import zoo

import lowtide
from lowtide import policies
from lowtide.graph import StepGraph
from lowtide.plan.moves import lossless_codec, movable
from lowtide.plan.plan import Compress, Moving, Offload, Plan
from lowtide.plan.simulate import Simulator

pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("quiet_transformers")

FAMILIES = {family.name: family for family in zoo.FAMILIES}


def quarters(graph: StepGraph, budget: int | None = None) -> Plan:
    """Keep, recompute, offload to disk and to the host in turn; what a lossless codec fits is compressed on its way."""
    sim = Simulator(graph)
    moves: dict[int, Moving] = {}
    dtypes = {s.value: s.dtype.removeprefix("torch.") for s in graph.saved}
    may = set(movable(sim))
    stored = {v for k, v in enumerate(sorted(sim.droppable)) if k % 4}
    for k, value in enumerate(sorted(sim.droppable)):
        if value in may and k % 4 > 1:
            codec = lossless_codec(sim, value, dtypes[value])
            moves[value] = Compress(codec) if codec else Offload("disk" if k % 4 == 2 else "host")
    return policies.make_plan(graph, stored=stored, policy="quarters", moves=moves, window_bytes=1 << 16)


EVERY_TIME = ("gpt2", "bert", "t5", "vit", "resnet", "mamba", "mixtral", "wav2vec2", "lstm", "unet")


@pytest.mark.parametrize("name", [name if name in EVERY_TIME else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES])
def test_a_mix_of_all_stores(name: str) -> None:
    torch.manual_seed(0)
    model, batch = FAMILIES[name].build()
    twin = copy.deepcopy(model.train())
    handle = lowtide.limit_memory(twin, policy=quarters)
    with warnings.catch_warnings():
        warnings.simplefilter("error", lowtide.LowtideWarning)
        for seed in range(3):
            found = []
            for which in (model, twin):
                which.zero_grad()
                torch.manual_seed(seed)
                loss = which(**batch).loss
                loss.backward()
                gradients = [p.grad.clone() for p in which.parameters() if p.grad is not None]
                found.append([loss.detach(), *gradients, *(b.clone() for b in which.buffers())])
            assert len(found[0]) == len(found[1])
            for a, b in zip(*found, strict=True):
                assert torch.equal(a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8))
    assert handle.plan is not None and handle.plan.moves
    for tier in handle._limiter.stores.tiers.values():
        assert tier.arena.taken_bytes == 0
    handle.remove()
