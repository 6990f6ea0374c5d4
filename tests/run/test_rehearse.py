"""Steps that follow the script of an earlier one: fewer dispatches, the same bits, and nothing left behind
when a step is another.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import lowtide
from lowtide.graph import StepGraph
from lowtide.interception import interceptors
from lowtide.plan.data import Plan
from lowtide.plan.policies import make_plan
from lowtide.plan.simulate import Simulator
from lowtide.run.follow import Follower
from lowtide.run.rehearse import Recipe

N = 16


def give_up_gelu(graph: StepGraph, budget: int | None = None) -> Plan:
    """Keep all but what GELU wrote."""
    made = [graph.operations[v.producer].name if v.producer is not None else "" for v in graph.values]
    stored = [v for v in Simulator(graph).droppable if "gelu" not in made[v]]
    return make_plan(graph, stored=stored, policy="give_up_gelu", budget=budget, bound=False)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(N)
        self.up = nn.Linear(N, 2 * N)
        self.act = nn.GELU()
        self.middle = nn.Sequential(nn.Linear(2 * N, 2 * N), nn.ReLU(inplace=True), nn.Linear(2 * N, 2 * N))
        self.dropout = nn.Dropout(0.2)
        self.down = nn.Linear(2 * N, N)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.act(self.up(self.norm(x)))
        return x + self.down(self.dropout(self.middle(h)))


class Net(nn.Module):
    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.around: Any = lambda k, call: call()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for k, block in enumerate(self.blocks):
            x = self.around(k, lambda block=block, x=x: block(x))
        return x.square().sum()


class Counts(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def batch() -> torch.Tensor:
    return torch.randn(8, N, generator=torch.Generator().manual_seed(3))


def script_of(model: nn.Module) -> Any:
    return model.__dict__["forward"].latest.script


def heard(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The dispatches of one step that go through the recorder."""
    model.zero_grad(set_to_none=True)
    names: list[str] = []
    operation = Follower.operation

    def counting(self: Any, func: Any, args: Any, kwargs: Any) -> Any:
        names.append(str(func))
        return operation(self, func, args, kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Follower, "operation", counting)
        model(batch()).backward()
    return names


def untouched(model: nn.Module) -> bool:
    return interceptors() == [] and not any(
        "forward" in m.__dict__ for m in model.modules() if m is not model
    )


