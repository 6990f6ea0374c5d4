"""`limit_memory`: several models, nested ones, and threads."""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_model import N, batch, needs_meter, small
from torch import nn
from torch.utils.checkpoint import checkpoint

import lowtide


def test_two_models_interleaved(twins: Any) -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = small(), small(layers=2)

    plain, limited = Both(), Both()
    lowtide.limit_memory(limited.a, policy="full")
    lowtide.limit_memory(limited.b, "85%")
    for seed in range(3):
        grads = []
        for pair in (plain, limited):
            pair.zero_grad()
            torch.manual_seed(seed)
            first, second, third = pair.a(batch()), pair.b(batch(110)), pair.a(batch())
            second.backward()
            (first * third).backward()
            grads.append([p.grad.clone() for p in pair.parameters()])
        assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    assert limited.a.__dict__["forward"].book.known is not limited.b.__dict__["forward"].book.known


THREADS = """
import os, threading, warnings
import torch, lowtide
warnings.simplefilter("ignore")
torch.set_num_threads(1)
for _ in range(2):  # copies, which need not import it all again
    copied = os.fork()
    if not copied:
        break
    ended = os.waitpid(copied, 0)[1]
    assert ended == 0, ended
else:
    raise SystemExit

def train(steps):
    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(4)))
    lowtide.limit_memory(model, "150%")  # of a process, which counts what others allocate meanwhile
    for _ in range(steps):
        model(torch.randn(32, 16)).sum().backward()
    done.append(model)

done, at_once = [], threading.Barrier(4)
threads = [threading.Thread(target=lambda n=n: (at_once.wait(), train(n))) for n in (1, 1, 2, 3)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert len(done) == 4
"""


def test_threads_that_begin_at_once_share_what_is_registered_and_end_with_the_process() -> None:
    """Each took the first registration for its own; and a thread that kept something of lowtide's waited for
    Python, which was gone, and aborted the process in half of the runs.
    """
    done = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-1500:]


@pytest.mark.parametrize("outer", ["full", None])
def test_a_limited_model_inside_a_limited_model(outer: str | None, everything: Any) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = small()
            self.linear = nn.Linear(N, N)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(torch.tanh(self.linear(x)).exp())

    torch.manual_seed(0)
    plain = Outer()
    limited = copy.deepcopy(plain)
    lowtide.limit_memory(limited.inner, policy="full")
    if outer is not None:
        lowtide.limit_memory(limited, policy=everything)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for seed in range(3):
            grads = []
            for model in (plain, limited):
                model.zero_grad()
                torch.manual_seed(seed)
                model(batch()).backward()
                grads.append([p.grad.clone() for p in model.parameters()])
            assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    assert not [one for one in caught if "has not engaged" in str(one.message)], "the inner one ran, too"


def in_two_threads(work: Callable[[int], None]) -> None:
    """Call ``work(0)`` and ``work(1)`` at the same time; neither raises."""
    barrier = threading.Barrier(2)
    errors: list[BaseException] = []

    def run(k: int) -> None:
        try:
            barrier.wait()
            work(k)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(k,)) for k in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def test_threads_train_two_limited_models() -> None:
    def trained(model: torch.nn.Module) -> list[torch.Tensor]:
        for step in range(4):
            model.zero_grad()
            model(batch(6 + step % 2)).backward()
        return [p.grad.clone() for p in model.parameters()]

    def work(k: int) -> None:
        torch.set_num_threads(1)
        results[k] = trained(models[k])

    results: dict[int, list[torch.Tensor]] = {}
    plain = [trained(small(dropout=0.0, layers=2 + k)) for k in range(2)]
    models = [small(dropout=0.0, layers=2 + k) for k in range(2)]
    for model in models:
        lowtide.limit_memory(model, policy="full")
    in_two_threads(work)
    for k in range(2):
        assert all(torch.equal(a, b) for a, b in zip(plain[k], results[k], strict=True))


def test_one_limited_model_in_two_threads() -> None:
    """As DataParallel's replicas or an asynchronous trainer would: forwards at the same time, each with its
    own backward.
    """
    model = small(dropout=0.0)
    lowtide.limit_memory(model, policy="full")
    plain = small(dropout=0.0)
    expected = [torch.autograd.grad(plain(batch(6 + k)), list(plain.parameters())) for k in range(2)]
    parameters = list(model.parameters())  # while one thread plans, the model shows others fake ones
    found: dict[int, Any] = {}

    def work(k: int) -> None:
        for _ in range(3):
            found[k] = torch.autograd.grad(model(batch(6 + k)), parameters)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        in_two_threads(work)
    for k in range(2):
        assert all(torch.equal(a, b) for a, b in zip(expected[k], found[k], strict=True))


