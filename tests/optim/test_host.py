"""Measure 1: bitwise the wrapped optimizer with its fused kernel, whatever the fraction, tier, link and way
of gradients.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from benchmarks.throttled_link import ThrottledLink
from runs import ADAMW, FRACTIONS, IDS, KINDS, MODES, batch, equal, groups, model, same_state, train

from lowtide.optim import HostOptimizer, OptimError


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("kind", "options"), KINDS, ids=IDS)
def test_every_fraction(kind: Any, options: dict[str, Any], mode: str) -> None:
    plain_model = model()
    plain = kind(groups(plain_model), fused=True, **options)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(plain, 8)
    losses = train(plain_model, plain, range(4), clip=0.5, accumulate=2, scheduler=schedule)
    # where a fraction cuts does not depend on the kind
    for fraction in FRACTIONS if kind is torch.optim.AdamW else FRACTIONS[::5]:
        ours_model = model()
        ours = HostOptimizer(kind, groups(ours_model), host_fraction=fraction, **MODES[mode](), **options)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(ours, 8)
        assert train(ours_model, ours, range(4), clip=0.5, accumulate=2, scheduler=schedule) == losses, (
            fraction
        )
        assert equal(plain_model, ours_model), fraction
        assert same_state(plain.state_dict(), ours.state_dict()), fraction
        ours.close()


@pytest.mark.parametrize("mode", MODES)
def test_resume_at_half(mode: str) -> None:
    """Twenty steps; at ten everything is saved and built anew, at another fraction."""
    whole_model = model()
    whole = torch.optim.AdamW(groups(whole_model), fused=True, **ADAMW)
    schedule = torch.optim.lr_scheduler.OneCycleLR(whole, 0.02, total_steps=20)
    train(whole_model, whole, range(20), clip=0.5, scheduler=schedule)
    for fraction in (0.0, 0.3, 1.0):
        first_model = model()
        first = HostOptimizer(
            torch.optim.AdamW, groups(first_model), host_fraction=fraction, **MODES[mode](), **ADAMW
        )
        schedule = torch.optim.lr_scheduler.OneCycleLR(first, 0.02, total_steps=20)
        train(first_model, first, range(10), clip=0.5, scheduler=schedule)
        saved = [thing.state_dict() for thing in (first_model, first, schedule)]
        first.close()
        second_model = model()
        with torch.no_grad():
            second_model.gain.fill_(9)
        second = HostOptimizer(
            torch.optim.AdamW, groups(second_model), host_fraction=1 - fraction / 2, **MODES[mode](), **ADAMW
        )
        schedule = torch.optim.lr_scheduler.OneCycleLR(second, 0.02, total_steps=20)
        for thing, state in zip((second_model, second, schedule), saved, strict=True):
            thing.load_state_dict(state)
        train(second_model, second, range(10, 20), clip=0.5, scheduler=schedule)
        assert equal(whole_model, second_model), fraction
        second.close()


def test_checkpoints_are_exchanged_with_the_wrapped_optimizer() -> None:
    plain_model, ours_model = model(), model()
    plain = torch.optim.AdamW(groups(plain_model), fused=True, **ADAMW)
    ours = HostOptimizer(torch.optim.AdamW, groups(ours_model), host_fraction=0.5, **ADAMW)
    train(plain_model, plain, range(3))
    train(ours_model, ours, range(3))
    there, back = model(), model()
    there.load_state_dict(ours_model.state_dict())
    back.load_state_dict(plain_model.state_dict())
    to_plain = torch.optim.AdamW(groups(there), fused=True, **ADAMW)
    to_plain.load_state_dict(ours.state_dict())
    to_ours = HostOptimizer(torch.optim.AdamW, groups(back), host_fraction=0.7, **ADAMW)
    to_ours.load_state_dict(plain.state_dict())
    train(there, to_plain, range(3, 6))
    train(back, to_ours, range(3, 6))
    train(plain_model, plain, range(3, 6))
    assert equal(plain_model, there)
    assert equal(plain_model, back)
    assert same_state(plain.state_dict(), to_ours.state_dict())


@pytest.mark.parametrize("mode", MODES)
def test_late_and_thawed_parameters(mode: str) -> None:
    def run(optimizer_of: Any, fraction: float) -> Any:
        torch.manual_seed(0)
        net = torch.nn.Sequential(
            torch.nn.Linear(33, 40), torch.nn.Linear(40, 33), torch.nn.Linear(33, 20), torch.nn.LayerNorm(20)
        )
        net[1].requires_grad_(False)
        optimizer = optimizer_of([*net[0].parameters(), *net[1].parameters()], fraction)
        for step in range(6):
            if step == 2:
                optimizer.add_param_group(
                    {"params": [*net[2].parameters(), *net[3].parameters()], "lr": 3e-3}
                )
            if step == 4:
                net[1].requires_grad_(True)
                net[0].weight.requires_grad_(False)
            optimizer.zero_grad()
            net.zero_grad()  # those that are in no group yet
            net(batch(step)).square().mean().backward()
            optimizer.step()
        return net

    plain = run(lambda params, _: torch.optim.AdamW(params, fused=True, **ADAMW), 0)
    for fraction in (0.0, 0.2, 0.5, 0.9, 1.0):
        ours = run(
            lambda params, f: HostOptimizer(
                torch.optim.AdamW, params, host_fraction=f, **MODES[mode](), **ADAMW
            ),
            fraction,
        )
        assert equal(plain, ours), fraction


def test_gradients_are_forgotten_as_ever() -> None:
    """`None`, zero_grad of model or optimizer, in place or not, and steps without zero_grad."""

    def run(net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for step in range(10):
            net(batch(step)).backward()
            if step == 1:
                net.zero_grad()
            elif step == 2:
                optimizer.zero_grad(set_to_none=False)
            elif step == 3:
                net.zero_grad(set_to_none=False)
            elif step == 4:
                net.first.weight.grad = None
            elif step == 5:
                net.second.weight.grad = torch.ones_like(net.second.weight)
            optimizer.step()
            if step % 3:
                optimizer.zero_grad()

    plain_model = model()
    run(plain_model, torch.optim.AdamW(plain_model.parameters(), fused=True, **ADAMW))
    for mode in MODES:
        for fraction in (0.4, 1.0):
            ours_model = model()
            run(
                ours_model,
                HostOptimizer(
                    torch.optim.AdamW,
                    ours_model.parameters(),
                    host_fraction=fraction,
                    **MODES[mode](),
                    **ADAMW,
                ),
            )
            assert equal(plain_model, ours_model), (mode, fraction)


def test_a_frozen_parameter_that_has_a_gradient_is_updated() -> None:
    plain_model, ours_model = model(), model()
    plain = torch.optim.AdamW(plain_model.parameters(), fused=True, **ADAMW)
    ours = HostOptimizer(torch.optim.AdamW, ours_model.parameters(), host_fraction=0.5, **ADAMW)
    for net, optimizer in ((plain_model, plain), (ours_model, ours)):
        net(batch(0)).backward()
        net.second.requires_grad_(False)
        optimizer.step()
    assert equal(plain_model, ours_model)


def test_clipping_twice_and_other_norms() -> None:
    for order in (1.0, 2.0, float("inf")):
        plain_model, ours_model = model(), model()
        plain = torch.optim.SGD(plain_model.parameters(), lr=0.1, fused=True)
        ours = HostOptimizer(
            torch.optim.SGD,
            ours_model.parameters(),
            host_fraction=0.6,
            stream_gradients=True,
            link=ThrottledLink(),
            lr=0.1,
        )
        for step in range(3):
            for net in (plain_model, ours_model):
                net.zero_grad()
                net(batch(step)).backward()
            for most in (0.3, 0.1):
                expected = torch.nn.utils.clip_grad_norm_(plain_model.parameters(), most, order)
                assert torch.equal(ours.clip_grad_norm_(most, order), expected)
            for net in (plain_model, ours_model):
                net(batch(step + 50)).backward()  # on top of clipped gradients
            plain.step()
            ours.step()
        assert equal(plain_model, ours_model)


@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
def test_gradient_scaler(fraction: float) -> None:
    def run(optimizer_of: Any) -> tuple[Any, list[float]]:
        net = model()
        optimizer = optimizer_of(net.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=2)
        scales = []
        for step in range(8):
            optimizer.zero_grad()
            scaler.scale(net(batch(step) * 1e4)).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        return net, scales

    plain, scales = run(lambda params: torch.optim.AdamW(params, **ADAMW, fused=True))
    ours, same = run(lambda params: HostOptimizer(torch.optim.AdamW, params, host_fraction=fraction, **ADAMW))
    assert scales == same
    assert scales[0] < 2.0**127  # steps were skipped
    assert equal(plain, ours)


@pytest.mark.parametrize("link", [False, True])
@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_gradient_scaler_takes_gradients_that_were_sent(fraction: float, link: bool) -> None:
    """Scales, skipped steps, norms and weights are those of the optimizer by itself, with accumulation."""

    def run(optimizer_of: Any) -> tuple[Any, list[float]]:
        net = model()
        optimizer = optimizer_of(net.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=2)
        found = []
        for step in range(8):
            optimizer.zero_grad()
            for number in range(2):
                scaler.scale(net(batch(2 * step + number) * 1e4)).backward()
            if step % 2:
                scaler.unscale_(optimizer)
                clip = getattr(optimizer, "clip_grad_norm_", None)
                most: Any = (0.5,) if clip else (net.parameters(), 0.5)
                found.append(float((clip or torch.nn.utils.clip_grad_norm_)(*most)))
            scaler.step(optimizer)
            scaler.update()
            found.append(scaler.get_scale())
        return net, [one for one in found if one == one]

    plain, expected = run(lambda params: torch.optim.AdamW(params, **ADAMW, fused=True))
    options: dict[str, Any] = {"link": ThrottledLink()} if link else {}
    options |= {"stream_gradients": True, "host_fraction": fraction, **ADAMW}
    ours, found = run(lambda params: HostOptimizer(torch.optim.AdamW, params, **options))
    assert found == expected and expected[0] < 2.0**127, "steps were skipped"
    assert equal(plain, ours)


def test_gradient_scaler_is_refused_where_updates_have_begun() -> None:
    net = model()
    options: dict[str, Any] = {"stream_gradients": True, "overlap_update": True, **ADAMW}
    optimizer = HostOptimizer(torch.optim.AdamW, net.parameters(), **options)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(net(batch(0))).backward()
    with pytest.raises(OptimError, match="overlap_update=False"):
        scaler.unscale_(optimizer)


def test_what_needs_gradients_raises() -> None:
    net = model()
    optimizer = HostOptimizer(
        torch.optim.AdamW, net.parameters(), stream_gradients=True, host_fraction=0.5, **ADAMW
    )
    net(batch(0)).backward()
    with pytest.raises(OptimError, match="clip_grad_norm_"):
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    with pytest.raises(OptimError, match="clip_grad_norm_"):
        torch.nn.utils.clip_grad_value_(net.parameters(), 1.0)
    with pytest.raises(OptimError, match="stream_gradients"):
        net.second.weight.grad.abs().max()  # type: ignore[union-attr]
    optimizer.step()


LOOKS: dict[str, Any] = {
    "norm": lambda g: g.detach().norm(),
    "data": lambda g: g.data.norm(),
    "finite": lambda g: bool(torch.isfinite(g).all()),
    "item": lambda g: g[0, 0].item(),
    "copy": lambda g: g.clone(),
    "deepcopy": copy.deepcopy,
    "to another type": lambda g: g.to(torch.float64),
    "flat": lambda g: torch.nn.utils.parameters_to_vector([g]),
    "foreach": lambda g: torch._foreach_norm([g]),
    "scaled in place": lambda g: g.mul_(2),
    "filled": lambda g: g.fill_(1),
    "copied into": lambda g: g.copy_(torch.ones(g.shape)),
    "copied from": lambda g: torch.zeros(g.shape).copy_(g),
    "added to another": lambda g: torch.zeros(g.shape).add_(g),
    "assigned to": lambda g: setattr(g, "data", torch.ones(g.shape)),
}


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS.keys())
def test_no_look_at_a_gradient_that_left_sees_nothing(look: Any) -> None:
    plain_model, net = model(), model()
    plain = torch.optim.AdamW(plain_model.parameters(), fused=True, **ADAMW)
    ours = HostOptimizer(torch.optim.AdamW, net.parameters(), stream_gradients=True, **ADAMW)
    for each in (plain_model, net):
        each(batch(0)).backward()
    with pytest.raises(OptimError, match="on the host"):
        look(net.second.weight.grad)
    ours.step()
    plain.step()
    assert equal(plain_model, net)


def test_closure_and_hooks() -> None:
    plain_model, ours_model = model(), model()
    plain = torch.optim.AdamW(plain_model.parameters(), fused=True, **ADAMW)
    ours = HostOptimizer(
        torch.optim.AdamW, ours_model.parameters(), host_fraction=0.5, stream_gradients=True, **ADAMW
    )
    seen: list[str] = []
    ours.register_step_pre_hook(lambda *_: seen.append("before"))
    ours.register_step_post_hook(lambda *_: seen.append("after"))
    for net, optimizer in ((plain_model, plain), (ours_model, ours)):

        def closure(net: Any = net, optimizer: Any = optimizer) -> Any:
            optimizer.zero_grad()
            loss = net(batch(0))
            loss.backward()
            return loss

        assert optimizer.step(closure).item() == model()(batch(0)).item()
    assert equal(plain_model, ours_model)
    assert seen == ["before", "after"]


def test_fraction_changes_in_mid_run() -> None:
    plain_model, ours_model = model(), model()
    plain = torch.optim.AdamW(plain_model.parameters(), fused=True, **ADAMW)
    ours = HostOptimizer(torch.optim.AdamW, ours_model.parameters(), host_fraction=0.0, **ADAMW)
    for number, fraction in enumerate((0.0, 0.7, 1.0, 0.3)):
        ours.set_host_fraction(fraction)
        train(plain_model, plain, range(2 * number, 2 * number + 2))
        train(ours_model, ours, range(2 * number, 2 * number + 2))
        assert abs(ours.host_elements - fraction * (ours.host_elements + ours.device_elements)) < 16
    assert equal(plain_model, ours_model)
    assert ours.host_bytes < 2 * 3 * 4 * 6000 + 4 * 2**20 * 16  # what was moved away was given back


def test_a_fraction_without_room_changes_nothing() -> None:
    plain_model, ours_model = model(), model()
    plain = torch.optim.AdamW(plain_model.parameters(), fused=True, **ADAMW)
    ours = HostOptimizer(
        torch.optim.AdamW, ours_model.parameters(), host_fraction=0.2, host_limit="20KiB", **ADAMW
    )
    for net, optimizer in ((plain_model, plain), (ours_model, ours)):
        train(net, optimizer, range(2))
        net.second.requires_grad_(False)  # has state that has to come along
    with pytest.raises(OptimError, match="host_limit"):
        ours.set_host_fraction(1.0)
    assert ours.host_fraction == 0.2
    train(plain_model, plain, range(2, 4))
    train(ours_model, ours, range(2, 4))
    ours.set_host_fraction(0.3)
    for net, optimizer in ((plain_model, plain), (ours_model, ours)):
        net.second.requires_grad_(True)
        train(net, optimizer, range(4, 6))
    assert equal(plain_model, ours_model)


def test_channels_last_and_double() -> None:
    for dtype in (torch.float32, torch.float64):
        torch.manual_seed(0)
        pair = [torch.nn.Conv2d(5, 7, 3).to(dtype).to(memory_format=torch.channels_last) for _ in range(2)]
        pair[1].load_state_dict(pair[0].state_dict())
        plain = torch.optim.AdamW(pair[0].parameters(), fused=True, **ADAMW)
        ours = HostOptimizer(
            torch.optim.AdamW,
            pair[1].parameters(),
            host_fraction=0.4,
            stream_gradients=True,
            link=ThrottledLink(),
            **ADAMW,
        )
        for net, optimizer in zip(pair, (plain, ours), strict=True):
            for step in range(3):
                optimizer.zero_grad()
                x = torch.randn(2, 5, 8, 8, dtype=dtype, generator=torch.Generator().manual_seed(step))
                net(x).square().mean().backward()
                optimizer.step()
        assert equal(*pair)
        assert same_state(plain.state_dict(), ours.state_dict())
