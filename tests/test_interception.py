"""Interceptors see every operation below autograd and change nothing of what PyTorch does."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from names_seen import Names, names_of
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lowtide import interception, private
from lowtide.interception import (
    _KEY,
    Interceptor,
    _included,
    _Kernel,
    _RecordStream,
    interceptors,
    is_evicted,
    proceed,
    unseen,
    watchers,
    without_modes,
)


def seen() -> bool:
    """Whether operations of this thread come to our kernels."""
    return _included(_KEY)


# ---- the key -------------------------------------------------------------------------------------


def test_spans_of_the_profiler_are_no_operations() -> None:
    def run() -> None:
        with torch.profiler.record_function("a hook of FSDP"):
            torch.ones(2).exp()

    with Names() as names:
        run()
    assert names.names[-1] == "aten.exp.default"  # nothing is seen where the span ends
    assert not any(name.startswith("profiler.") for name in names.names)


def test_the_key_is_one_that_pytorch_leaves_alone() -> None:
    with Names():
        pass
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    assert has("aten::add.Tensor", _KEY) and has("aten::native_layer_norm", _KEY) and has("aten::copy_", _KEY)
    # a view, and one that is made of others
    assert not has("aten::view", _KEY) and not has("aten::linear", _KEY)
    assert not _included(_KEY) and not torch.ones(2).add(1).is_sparse


def test_nothing_is_left_included() -> None:
    assert not seen() and interceptors() == []
    with Names() as names:
        assert seen() and interceptors() == [names]
    assert not seen() and interceptors() == []
    torch.ones(2)
    assert names.names == []


def test_nothing_is_left_included_after_an_error() -> None:
    class Fails(Interceptor):
        def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            raise KeyError(func)

    with pytest.raises(KeyError), Fails():
        torch.ones(2)
    assert not seen() and interceptors() == []
    with Names() as names:
        with pytest.raises(RuntimeError, match="size"):
            torch.ones(2) @ torch.ones(3)
        assert seen()
        torch.ones(2).sin()
    assert names.short[-1] == "sin" and not seen()


def test_an_operation_of_a_library_that_comes_later_is_seen() -> None:
    with Names():
        pass
    with torch.library._scoped_library("lowtide_later", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CPU")
        with Names() as names:
            assert torch.equal(torch.ops.lowtide_later.twice(torch.ones(2)), torch.full((2,), 2.0))
        assert "lowtide_later.twice.default" in names.names


# ---- what is seen --------------------------------------------------------------------------------


def test_what_an_interruption_left_out_is_registered_by_the_next_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ctrl-C while kernels are put at the key: every operation is seen afterwards."""
    asked = ("first", "second", "third")
    with torch.library._scoped_library("lowtide_interrupted", "DEF") as library:
        for name in asked:
            library.define(f"{name}(Tensor x) -> Tensor")
            library.impl(name, lambda x: x + 1, "CompositeExplicitAutograd")

        def interrupt(name: str) -> interception._Kernel:
            if name == "lowtide_interrupted::second":
                raise KeyboardInterrupt
            return _Kernel(name)

        with monkeypatch.context() as patch:
            patch.setattr(interception, "_Kernel", interrupt)
            with pytest.raises(KeyboardInterrupt):
                Names().start()
        x = torch.ones(2)
        names = names_of(lambda: [getattr(torch.ops.lowtide_interrupted, name)(x) for name in asked])
        assert names == list(asked)


def test_views_are_not_seen() -> None:
    x = torch.ones(4, 6)
    assert (
        names_of(
            lambda: (
                x.view(24),
                x.t(),
                x[1:],
                x.reshape(6, 4),
                x.expand(2, 4, 6),
                x.detach(),
                x.split(2),
                x.unsqueeze(0),
            )
        )
        == []
    )
    assert names_of(lambda: x.t().contiguous()) == ["clone"]


def test_kernels_do_not_see_themselves() -> None:
    """An operation's kernel calls others, which are no operations of the program."""
    x = torch.randn(3, 4)
    assert names_of(lambda: torch.nn.functional.layer_norm(x, (4,))) == ["native_layer_norm"]
    assert names_of(lambda: x.softmax(1)) == ["_softmax"]