def test_planning_in_one_thread_does_not_disturb_another() -> None:
    """While one thread traces on fake parameters, another uses its own model; both drop out by the one
    default generator.
    """
    model, other = small(layers=6), small()
    errors: list[BaseException] = []
    stop = threading.Event()

    def work() -> None:
        try:
            while not stop.is_set():
                other.zero_grad()
                other(batch()).backward()
                assert all(type(p.grad) is torch.Tensor for p in other.parameters())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        lowtide.limit_memory(model, policy="full")
        model(batch()).backward()
    finally:
        stop.set()
        thread.join()
    assert errors == []


def test_each_of_two_models_in_one_step_has_its_own_budget() -> None:
    """Two encoders one after the other: neither is planned for what the other holds."""

    def encoder() -> nn.Module:
        layers = [
            nn.Sequential(nn.Linear(N, 4 * N), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * N, N))
            for _ in "1234"
        ]
        return nn.Sequential(*layers)

    torch.manual_seed(0)
    plain, x = [encoder(), encoder()], torch.randn(256, N)
    limited = copy.deepcopy(plain)
    handles = [lowtide.limit_memory(model, "85%") for model in limited]
    said: list[Any] = []
    for seed in range(4):
        grads = []
        for first, second in (plain, limited):
            first.zero_grad()
            second.zero_grad()
            torch.manual_seed(seed)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                second(first(x)).square().sum().backward()
            said += [str(one.message) for one in caught]
            grads.append([p.grad.clone() for model in (first, second) for p in model.parameters()])
        assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    plans = [handle.plan for handle in handles]
    assert all(plan is not None and plan.replayed for plan in plans)
    assert plans[0].predicted_peak_bytes == pytest.approx(plans[1].predicted_peak_bytes, rel=0.2)
    assert sum("several limited models take part" in text for text in said) == 2


