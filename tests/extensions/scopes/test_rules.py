"""Rules of a scope: what they are told, and which lists of operations there are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from scoped_model import N, backward, batch, grads, make
from torch import nn

import lowtide
from lowtide import PlanError

aten = torch.ops.aten


@pytest.mark.parametrize(
    "operations",
    [
        ["aten.gelu.default"],
        ("aten.gelu",),
        {aten.gelu.default},
        [aten.gelu, "aten.tanh"],
        frozenset({aten.gelu, aten.exp.default}),
    ],
    ids=["name", "tuple", "set", "mixed", "frozenset"],
)
def test_a_list_of_operations_is_a_rule(same: Any, operations: Any) -> None:
    plain, model = make(), make()
    plain.scoped = lambda k: False
    model.policy = operations
    assert all(map(same, grads(plain), grads(model)))
    log = backward(model(batch()))
    assert log.count("gelu") == 3 and log.count("native_layer_norm") == log.count("addmm") == 0


@pytest.mark.parametrize(
    ("operation", "says"),
    [
        ("aten.geluu", "no operation of that name"),
        ("gelu", "no operation of that name"),
        ("aten", "no operation of that name"),
        ("nowhere.gelu.default", "no operation of that name"),
        (3, "a list names operations"),
        (aten.view, "views"),
        ("aten.t.default", "views"),
        (aten.linear, "made of other operations"),
        ("aten.matmul.default", "made of other operations"),
    ],
)
def test_a_list_names_what_a_scope_sees(operation: Any, says: str) -> None:
    with pytest.raises(PlanError, match=says), lowtide.checkpointing([operation]):
        pass


def test_a_rule_sees_the_operation_and_its_arguments(same: Any) -> None:
    """Products with few columns are cheap to run again."""
    plain, model = make(), make()
    plain.scoped = lambda k: False
    asked: list[Any] = []

    def narrow(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        asked.append(func)
        return func is aten.addmm.default and args[2].shape[1] == 4 * N

    model.policy = narrow
    assert all(map(same, grads(plain), grads(model)))
    assert asked.count(aten.addmm.default) == 6
    log = backward(model(batch()))
    assert log.count("addmm") == 3  # gelu saves what the first of each block made


class Rule:
    """A rule that is an object."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __call__(self, name: str) -> bool:
        self.asked.append(name)
        return True


@pytest.mark.parametrize("rule", [lambda: True, lambda a, b: True, lambda a, b, c, d: True])
def test_a_rule_that_takes_something_else_is_refused(rule: Any) -> None:
    with pytest.raises(PlanError, match="a rule takes"), lowtide.checkpointing(rule):
        pass


@pytest.mark.parametrize("where", ["alone", "verified always", "in a look", "nested", "fake"])
def test_a_rule_is_asked_once_for_each_operation(where: str) -> None:
    """Views are no operations, what a backward inside runs is not the scope's, and second runs and replays
    are no others.
    """
    rule = Rule()

    class Scoped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(N, N))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with lowtide.checkpointing(None if where == "nested" else "keep_all"):
                verify: Any = "always" if where == "verified always" else "first"
                with lowtide.checkpointing(rule, verify=verify):
                    y = (x @ self.weight.t()).view(-1, N).tanh()
                    if where != "fake":
                        (inner,) = torch.autograd.grad(y.square().sum(), self.weight, retain_graph=True)
                        y = y + inner.sum()
                y = y.exp()
            return y.sum()

    model = Scoped()
    inner = [] if where == "fake" else ["pow", "sum", "ones_like", "sum", "add"]
    expected = ["mm", "tanh", *inner]
    if where == "fake":
        lowtide.trace(model, batch(), fake=True, costs=False)
    else:
        if where == "in a look":
            lowtide.limit_memory(model, policy="keep_all")
        model(batch()).backward()
    assert [name.split(".")[1] for name in rule.asked] == expected


def test_a_stateful_rule_decides_as_it_counts(same: Any) -> None:
    """Every other product: in each step the same, limited or not."""

    def every_other() -> Any:
        count = iter(range(1000))
        return lambda name: name == "aten.addmm.default" and next(count) % 2 == 0

    plain, model = make(), make()
    plain.scoped = lambda k: False
    expected = grads(plain)
    for _ in range(3):
        model.policy = every_other()
        assert all(map(same, expected, grads(model)))
        log = backward(model(batch()))
        assert log.count("addmm") == 3
    model.policy = every_other()
    handle = lowtide.limit_memory(model, policy="keep_all")
    for _ in range(3):
        assert all(map(same, expected, grads(model)))
    products = [o.index for o in handle.graph.operations if o.name == "aten.addmm.default"][:6]
    evicted = {handle.graph.values[saved.value].producer for saved in handle.graph.saved if saved.forced}
    # what the second of a block makes, nothing saves
    assert [number in evicted for number in products] == [True, False] * 3


def test_a_rule_may_look_at_numbers(same: Any) -> None:
    """What it runs itself is neither recorded nor asked about."""
    asked: list[str] = []

    def by_size(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        asked.append(str(func))
        return bool(args[0].abs().max() < 1e9)

    w = nn.Parameter(batch())
    with lowtide.checkpointing(by_size):
        y = F.gelu(w * 2)
    y.sum().backward()
    assert asked == ["aten.mul.Tensor", "aten.gelu.default"]


def test_an_error_in_a_rule_is_the_users() -> None:
    def fails(name: str) -> bool:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), lowtide.checkpointing(fails):
        batch().requires_grad_().exp()