def test_the_backward_is_seen_as_it_runs_without() -> None:
    """Under a dispatch mode these formulas take other ways: out of place, and with second gradients."""
    x = torch.randn(6, 4, requires_grad=True)
    target = torch.tensor([0, 1, 2, 3, 0, 1])

    def step() -> None:
        nn.functional.cross_entropy(x.gather(1, torch.zeros(6, 4, dtype=torch.long)).exp(), target).backward()

    found = names_of(step)
    assert "scatter_add_" in found and "scatter_add" not in found


def test_gradients_that_meet_are_added_in_place_as_without() -> None:
    """The engine adds into a gradient that it alone holds; whether it may, it finds by counting references,
    which an interceptor must not raise.
    """
    x = torch.randn(50, requires_grad=True)
    with Names() as names:
        y = x * 1.5
        (y.sin() * y.cos()).sum().backward()
    assert [name for name in names.names if name.startswith("aten.add")] == ["aten.add_.Tensor"]


def test_numbers_that_were_wrapped_come_as_without() -> None:
    x = torch.arange(4)
    half = torch.ones(2, dtype=torch.float16)
    runs: list[Callable[[], torch.Tensor]] = [
        lambda: x * 0.5,
        lambda: 0.5 * x,
        lambda: 2 - x,
        lambda: 1.0 / (x + 1),
        lambda: half * 3.3,
        lambda: half.add_(0.1),
        lambda: torch.where(x > 1, 1.5, x),
        lambda: torch.where(x > 1, x, 7),
        lambda: x.float().masked_fill(x > 2, 0.25),
        lambda: x**2,
        lambda: 2**x,
        lambda: torch.maximum(x.float(), torch.tensor(1.5)),
        lambda: x + True,
        lambda: x * 1j,
    ]
    for number, run in enumerate(runs):
        half.fill_(1)
        expected = run().clone()
        half.fill_(1)
        with Names():
            found = run()
        assert found.dtype == expected.dtype and torch.equal(found, expected), number


def test_a_conjugate_is_lazy_as_without() -> None:
    x = torch.randn(4, 4, dtype=torch.complex64)
    expected = torch.linalg.pinv(x), x.conj() @ x
    with Names():
        found = torch.linalg.pinv(x), x.conj() @ x
        assert x.conj().is_conj()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


# ---- several, and none ---------------------------------------------------------------------------


def test_interceptors_nest_and_may_end_in_any_order() -> None:
    outer, inner = Names(), Names()
    outer.start()
    inner.start()
    torch.ones(2)
    outer.stop()
    torch.ones(2).sin()
    inner.stop()
    torch.ones(2).cos()
    assert outer.short == ["ones"] and inner.short == ["ones", "ones", "sin"]


def test_what_an_interceptor_runs_itself_is_not_seen() -> None:
    class Doubles(Interceptor):
        def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return proceed(func, args, kwargs) * 2

    with Names() as names, Doubles():
        found = torch.ones(2)
    assert names.short == ["ones"] and found.tolist() == [2, 2]


def test_unseen() -> None:
    with Names() as names:
        with unseen():
            torch.ones(2)
            assert not seen()
        assert seen()
        torch.ones(2).sin()
    assert names.short == ["ones", "sin"]
    with unseen():
        assert not seen()
    assert not seen()


def test_proceed_outside_of_all_runs_the_operation() -> None:
    assert proceed(torch.ops.aten.add.Tensor, (torch.ones(2), 1), {}).tolist() == [2, 2]


# ---- other parts of PyTorch ----------------------------------------------------------------------


def test_subclasses_come_apart_above() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    a, b = torch.ones(3), torch.full((3,), 2.0)
    with Names() as names:
        found = TwoTensor(a, b).sin()
    assert isinstance(found, TwoTensor) and torch.equal(found.b, b.sin())
    whole = torch.__version__ < (2, 13)  # the key stands above that of subclasses there
    assert names.short.count("sin") == (1 if whole else 2)