class _Raises(torch.autograd.Function):
    """Ends its backward with an error."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        raise ValueError("no gradient")


def test_a_loss_kept_after_an_error_in_its_backward_takes_no_part_in_steps_of_other_models() -> None:
    """The error ends backward before it reaches the model, and the loss keeps the first step open. The other
    model was taken for a part of that.
    """
    failing, other = small(dropout=0.0), small(dropout=0.0)
    plain = copy.deepcopy(other)
    lowtide.limit_memory(failing, "90%")
    handle = lowtide.limit_memory(other, "70%")
    loss = _Raises.apply(failing(batch()))
    with pytest.raises(ValueError, match="no gradient"):
        loss.backward()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            for model in (other, plain):
                model.zero_grad()
                model(batch()).backward()
    assert not [str(one.message) for one in caught if "several limited models" in str(one.message)]
    pairs = zip(other.parameters(), plain.parameters(), strict=True)
    assert all(torch.equal(a.grad, b.grad) for a, b in pairs)  # pyright: ignore
    assert handle.plan is not None and handle.plan.replayed
    del loss
    other(batch()).backward()
    assert handle.measured_peak_bytes is not None


def test_an_outer_limit_whose_plan_changes_nothing_decides_for_an_inner_one(twins: Any) -> None:
    """The inner one was planned for, too, and both were said to be held no more."""

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = small()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x.exp()) * 2

    pair = twins(Outer(), budget="100%")
    inner = lowtide.limit_memory(pair.limited.inner, "90%")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for seed in range(3):
            pair.step(lambda model: model(batch()), seed)
    assert pair.handle.plan.changes_nothing and inner.plan is None


def test_a_limited_model_in_a_scope_is_told_that_the_scope_decides(twins: Any) -> None:
    model = small()
    handle = lowtide.limit_memory(model, "90%")
    with pytest.warns(lowtide.LowtideWarning, match="runs inside lowtide.checkpoint"):
        lowtide.checkpoint(model, batch()).backward()
    assert handle.plan is None


class Checkpointed(nn.Module):
    """Checkpoints two models, what it computes around them, and itself."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first, self.second = small(), small(layers=2)
        self.linear = nn.Linear(N, N)

    def part(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x.sin() * self.first(x.cos()))) * self.second(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        return checkpoint(self.part, x, use_reentrant=self.reentrant).sum()  # pyright: ignore


def assert_same_gradients(plain: nn.Module, limited: nn.Module, steps: int, same: Any) -> None:
    """Steps of both models, each from the seed of its number, have the same gradients."""
    for seed in range(steps):
        for model in (plain, limited):
            torch.manual_seed(seed)
            model.zero_grad()
            model(batch()).backward()
        pairs = zip(plain.parameters(), limited.parameters(), strict=True)
        assert all(same(a.grad, b.grad) for a, b in pairs)


@pytest.mark.filterwarnings("ignore:a planned step took")  # what runs again takes its own, too
@pytest.mark.parametrize("budget", ["100%", "80%", None])
def test_limited_models_within_a_checkpoint(budget: str | None, everything: Any, same: Any) -> None:
    """The checkpoint counts what its two forwards save: it raised `CheckpointError` from the second step on,
    where a plan evicts.
    """
    torch.manual_seed(0)
    plain = Checkpointed(reentrant=False)
    limited = copy.deepcopy(plain)
    options: dict[str, Any] = {"policy": everything} if budget is None else {"budget": budget}
    handle = lowtide.limit_memory(limited.first, **options)
    assert_same_gradients(plain, limited, 4, same)
    assert handle.plan is not None and bool(handle.plan.replayed) is (budget != "100%")


def test_a_limited_model_whose_forward_a_backward_runs(same: Any) -> None:
    """A reentrant checkpoint runs its one forward with gradients there: planning raised `IndexError`."""
    torch.manual_seed(0)
    plain = Checkpointed(reentrant=True)
    limited = copy.deepcopy(plain)
    handle = lowtide.limit_memory(limited.first, "80%")
    with pytest.warns(lowtide.LowtideWarning, match="runs within a backward") as caught:
        assert_same_gradients(plain, limited, 3, same)
    assert len(caught) == 1 and handle.plan is None


@needs_meter
def test_the_peak_of_a_step_of_several_models_is_not_given_as_that_of_one() -> None:
    """It stayed that of an earlier step of one model alone."""
    first, second = small(), small()
    handles = [lowtide.limit_memory(model, "80%", progress=False) for model in (first, second)]
    first(batch(100)).backward()
    first.zero_grad()
    assert handles[0].measured_peak_bytes is not None
    for _ in range(3):
        (first(batch(200)) + second(batch(200))).backward()
        assert [handle.measured_peak_bytes for handle in handles] == [None, None]


class Wide(nn.Module):
    """A block that is larger than what enters it: its layers have names, none a number."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.mid = nn.LayerNorm(N), nn.Linear(N, 8 * N), nn.Linear(8 * N, 8 * N)
        self.down = nn.Linear(8 * N, N)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.mid(torch.tanh(self.up(self.norm(x))))))


@needs_meter
@needs_meter
def test_a_model_that_joins_the_steps_of_one_with_a_plan_is_noticed() -> None:
    first, second, alone = small(), small(layers=2), small(layers=2)
    handle, other = lowtide.limit_memory(first, "80%"), lowtide.limit_memory(second, "80%")
    lowtide.limit_memory(alone, "80%")
    alone(batch(200)).backward()
    for _ in range(2):
        first(batch(200)).backward()
    assert handle.measured_peak_bytes is not None
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(3):
            (first(batch(200)) + second(batch(200))).backward()
            assert handle.measured_peak_bytes is None and other.measured_peak_bytes is None
    texts = [str(warning.message) for warning in told]
    assert [text for text in texts if "was predicted" in text] == [], "the other's bytes are not its own"
    assert sum("several limited models" in text for text in texts) == 2
    graph, expected = other.graph, lowtide.handle_of(alone).graph  # type: ignore[union-attr]
    assert graph is not None and expected is not None
    assert [op.name for op in graph.operations] == [op.name for op in expected.operations]


def test_limited_blocks_take_what_checkpoints_around_them_take() -> None:
    """A block without numbered children is one region, not as many as it has layers."""

    def peak(limited: bool) -> int:
        torch.manual_seed(2)
        blocks = [Wide() for _ in range(5)]
        if limited:
            for block in blocks:
                lowtide.limit_memory(block, policy="full")

        def step() -> None:
            x = batch(400).requires_grad_()
            for block in blocks:
                x = block(x) if limited else checkpoint(block, x, use_reentrant=False)
            x.square().sum().backward()

        for _ in range(2):
            step()
        return lowtide.measure(step).peak_bytes

    assert peak(limited=True) <= peak(limited=False)


def test_a_profiled_step_leaves_no_cycle_around_the_inputs_of_blocks() -> None:
    blocks, entered = [Wide() for _ in range(2)], list[Any]()
    for block in blocks:
        lowtide.limit_memory(block, policy="full")
        block.register_forward_pre_hook(lambda _, given: entered.append(weakref.ref(given[0])))
    gc.collect()
    gc.disable()
    try:
        blocks[1](blocks[0](batch().requires_grad_())).square().sum().backward()
        assert len(entered) == 2 and not any(reference() is not None for reference in entered)
    finally:
        gc.enable()
