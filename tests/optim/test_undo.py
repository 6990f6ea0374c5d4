"""An update that is undone leaves the bytes from before it; the steps after it are the plain ones."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from benchmarks.throttled_link import ThrottledLink
from runs import ADAMW, IDS, KINDS, MODES, batch, equal, groups, model, same_state, train
from torch import nn

from lowtide.optim import HostOptimizer, OptimError

STREAMED = [mode for mode in MODES if mode.endswith("streamed")]


def bits(net: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    return [[p.detach().clone() for p in net.parameters()], copy.deepcopy(optimizer.state_dict())]


def same(a: list[Any], b: list[Any]) -> bool:
    return all(map(torch.equal, a[0], b[0])) and same_state(a[1], b[1])


def reversible(net: nn.Module, kind: Any = torch.optim.AdamW, **options: Any) -> HostOptimizer:
    return HostOptimizer(kind, groups(net), reversible=True, **options)


@pytest.mark.parametrize("fraction", [0.0, 0.3, 0.8, 1.0])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rollback_restores_every_byte(mode: str, fraction: float, dtype: torch.dtype) -> None:
    plain_model, net = model(dtype), model(dtype)
    ours = reversible(net, host_fraction=fraction, **MODES[mode](), **ADAMW)
    twin = HostOptimizer(torch.optim.AdamW, groups(plain_model), **ADAMW)
    for step in range(3):
        train(plain_model, twin, range(step, step + 1))
        before = bits(net, ours)
        train(net, ours, range(step, step + 1))
        after = bits(net, ours)
        assert not same(before, after)
        ours.rollback()
        assert same(before, bits(net, ours))
        with pytest.raises(OptimError, match="no update to undo"):
            ours.rollback()
        ours.step()  # the gradients are still there
        assert same(after, bits(net, ours))
        assert equal(plain_model, net)
    ours.close()


@pytest.mark.parametrize("fraction", [0.5, 1.0])
@pytest.mark.parametrize(
    ("kind", "options"),
    [*KINDS, (torch.optim.RMSprop, {"lr": 1e-3, "momentum": 0.9}), (torch.optim.NAdam, {"lr": 1e-3})],
    ids=[*IDS, "rmsprop", "nadam"],
)
def test_every_kind_of_state(kind: Any, options: dict[str, Any], fraction: float) -> None:
    net = model()
    ours = reversible(net, kind, host_fraction=fraction, **options)
    for step in range(3):
        before = bits(net, ours)
        train(net, ours, range(step, step + 1))
        after = bits(net, ours)
        ours.rollback()
        assert same(before, bits(net, ours))
        ours.step()
        assert same(after, bits(net, ours))


@pytest.mark.parametrize("mode", ["memory", "disk-streamed", "link-streamed"])
def test_subgroups(mode: str) -> None:
    """Steps of subgroups are one step; each is undone alone."""
    whole, net = model(), model()
    one = HostOptimizer(torch.optim.AdamW, groups(whole), host_fraction=0.7, **ADAMW)
    ours = reversible(net, host_fraction=0.7, **MODES[mode](), **ADAMW)
    parts = [list(net.second.parameters()), [net.gain, net.unused], list(net.first.parameters())]
    known = {id(p) for part in parts for p in part}
    parts.append([p for p in net.parameters() if id(p) not in known])
    for step in range(3):
        train(whole, one, range(step, step + 1))
        net.zero_grad()
        net(batch(step * 10)).backward()
        for part in parts:
            ours.step_subgroup(part)
        assert equal(whole, net)
        assert same_state(one.state_dict(), ours.state_dict())
    after = bits(net, ours)
    ours.rollback(parts[0])
    changed = {id(p) for p in parts[0]}
    for p, then in zip(net.parameters(), after[0], strict=True):
        assert torch.equal(p, then) == (id(p) not in changed)
    ours.step_subgroup(parts[0])
    assert same(after, bits(net, ours))
    ours.rollback(net.parameters())
    ours.step()
    assert same(after, bits(net, ours))
    with pytest.raises(OptimError, match="of this optimizer"):
        ours.step_subgroup(nn.Linear(2, 2).parameters())
    with pytest.raises(OptimError, match="of this optimizer"):
        ours.rollback([torch.zeros(3)])


@pytest.mark.parametrize("fraction", [0.6, 1.0])
@pytest.mark.parametrize("mode", STREAMED)
def test_updates_beside_backward_are_clipped(mode: str, fraction: float) -> None:
    """Updates begin before the norm is known. Clipped or not, all steps are the plain ones."""
    plain_model, net = model(), model()
    plain = torch.optim.AdamW(groups(plain_model), fused=True, **ADAMW)
    ours = reversible(net, host_fraction=fraction, overlap_update=True, **MODES[mode](), **ADAMW)
    clipped = []
    for step in range(6):
        limit = 1e-3 if step % 2 else 1e3
        for one, optimizer in ((plain_model, plain), (net, ours)):
            optimizer.zero_grad()
            one(batch(step)).backward()
        own = [p for group in plain.param_groups for p in group["params"]]
        expected = nn.utils.clip_grad_norm_(own, limit)
        early = any(slot.updated for slot in ours._slots.values())
        assert torch.equal(ours.clip_grad_norm_(limit), expected)
        clipped.append((early, any(slot.updated for slot in ours._slots.values())))
        plain.step()
        ours.step()
        assert equal(plain_model, net)
        assert same_state(plain.state_dict(), ours.state_dict())
    assert clipped == [(True, True), (True, False)] * 3
    ours.close()


@pytest.mark.parametrize("fraction", [0.6, 1.0])
@pytest.mark.parametrize("forget", ["optimizer", "model"])
@pytest.mark.parametrize("fault", ["exception", "not finite"])
def test_a_step_that_is_skipped_leaves_no_trace(fault: str, forget: str, fraction: float) -> None:
    """Where updates ran beside a backward that failed, or had no finite gradients, training goes on."""
    plain_model, net = model(), model()
    plain = torch.optim.AdamW(groups(plain_model), fused=True, **ADAMW)
    more: dict[str, Any] = {"link": ThrottledLink(), "stream_gradients": True, "overlap_update": True}
    ours = reversible(net, host_fraction=fraction, **more, **ADAMW)
    for one, optimizer in ((plain_model, plain), (net, ours)):
        train(one, optimizer, range(3))
        optimizer.zero_grad()
    before = [p.detach().clone() for p in net.parameters()]
    if fault == "exception":
        handle = net.first.weight.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            net(batch(3)).backward()
        handle.remove()
    else:
        (net(batch(3)) * float("inf")).backward()
        assert not torch.isfinite(ours.clip_grad_norm_(1.0))
    if forget == "optimizer":
        ours.zero_grad()
        assert same_state(plain.state_dict(), ours.state_dict())
    else:
        net.zero_grad()
    assert all(map(torch.equal, before, net.parameters()))
    for one, optimizer in ((plain_model, plain), (net, ours)):
        one(batch(4)).backward()
        optimizer.step()
    assert equal(plain_model, net)
    assert same_state(plain.state_dict(), ours.state_dict())
    ours.close()


def test_hyper_parameters_that_change_after_backward() -> None:
    plain_model, net = model(), model()
    plain = torch.optim.AdamW(groups(plain_model), fused=True, **ADAMW)
    ours = reversible(net, overlap_update=True, stream_gradients=True, **ADAMW)
    for step in range(3):
        for one, optimizer in ((plain_model, plain), (net, ours)):
            optimizer.zero_grad()
            one(batch(step)).backward()
            optimizer.param_groups[0]["lr"] *= 0.5
            optimizer.step()
        assert equal(plain_model, net)


def test_what_cannot_be_undone() -> None:
    net = model()
    ours = HostOptimizer(torch.optim.AdamW, net.parameters(), **ADAMW)
    train(net, ours, range(1))
    with pytest.raises(OptimError, match="reversible=True"):
        ours.rollback()
    with pytest.raises(OptimError, match="reversible and delayed"):
        HostOptimizer(torch.optim.AdamW, net.parameters(), reversible=True, delayed=True)
    ours = reversible(net, **ADAMW)
    with pytest.raises(OptimError, match="no update to undo"):
        ours.rollback()
    train(net, ours, range(2))
    with torch.no_grad():
        net.gain.fill_(3.0)
    with pytest.raises(OptimError, match="1 parameters were written to"):
        ours.rollback()
    train(net, ours, range(1))
    ours.load_state_dict(copy.deepcopy(ours.state_dict()))
    with pytest.raises(OptimError, match="a checkpoint was loaded"):
        ours.rollback()
    ours = reversible(net, overlap_update=True, stream_gradients=True, **ADAMW)
    train(net, ours, range(2))
    net.zero_grad()
    net(batch(2)).backward()
    with pytest.raises(OptimError, match="running beside backward"):
        ours.rollback()
    ours.close()


def test_copies_take_what_the_budget_counts() -> None:
    net = model()
    elements = sum(p.numel() for p in net.parameters() if p.requires_grad)
    without = HostOptimizer(torch.optim.AdamW, groups(net), host="memory", **ADAMW)
    ours = reversible(net, host="memory", **ADAMW)
    for optimizer in (without, ours):
        train(net, optimizer, range(2))
    assert ours.host_bytes - without.host_bytes == 12 * elements
    assert ours.device_state_bytes() - without.device_state_bytes() == 12 * elements
    held = sum(t.nbytes for t in ours.resident_state()) - sum(t.nbytes for t in without.resident_state())
    assert held == 12 * elements
    ours.set_host_fraction(0.5)
    assert ours.host_bytes - without.host_bytes == 12 * elements - 8 * ours.device_elements
    few = reversible(net, host="memory", host_limit=without.host_bytes, **ADAMW)
    with pytest.raises(OptimError, match="host_limit"):
        few.step()
    assert few.host_bytes == 0
