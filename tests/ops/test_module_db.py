"""PyTorch's own table of modules (`module_db`): three training steps of each input, limited and plain, bit by
bit, within the budget.
"""

from __future__ import annotations

import copy
import functools
import gc
import random
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from compare import SLACK_BYTES, TRIES, differences, peak_of, snapshot
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

import lowtide

pytest.importorskip("expecttest")  # PyTorch's table imports it

DTYPES = [torch.float32, torch.float64]
BUDGETS = ["100%", "70%"]
STEPS = 3
HEAVY = ("nn.MultiheadAttention", "nn.RNN", "nn.LSTM", "nn.GRU")
HEAVY += (
    "nn.TransformerEncoder",
    "nn.TransformerEncoderLayer",
    "nn.TransformerDecoderLayer",
    "nn.Transformer",
)
"""Modules whose planning takes seconds, with hundreds of inputs each: of these every other one, under one of
the budgets.
"""
SHARES = {**dict.fromkeys(HEAVY, 2), "nn.LinearCrossEntropyLoss": 20}
"""One input in so many is tried. The table has 1,714 of the latter, which combine the same few options."""
FLOAT64_SHARE = 4  # of these in float64: the same operations as in float32, in other kernels
SAMPLE = 40

DIFFERS: dict[str, str] = {}
"""Inputs (as `Case.name`, or the module's name) whose plain steps are not reproducible, and why."""


@dataclass
class Case:
    """One module, its arguments, and the arguments of its forward."""

    name: str
    module: str
    dtype: torch.dtype
    training: bool
    kind: Any
    input: Any
    budgets: list[str]

    def build(self) -> nn.Module:
        """The module, always the same."""
        torch.manual_seed(0)
        constructor = self.input.constructor_input
        model = self.kind(*constructor.args, **constructor.kwargs).to(self.dtype)
        return model.train(self.training)

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Those of the forward, copied; those that require gradients are leaves."""
        forward = self.input.forward_input
        return tree_map(_fresh, (tuple(forward.args), dict(forward.kwargs)))


def _fresh(thing: Any) -> Any:
    if isinstance(thing, torch.Tensor):
        return thing.detach().clone().requires_grad_(thing.requires_grad)
    return copy.deepcopy(thing)


@functools.cache
def cases() -> tuple[Case, ...]:
    """Every input that is tried, in the table's order."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_modules import module_db
    gc.collect()
    gc.freeze()  # every measurement collects, and would go through what was just imported
    found = []
    for info in module_db:
        for dtype in DTYPES:
            if dtype not in info.supported_dtypes("cpu"):
                continue
            every = SHARES.get(info.name, 1) * (FLOAT64_SHARE if dtype is torch.float64 else 1)
            draw = random.Random(f"{info.name} {dtype}")
            for training in [True, False] if info.train_and_eval_differ else [True]:
                torch.manual_seed(0)
                random.seed(0)
                made = info.module_inputs_func(
                    info, device="cpu", dtype=dtype, requires_grad=True, training=training
                )
                for number, given in enumerate(made):
                    budgets = draw.sample(BUDGETS, 1 if info.name in HEAVY else len(BUDGETS))
                    if (number and draw.randrange(every)) or given.forward_input is None:
                        continue
                    mode = "train" if training else "eval"
                    name = f"{info.name} {str(dtype).removeprefix('torch.')} {mode} {number}"
                    found.append(
                        Case(name, info.name, dtype, training, info.module_cls, given, sorted(budgets))
                    )
    return tuple(found)


def loss_of(output: Any) -> torch.Tensor | None:
    """Every differentiable number of the output counts, each with a weight of its own."""
    leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    parts = [
        (leaf * torch.linspace(0.5, 1.5, leaf.numel(), dtype=leaf.dtype).view(leaf.shape)).sum()
        for leaf in leaves
    ]
    return sum(parts[1:], parts[0]) if parts else None


def _detached(thing: Any) -> Any:
    return thing.detach() if isinstance(thing, torch.Tensor) else thing


