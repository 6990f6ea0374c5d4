"""Promise 2: what does not reproduce is found at the first step, kept, named once in a warning, and planned
around.
"""

from __future__ import annotations

import ctypes
import itertools
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide import LowtideWarning, ReplayError
from lowtide.ops import Call, op_info
from lowtide.run.record.directors import ScopeDirector
from lowtide.run.record.recorder import Recorder
from lowtide.run.record.tape import Tape

N = 16


def by_numpy(h: torch.Tensor) -> torch.Tensor:
    """A kernel that fills an empty output where the dispatcher does not look, as Triton's do."""
    out = torch.empty_like(h)
    out.detach().numpy()[:] = h.detach().numpy() * 3
    return out


def over_a_result(h: torch.Tensor) -> torch.Tensor:
    """And one that overwrites what an operation has written."""
    out = h.detach() * 1.0
    out.numpy()[1:3] = 7.0
    return out


def by_memset(h: torch.Tensor) -> torch.Tensor:
    out = h.detach().exp()
    ctypes.memset(out.data_ptr(), 0, out.numel() * 2)
    return out


def through_a_view(h: torch.Tensor) -> torch.Tensor:
    out = h.detach().sigmoid()
    out[2:].numpy().fill(0.5)
    return out


def between_two_readers(h: torch.Tensor) -> torch.Tensor:
    out = h.detach().exp()
    before = out.sin()
    out.numpy()[:] = 2.0
    return out.cos() + before


class Behind(nn.Module):
    """A function that writes behind the dispatcher, in the middle of a plain network."""

    def __init__(self, write: Any) -> None:
        super().__init__()
        self.first = nn.Linear(N, N)
        self.write = write
        self.last = nn.Linear(N, N)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.nn.functional.gelu(self.first(x))
        y = self.write(h)
        return torch.tanh(self.last(y * h * y)).square().sum()


WRITES = [by_numpy, over_a_result, by_memset, through_a_view]


