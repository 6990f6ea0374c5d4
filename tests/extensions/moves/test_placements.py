"""Which values may move, and in which ways."""

from __future__ import annotations

import torch
from torch import nn

import lowtide
from lowtide.extensions.moves.placements import (
    placements_of,
)
from lowtide.plan.data import Chain, Compress, Offload
from lowtide.plan.search import Search


def test_codecs_are_offered_once_and_where_they_save() -> None:
    model = nn.Sequential(nn.Linear(24, 24), nn.GELU(), nn.Linear(24, 24), nn.LayerNorm(24))
    graph = lowtide.trace(lambda: model(torch.randn(64, 24)).square().mean())
    sim = Search(graph).sim
    offered = [Compress("int4"), Chain(Compress("int4"), Offload("disk")), Compress("int8"), Compress("int8")]
    ways = placements_of(sim, offered, {}, 1)
    assert {tuple(m.decision for m in rows) for rows in ways.values()} == {tuple(offered[:3])}
    assert not placements_of(sim, [Compress("mask")], {}, 1 << 20)
    assert lowtide.measure_links("int4").keys() == {"int4"}
