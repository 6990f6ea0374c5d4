"""`limit_memory`: the handle, budgets, kinds of steps, copies, threads, and how much memory steps really take."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import itertools
import pickle
import subprocess
import sys
import threading
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide import BudgetError, LowtideWarning, PlanError, private
from lowtide.meter import available, measure, resident_bytes
from lowtide.run.limit import Limiter

N = 16

needs_meter = pytest.mark.skipif(not available(), reason="needs a C++ compiler for the counting allocator")


class Small(nn.Module):
    """A few layers and a loss."""

    def __init__(self, width: int = N, layers: int = 3, dropout: float = 0.1) -> None:
        super().__init__()
        self.layers = nn.ModuleList([self.layer(width, dropout) for _ in range(layers)])

    @staticmethod
    def layer(width: int, dropout: float) -> nn.Module:
        return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(dropout), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        """Documented."""
        for layer in self.layers:
            x = x + layer(x) * scale
        return x.square().mean()


def small(**options: Any) -> Small:
    torch.manual_seed(5)
    return Small(**options)  # a batch of 100 rows takes several times what its weights take


def batch(rows: int = 100, width: int = N) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(3))


# ---- arguments and errors ---------------------------------------------------------------------------------------------------------------


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


def test_limiting_twice() -> None:
    model = small()
    handle = lowtide.limit_memory(model, "90%")
    with pytest.raises(PlanError, match="limited already"):
        lowtide.limit_memory(model, "80%")
    handle.remove()
    lowtide.limit_memory(model, "80%").remove()


@needs_meter
def test_too_small_a_budget_names_the_smallest_and_that_works(same: Any) -> None:
    model = small(width=64)
    x = batch(64, 64)
    handle = lowtide.limit_memory(model, "1KiB")
    with pytest.raises(BudgetError, match="smallest") as caught:
        model(x)
    least = caught.value.smallest_bytes
    assert least is not None and least > 1024
    assert any(word in str(caught.value) for word in ("layers.", "module")), "says where the peak stands"
    with pytest.raises(BudgetError):  # it is refused again
        model(x)
    assert model.layers[0][1].weight.grad is None
    handle.remove()
    refused = copy.deepcopy(model)
    lowtide.limit_memory(refused, least - 4096)
    with pytest.raises(BudgetError):
        refused(x)
    handle = lowtide.limit_memory(model, least)
    handle.prepare(x)
    standing = sum(p.nbytes for p in model.parameters()) + x.nbytes
    for _ in range(4):  # the first one, which verifies, too
        model.zero_grad()
        handle.prepare(x)  # if it has to plan again, it does so outside the meter
        assert standing + measure(lambda: model(x).backward()).peak_bytes <= least
    assert handle.plan.predicted_peak_bytes <= least


def test_a_budget_that_does_not_hold_the_optimizer() -> None:
    model = small()
    optimizer = torch.optim.AdamW(model.parameters())
    lowtide.limit_memory(model, resident_bytes(model) * 2, optimizer=optimizer)
    with pytest.raises(BudgetError, match=r"optimizer\.step") as caught:
        model(batch())
    assert caught.value.smallest_bytes >= 4 * resident_bytes(model)


# ---- the handle -------------------------------------------------------------------------------------------------------------------------


def test_handle(same: Any) -> None:
    model = small()
    before = dict(model.__dict__)
    handle = lowtide.limit_memory(model, policy="full")
    assert handle.model is model and handle.plan is None and handle.graph is None and handle.plans == {}
    model(batch()).backward()
    assert handle.plan.replayed and handle.plan.policy == "full"
    assert handle.graph is not None and list(handle.plans.values()) == [handle.plan]
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


# ---- kinds of steps ---------------------------------------------------------------------------------------------------------------------


def test_a_plan_for_each_shape(twins: Any) -> None:
    pair = twins(small())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for rows in (4, 6, 4, 6, 9):
            pair.step(lambda m, rows=rows: m(batch(rows)), rows)
    said = [str(w.message) for w in caught if issubclass(w.category, LowtideWarning)]
    assert len(pair.handle.plans) == 3
    assert len(said) == 2 and all("shapes" in text for text in said)


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


# ---- copies -----------------------------------------------------------------------------------------------------------------------------


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
    assert limiter is not own and limiter.model is twin and limiter.plans == {}
    results = []
    for one in (model, twin):
        torch.manual_seed(0)
        one(batch()).sum().backward()
        results.append([p.grad.clone() for p in one.parameters()])
    assert all(map(same, *results))
    assert limiter.latest.plan.replayed and limiter.latest is not own.latest
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


# ---- several models, threads ------------------------------------------------------------------------------------------------------------


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
    assert limited.a.__dict__["forward"].plans is not limited.b.__dict__["forward"].plans


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
    for seed in range(3):
        grads = []
        for model in (plain, limited):
            model.zero_grad()
            torch.manual_seed(seed)
            model(batch()).backward()
            grads.append([p.grad.clone() for p in model.parameters()])
        assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_threads_train_two_limited_models() -> None:
    results: dict[int, list[torch.Tensor]] = {}
    errors: list[BaseException] = []
    plain = []
    for k in range(2):
        model = small(dropout=0.0, layers=2 + k)
        for step in range(4):
            model.zero_grad()
            model(batch(6 + step % 2)).backward()
        plain.append([p.grad.clone() for p in model.parameters()])

    def work(k: int) -> None:
        try:
            torch.set_num_threads(1)
            model = models[k]
            barrier.wait()
            for step in range(4):
                model.zero_grad()
                model(batch(6 + step % 2)).backward()
            results[k] = [p.grad.clone() for p in model.parameters()]
        except BaseException as error:
            errors.append(error)

    models = [small(dropout=0.0, layers=2 + k) for k in range(2)]
    for model in models:
        lowtide.limit_memory(model, policy="full")
    barrier = threading.Barrier(2)
    threads = [threading.Thread(target=work, args=(k,)) for k in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    for k in range(2):
        assert all(torch.equal(a, b) for a, b in zip(plain[k], results[k], strict=True))


def test_one_limited_model_in_two_threads() -> None:
    """As DataParallel's replicas or an asynchronous trainer would: forwards at the same time, each with its own backward."""
    model = small(dropout=0.0)
    lowtide.limit_memory(model, policy="full")
    plain = small(dropout=0.0)
    expected = [torch.autograd.grad(plain(batch(6 + k)), list(plain.parameters())) for k in range(2)]
    parameters = list(model.parameters())  # while one thread plans, the model shows others fake ones
    found: dict[int, Any] = {}
    errors: list[BaseException] = []

    def work(k: int) -> None:
        try:
            barrier.wait()
            for _ in range(3):
                found[k] = torch.autograd.grad(model(batch(6 + k)), parameters)
        except BaseException as error:
            errors.append(error)

    barrier = threading.Barrier(2)
    threads = [threading.Thread(target=work, args=(k,)) for k in range(2)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert errors == []
    for k in range(2):
        assert all(torch.equal(a, b) for a, b in zip(expected[k], found[k], strict=True))


def test_planning_in_one_thread_does_not_disturb_another() -> None:
    """While one thread traces on fake parameters, another uses its own model."""
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


# ---- memory -----------------------------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).view(*x.shape[:2], 3, 4, -1).permute(2, 0, 3, 1, 4)
        h = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + self.out(h)
        return x + self.mlp(x)


class Gpt(nn.Module):
    def __init__(self, width: int = 64, layers: int = 3, vocabulary: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(layers)])
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens.roll(-1, 1).flatten())