def batch() -> torch.Tensor:
    return torch.randn(6, N, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("write", WRITES, ids=lambda f: f.__name__)
def test_writes_behind_the_dispatcher(twins: Any, write: Any) -> None:
    pair = twins(Behind(write))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for seed in range(4):
            pair.step(lambda m: m(batch()), seed)
    said = [str(w.message) for w in caught if issubclass(w.category, LowtideWarning)]
    kept = pair.handle.kept
    assert pair.handle.plan.replayed  # the rest is still evicted
    if kept:
        for name in kept:
            assert sum(name in text for text in said) == 1
            replayed = {pair.handle.graph.operations[i].name for i in pair.handle.plan.replayed}
            assert name not in replayed
    else:
        assert write is by_numpy  # an empty tensor is never replayed in the first place


@pytest.mark.parametrize("write", WRITES, ids=lambda f: f.__name__)
def test_writes_behind_the_dispatcher_in_a_scope(same: Any, write: Any) -> None:
    model, grads = Behind(write), []
    for scoped in (False, True):
        model.zero_grad()
        with lowtide.checkpointing(policy=None if scoped else "keep_all"):
            loss = model(batch())
        try:
            loss.backward()
        except ReplayError:
            assert scoped  # right or a clear error: never wrong
            return
        grads.append([p.grad.clone() for p in model.parameters()])
    assert all(map(same, *grads))


def test_a_write_between_two_readers_is_an_error_and_never_a_wrong_number(same: Any, everything: Any) -> None:
    """The first reader's input exists nowhere any more: nothing can be evicted there, and nothing that was
    can come back.
    """
    model = Behind(between_two_readers)
    model(batch()).backward()
    grads = [p.grad.clone() for p in model.parameters()]
    lowtide.limit_memory(model, policy=everything)
    for _ in range(2):
        model.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", LowtideWarning)
            loss = model(batch())
        try:
            loss.backward()
        except ReplayError:
            continue
        assert all(same(a, p.grad) for a, p in zip(grads, model.parameters(), strict=True))


CALLS = itertools.count()


@torch.library.custom_op("lowtide_tests::noise", mutates_args=())
def noise(x: torch.Tensor) -> torch.Tensor:
    """An operation that is nondeterministic and does not say so."""
    return x * (1 + next(CALLS))


@noise.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("lowtide_tests::honest", mutates_args=())
def honest(x: torch.Tensor) -> torch.Tensor:
    return x * 3


@honest.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("lowtide_tests::writes", mutates_args=("x",))
def writes(x: torch.Tensor, by: float) -> None:
    x.mul_(by)


@torch.library.custom_op("lowtide_tests::by_layout", mutates_args=("x",))
def by_layout(x: torch.Tensor) -> None:
    x.mul_(1 + x.stride(0))


def test_an_operation_that_goes_by_the_layout_is_compared_in_the_same() -> None:
    def function(h: torch.Tensor) -> torch.Tensor:
        y = h.exp()
        # as vectorized kernels do in their last bits, on some processors
        by_layout(y.detach().chunk(2, 1)[1])
        return y.detach().sin()

    asked = itertools.count()
    around = lambda back: (next(asked), back())[1]  # noqa: E731
    recorder = Recorder(ScopeDirector(), tape=Tape(verify=True), around_unpack=around)
    with recorder.recording():
        loss = Behind(function)(batch())
    loss.backward()
    assert next(asked)
    assert not recorder.tape.findings


def test_nondeterministic_operation_is_kept_and_named_once(same: Any, everything: Any) -> None:
    global CALLS
    model = Behind(lambda h: noise(h.detach()))
    handle = lowtide.limit_memory(model, policy=everything)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(3):
            model.zero_grad()
            start = 100 * step
            CALLS = itertools.count(start)
            model(batch()).backward()
            twin = Behind(lambda h, start=start: h.detach() * (1 + start))
            twin.load_state_dict(model.state_dict())
            twin(batch()).backward()
            assert all(
                same(a.grad, b.grad) for a, b in zip(model.parameters(), twin.parameters(), strict=True)
            )
    assert list(handle.kept) == ["lowtide_tests.noise.default"]
    assert sum("lowtide_tests.noise" in str(w.message) for w in caught) == 1
    assert handle.plan.replayed


def test_custom_operations(twins: Any) -> None:
    def function(h: torch.Tensor) -> torch.Tensor:
        y = honest(h.detach().exp())
        z = y.sin()
        writes(z, 2.0)
        return honest(z) * y

    handle = twins(Behind(function)).check(lambda m: m(batch()))
    names = {handle.graph.operations[i].name for i in handle.plan.replayed}
    assert "lowtide_tests.honest.default" in names


torch.library.define(
    "lowtide_tests::attention",
    "(Tensor x, float dropout_p) -> (Tensor output, Tensor rng_state, Tensor unused)",
)


@torch.library.impl("lowtide_tests::attention", "CPU")
def attention(x: torch.Tensor, dropout_p: float) -> tuple[torch.Tensor, ...]:
    """Results as on a GPU: what holds the generator's state has content where attention drops out."""
    garbage = [torch.full((2,), next(CALLS)) for _ in range(2)]
    if not dropout_p:
        return x.exp(), *garbage
    state = torch.randint(1 << 40, (2,))
    kept = torch.rand(x.shape, generator=torch.Generator().manual_seed(int(state[0]))) >= dropout_p
    return x.exp() * kept, state, garbage[1]


class Attention(torch.autograd.Function):
    """Saves all results, as PyTorch's attention does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dropout_p: float) -> torch.Tensor:
        results = torch.ops.lowtide_tests.attention(x, dropout_p)
        ctx.save_for_backward(*results)
        return results[0]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient * ctx.saved_tensors[0], None


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("verify", ["first", "always"])
def test_what_attention_returns_and_nobody_writes_is_compared_with_nothing(
    twins: Any, dropout: float, verify: str, everything: Any
) -> None:
    global CALLS
    CALLS = itertools.count()
    model = Behind(lambda h: Attention.apply(h.sin(), dropout))
    handle = twins(model, policy=everything, verify=verify).check(lambda m: m(batch()))
    assert handle.kept == {}
    names = {handle.graph.operations[i].name for i in handle.plan.replayed}
    assert "lowtide_tests.attention.default" in names


def test_the_state_that_a_dropout_began_at_is_compared() -> None:
    called = Call(torch.ops.lowtide_tests.attention.default, (batch(), 0.5), {})
    assert called.loose == (2,) and called.draws()
    called = Call(torch.ops.lowtide_tests.attention.default, (batch(), 0.0), {})
    assert called.loose == (2, 1) and not called.draws()


ATTENTION = torch.ops.aten


@pytest.mark.parametrize(
    ("operation", "dropping", "undropped"),
    [
        (ATTENTION._scaled_dot_product_flash_attention, {7}, {6, 7}),
        (ATTENTION._flash_attention_forward, {3}, {2, 3}),
        (ATTENTION._scaled_dot_product_efficient_attention, set(), {2, 3}),
        (ATTENTION._efficient_attention_forward, set(), {2, 3}),
        (ATTENTION._scaled_dot_product_cudnn_attention, set(), {6, 7}),
        (ATTENTION._scaled_dot_product_flash_attention_for_cpu, set(), set()),
    ],
)
def test_results_of_pytorchs_attention_that_carry_nothing(
    operation: Any, dropping: set[int], undropped: set[int]
) -> None:
    position = op_info(operation.default).dropout_position
    for dropout, loose in ((0.1, dropping), (0.0, undropped)):
        call = Call(operation.default, (None,) * position + (dropout,), {})
        assert set(call.loose) == loose and call.draws() is bool(dropout)


def test_always_finds_what_turns_nondeterministic_later(everything: Any) -> None:
    """The generator of noise behaves at the first step; digests find it later, and the step raises."""
    global CALLS
    model = Behind(lambda h: noise(h.detach()))
    handle = lowtide.limit_memory(model, policy=everything, verify="always")
    CALLS = itertools.repeat(1)
    for _ in range(2):
        model(batch()).backward()
        model.zero_grad()
    assert handle.kept == {}
    CALLS = itertools.count()
    with pytest.raises(ReplayError, match=r"noise|bytes"):
        model(batch()).backward()


def test_verify_never_does_not_look(everything: Any) -> None:
    global CALLS
    CALLS = itertools.count()
    model = Behind(lambda h: noise(h.detach()))
    handle = lowtide.limit_memory(model, policy=everything, verify="never")
    model(batch()).backward()
    assert handle.kept == {}
    model.zero_grad()
    CALLS = itertools.count()
    model(batch()).backward()
    assert next(CALLS) == 2  # forward and replay, no third run


def test_verification_runs_each_operation_twice_and_only_in_the_first_step(everything: Any) -> None:
    global CALLS
    model = Behind(lambda h: noise(h.detach()))
    lowtide.limit_memory(model, policy=everything)
    counted = []
    for _ in range(4):
        CALLS = Counter()
        model(batch()).backward()
        model.zero_grad()
        counted.append(CALLS.count)
    assert counted[0] >= 2 and counted[1:] == [2] * 3  # the forward and its replay


class Counter:
    """An iterator that always gives 1 and counts."""

    count = 0

    def __next__(self) -> int:
        self.count += 1
        return 1


@pytest.mark.parametrize("verify", ["first", "always"])
def test_a_scope_keeps_a_nondeterministic_operation(same: Any, verify: Any) -> None:
    """It is found when the scope first runs, named once, and kept from then on without another second run."""
    global CALLS
    model, grads = Behind(lambda h: noise(h.detach())), []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            CALLS = itertools.count(5)
            model.zero_grad()
            with lowtide.checkpointing(verify=verify):
                loss = model(batch())
            ran = next(CALLS) - 5
            loss.backward()
            grads.append((ran, [p.grad.clone() for p in model.parameters()]))
    twin = Behind(lambda h: h.detach() * 6)
    twin.load_state_dict(model.state_dict())
    twin(batch()).backward()
    for ran, found in grads:
        assert all(map(same, (p.grad for p in twin.parameters()), found)), ran
    assert [ran for ran, _ in grads] == [2, 1, 1]
    assert sum("lowtide_tests.noise" in str(w.message) for w in caught) == 1


def test_a_scope_finds_what_turns_nondeterministic_later() -> None:
    """Each replay of ``always`` is compared; ``first`` compares no more, and says so."""
    global CALLS
    model = Behind(lambda h: noise(h.detach()))
    for verify, raises in (("first", False), ("always", True)):
        for turn in range(2):
            CALLS = itertools.repeat(1)
            with lowtide.checkpointing(verify=verify):
                loss = model(batch())
            CALLS = itertools.repeat(2) if turn else CALLS
            if turn and raises:
                with pytest.raises(ReplayError, match="other bytes in its replay"):
                    loss.backward()
            else:
                loss.backward()


def test_a_write_that_pytorch_does_not_see_is_named_as_a_cause() -> None:
    """``first`` would not notice it, so the error does not send there alone."""
    scale = torch.ones(8)
    weight = torch.ones(8, requires_grad=True)
    with lowtide.checkpointing(verify="always"):
        loss = (weight * scale.exp()).sin().sum()
    scale.numpy()[:] += 1
    with pytest.raises(ReplayError, match=r"If NumPy .* only verify='always' detects this"):
        loss.backward()


def test_what_did_not_reproduce_in_backward_is_verified_again() -> None:
    global CALLS
    model = Behind(lambda h: noise(h.detach()))
    for raises in (True, True, False, False):
        CALLS = counter = Counter()
        with lowtide.checkpointing():
            loss = model(batch())
        ran = counter.count
        CALLS = itertools.repeat(2 if raises else 1)
        if raises:
            with pytest.raises(ReplayError, match="other bytes in its replay"):
                loss.backward()
        else:
            loss.backward()
        verified = ran == 2
    assert not verified  # the third run reproduced, and the fourth was trusted
