"""Every optimizer that treats elements alone is taken, bitwise the plain one on the host; every other one is
refused with the reason.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from runs import MODES, equal, groups, model, same_state, train

import lowtide
from lowtide import meter
from lowtide.optim import HostOptimizer, OptimError


class Louder(torch.optim.AdamW):
    """A subclass of one's own, with state beside its parent's and an attribute that no group has."""

    def __init__(self, params: Any, lr: float = 1e-3, louder: float = 2.0) -> None:
        super().__init__(params, lr=lr)
        self.louder = louder

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    last = self.state[p].pop("last", None)
                    p.grad = p.grad * self.louder + (0 if last is None else last)
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["last"] = p.grad.clone()


KINDS: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.RMSprop, {"lr": 1e-2, "momentum": 0.9, "centered": True, "weight_decay": 0.01}),
    (torch.optim.RMSprop, {"lr": 1e-2, "foreach": True}),
    (torch.optim.Adagrad, {"lr": 1e-2, "lr_decay": 0.1, "initial_accumulator_value": 0.3}),
    (torch.optim.Adagrad, {"lr": 1e-2, "fused": True}),
    (torch.optim.NAdam, {"lr": 1e-2, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    (torch.optim.RAdam, {"lr": 1e-2}),
    (torch.optim.Adamax, {"lr": 1e-2, "maximize": True}),
    (torch.optim.ASGD, {"lr": 1e-2, "t0": 2}),
    (torch.optim.Adadelta, {"lr": 1.0}),
    (torch.optim.Rprop, {"lr": 1e-2}),
    (Louder, {"louder": 1.5}),
]
IDS = [f"{kind.__name__}-{number}" for number, (kind, _) in enumerate(KINDS)]


@pytest.mark.parametrize(("kind", "options"), KINDS, ids=IDS)
def test_bitwise_the_plain_one_at_every_fraction_and_through_state_dicts(
    kind: Any, options: dict[str, Any]
) -> None:
    def scheduled(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)

    plain_model = model()
    plain = kind(_groups(plain_model, kind), **options)
    losses = train(plain_model, plain, range(8), clip=0.5, accumulate=2, scheduler=scheduled(plain))
    for number, fraction in enumerate((0.0, 0.3, 0.5, 1.0)):
        mode = list(MODES.values())[number * 2 % len(MODES)]
        first_model = model()
        first = HostOptimizer(kind, _groups(first_model, kind), host_fraction=fraction, **mode(), **options)
        schedule = scheduled(first)
        found = train(first_model, first, range(4), clip=0.5, accumulate=2, scheduler=schedule)
        second_model = model()
        second = HostOptimizer(
            kind, _groups(second_model, kind), host_fraction=1 - fraction / 2, **mode(), **options
        )
        again = scheduled(second)
        for to, of in ((second_model, first_model), (second, first), (again, schedule)):
            to.load_state_dict(of.state_dict())
        found += train(second_model, second, range(4, 8), clip=0.5, accumulate=2, scheduler=again)
        assert found == losses, fraction
        assert equal(plain_model, second_model), fraction
        assert same_state(_begun(plain.state_dict()), second.state_dict()), fraction
        first.close(), second.close()


def _begun(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Without what Adagrad keeps for parameters that never had a gradient."""
    return {
        **state_dict,
        "state": {k: entries for k, entries in state_dict["state"].items() if entries.get("step", 1) != 0},
    }


def _groups(net: Any, kind: Any) -> Any:
    """Two groups with options of their own, where the optimizer has weight decay."""
    found = groups(net)
    if kind in (torch.optim.Rprop, Louder):
        for group in found:
            group.pop("weight_decay", None)
    return found


