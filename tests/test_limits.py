"""`limit_memory` put on, found, replaced and removed."""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
import weakref
from typing import Any

import pytest
import torch
from loops import data, mlp, step

import lowtide


class Autocast:
    """A forward inside another, as accelerate leaves it on a model for mixed precision."""

    def __init__(self, forward: Any) -> None:
        self.__wrapped__ = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return self.__wrapped__(*args, **kwargs)


def test_a_limit_is_found_replaced_and_removed_inside_a_wrapped_forward() -> None:
    model = mlp()
    first = lowtide.limit_memory(model, "100%")
    wrapper = Autocast(model.forward)
    model.forward = wrapper  # type: ignore[method-assign]
    assert lowtide.handle_of(model) is first
    step(model)
    second = lowtide.limit_memory(model, "90%")
    assert lowtide.handle_of(model) is second is not first
    step(model)
    assert second.plan is not None and len(first.plans) == 1, "the limit inside is not in force any more"
    second.remove()
    assert model.__dict__["forward"] is wrapper and lowtide.handle_of(model) is None
    step(model)
    assert len(first.plans) == 1


def test_a_limit_that_was_bound_to_its_model_runs() -> None:
    """accelerate's ``unwrap_model(keep_fp32_wrapper=False)`` binds what it finds below its wrappers."""
    import types

    model = mlp()
    handle = lowtide.limit_memory(model, "100%")
    model.forward = types.MethodType(model.forward, model)  # type: ignore[method-assign]
    step(model)
    assert handle.plan is not None and lowtide.handle_of(model) is not None


def test_a_limit_has_one_handle() -> None:
    """Whoever asks gets the object that `limit_memory` or `lowtide.compile` made; a copy has its own, and a
    model goes when nobody holds it or its handle.
    """
    model = mlp()
    handle = lowtide.limit_memory(model, "100%")
    twin = copy.deepcopy(model)
    step(model)
    handle.set_budget("90%")
    assert lowtide.handle_of(model) is handle is lowtide.handle_of(model) and {handle: 1}[handle] == 1
    own = lowtide.handle_of(twin)
    assert own is lowtide.handle_of(twin) is not handle and own is not None and own.model is twin
    gone = weakref.ref(model)
    del model, handle
    gc.collect()
    assert gone() is None
    compiled = lowtide.compile(mlp(), "100%", backend="aot_eager")
    made = lowtide.handle_of(compiled)
    made.set_budget("90%")  # type: ignore[union-attr]
    assert made is not None and lowtide.handle_of(compiled) is made


def test_a_handle_whose_limit_is_gone_says_so() -> None:
    model = mlp()
    old = lowtide.limit_memory(model, "80%")
    new = lowtide.limit_memory(model, "90%")
    for use in (lambda: old.set_budget("50%"), lambda: old.prepare(data(0))):
        with pytest.raises(lowtide.PlanError, match="handle_of"):
            use()
    new.set_budget("85%")
    old.remove()
    assert lowtide.handle_of(model) is not None, "the limit in force stays"


AHEAD = """
import torch, lowtide
from lowtide import interception
interception.cpp_module()  # compiled, where it can be
model = torch.nn.Linear(4, 4)
lowtide.limit_memory(model, "100%", progress=False)
def fails(*_):
    raise AssertionError("the first step waits for it")
interception._put_kernels = fails
model(torch.randn(2, 4)).sum().backward()
"""


def test_a_first_step_does_not_wait_for_what_a_process_does_once() -> None:
    """Kernels for thousands of operations took ten times as long as the step of a small model."""
    done = subprocess.run([sys.executable, "-c", AHEAD], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-1500:]


def test_a_policy_whose_speeds_are_missing_leaves_the_model_as_it_is() -> None:
    model = mlp()
    with pytest.raises(lowtide.PlanError, match="the speed of the group"):
        lowtide.limit_memory(model, "60%", policy=lowtide.policies.mixed(lowtide.Shard("data", 2)))
    assert lowtide.handle_of(model) is None and "forward" not in model.__dict__
    lowtide.limit_memory(model, "100%")
