"""`delayed` and `overlap_update`: against a plain reference of their schedules."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from benchmarks.throttled_link import ThrottledLink
from runs import ADAMW, MODES, batch, equal, model, train

from lowtide.optim import HostOptimizer, OptimError


def delayed_reference(steps: int, warm_up: int, clip: float | None = None) -> list[Any]:
    """Parameters after each step: updates that parameters see one step late, from the step after the
    warm-up.
    """
    net = model()
    ahead = [p.detach().clone() for p in net.parameters() if p.requires_grad]
    trainable = [p for p in net.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(ahead, fused=True, **ADAMW)
    seen = []
    for step in range(steps):
        late = step >= warm_up
        net.zero_grad()
        net(batch(step * 10)).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(trainable, clip)
        before = [p.clone() for p in ahead]
        for p, twin in zip(trainable, ahead, strict=True):
            twin.grad = None if p.grad is None else p.grad.clone()
        optimizer.step()
        with torch.no_grad():
            for p, old, new in zip(trainable, before, ahead, strict=True):
                p.copy_(old if late else new)  # late: the update of the step before is seen, this one is not
        seen.append([p.detach().clone() for p in net.parameters()])
    with torch.no_grad():
        for p, new in zip(trainable, ahead, strict=True):
            p.copy_(new)
    return [*seen, list(net.parameters())]


@pytest.mark.parametrize("clip", [None, 0.3])
@pytest.mark.parametrize("mode", MODES)
def test_delayed_equals_its_schedule(mode: str, clip: float | None) -> None:
    expected = delayed_reference(8, 3, clip)
    net = model()
    ours = HostOptimizer(
        torch.optim.AdamW, net.parameters(), delayed=True, delay_after=3, **MODES[mode](), **ADAMW
    )

    def check(step: int) -> None:
        assert all(torch.equal(a, b) for a, b in zip(expected[step], net.parameters(), strict=True)), step

    train(net, ours, range(8), clip=clip, after=check)
    ours.finish()
    check(8)
    ours.close()


def test_delayed_resumes_in_mid_air() -> None:
    expected = delayed_reference(8, 2)
    first_model = model()
    first = HostOptimizer(torch.optim.AdamW, first_model.parameters(), delayed=True, delay_after=2, **ADAMW)
    train(first_model, first, range(5))
    saved = [first_model.state_dict(), first.state_dict()]
    second_model = model()
    second = HostOptimizer(
        torch.optim.AdamW,
        second_model.parameters(),
        delayed=True,
        delay_after=2,
        stream_gradients=True,
        **ADAMW,
    )
    second_model.load_state_dict(saved[0])
    second.load_state_dict(saved[1])
    train(second_model, second, range(5, 8))
    second.finish()
    assert all(torch.equal(a, b) for a, b in zip(expected[-1], second_model.parameters(), strict=True))
    with pytest.raises(OptimError, match="delayed update was under way"):
        HostOptimizer(torch.optim.AdamW, model().parameters(), **ADAMW).load_state_dict(saved[1])


def test_delayed_update_in_parts_leaves_the_device_part_on_time() -> None:
    """Elements on the device follow the plain schedule in the first late step, those on the host stay."""
    net, plain_model = model(), model()
    ours = HostOptimizer(
        torch.optim.AdamW, net.parameters(), host_fraction=0.5, delayed=True, delay_after=0, **ADAMW
    )
    plain = torch.optim.AdamW(plain_model.parameters(), fused=True, **ADAMW)
    train(net, ours, range(1))
    train(plain_model, plain, range(1))
    for p, q, start in zip(net.parameters(), plain_model.parameters(), model().parameters(), strict=True):
        slot = ours._slots.get(p)
        if slot is None or p.grad is None:
            continue
        flat = [t.detach().view(-1) for t in (p, q, start)]
        assert torch.equal(flat[0][: slot.cut], flat[1][: slot.cut])
        assert torch.equal(flat[0][slot.cut :], flat[2][slot.cut :])


def test_writing_to_parameters_in_mid_air_is_refused() -> None:
    net = model()
    ours = HostOptimizer(torch.optim.AdamW, net.parameters(), delayed=True, delay_after=0, **ADAMW)
    train(net, ours, range(2))
    with torch.no_grad():
        net.gain.fill_(3)
    with pytest.raises(OptimError, match="finish"):
        train(net, ours, range(2, 3))


@pytest.mark.parametrize("fraction", [0.3, 0.8, 1.0])
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode.endswith("streamed")])
def test_overlapped_updates_are_the_same_updates(mode: str, fraction: float) -> None:
    plain_model, ours_model = model(), model()
    plain = torch.optim.AdamW(plain_model.parameters(), fused=True, **ADAMW)
    ours = HostOptimizer(
        torch.optim.AdamW,
        ours_model.parameters(),
        host_fraction=fraction,
        overlap_update=True,
        **MODES[mode](),
        **ADAMW,
    )
    for step in range(6):
        for net in (plain_model, ours_model):
            net.zero_grad()
        plain_model(batch(step)).backward()
        plain_model(batch(step + 100)).backward()
        before = [p.detach().clone() for p in ours_model.parameters()]
        with ours.accumulating():
            ours_model(batch(step)).backward()
        ours_model(batch(step + 100)).backward()
        # nothing changes before step()
        assert all(torch.equal(a, b) for a, b in zip(before, ours_model.parameters(), strict=True))
        plain.step()
        ours.step()
        assert equal(plain_model, ours_model)
    ours.close()


def test_overlap_is_refused_where_it_is_not_legal() -> None:
    net = model()
    ours = HostOptimizer(
        torch.optim.AdamW, net.parameters(), overlap_update=True, stream_gradients=True, **ADAMW
    )
    net(batch(0)).backward()
    with pytest.raises(OptimError, match="clip"):
        ours.clip_grad_norm_(1.0)
    with pytest.raises(OptimError, match="accumulating"):
        net(batch(1)).backward()
    ours = HostOptimizer(
        torch.optim.AdamW, (net := model()).parameters(), overlap_update=True, stream_gradients=True, **ADAMW
    )
    net(batch(0)).backward()
    ours.param_groups[0]["lr"] = 0.5
    with pytest.raises(OptimError, match="hyper-parameters changed"):
        ours.step()


@pytest.mark.parametrize("forget", ["optimizer", "model"])
def test_overlap_after_a_failed_backward_asks_for_the_checkpoint(forget: str) -> None:
    net = model()
    ours = HostOptimizer(
        torch.optim.AdamW,
        net.parameters(),
        overlap_update=True,
        stream_gradients=True,
        link=ThrottledLink(),
        **ADAMW,
    )
    train(net, ours, range(3))
    ours.zero_grad()
    saved = [{k: v.clone() for k, v in net.state_dict().items()}, copy.deepcopy(ours.state_dict())]
    expected_model = model()
    expected_model.load_state_dict(saved[0])
    expected = torch.optim.AdamW(expected_model.parameters(), fused=True, **ADAMW)
    expected.load_state_dict(saved[1])
    handle = net.first.weight.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        net(batch(3)).backward()
    handle.remove()
    with pytest.raises(OptimError, match="checkpoint"):
        if forget == "optimizer":
            ours.zero_grad()
        else:
            net.zero_grad()
            net(batch(3)).backward()
            ours.step()
    with pytest.raises(OptimError, match="checkpoint"):
        ours.step()
    net.zero_grad()
    net.load_state_dict(saved[0])
    ours.load_state_dict(saved[1])
    train(net, ours, range(3, 6))
    train(expected_model, expected, range(3, 6))
    assert equal(net, expected_model)
