"""Which calls of a limited model are limited steps, and why the others run as they are."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide import private
from lowtide.run.limit.calls import PlainCall, another_decides, deciding, why_plain
from lowtide.run.limit.key import Inputs

Ask = Callable[..., None]
"""From a model and its arguments: notes why a call of the model would run as it is, there and then."""


def _net() -> nn.Module:
    return nn.Linear(3, 3)


def _frozen() -> nn.Module:
    return _net().requires_grad_(False)


def _within(context: Any, model: Callable[[], nn.Module] = _net, grad: bool = False) -> Callable[[Ask], None]:
    def call(ask: Ask) -> None:
        with context():
            ask(model(), torch.ones(3, requires_grad=grad))

    return call


def _both() -> Any:
    stack = ExitStack()
    stack.enter_context(deciding())
    stack.enter_context(lowtide.checkpointing())
    return stack


def _in_a_backward(ask: Ask) -> None:
    x = torch.ones(3, requires_grad=True)

    def hook(_: torch.Tensor) -> None:
        with torch.enable_grad():
            ask(_net(), torch.ones(3))

    x.register_hook(hook)
    x.sum().backward()


def _again_for_a_checkpoint(ask: Ask) -> None:
    model = _net()

    def part(x: torch.Tensor) -> torch.Tensor:
        if private.in_backward():  # the second time, for backward
            ask(model, x)
        return model(x)

    result: Any = checkpoint(part, torch.ones(3), use_reentrant=False)
    result.sum().backward()


def _transformed(ask: Ask) -> None:
    model = _net()

    def part(x: torch.Tensor) -> torch.Tensor:
        ask(model, x)
        return x

    torch.func.vmap(part)(torch.ones(2, 3))


def _traced(ask: Ask) -> None:
    model = _net()

    def part(x: torch.Tensor) -> torch.Tensor:
        ask(model, x)
        return x + 1

    torch.jit.trace(part, torch.ones(3), check_trace=False)


NOTHING = PlainCall(engages=False, saves_nothing=True)

CASES: list[tuple[str, Callable[[Ask], None], PlainCall | None, str]] = [
    ("a training step", _within(nullcontext), None, ""),
    ("without gradients", _within(torch.no_grad), NOTHING, ""),
    ("for inference", _within(torch.inference_mode), NOTHING, ""),
    ("traced for an export", _traced, NOTHING, ""),
    ("in a limited model that runs as it is", _within(deciding), PlainCall(), ""),
    ("in a scope", _within(lowtide.checkpointing), PlainCall(), "runs inside lowtide.checkpoint"),
    ("in a scope of such a model", _within(_both), PlainCall(), ""),
    ("in a backward", _in_a_backward, PlainCall(in_backward=True), "within a backward"),
    ("again for a checkpoint", _again_for_a_checkpoint, PlainCall(in_backward=True), ""),
    ("transformed", _transformed, PlainCall(), "inside a function transform"),
    ("lazy", _within(nullcontext, lambda: nn.LazyLinear(3)), PlainCall(), "not initialized yet"),
    ("only its inputs train", _within(nullcontext, _frozen, grad=True), PlainCall(), "requires grad"),
    ("nothing trains", _within(nullcontext, _frozen), PlainCall(engages=False), ""),
]
"""A situation, how a call comes into it, why it runs as it is, and words of the warning, if there is one."""


@pytest.mark.parametrize(
    ("call", "expected", "words"), [case[1:] for case in CASES], ids=[c[0] for c in CASES]
)
@pytest.mark.filterwarnings("ignore:.torch.jit.trace", "ignore:Lazy modules")
def test_why_a_call_runs_as_it_is(
    call: Callable[[Ask], None], expected: PlainCall | None, words: str
) -> None:
    asked: list[PlainCall | None] = []
    call(lambda model, *args: asked.append(why_plain(Inputs(model, args, {}, compiled=False))))
    (found,) = asked
    assert (None if found is None else replace(found, reason="")) == expected
    reason = "" if found is None else found.reason
    assert words in reason and bool(reason) == bool(words)


def test_what_decides_ends_with_its_block() -> None:
    with pytest.raises(KeyError), deciding(), deciding():
        assert another_decides()
        raise KeyError
    assert not another_decides()