def test_later_steps_hear_less_and_give_the_same_bits(twins: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    pair = twins(Net(), policy=give_up_gelu)
    for seed in range(5):
        pair.step(lambda m: m(batch()), seed)
    script = script_of(pair.limited)
    assert script is not None and script.marks
    with Counts() as all_of_them:
        pair.plain(batch())
    names = heard(pair.limited, monkeypatch)
    assert names == [str(func) for func, _, _ in script.entries]
    assert 0 < names.count("aten.gelu.default") == 3
    assert len(names) < len(all_of_them.names) / 2
    # of three: the first stretch is too short to leave for
    assert names.count("aten.native_layer_norm.default") <= 1
    assert "aten.relu_.default" not in names
    assert untouched(pair.limited)


def test_a_plan_made_again_is_listened_to_again(twins: Any) -> None:
    torch.manual_seed(0)
    pair = twins(Net(), policy=give_up_gelu)
    for seed in range(3):
        pair.step(lambda m: m(batch()), seed)
    limiter = pair.limited.__dict__["forward"]
    first = script_of(pair.limited)
    limiter.latest.solve_again = "the test wants it"
    for seed in range(3):
        pair.step(lambda m: m(batch()), seed)
    second = script_of(pair.limited)
    assert second is not first and second.plan is limiter.latest.plan


@pytest.mark.parametrize("change", ["skip", "twice", "other order"])
def test_a_step_that_departs(twins: Any, change: str) -> None:
    """Modules that do not run, run twice or in another order: the recorder is back, and bits are the same."""
    torch.manual_seed(0)
    pair = twins(Net(), policy=give_up_gelu)
    for seed in range(4):
        pair.step(lambda m: m(batch()), seed)

    def forward(m: Any) -> torch.Tensor:
        blocks = list(m.blocks)
        chosen = {"skip": blocks[1:], "twice": [blocks[0], *blocks], "other order": blocks[::-1]}[change]
        order = iter(chosen)
        m.around = lambda k, call: call()
        m.blocks, before = nn.ModuleList(order), m.blocks
        try:
            return m(batch())
        finally:
            m.blocks = before

    for seed in range(2):
        pair.step(forward, seed)
        assert untouched(pair.limited)
    pair.step(lambda m: m(batch()), 9)


def test_a_mode_of_the_models_own_around_a_block(twins: Any) -> None:
    """The recorder neither leaves from under another mode nor comes back above it."""
    torch.manual_seed(0)
    pair = twins(Net(), policy=give_up_gelu)
    for seed in range(4):
        pair.step(lambda m: m(batch()), seed)
    found = []

    def counted(k: int, call: Any) -> Any:
        if k != 1:
            return call()
        with Counts() as counts:
            result = call()
        found.append(counts.names)
        return result

    for model in (pair.plain, pair.limited):
        model.around = counted
    for seed in range(2):
        pair.step(lambda m: m(batch()), seed)
        assert untouched(pair.limited)
    plain, limited = (
        [name for name in names if not name.startswith(("aten.detach", "aten.empty", "aten.as_strided"))]
        for names in found[:2]
    )
    assert set(plain) <= set(limited)


def test_an_exception_in_a_quiet_stretch(twins: Any) -> None:
    torch.manual_seed(0)
    pair = twins(Net(), policy=give_up_gelu)
    for seed in range(4):
        pair.step(lambda m: m(batch()), seed)
    middle = pair.limited.blocks[1].middle[1]

    def fail(*_: Any) -> None:
        raise KeyError("on demand")

    hook = middle.register_forward_hook(fail)
    with pytest.raises(KeyError, match="on demand"):
        pair.limited(batch())
    assert untouched(pair.limited)
    hook.remove()
    for seed in range(2):
        pair.step(lambda m: m(batch()), seed)


@pytest.mark.parametrize("inside", ["scope", "limited model"])
def test_what_looks_for_the_recorder_finds_it(twins: Any, inside: str) -> None:
    """A scope and a limited model inside follow the plan outside, so no script may leave the recorder."""
    torch.manual_seed(0)
    pair = twins(Net(), policy=give_up_gelu)
    if inside == "limited model":
        lowtide.limit_memory(pair.limited.blocks[1], policy="full")
    else:

        def scoped(k: int, call: Any) -> Any:
            with lowtide.checkpointing():
                return call()

        for model in (pair.plain, pair.limited):
            model.around = scoped
    for seed in range(5):
        pair.step(lambda m: m(batch()), seed)
    script = script_of(pair.limited)
    assert script is not None and script.entries and script.marks == ()
    if inside == "limited model":
        assert pair.limited.blocks[1].__dict__["forward"].latest is None


class Unlike(nn.Module):
    """Blocks whose operations are the same ones with other arguments: weights or none, dropout or none, a
    tensor or a list of them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(N, elementwise_affine=k != 1), nn.Linear(N, N), nn.GELU())
            for k in range(3)
        )
        self.order = [0, 1, 2]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for k in self.order:
            h = self.blocks[k](x)
            heads = h.view(2, 2, 4, N // 2).transpose(1, 2)
            mixed = nn.functional.scaled_dot_product_attention(
                heads, heads, heads, dropout_p=0.3 if k == 1 else 0.0
            )
            x = torch.cat([x + mixed.transpose(1, 2).reshape(8, N), h.exp().detach()])[k : k + 8]
        return x.square().sum()


def test_operations_are_recorded_by_recipe(twins: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without another look at what an earlier step found, also where modules take turns whose arguments
    differ.
    """
    torch.manual_seed(0)
    pair = twins(
        Unlike(),
        policy=lambda graph, budget=None: make_plan(
            graph, stored=[], policy="all", budget=budget, bound=False
        ),
    )
    for seed in range(5):
        pair.step(lambda m: m(batch()), seed)
    script = script_of(pair.limited)
    recipes = [kind for _, kind, _ in script.entries if isinstance(kind, Recipe)]
    assert len(recipes) > 15
    looked: list[str] = []
    operation = Follower._operation

    def counting(self: Any, func: Any, *rest: Any) -> Any:
        looked.append(str(func))
        return operation(self, func, *rest)

    monkeypatch.setattr(Follower, "_operation", counting)
    pair.step(lambda m: m(batch()), 7)
    assert all("_." in name for name in looked), "only what writes in place takes a closer look"
    for order in ([1, 0, 2], [2, 1, 0], [0, 2, 1]):
        for model in (pair.plain, pair.limited):
            model.order = order
        pair.step(lambda m: m(batch()), 8)
