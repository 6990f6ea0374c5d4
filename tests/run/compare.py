"""Run one piece of training code twice, plain and limited, and compare what it leaves behind bit by bit."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

import lowtide
from lowtide import meter

Limit = Callable[..., Any]
Pattern = Callable[[Limit], Iterator[Any]]
"""Training code as a generator: it hands each model to ``limit(model, **options)``, which returns it, and
yields after each step whatever has to be equal: modules (parameters, gradients, buffers), tensors, numbers,
or containers of these."""

SLACK_BYTES = 8192
"""What a step may take above its budget: Python's random state in a tensor and the like, which only tiny
models notice.
"""
TRIES = 6
SAID = re.compile(r"above the budget|over (its|the) budget|more than (its|the) budget|exceed", re.IGNORECASE)


def bits(tensor: torch.Tensor) -> bytes:
    """A tensor's elements as bytes; of a sparse, nested or distributed tensor those of its parts."""
    tensor = tensor.detach()
    if tensor.is_nested:
        return b"".join(bits(part) for part in tensor.unbind())
    if hasattr(tensor, "to_local"):
        return bits(tensor.to_local())
    if tensor.layout is not torch.strided:
        return b"".join(bits(part) for part in meter.resident.plain_parts(tensor))
    plain = tensor.resolve_conj().resolve_neg().contiguous().cpu()
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""


def _leaf(thing: Any) -> Any:
    if isinstance(thing, torch.Tensor):
        # the size of a jagged dimension is an object of its own in every tensor
        shape = None if thing.is_nested else tuple(thing.shape)
        return (str(thing.dtype), shape, bits(thing))
    return thing if isinstance(thing, (bool, int, float, str, bytes, type(None))) else repr(type(thing))


def snapshot(things: Any) -> dict[str, Any]:
    """What was yielded, by name, copied: of modules the parameters, their gradients and the buffers."""
    found: dict[str, Any] = {}
    for at, thing in enumerate(things if isinstance(things, (tuple, list)) else (things,)):
        if isinstance(thing, torch.nn.Module):
            for name, parameter in thing.named_parameters():
                found[f"{at}: {name}"] = _leaf(parameter)
                found[f"{at}: gradient of {name}"] = _leaf(parameter.grad)
            for name, buffer in thing.named_buffers():
                found[f"{at}: buffer {name}"] = _leaf(buffer)
        else:
            for number, leaf in enumerate(tree_leaves(thing)):
                found[f"{at}: leaf {number}"] = _leaf(leaf)
    return found


def differences(plain: list[dict[str, Any]], limited: list[dict[str, Any]]) -> list[str]:
    """What is not equal bit by bit, as ``step 1: gradient of weight``."""
    found = [] if len(plain) == len(limited) else [f"{len(plain)} steps plain, {len(limited)} limited"]
    for number, (one, other) in enumerate(zip(plain, limited, strict=False), 1):
        names = [*one, *(name for name in other if name not in one)]
        found += [
            f"step {number}: {name}" for name in names if one.get(name, "absent") != other.get(name, "absent")
        ]
    return found


@dataclass
class Run:
    """What limited training code did.

    Attributes:
        handles: of each limited model.
        messages: lowtide's warnings.
        steps: what was yielded, copied.
    """

    handles: list[lowtide.Handle] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)
    steps: list[dict[str, Any]] = field(default_factory=list)

    @property
    def said(self) -> bool:
        """Whether a warning says that a step took more than its budget."""
        return any(SAID.search(message) for message in self.messages)


def run_plain(pattern: Pattern) -> list[dict[str, Any]]:
    """The code without lowtide."""
    torch.manual_seed(0)
    return [snapshot(things) for things in pattern(lambda model, **_: model)]


def run_limited(pattern: Pattern, budget: str | int = "70%") -> Run:
    """The code with each model limited; a budget that no plan meets is replaced by the smallest that the
    refusal names.

    Raises:
        lowtide.BudgetError: what was named does not do, either.
    """
    for attempt in range(TRIES):
        run = Run()

        def limit(model: Any, run: Run = run, budget: str | int = budget, **options: Any) -> Any:
            run.handles.append(lowtide.limit_memory(model, **{"budget": budget, **options}))
            return model

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.manual_seed(0)
            try:
                run.steps = [snapshot(things) for things in pattern(limit)]
                run.messages = [
                    str(w.message) for w in caught if issubclass(w.category, lowtide.LowtideWarning)
                ]
                return run
            except lowtide.BudgetError as error:
                if error.smallest_bytes is None or attempt == TRIES - 1:
                    raise
                budget = error.smallest_bytes
    raise AssertionError("unreachable")


def check(pattern: Pattern, budget: str | int = "70%", planned: bool = True) -> Run:
    """The code gives the same bits limited as plain; ``planned``: and every limited model had a plan. Where
    no plan fits the budget, and the governor held it, the code runs once more within the smallest.
    """
    plain = run_plain(pattern)
    assert plain, "the pattern yields nothing"
    run = _same(plain, pattern, budget)
    if planned and any(handle.plan is None for handle in run.handles):
        run = _same(plain, pattern, "min")
    if planned:
        assert run.handles and all(handle.plan is not None for handle in run.handles), (
            "a limited model never got a plan"
        )
    return run


def _same(plain: list[dict[str, Any]], pattern: Pattern, budget: str | int) -> Run:
    run = run_limited(pattern, budget)
    wrong = differences(plain, run.steps)
    assert not wrong, f"{len(wrong)} differences: {wrong[:6]}; warnings: {run.messages}"
    return run


def resident_bytes(models: Iterable[torch.nn.Module], inputs: Any = ()) -> int:
    """What is resident before a step: parameters, buffers, gradients, and inputs with their gradients; each
    storage once.
    """
    tensors = [tensor for model in models for tensor in meter.resident.resident_tensors(model)]
    tensors += [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
    tensors = [tensor for tensor in tensors if not torch.nn.parameter.is_lazy(tensor)]
    tensors += [t.grad for t in tensors if t.is_leaf and t.grad is not None]
    return sum(storage.nbytes() for storage in meter.storages(tensors))


def peak_of(step: Callable[[], Any], models: Iterable[torch.nn.Module], inputs: Any = ()) -> tuple[int, Any]:
    """The most live bytes at any moment of ``step()``, with what was resident before it; and what it
    returned.
    """
    resident = resident_bytes(models, inputs)
    measured = lowtide.measure(step, timeline=False)
    return resident + measured.peak_bytes, measured.value