def steps(case: Case, model: nn.Module, measured: bool = True) -> Iterator[tuple[dict[str, Any], int]]:
    """Training steps: what each leaves behind, and the most live bytes (0 where they are not
    measured).
    """
    optimizer = None
    for number in range(STEPS):
        args, kwargs = case.arguments()
        torch.manual_seed(100 + number)

        def step(args: Any = args, kwargs: Any = kwargs) -> Any:
            output = model(*args, **kwargs)
            loss = loss_of(output)
            if loss is not None:
                loss.backward()
            return tree_map(_detached, output)

        peak, output = peak_of(step, [model], (args, kwargs)) if measured else (0, step())
        given = [leaf.grad for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        yield snapshot((model, output, given, torch.get_rng_state())), peak
        trained = [p for p in model.parameters() if p.requires_grad]
        # not before the first step: lazy modules have nothing to train until then
        if optimizer is None and trained:
            optimizer = torch.optim.SGD(trained, lr=0.01)
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()


def plain_steps(case: Case) -> list[dict[str, Any]]:
    """What the steps leave behind without lowtide."""
    return [found for found, _ in steps(case, case.build(), measured=False)]


def limited_steps(case: Case, budget: str | int) -> tuple[list[dict[str, Any]], list[tuple[int, int]]]:
    """The same, limited: what the steps leave behind; and of each the most live bytes, and the budget.

    With 100 % the loss lies outside, and lowtide has to measure it; below that it is given.
    """
    inside = {} if budget == "100%" else {"loss_fn": lambda output: loss_of(output)}
    for attempt in range(TRIES):
        model = case.build()
        handle = lowtide.limit_memory(model, budget, **inside)
        try:
            found, peaks = [], []
            for left, peak in steps(case, model):
                found.append(left)
                limit = handle.plan.budget_bytes if handle.plan is not None else None
                if limit is not None:
                    peaks.append((peak, limit))
            return found, peaks
        except lowtide.BudgetError as error:
            if error.smallest_bytes is None or attempt == TRIES - 1:
                raise
            budget = f"{error.smallest_bytes}B"  # a bare number of less than a hundred is refused
    raise AssertionError("unreachable")


def faults(case: Case) -> list[str]:
    """What is wrong with a limited module, in words."""
    plain = plain_steps(case)
    if case.name in DIFFERS or case.module in DIFFERS:
        return (
            []
            if differences(plain, plain_steps(case))
            else [f"{case.name}: named as not reproducible, and it is"]
        )
    found = []
    for budget in case.budgets:
        try:
            limited, peaks = limited_steps(case, budget)
        except Exception as error:
            found.append(f"{case.name} at {budget}: {type(error).__name__}: {str(error)[:200]}")
            continue
        if wrong := differences(plain, limited):
            itself = (
                " (plain steps differ among themselves, too)" if differences(plain, plain_steps(case)) else ""
            )
            found.append(f"{case.name} at {budget}: {len(wrong)} differences: {wrong[:3]}{itself}")
        for number, (peak, limit) in enumerate(peaks[1:], 2):
            if peak > limit + SLACK_BYTES:
                found.append(f"{case.name} at {budget}: step {number} took {peak:,} bytes of {limit:,}")
    return found


def check(chosen: list[Case]) -> None:
    """Nothing is wrong with any of these."""
    assert chosen
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for case in chosen:
            found += faults(case)
    assert not found, f"{len(found)} faults in {len(chosen)} inputs:\n" + "\n".join(found)


PARTS = 8


@pytest.mark.parametrize("part", range(PARTS))
def test_a_sample(part: int) -> None:
    chosen = random.Random(16).sample(cases(), SAMPLE)
    check(chosen[part::PARTS])


def module_names() -> list[str]:
    """The modules of the table. It takes seconds to import, so that it is asked only where the tests will
    run.
    """
    return list(dict.fromkeys(case.module for case in cases()))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One slow test for each module of the table, where slow tests are asked for."""
    if "module" in metafunc.fixturenames:
        asked = "slow" in metafunc.config.getoption("markexpr")
        metafunc.parametrize("module", module_names() if asked else ["all"])


@pytest.mark.slow
def test_every_input(module: str) -> None:
    check([case for case in cases() if case.module == module])
