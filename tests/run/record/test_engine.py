"""The executor in C++: little is asked of Python, and the bits are the same, also where a step departs."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import lowtide
from lowtide.graph import StepGraph
from lowtide.interception import Interceptor, interceptors, proceed
from lowtide.plan.data import Plan
from lowtide.plan.policies import make_plan
from lowtide.plan.simulate.simulator import Simulator
from lowtide.run.record.recorder import Recorder

N = 16


def evict_gelu(graph: StepGraph, budget: int | None = None) -> Plan:
    """Keep all but what GELU wrote."""
    made = [graph.operations[v.producer].name if v.producer is not None else "" for v in graph.values]
    stored = [v for v in Simulator(graph).droppable if "gelu" not in made[v]]
    return make_plan(graph, stored=stored, policy="evict_gelu", budget=budget)


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


def heard(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The operations of one step's forward that the recorder in Python is asked about."""
    model.zero_grad(set_to_none=True)
    names: list[str] = []
    operation = Recorder.operation

    def counting(self: Any, func: Any, args: Any, kwargs: Any) -> Any:
        names.append(str(func))
        return operation(self, func, args, kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Recorder, "operation", counting)
        model(batch()).backward()
    return names


def test_python_is_asked_about_little_and_the_bits_are_the_same(
    twins: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what a plan keeps or records, only random numbers that are recorded are Python's here."""
    torch.manual_seed(0)
    pair = twins(Net(), policy=evict_gelu)
    for seed in range(5):
        pair.step(lambda m: m(batch()), seed)
    assert set(heard(pair.limited, monkeypatch)) <= {"aten.empty_like.default", "aten.bernoulli_.float"}
    assert interceptors() == []


@pytest.mark.parametrize("change", ["skip", "twice", "other order"])
def test_a_step_that_departs(twins: Any, change: str) -> None:
    """Modules that do not run, run twice or in another order: the recorder is back, and bits are the same."""
    torch.manual_seed(0)
    pair = twins(Net(), policy=evict_gelu)
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
        assert interceptors() == []
    pair.step(lambda m: m(batch()), 9)


def test_a_mode_of_the_models_own_around_a_block(twins: Any) -> None:
    """The recorder neither leaves from under another mode nor comes back above it."""
    torch.manual_seed(0)
    pair = twins(Net(), policy=evict_gelu)
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
        assert interceptors() == []
    plain, limited = (
        [name for name in names if not name.startswith(("aten.detach", "aten.empty", "aten.as_strided"))]
        for names in found[:2]
    )
    assert set(plain) <= set(limited)


def test_an_exception_in_a_quiet_stretch(twins: Any) -> None:
    torch.manual_seed(0)
    pair = twins(Net(), policy=evict_gelu)
    for seed in range(4):
        pair.step(lambda m: m(batch()), seed)
    middle = pair.limited.blocks[1].middle[1]

    def fail(*_: Any) -> None:
        raise KeyError("on demand")

    hook = middle.register_forward_hook(fail)
    with pytest.raises(KeyError, match="on demand"):
        pair.limited(batch())
    assert interceptors() == []
    hook.remove()
    for seed in range(2):
        pair.step(lambda m: m(batch()), seed)


@pytest.mark.parametrize("inside", ["scope", "limited model"])
def test_what_looks_for_the_recorder_finds_it(twins: Any, inside: str) -> None:
    """A scope and a limited model inside follow the plan outside."""
    torch.manual_seed(0)
    pair = twins(Net(), policy=evict_gelu)
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
    if inside == "limited model":
        assert pair.limited.blocks[1].__dict__["forward"].book.latest is None


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


def test_modules_take_turns_whose_arguments_differ(twins: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    pair = twins(
        Unlike(),
        policy=lambda graph, budget=None: make_plan(graph, stored=[], policy="all", budget=budget),
    )
    for seed in range(5):
        pair.step(lambda m: m(batch()), seed)
    asked = heard(pair.limited, monkeypatch)
    assert len(asked) < 10
    for order in ([1, 0, 2], [2, 1, 0], [0, 2, 1]):
        for model in (pair.plain, pair.limited):
            model.order = order
        pair.step(lambda m: m(batch()), 8)


def test_the_same_saved_tensors_are_asked_for_again(twins: Any) -> None:
    """A retained graph: the second backward replays anew what the first let go."""
    torch.manual_seed(0)
    pair = twins(Unlike(), policy="full")
    for seed in range(4):
        pair.step(lambda m: m(batch()), seed)
    grads = []
    for model in (pair.plain, pair.limited):
        model.zero_grad(set_to_none=True)
        torch.manual_seed(5)
        loss = model(batch())
        loss.backward(retain_graph=True)
        loss.backward()
        grads.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_a_saved_tensor_that_is_overwritten_raises_as_in_a_plain_step(twins: Any) -> None:
    torch.manual_seed(0)
    pair = twins(Net(), policy=evict_gelu)
    for seed in range(4):
        pair.step(lambda m: m(batch()), seed)
    said = []
    for model in (pair.plain, pair.limited):
        kept: list[torch.Tensor] = []
        hook = model.blocks[1].act.register_forward_hook(lambda _m, _x, out, kept=kept: kept.append(out))
        loss = model(batch())
        with torch.no_grad():
            kept[0].mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation") as error:
            loss.backward()
        said.append(str(error.value).partition("Hint")[0].partition(", which is")[0])
        hook.remove()
    assert said[0].partition("]")[0] == said[1].partition("]")[0]
    for seed in range(2):
        pair.step(lambda m: m(batch()), seed)


def top_hooks() -> Any:
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def test_hooks_of_others_stay_above(twins: Any) -> None:
    class Hooked(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.up(self.norm(x))

            def pack(tensor: torch.Tensor) -> torch.Tensor:
                self.seen.append(tuple(tensor.shape))
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                evicted = self.act(h)
            self.after = top_hooks()
            return x + self.down(self.middle(evicted))

    pair = twins(Hooked(), policy=evict_gelu)
    for model in (pair.plain, pair.limited):
        model.seen = []
    for seed in range(3):
        pair.step(lambda m: m(batch()).sum(), seed)
    assert pair.plain.seen == pair.limited.seen != [] and pair.handle.plan.replayed
    assert pair.plain.after is None and pair.limited.after is not None


def test_an_error_takes_the_hooks_away(twins: Any) -> None:
    class Fails(Block):
        failing = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.act(self.up(self.norm(x)))
            if self.failing:
                assert top_hooks() is not None
                raise ArithmeticError
            return x + self.down(h)

    pair = twins(Fails(), policy=evict_gelu)
    for seed in range(2):
        pair.step(lambda m: m(batch()).sum(), seed)
    pair.limited.failing = True
    with pytest.raises(ArithmeticError):
        pair.limited(batch())
    assert top_hooks() is None
    pair.limited.failing = False
    pair.step(lambda m: m(batch()).sum(), 2)


def test_a_recorder_may_end_within_an_operation(twins: Any) -> None:
    """Where garbage is all that holds it, a kernel is the last to let go of its C++ recorder."""

    class Holds(list[Any]):
        """What garbage can hold and a weak reference can watch."""

    class Kept(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            box[0].extend(interceptors()[-1:])
            return super().forward(x)

    class Collects(Interceptor):
        def operation(self, func: Any, args: Any, kwargs: Any) -> Any:
            gc.collect()
            return proceed(func, args, kwargs)

    pair, box = twins(Kept(), policy=evict_gelu), [Holds()]
    for seed in range(2):
        box[0].clear()
        pair.step(lambda m: m(batch()).sum(), seed)
    assert any(isinstance(one, Recorder) and one.cpp is not None for one in box[0])
    box[0].append(box[0])
    end = weakref.ref(box[0])
    gc.disable()
    try:
        box.clear()
        with Collects():
            assert end() is not None
            assert torch.equal(torch.ones(2) + 1, torch.full((2,), 2.0))
            assert end() is None
    finally:
        gc.enable()
