"""What a model keeps outside its modules is after a trace what it was before, and no fake tensor is anywhere."""

from __future__ import annotations

import copy
import functools
import gc
import sys
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

import lowtide
from lowtide import private
from lowtide.errors import TraceError
from lowtide.trace.fake import Faker, borrowed
from lowtide.trace.leaks import Outside, nothing_outside

WIDTH = 8
TABLES: dict[Any, Any] = {}
NESTED: dict[str, dict[int, torch.Tensor]] = {"tables": {}}
RECENT: OrderedDict[int, torch.Tensor] = OrderedDict()
LAST: deque[Any] = deque(maxlen=2)
LIST: list[Any] = []
table: torch.Tensor | None = None
known_length = 0
calls = 0
LOCAL = threading.local()


def angles(length: int) -> torch.Tensor:
    return torch.linspace(0.0, 1.0, length).sin() + 1.0


class Layer(torch.nn.Module):
    """A linear layer whose inputs are scaled by a table that somebody caches."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(WIDTH, WIDTH)

    def scale(self, length: int) -> torch.Tensor:
        raise NotImplementedError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(self.linear(x * self.scale(x.shape[-1])))


class CachedMethod(Layer):
    @functools.lru_cache(maxsize=4)  # noqa: B019
    def scale(self, length: int) -> torch.Tensor:
        return angles(length)


class CachedForGood(Layer):
    @staticmethod
    @functools.cache
    def scale(length: int) -> tuple[torch.Tensor, int]:  # type: ignore[override]
        return angles(length), length

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(self.linear(x * self.scale(x.shape[-1])[0]))


def cached_unless_compiling(maxsize: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def decorator(function: Callable[..., Any]) -> Callable[..., Any]:
        with_cache = functools.lru_cache(maxsize=maxsize)(function)

        @functools.wraps(function)
        def wrapper(*args: Any) -> Any:
            return function(*args) if torch.compiler.is_compiling() else with_cache(*args)

        return wrapper

    return decorator


class Decorated(Layer):
    @cached_unless_compiling(maxsize=2)
    def scale(self, length: int) -> torch.Tensor:
        return angles(length)


class InGlobalDict(Layer):
    def scale(self, length: int) -> torch.Tensor:
        if length not in TABLES:
            TABLES[length] = angles(length)
        return TABLES[length]


class InNestedDict(Layer):
    def scale(self, length: int) -> torch.Tensor:
        return NESTED["tables"].setdefault(length, angles(length))


class InOrderedDict(Layer):
    def scale(self, length: int) -> torch.Tensor:
        if length not in RECENT:
            RECENT[length] = angles(length)
            while len(RECENT) > 2:
                RECENT.popitem(last=False)
        return RECENT[length]


class InDeque(Layer):
    def scale(self, length: int) -> torch.Tensor:
        if not LAST or LAST[-1].shape[0] != length:
            LAST.append(angles(length))
        return LAST[-1]


class InList(Layer):
    def scale(self, length: int) -> torch.Tensor:
        if len(LIST) < 2:
            LIST.append((length, angles(length)))
        return LIST[-1][1]


class InGlobal(Layer):
    """The length goes by itself: were it left, the next step would find no table."""

    def scale(self, length: int) -> torch.Tensor:
        global table, known_length
        if length > known_length:
            table, known_length = angles(length), length
        assert table is not None
        return table[:length]


class InThread(Layer):
    def scale(self, length: int) -> torch.Tensor:
        if not hasattr(LOCAL, "table"):
            LOCAL.table = angles(length)
        return LOCAL.table


class OnClass(Layer):
    shared: torch.Tensor | None = None

    def scale(self, length: int) -> torch.Tensor:
        if OnClass.shared is None:
            OnClass.shared = angles(length)
        return OnClass.shared


class Rotary:
    def __init__(self) -> None:
        self.length = 0
        self.table: torch.Tensor | None = None

    def __call__(self, length: int) -> torch.Tensor:
        if length > self.length:
            self.length, self.table = length, angles(length)
        assert self.table is not None
        return self.table[:length]


class InHelper(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.rotary = Rotary()

    def scale(self, length: int) -> torch.Tensor:
        return self.rotary(length)


class InNamespace(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.state = {"of": SimpleNamespace(tables={})}

    def scale(self, length: int) -> torch.Tensor:
        return self.state["of"].tables.setdefault(length, angles(length))


def in_attribute(length: int) -> torch.Tensor:
    if in_attribute.table is None:  # type: ignore[attr-defined]
        in_attribute.table = angles(length)  # type: ignore[attr-defined]
    return in_attribute.table  # type: ignore[attr-defined]


in_attribute.table = None  # type: ignore[attr-defined]


def in_default(length: int, tables: dict[int, torch.Tensor] = {}) -> torch.Tensor:  # noqa: B006
    if length not in tables:
        tables[length] = angles(length)
    return tables[length]


def with_variable() -> Callable[[int], torch.Tensor]:
    kept: torch.Tensor | None = None

    def scale(length: int) -> torch.Tensor:
        nonlocal kept
        if kept is None:
            kept = angles(length)
        return kept

    return scale


in_closure = with_variable()


class InFunction(Layer):
    def scale(self, length: int) -> torch.Tensor:
        return in_attribute(length) * in_default(length) * in_closure(length)


class ByGlobalHelper(Layer):
    """The object that caches is made by the step itself."""

    def scale(self, length: int) -> torch.Tensor:
        if "rotary" not in TABLES:
            TABLES["rotary"] = Rotary()
        return TABLES["rotary"](length)


class FarAway(Layer):
    """Held deeper than is looked at before a trace."""

    def __init__(self) -> None:
        super().__init__()
        self.helper = SimpleNamespace(a=SimpleNamespace(b=SimpleNamespace(c=SimpleNamespace(d=SimpleNamespace(tables={}, odd=set())))))

    def scale(self, length: int) -> torch.Tensor:
        far = self.helper.a.b.c.d
        if length not in far.tables:
            far.tables[length] = (angles(length),)
            far.odd.add(far.tables[length][0])
        return far.tables[length][0]


KINDS: list[type[Layer]] = [
    CachedMethod,
    CachedForGood,
    Decorated,
    InGlobalDict,
    InNestedDict,
    InOrderedDict,
    InDeque,
    InList,
    InGlobal,
    InThread,
    OnClass,
    InHelper,
    InNamespace,
    InFunction,
    ByGlobalHelper,
    FarAway,
]


@pytest.fixture(autouse=True)
def empty() -> Iterator[None]:
    """No cache holds anything before a test."""
    _empty()
    yield
    _empty()


def _empty() -> None:
    global table, known_length, calls, in_closure
    table, known_length, calls = None, 0, 0
    for kept in (TABLES, NESTED["tables"], RECENT, LAST, LIST, in_default.__defaults__[0], LOCAL.__dict__):  # type: ignore[index]
        kept.clear()
    OnClass.shared = in_attribute.table = None  # type: ignore[attr-defined]
    in_closure = with_variable()
    CachedMethod.scale.cache_clear()
    CachedForGood.scale.cache_clear()  # type: ignore[attr-defined]
    Decorated.scale.__closure__[1].cell_contents.cache_clear()  # type: ignore[attr-defined]


@pytest.fixture
def fakes() -> Callable[[], list[FakeTensor]]:
    """Finds the fake tensors that were made since and are still there."""

    def living() -> list[FakeTensor]:
        gc.collect()
        return [item for item in gc.get_objects() if issubclass(type(item), FakeTensor)]

    before = living()  # held, so that no other takes its place
    ids = set(map(id, before))
    return lambda before=before: [item for item in living() if id(item) not in ids]  # type: ignore[misc]


def made(kind: type[Layer]) -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(kind(), kind())


def steps(model: torch.nn.Module, count: int = 3) -> list[torch.Tensor]:
    torch.manual_seed(1)
    found = []
    for _ in range(count):
        model.zero_grad()
        loss = model(torch.randn(4, WIDTH)).square().sum()
        loss.backward()
        found += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
    return found


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_limited_steps_are_those_of_the_plain_model(kind: type[Layer]) -> None:
    model = made(kind)
    plain = steps(copy.deepcopy(model))
    _empty()
    handle = lowtide.limit_memory(model, budget="100%")
    limited = steps(model)
    assert handle.graph is not None and handle.graph.source == "fake"
    assert len(plain) == len(limited) and all(torch.equal(a, b) for a, b in zip(plain, limited, strict=True))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_nothing_holds_a_fake_after_a_trace(kind: type[Layer], fakes: Callable[[], list[FakeTensor]]) -> None:
    model = made(kind)
    graph = lowtide.trace(lambda x: model(x).sum(), torch.randn(4, WIDTH), costs=False)
    assert graph.source == "fake" and not fakes()
    assert torch.isfinite(model(torch.randn(4, WIDTH))).all()


def test_a_cache_of_real_tensors_is_kept_and_used() -> None:
    real = TABLES[WIDTH] = angles(WIDTH)
    other = TABLES[3] = angles(3)
    cached = CachedMethod().eval()
    first = cached.scale(WIDTH)
    lowtide.trace(lambda x: (cached(x) + made(InGlobalDict)(x)).sum(), torch.randn(4, WIDTH), model=cached, real=True, costs=False)
    model = torch.nn.Sequential(made(InGlobalDict), cached)
    graph = lowtide.trace(lambda x: model(x).sum(), torch.randn(4, WIDTH), costs=False)
    assert TABLES[WIDTH] is real and TABLES[3] is other and len(TABLES) == 2
    assert cached.scale(WIDTH) is first
    assert not any("linspace" in operation.name for operation in graph.operations)


def test_what_the_trace_drove_out_is_there_again() -> None:
    RECENT[1], RECENT[2] = angles(1), angles(2)
    LAST.extend([angles(1), angles(2)])
    before = [*RECENT.values(), *LAST]
    model = torch.nn.Sequential(InOrderedDict(), InDeque())
    lowtide.trace(lambda x: model(x).sum(), torch.randn(4, WIDTH), costs=False)
    assert {id(item) for item in (*RECENT.values(), *LAST)} == {id(item) for item in before}


class Registers(Layer):
    def scale(self, length: int) -> torch.Tensor:
        global calls
        calls += 1
        TABLES["used"] = [calls]
        return angles(length)


def test_where_no_fake_is_nothing_is_touched() -> None:
    model = made(Registers)
    lowtide.trace(lambda x: model(x).sum(), torch.randn(4, WIDTH), costs=False)
    assert calls == 2 and TABLES == {"used": [2]}


def test_what_others_register_meanwhile_stays() -> None:
    class Busy(InGlobalDict):
        def scale(self, length: int) -> torch.Tensor:
            TABLES["hook"] = steps
            return super().scale(length)

    model = made(Busy)
    lowtide.trace(lambda x: model(x).sum(), torch.randn(4, WIDTH), costs=False)
    assert TABLES["hook"] is steps and len(TABLES) == 1


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_trace_that_fails_leaves_nothing_either(kind: type[Layer], fakes: Callable[[], list[FakeTensor]]) -> None:
    model = made(kind)

    def step(x: torch.Tensor) -> torch.Tensor:
        return model(x).sum() * float(model(x).sum().detach())

    with pytest.raises(TraceError, match="real=True"):
        lowtide.trace(step, torch.randn(4, WIDTH), model=model, costs=False)
    assert not fakes()
    assert torch.isfinite(model(torch.randn(4, WIDTH))).all()


class FarAttribute(Layer):
    """An attribute that is held deeper than is looked at: nobody knows whether it was there."""

    def __init__(self) -> None:
        super().__init__()
        self.helper = SimpleNamespace(a=SimpleNamespace(b=SimpleNamespace(c=SimpleNamespace(d=Rotary()))))

    def scale(self, length: int) -> torch.Tensor:
        far = self.helper.a.b.c.d
        if getattr(far, "table", None) is None:
            far.table = angles(length)
        return far.table


def test_where_nobody_knows_what_was_there_the_step_is_traced_for_real() -> None:
    model = made(FarAttribute)
    plain = steps(copy.deepcopy(model))
    with pytest.raises(TraceError, match=r"keeps tensors in Rotary\.table"):
        lowtide.trace(lambda x: model(x).sum(), torch.randn(4, WIDTH), costs=False)
    model = made(FarAttribute)
    handle = lowtide.limit_memory(model, budget="100%")
    assert all(torch.equal(a, b) for a, b in zip(plain, steps(model), strict=True))
    assert handle.graph is not None and handle.graph.source == "real" and "Rotary.table" in " ".join(handle.graph.notes)


def test_no_search_among_all_objects_for_models_that_keep_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise AssertionError("a trace that left nothing behind was searched for")

    monkeypatch.setattr(Outside, "put_back", refuse)
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.LayerNorm(WIDTH), torch.nn.MultiheadAttention(WIDTH, 2))
    x = torch.randn(4, 2, WIDTH)
    lowtide.trace(lambda x: model[2](*[model[1](model[0](x))] * 3)[0].sum(), x, model=model, costs=False)


def test_fakes_of_another_trace_are_not_touched() -> None:
    other = Faker()
    TABLES["other"] = other.tensor(torch.randn(3))
    model = made(InGlobalDict)
    lowtide.trace(lambda x: model(x).sum(), torch.randn(4, WIDTH), costs=False)
    assert list(TABLES) == ["other"] and private.is_fake_of(TABLES["other"], other.mode)


def test_large_containers_are_not_copied(fakes: Callable[[], list[FakeTensor]]) -> None:
    model = made(InGlobalDict)
    TABLES.update((-number, "data") for number in range(1, 20_000))
    outside = Outside([model])
    assert not any(place.now is TABLES for place in outside._places)
    lowtide.trace(lambda x: model(x).sum(), torch.randn(4, WIDTH), costs=False)
    assert WIDTH not in TABLES and len(TABLES) == 19_999 and not fakes()


def test_the_block_itself() -> None:
    faker = Faker()
    model = made(InGlobal)
    with nothing_outside(faker, [model]), borrowed([model], faker), faker.mode:
        globals()["table"] = faker.tensor(torch.randn(2))
    assert table is None and sys.modules[__name__].__dict__["table"] is None