@needs_meter
def test_budgets_hold_and_are_monotone(same: Any) -> None:
    torch.manual_seed(0)
    plain = Gpt()
    tokens = torch.randint(0, 64, (8, 64))

    def peak(model: nn.Module) -> int:
        found = 0
        for _ in range(3):
            model.zero_grad()
            if isinstance(model.__dict__.get("forward"), Limiter):
                model.__dict__["forward"].planned((tokens,), {})  # outside the meter
            torch.manual_seed(1)
            found = max(found, measure(lambda: model(tokens).backward()).peak_bytes)
        return found + sum(p.nbytes for p in model.parameters()) + tokens.nbytes

    most = peak(plain)
    grads = [p.grad.clone() for p in plain.parameters()]
    probe = copy.deepcopy(plain)
    first = lowtide.limit_memory(probe, 1)
    with pytest.raises(BudgetError) as caught:
        probe(tokens)
    least = caught.value.smallest_bytes
    assert least < 0.7 * most
    peaks, seconds = [], []
    for k in range(6):
        budget = least + (most - least) * k // 5
        model = copy.deepcopy(plain)
        model.zero_grad()
        handle = lowtide.limit_memory(model, budget)
        handle.share_costs(first)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            peaks.append(peak(model))
        plan = handle.plan
        assert peaks[-1] <= budget
        assert abs(peaks[-1] - plan.predicted_peak_bytes) <= 0.01 * peaks[-1], (peaks[-1], plan.predicted_peak_bytes)
        assert all(same(a, p.grad) for a, p in zip(grads, model.parameters(), strict=True))
        seconds.append(plan.predicted_extra_seconds / plan.plain_seconds)
    assert peaks == sorted(peaks)
    # Each plan is within a gap of the best.
    assert all(later <= earlier + 0.05 for earlier, later in itertools.pairwise(seconds))


