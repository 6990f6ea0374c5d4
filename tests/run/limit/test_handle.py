"""`limit_memory`: the handle, budgets, kinds of steps, copies, and what it leaves alone."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import pickle
import re
import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch
from small_model import N, Small, batch, needs_meter, small
from torch import nn

import lowtide
from lowtide import BudgetError, PlanError
from lowtide.interception import interceptors
from lowtide.meter import measure, resident_bytes

# ---- arguments and errors ------------------------------------------------------------------------


@pytest.mark.parametrize("budget", ["lots", "0", "-5MiB", "12XB", 0, -3, 1.5, True, "", "%"])
def test_budgets_that_mean_nothing(budget: Any) -> None:
    with pytest.raises(BudgetError) as caught:
        lowtide.limit_memory(small(), budget)
    assert caught.value.smallest_bytes is None


@pytest.mark.parametrize("arguments", [{"verify": "maybe", "budget": "1GiB"}, {"policy": "no such policy"}])
def test_arguments_that_mean_nothing(arguments: dict[str, Any]) -> None:
    model = small()
    with pytest.raises(PlanError):
        lowtide.limit_memory(model, **arguments)
        model(batch())
    with pytest.raises(PlanError, match="Module"):
        lowtide.limit_memory(lambda x: x, "1GiB")  # type: ignore[arg-type]
    with pytest.raises(BudgetError, match="policy"):
        lowtide.limit_memory(small())


def test_a_second_limit_replaces_the_first() -> None:
    model = small()
    first = lowtide.limit_memory(model, policy="full")
    second = lowtide.limit_memory(model, "80%")
    model(batch()).backward()
    assert first.plan is None and second.plan is not None and second.plan.budget_bytes is not None
    first.remove()  # does nothing any more
    assert "forward" in model.__dict__
    second.remove()
    assert "forward" not in model.__dict__


def test_too_small_a_share_names_the_smallest_and_that_works() -> None:
    model, x = small(width=64), batch(64, 64)
    handle = lowtide.limit_memory(model, "0.1%")
    with pytest.raises(BudgetError, match=r"bytes, ([0-9.]+%) of the plain step's peak") as caught:
        model(x).sum().backward()
    found = re.search(r"bytes, ([0-9.]+%) of", str(caught.value))
    assert found is not None
    handle.remove()
    model.zero_grad()
    handle = lowtide.limit_memory(model, found[1])
    model(x).sum().backward()
    assert handle.plan.predicted_peak_bytes <= caught.value.smallest_bytes * 1.01


@needs_meter
def test_too_small_a_budget_names_the_smallest_and_that_works(same: Any) -> None:
    model = small(width=64)
    x = batch(64, 64)
    handle = lowtide.limit_memory(model, "1KiB")
    with pytest.raises(BudgetError, match="smallest") as caught:
        model(x).backward()
    least = caught.value.smallest_bytes
    assert least is not None and least > 1024
    assert any(word in str(caught.value) for word in ("layers.", "module")), "says where the peak is"
    model.zero_grad()
    with pytest.raises(BudgetError):  # it is refused again
        model(x).backward()
    model.zero_grad()
    with pytest.raises(BudgetError):
        handle.prepare(x)
    assert model.layers[0][1].weight.grad is None, "nothing is left of a step that only planned"
    handle.remove()
    refused = copy.deepcopy(model)
    lowtide.limit_memory(refused, int(0.93 * least))  # what is named may be a few per cent above what works
    with pytest.raises(BudgetError):
        refused(x).backward()
    handle = lowtide.limit_memory(model, least)
    handle.prepare(x)
    resident = sum(p.nbytes for p in model.parameters()) + x.nbytes
    for _ in range(4):
        model.zero_grad()
        handle.prepare(x)  # if it has to plan again, it does so outside the meter
        assert resident + measure(lambda: model(x).backward()).peak_bytes <= least
    assert handle.plan.predicted_peak_bytes <= least


def test_a_budget_that_does_not_hold_the_optimizer() -> None:
    model = small()
    optimizer = torch.optim.AdamW(model.parameters())
    parameters = resident_bytes(model)
    lowtide.limit_memory(model, parameters * 2, optimizer=optimizer)
    with pytest.raises(BudgetError, match=r"optimizer\.step") as caught:
        model(batch()).backward()
    assert caught.value.smallest_bytes >= 4 * parameters


# ---- the handle ----------------------------------------------------------------------------------


def test_handle(same: Any) -> None:
    model = small()
    before = dict(model.__dict__)
    handle = lowtide.limit_memory(model, policy="full")
    assert handle.model is model and handle.plan is None and handle.graph is None and handle.plans == []
    model(batch()).backward()
    assert handle.plan.replayed and handle.plan.policy == "full"
    assert handle.graph is not None and handle.plans == [handle.plan]
    assert "layers.1" in str(handle.plan)
    handle.remove()
    assert model.__dict__.keys() == before.keys() and "forward" not in model.__dict__
    handle.remove()  # again is harmless
    model(batch()).backward()


def test_remove_gives_an_instance_its_own_forward_back() -> None:
    model = small()
    own = lambda x: Small.forward(model, x) * 2  # noqa: E731
    model.forward = own
    handle = lowtide.limit_memory(model, policy="full")
    torch.manual_seed(0)
    loss = model(batch())
    handle.remove()
    assert model.forward is own
    loss.backward()  # a step that is under way finishes under its plan
    torch.manual_seed(0)
    assert torch.equal(model(batch()), loss)


def test_prepare_plans_without_a_step() -> None:
    model = small()
    handle = lowtide.limit_memory(model, "90%")
    state = torch.get_rng_state()
    plan = handle.prepare(batch())
    assert plan is handle.plan and torch.equal(state, torch.get_rng_state())
    assert all(p.grad is None for p in model.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(batch()).backward()
    assert len(handle.plans) == 1


def test_model_looks_as_before() -> None:
    model, plain = small(), small()
    handle = lowtide.limit_memory(model, "90%")
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [n for n, _ in model.named_modules()] == [n for n, _ in plain.named_modules()]
    assert inspect.signature(model.forward) == inspect.signature(plain.forward)
    assert isinstance(model, Small) and repr(model) == repr(plain)
    model(batch())
    assert list(model.state_dict()) == list(plain.state_dict())
    model.load_state_dict(plain.state_dict())
    model.to(torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model(batch().double()).backward()
    handle.remove()


def test_hooks_of_the_model_fire(same: Any) -> None:
    fired: list[str] = []
    model = small()
    lowtide.limit_memory(model, policy="full")
    model(batch())  # planning fires hooks of the inner modules; only what comes after is counted

    model.register_forward_pre_hook(lambda m, a: fired.append("pre"))
    model.register_forward_hook(lambda m, a, y: fired.append("post"))
    model.register_full_backward_hook(lambda m, a, b: fired.append("backward"))
    model.layers[1].register_forward_hook(lambda m, a, y: fired.append("inner"))
    model.layers[1].register_full_backward_hook(lambda m, a, b: fired.append("inner backward"))
    x = batch().requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model(x)
    fired.clear()
    model(x).backward()
    assert fired == ["pre", "inner", "post", "inner backward", "backward"]


# ---- kinds of steps ------------------------------------------------------------------------------


def test_a_plan_for_each_shape(twins: Any) -> None:
    pair = twins(small())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for rows in (4, 6, 4, 6, 9):
            pair.step(lambda m, rows=rows: m(batch(rows)), rows)
    assert len(pair.handle.plans) == 3


@pytest.mark.filterwarnings("ignore::lowtide.LowtideWarning")
def test_a_plan_for_each_kind_of_step(twins: Any) -> None:
    pair = twins(small())

    def both(change: Any) -> None:
        for model in (pair.plain, pair.limited):
            change(model)

    run = lambda m: m(batch())  # noqa: E731
    pair.step(run)
    both(lambda m: m.eval())
    pair.step(run)
    both(lambda m: m.train())
    both(lambda m: m.layers[0].requires_grad_(False))
    pair.step(run)
    both(lambda m: m.layers[0].requires_grad_(True))
    pair.step(lambda m: m(batch(), scale=0.5))
    pair.step(run, clear=False)
    pair.step(lambda m: m(batch().requires_grad_()))
    assert len(pair.handle.plans) == 6
    both(lambda m: m.to(torch.float64))
    pair.step(lambda m: m(batch().double()))
    assert len(pair.handle.plans) == 7


@pytest.mark.filterwarnings("ignore::lowtide.LowtideWarning")
def test_a_model_that_grows(twins: Any) -> None:
    """A plan for other parameters than the model has now must not be followed."""
    pair = twins(small())
    pair.step(lambda m: m(batch()))
    for model in (pair.plain, pair.limited):
        torch.manual_seed(1)
        model.layers.append(nn.Sequential(nn.Linear(N, N), nn.Tanh(), nn.Linear(N, N)))
    for seed in range(2):
        pair.step(lambda m: m(batch()), seed)


# ---- copies --------------------------------------------------------------------------------------


def pickled(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


def saved(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("twin_of", [copy.deepcopy, pickled, saved], ids=["deepcopy", "pickle", "torch.save"])
@pytest.mark.parametrize("ran", [False, True])
def test_copies_train_on_their_own(twins: Any, same: Any, twin_of: Any, ran: bool) -> None:
    model = small()
    handle = lowtide.limit_memory(model, policy="full", loss_fn=torch.sum)
    if ran:
        model(batch()).sum().backward()
        model.zero_grad()
    twin = twin_of(model)
    limiter, own = twin.__dict__["forward"], model.__dict__["forward"]
    assert limiter is not own and limiter.model is twin and limiter.book.known == {}
    results = []
    for one in (model, twin):
        torch.manual_seed(0)
        one(batch()).sum().backward()
        results.append([p.grad.clone() for p in one.parameters()])
    assert all(map(same, *results))
    assert limiter.book.latest.plan.replayed and limiter.book.latest is not own.book.latest
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert any(p.abs().sum() > 0 for p in model.parameters())
    handle.remove()
    assert "forward" in twin.__dict__


def test_a_copy_inside_a_larger_model(same: Any) -> None:
    outer = nn.ModuleDict({"inner": small()})
    lowtide.limit_memory(outer["inner"], policy="full")
    twin = copy.deepcopy(outer)
    assert twin["inner"].__dict__["forward"].model is twin["inner"]


def test_shallow_parameter_sharing_copies_share_no_plan() -> None:
    model = small()
    lowtide.limit_memory(model, policy="full")
    other = Small()
    other.load_state_dict(model.state_dict())
    assert "forward" not in other.__dict__


# ---- no global state -----------------------------------------------------------------------------


def test_importing_lowtide_imports_no_torch() -> None:
    code = (
        "import sys, lowtide; dir(lowtide); assert 'torch' not in sys.modules, 'torch'; assert 'numpy' not "
        "in sys.modules, 'numpy'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_name_of_the_face_exists() -> None:
    for name in lowtide.__all__:
        assert getattr(lowtide, name) is not None, name
    assert callable(lowtide.plan) and callable(lowtide.trace)


def test_looking_at_saved_tensors_outside_backward(everything: Any) -> None:
    """Debuggers and graph printers read `grad_fn._saved_...` when no backward runs."""
    model = nn.Sequential(nn.Linear(N, N), nn.Sigmoid(), nn.Linear(N, 1))
    lowtide.limit_memory(model, policy=everything, loss_fn=torch.sum)
    for _ in range(3):
        model.zero_grad()
        y = model(batch())
        node = y.grad_fn.next_functions[1][0]
        assert "Sigmoid" in type(node).__name__
        assert node._saved_result.shape == (100, N)
        y.sum().backward()
    assert interceptors() == []


def test_a_first_backward_that_fails_leaves_nothing() -> None:
    """Nobody calls back when a backward fails: the step is over when its graph goes, or when the next one
    begins.
    """

    def fails(_: torch.Tensor) -> None:
        raise KeyError("mine")

    model = small()
    handle = lowtide.limit_memory(model, policy="full")
    x = batch().requires_grad_()
    hook = x.register_hook(fails)
    for keeps in (False, True):
        loss = model(x)
        with pytest.raises(KeyError, match="mine"):
            loss.backward()
        if not keeps:
            del loss
            gc.collect()  # the error's traceback held the loss
            assert interceptors() == []
    hook.remove()
    model.zero_grad()
    model(x).backward()
    assert interceptors() == [] and handle.plan is not None


@needs_meter
def test_one_graph_that_is_kept_leaves_later_plans_as_they_were() -> None:
    model = small()
    handle = lowtide.limit_memory(model, 240_000)

    def step(twice: bool = False) -> None:
        model.zero_grad()
        loss = model(batch())
        if twice:
            loss.backward(retain_graph=True)
        loss.backward()

    for _ in range(3):
        step()
    assert handle.plan is not None
    before = handle.plan.predicted_peak_bytes
    step(twice=True)
    for _ in range(2):
        step()
    assert handle.plan.predicted_peak_bytes == before


@needs_meter
def test_a_budget_given_while_a_graph_is_kept_is_planned_for() -> None:
    model = small()
    handle = lowtide.limit_memory(model, "70%")
    for _ in range(2):
        model.zero_grad()
        model(batch()).backward()
    model.zero_grad()
    loss = model(batch())
    loss.backward(retain_graph=True)
    handle.set_budget("60%")
    loss.backward()
    del loss
    model.zero_grad()
    model(batch()).backward()
    assert handle.plan is not None and handle.plan.budget_bytes is not None
    assert handle.plan.budget_bytes <= 0.6 * handle.plan.plain_peak_bytes


def test_a_handle_whose_limit_is_gone_shows_that() -> None:
    model = small()
    first = lowtide.limit_memory(model, "80%")
    second = lowtide.limit_memory(model, "90%")
    assert "replaced" in repr(first) and "budget 90%" in repr(second)
    second.remove()
    assert "removed" in repr(second)
    with pytest.raises(PlanError, match="takes the limited module, not int"):
        lowtide.handle_of(3)  # type: ignore[arg-type]
