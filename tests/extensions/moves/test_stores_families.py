"""Bitwise the same step on every family of models, with a quarter each of what would be saved kept,
recomputed, on disk and on the host.
"""

from __future__ import annotations

import copy

import pytest
import torch
import zoo
from moving_net import check_same_steps

import lowtide
from lowtide import policies
from lowtide.extensions.moves.placements import lossless_codec, movable
from lowtide.graph import StepGraph
from lowtide.plan.data import Compress, Moving, Offload, Plan
from lowtide.plan.simulate import Simulator

pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("quiet_transformers")

FAMILIES = {family.name: family for family in zoo.FAMILIES}


def quarters(graph: StepGraph, budget: int | None = None) -> Plan:
    """Keep, recompute, offload to disk and to the host in turn; what a lossless codec fits is compressed on
    its way.
    """
    sim = Simulator(graph)
    moves: dict[int, Moving] = {}
    may = set(movable(sim))
    stored = {v for k, v in enumerate(sorted(sim.droppable)) if k % 4}
    for k, value in enumerate(sorted(sim.droppable)):
        if value in may and k % 4 > 1:
            codec = lossless_codec(sim, value)
            moves[value] = Compress(codec) if codec else Offload("disk" if k % 4 == 2 else "host")
    return policies.make_plan(graph, stored=stored, policy="quarters", moves=moves, window_bytes=1 << 16)


EVERY_TIME = ("gpt2", "bert", "t5", "vit", "resnet", "mamba", "mixtral", "wav2vec2", "lstm", "unet")


@pytest.mark.parametrize(
    "name", [name if name in EVERY_TIME else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]
)
def test_a_mix_of_all_stores(name: str) -> None:
    torch.manual_seed(0)
    model, batch = FAMILIES[name].build()
    twin = copy.deepcopy(model.train())
    handle = lowtide.limit_memory(twin, policy=quarters)
    check_same_steps(model, twin, batch, 3)
    assert handle.plan is not None and handle.plan.moves
    for tier in handle._limiter.extensions[0].stores.tiers.values():
        assert tier.arena.taken_bytes == 0
    handle.remove()
