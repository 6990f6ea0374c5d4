"""What a scope verifies, and when."""

from __future__ import annotations

from typing import Any

import pytest
import torch.nn.functional as F
from scoped_model import batch, grads, make
from torch import nn

import lowtide
from lowtide import PlanError
from lowtide.run.record import handles, tape
from lowtide.run.record import recorder as record


class Digests:
    """Counts digests, each of which waits for the device, and second runs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.digests = self.second_runs = 0
        digests = ((module, "digest") for module in (record, handles, tape))
        for module, name in (*digests, (tape, "why_not_reproduced")):
            monkeypatch.setattr(module, name, self.counted(name, getattr(module, name)))

    def counted(self, name: str, function: Any) -> Any:
        def call(*args: Any) -> Any:
            if name == "digest":
                self.digests += 1
            else:
                self.second_runs += 1
            return function(*args)

        return call

    def of(self, step: Any) -> tuple[bool, bool]:
        """Whether a step took digests, and ran operations twice."""
        self.digests = self.second_runs = 0
        step()
        return self.digests > 0, self.second_runs > 0


def test_a_scope_verifies_when_it_runs_for_the_first_time(monkeypatch: pytest.MonkeyPatch, same: Any) -> None:
    plain, model, count = make(), make(), Digests(monkeypatch)
    plain.scoped = lambda k: False
    assert count.of(lambda: grads(model)) == (True, True)
    verified = count.second_runs
    assert [count.of(lambda: grads(model)) for _ in range(3)] == [(False, False)] * 3
    assert all(map(same, grads(plain), grads(model)))
    # another shape, and the same again
    assert count.of(lambda: grads(model, batch()[:3])) == (True, True)
    assert count.of(lambda: grads(model, batch()[:3])) == (False, False)
    assert count.of(lambda: grads(model)) == (False, False)
    # a block that has not run yet
    model.blocks.append(make(1).blocks[0])
    assert count.of(lambda: grads(model)) == (True, True)
    assert 0 < count.second_runs < verified
    # other operations
    model.blocks[1].drop.p = 0.0
    assert count.of(lambda: grads(model)) == (True, True)
    # another model, from the same lines
    assert count.of(lambda: grads(make())) == (True, True)


def test_verify_always_and_never(monkeypatch: pytest.MonkeyPatch, same: Any) -> None:
    count, w = Digests(monkeypatch), nn.Parameter(batch())
    found = []

    def step(verify: Any) -> None:
        w.grad = None
        with lowtide.checkpointing(verify=verify):
            y = F.gelu(w * 2).exp()
        y.sum().backward()
        found.append(w.grad)

    for verify in ("always", "never"):
        for _ in range(2):
            assert count.of(lambda verify=verify: step(verify)) == ((verify == "always",) * 2)
    assert all(same(found[0], other) for other in found)
    with pytest.raises(PlanError, match="'sometimes' is not known"):
        lowtide.checkpointing(verify="sometimes")  # type: ignore[arg-type]


def test_a_scope_in_code_that_is_recorded_otherwise_is_verified_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a rule kept was not verified; it is when another rule evicts it in the same place."""
    count, model = Digests(monkeypatch), make(1)
    for policy, verified in (("keep_all", False), (["aten.gelu"], True), (None, True), (None, False)):
        model.policy = policy
        assert count.of(lambda: grads(model)) == (verified, verified), policy
