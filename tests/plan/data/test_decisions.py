"""Decisions are plain data: they go through JSON, and one that cannot be is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest

from lowtide.errors import PlanError
from lowtide.plan.data import Chain, Compress, Keep, Link, Offload, Recompute, Shard, form_and_tier
from lowtide.plan.data.decisions import decision_from_json

EVERY = [
    Keep(), Recompute(), Offload("disk", "/mnt"), Compress("int8"), Shard("data", 4),
    Chain(Shard("data", 4), Offload("host")), Chain(Compress("mask"), Offload("disk")),
]  # fmt: skip


@pytest.mark.parametrize("decision", EVERY, ids=lambda decision: decision.kind)
def test_a_decision_is_the_same_after_json(decision: Any) -> None:
    assert decision_from_json(json.loads(json.dumps(asdict(decision)))) == decision


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Offload("tape"), "give 'host' or 'disk'"),
        (lambda: Offload("host", "/mnt"), "has no path"),
        (lambda: Shard("data", 0), "1 or more"),
        (lambda: Chain(Keep(), Offload()), "a Shard or a Compress"),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_be_is_refused(make: Callable[[], Any], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        make()


def test_a_chain_is_its_form_and_its_tier() -> None:
    assert form_and_tier(EVERY[-1]) == (Compress("mask"), Offload("disk"))  # type: ignore[arg-type]
    assert form_and_tier(Offload("disk")) == (None, Offload("disk"))
    assert form_and_tier(Compress("int8")) == (Compress("int8"), None)


def test_each_transfer_has_its_latency() -> None:
    link = Link(write_bytes_per_second=100, read_bytes_per_second=50, latency_seconds=0.5)
    assert (link.seconds_out(100), link.seconds_in(100), link.there_and_back(100)) == (1.5, 2.5, 3.0)