def test_a_dispatch_mode_sees_first() -> None:
    class Counts(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            Counts.count += 1
            return func(*args, **(kwargs or {}))

    with Names() as names, Counts():
        torch.ones(2).sin()
    assert Counts.count == 2 and names.short == ["ones", "sin"]


def test_fake_tensors_pass_by() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with Names(), FakeTensorMode():
        found = torch.ones(3, 4) @ torch.ones(4, 5)
    assert found.shape == (3, 5)


def test_vmap_and_func_grad() -> None:
    x = torch.randn(5, 3)
    row = lambda r: (r.sin() * r.exp()).sum()  # noqa: E731
    expected = torch.func.vmap(torch.func.grad(row))(x), torch.func.jacrev(torch.tanh)(x[0])
    with Names() as names:
        found = torch.func.vmap(torch.func.grad(row))(x), torch.func.jacrev(torch.tanh)(x[0])
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)) and "sin" in names.short


def test_cond() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda t: t.sin(), lambda t: t.cos(), (x,))

    x = torch.ones(3)
    expected = step(x)
    with Names():
        assert torch.equal(step(x), expected)


def test_compiled_functions_run_compiled() -> None:
    torch._dynamo.reset()
    compiled: list[Any] = []

    def backend(module: Any, _: Any) -> Any:
        compiled.append(module)
        return module

    function = torch.compile(lambda x: x.sin().cos(), backend=backend)
    x = torch.randn(3)
    for _ in range(3):
        with Names() as names:
            found = function(x)
        assert torch.equal(found, x.sin().cos()) and torch.equal(function(x), found)
    assert len(compiled) == 2, "once with the key, which guards ask for, and once without"
    assert names.short == ["sin", "cos"]


def test_nothing_is_held_afterwards() -> None:
    import weakref

    x = torch.ones(3)
    with Names() as names:
        y = x.sin()
    watches = [weakref.ref(names), weakref.ref(y.untyped_storage())]
    del names, y
    gc.collect()
    assert [watch() for watch in watches] == [None, None]


# ---- who watches -------------------------------------------------------------------------------


def test_is_evicted_asks_the_interceptors() -> None:
    class Giving(Interceptor):
        def will_evict(self, tensor: torch.Tensor) -> bool:
            return tensor.numel() > 1

        def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return proceed(func, args, kwargs)

    one, two = torch.ones(1), torch.ones(2)
    assert not is_evicted(two)
    with Giving():
        assert is_evicted(two)
        assert not is_evicted(one)


def test_without_modes_nothing_is_seen() -> None:
    class Counting(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            Counting.calls += 1
            return func(*args, **(kwargs or {}))

    with Counting():
        with without_modes():
            torch.ones(2) + 1
        assert Counting.calls == 0
        torch.ones(2) + 1
        assert Counting.calls == 2


def test_watchers_are_interceptors_and_dispatch_modes() -> None:
    class Passing(Interceptor):
        def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return proceed(func, args, kwargs)

    assert watchers() == []

    class Counts(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    with Passing() as passing, Counts() as counts:
        assert watchers() == [passing, counts]


def test_a_stream_is_recorded_on_memory_that_the_allocator_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's allocator ignores ``record_stream`` of bytes that are shared (copy on write) or borrowed.
    Nobody sees the call, which by its schema writes, and writes nothing.
    """
    recorded: list[torch.Tensor] = []
    monkeypatch.setattr(
        "lowtide.interception._run", lambda func, below, args, kwargs: recorded.append(args[0])
    )
    kernel, keys = _RecordStream("aten::record_stream"), private.keys_below("Fake")
    plain = torch.ones(4)
    clone = torch.ops.aten._lazy_clone.default(plain)
    shared = private.storage_data(plain)
    assert private.storage_data(clone) == shared
    with Names() as seen:
        kernel(keys, clone, "a stream")
    assert not seen.short
    assert private.storage_data(clone) != shared and torch.equal(clone, plain)
    alias = torch.empty(0).set_(private.borrowed_storage(plain))  # pyright: ignore
    kernel(keys, alias, "a stream")
    assert recorded[0] is clone and recorded[1] is plain