@needs_meter
@pytest.mark.parametrize("way", ["limit", "scope"])
def test_a_hundred_steps_hold_no_more_memory(way: str) -> None:
    from lowtide.meter import counting_allocator

    model = small()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    if way == "limit":
        lowtide.limit_memory(model, "92%")

    def step() -> None:
        optimizer.zero_grad()
        if way == "limit":
            loss = model(batch())
        else:
            with lowtide.checkpointing():
                loss = model(batch())
        loss.backward()
        optimizer.step()

    allocator = counting_allocator()
    allocator.install()
    try:
        for _ in range(3):  # the first of them plans, the second knows what the first taught
            step()
        gc.collect()
        gc.disable()
        mark = allocator.mark()
        for _ in range(48):
            step()
        gc.collect()  # PyTorch's own pytree leaves small cycles
        half = len(gc.get_objects())
        for _ in range(50):
            step()
        live = allocator.mark_live(mark)  # before the collector runs: no cycle holds a tensor
        gc.collect()
        grown = len(gc.get_objects()) - half
        allocator.close_mark(mark)
    finally:
        gc.enable()
        allocator.uninstall()
    assert live <= 0
    assert grown < 50


def test_no_threads_and_no_files_are_left() -> None:
    model = small()
    before = threading.active_count()
    lowtide.limit_memory(model, "90%")
    model(batch()).backward()
    assert threading.active_count() == before


def test_handle_and_model_die_together() -> None:
    model = small()
    handle = lowtide.limit_memory(model, policy="full")
    model(batch()).backward()
    reference = weakref.ref(model)
    del model, handle
    gc.collect()
    assert reference() is None


# ---- no global state --------------------------------------------------------------------------------------------------------------------


def test_importing_lowtide_imports_no_torch() -> None:
    code = "import sys, lowtide; dir(lowtide); assert 'torch' not in sys.modules, 'torch'; assert 'numpy' not in sys.modules, 'numpy'"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_name_of_the_face_exists() -> None:
    code = (
        "import lowtide\nfor name in lowtide.__all__: assert getattr(lowtide, name) is not None, name\n"
        "assert callable(lowtide.plan) and callable(lowtide.trace)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


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
    assert private.dispatch_modes() == []