@pytest.mark.parametrize(("kind", "options"), KINDS, ids=IDS)
def test_state_goes_to_the_plain_optimizer_and_back(kind: Any, options: dict[str, Any]) -> None:
    plain_model, ours_model, there, back = model(), model(), model(), model()
    plain = kind(plain_model.parameters(), **options)
    ours = HostOptimizer(kind, ours_model.parameters(), host_fraction=0.5, **options)
    train(plain_model, plain, range(3))
    train(ours_model, ours, range(3))
    there.load_state_dict(ours_model.state_dict())
    back.load_state_dict(plain_model.state_dict())
    to_plain, to_ours = (
        kind(there.parameters(), **options),
        HostOptimizer(kind, back.parameters(), host_fraction=0.7, **options),
    )
    to_plain.load_state_dict(ours.state_dict())
    to_ours.load_state_dict(plain.state_dict())
    train(there, to_plain, range(3, 6))
    train(back, to_ours, range(3, 6))
    train(plain_model, plain, range(3, 6))
    assert equal(plain_model, there) and equal(plain_model, back)
    assert same_state(plain.state_dict(), to_ours.state_dict())


class Lamb(torch.optim.SGD):
    """Scales by the norm of a whole parameter."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            p -= 0.1 * p.grad * p.norm() / p.grad.norm()


class Counting(torch.optim.SGD):
    """Counts its calls in the group."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["calls"] = group.get("calls", 0) + 1
            for p in group["params"]:
                p -= 0.1 * p.grad / group["calls"]


class Noisy(torch.optim.SGD):
    """Adds noise."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            p -= 0.1 * (p.grad + torch.randn_like(p))


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (torch.optim.LBFGS, "does not step on flat parameters.*closure"),
        (torch.optim.SparseAdam, "dense gradients"),
        (torch.optim.Muon, "flat parameters"),
        (torch.optim.Adafactor, "depends on other elements|in another form"),
        (Lamb, "depends on other elements"),
        (Counting, "on earlier calls"),
        (Noisy, "depends on"),
    ],
)
def test_what_looks_beyond_an_element_is_refused(kind: Any, reason: str) -> None:
    with pytest.raises(OptimError, match=rf"cannot split {kind.__name__}: .*({reason})"):
        HostOptimizer(kind, [torch.nn.Parameter(torch.ones(4, 4))])


def test_what_is_no_optimizer_and_options_that_cannot_be() -> None:
    parameters = [torch.nn.Parameter(torch.ones(4, 4))]
    with pytest.raises(OptimError, match="wraps a class of optimizers"):
        HostOptimizer(torch.optim.RMSprop(parameters), parameters)  # type: ignore[arg-type]
    with pytest.raises(OptimError, match="capturable"):
        HostOptimizer(torch.optim.NAdam, parameters, capturable=True)
    with pytest.raises(OptimError, match="foreach"):
        HostOptimizer(torch.optim.AdamW, parameters, foreach=True)
    with pytest.raises(ValueError, match="learning rate"):
        HostOptimizer(torch.optim.RMSprop, parameters, lr=-1.0)


@pytest.mark.skipif(not meter.available(), reason="needs a C++ compiler for the counting allocator")
@pytest.mark.parametrize(("kind", "options"), KINDS, ids=IDS)
def test_a_step_takes_no_more_in_passing_than_planners_are_told(kind: Any, options: dict[str, Any]) -> None:
    parameters = [torch.nn.Parameter(torch.randn(300, 301))]
    ours = HostOptimizer(kind, parameters, host_fraction=0.0, host="memory", chunk_bytes=1 << 16, **options)
    for _ in range(2):
        parameters[0].grad = torch.randn(300, 301)
        state = ours.device_state_bytes() if not ours.device_elements else 0
        peak = lowtide.measure(ours.step).peak_bytes
        assert peak <= state + ours.step_bytes() + 4096


def test_masters_and_auto() -> None:
    """16-bit parameters are updated in float32, and a share can be chosen by speeds."""
    net = model(torch.bfloat16)
    ours = HostOptimizer(torch.optim.RMSprop, net.parameters(), host_fraction=0.5, lr=1e-3)
    train(net, ours, range(3))
    state = ours.state_dict()["state"]
    assert all(
        entries["square_avg"].dtype == entries["master"].dtype == torch.float32 for entries in state.values()
    )
    net = model()
    chosen = HostOptimizer(torch.optim.NAdam, net.parameters(), host_fraction="auto")
    train(net, chosen, range(2))
    assert chosen.balance is not None and chosen.host_elements + chosen.device_elements > 0
