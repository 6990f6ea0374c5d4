"""The dispatcher does what `lowtide.private.dispatch` says."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lowtide import private


def test_call_turns_lazy_conjugation_on_inside_a_mode() -> None:
    class Calls(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return private.call(func, args, kwargs or {})

    x = torch.randn(4, 4, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
    expected = torch.linalg.pinv(x)
    with Calls():
        assert torch.equal(torch.linalg.pinv(x), expected)


def test_answers_itself_where_a_type_dispatches() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    assert private.answers_itself(TwoTensor(torch.ones(2), torch.ones(2))) and not private.answers_itself(
        torch.ones(2)
    )


def test_transformed_where_torch_func_or_a_trace_runs() -> None:
    found: list[bool] = []

    def f(x: torch.Tensor) -> torch.Tensor:
        found.append(private.is_transformed())
        return x.sum()

    torch.func.grad(f)(torch.ones(3))
    torch.vmap(f)(torch.ones(3, 2))
    assert found == [True, True] and not private.is_transformed()


def test_without_torch_function_no_subclass_is_asked() -> None:
    class Asked(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise AssertionError

    x = torch.ones(2)
    x.__class__ = Asked
    with private.without_torch_function():
        assert type(x + 1) is torch.Tensor
    with pytest.raises(AssertionError):
        x + 1


KEY = "Fake"


def test_a_key_is_let_in_for_this_thread() -> None:
    other: list[bool] = []
    key = private.dispatch_key(KEY)
    private.include_key(key, True)
    try:
        assert private.is_key_included(key) and private.is_key_included(KEY)
        thread = threading.Thread(target=lambda: other.append(private.is_key_included(key)))
        thread.start()
        thread.join()
    finally:
        private.include_key(key, False)
    assert other == [False] and not private.is_key_included(KEY)


def test_a_key_is_kept_out_of_this_thread_though_it_is_let_in() -> None:
    seen: list[str] = []
    library = torch.library.Library("lowtide_test_kept_out", "DEF")
    library.define("note(Tensor x) -> Tensor")
    library.impl("note", lambda x: x, "CPU")
    library.impl("note", lambda x: seen.append(KEY) or x, KEY)
    key, one = private.dispatch_key(KEY), torch.ones(1)
    private.include_key(key, True)
    try:
        private.exclude_key(key, True)
        assert private.is_key_excluded(key)
        torch.ops.lowtide_test_kept_out.note(one)
        private.exclude_key(key, False)
        assert not private.is_key_excluded(key) and not seen
        torch.ops.lowtide_test_kept_out.note(one)
    finally:
        private.exclude_key(key, False)
        private.include_key(key, False)
    assert seen == [KEY]


def test_a_thread_object_is_there_in_the_backward_that_the_thread_asks_for() -> None:
    name, found = "lowtide.tests.private", []
    assert not private.has_thread_object(name)
    thing = object()

    def run() -> None:
        private.set_thread_object(name, thing)
        x = torch.ones(2, requires_grad=True)
        y = x * 2
        y.register_hook(lambda grad: found.append(private.thread_object(name)))
        y.sum().backward()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [thing] and not private.has_thread_object(name)


@pytest.mark.skipif(not hasattr(torch._C, "_remove_obj_from_tls"), reason="this PyTorch cannot take it out")
def test_a_thread_object_is_gone_when_python_lets_go_of_the_thread() -> None:
    name, left = "lowtide.tests.private.ends", []

    class Last:
        def __del__(self) -> None:
            left.append(private.has_thread_object(name))

    def run() -> None:
        private.set_thread_object(name, object())
        own.last = Last()  # of a local that is older, so that it goes later

    own = threading.local()
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    gc.collect()
    assert left == [False]


def test_a_kernel_at_the_key_is_called_and_passes_on_below() -> None:
    calls: list[str] = []
    with torch.library._scoped_library("lowtide_private", "DEF") as defined:
        defined.define("twice(Tensor x) -> Tensor")
        defined.impl("twice", lambda x: x * 2, "CPU")
        twice = torch.ops.lowtide_private.twice.default
        assert "lowtide_private::twice" in private.all_operation_names()
        assert not private.has_kernel_at("lowtide_private::twice", KEY)

        def kernel(keys: Any, x: torch.Tensor) -> torch.Tensor:
            calls.append("kernel")
            private.include_key(KEY, False)  # what runs below makes tensors of its own
            return private.redispatch(twice, keys & private.keys_below(KEY), x)

        library = private.kernel_library("lowtide_private")
        library.impl("twice", KEY, kernel, True)
        assert private.has_kernel_at("lowtide_private::twice", KEY)
        x = torch.ones(2)
        private.include_key(KEY, True)
        try:
            assert twice(x).tolist() == [2, 2]
        finally:
            private.include_key(KEY, False)
        twice(x)
        del library
    assert calls == ["kernel"]


def test_schemas_say_what_is_written_and_what_are_views() -> None:
    schema = private.schema_of(torch.ops.aten.add_.Tensor)
    assert schema.name == "aten::add_" and schema.overload_name == "Tensor"
    assert schema.arguments[0].alias_info.is_write and schema.arguments[1].alias_info is None
    view = next(one for one in private.all_schemas() if one.name == "aten::t")
    assert view.returns[0].alias_info is not None and not view.returns[0].alias_info.is_write


def test_similar_overloads_begin_with_the_one() -> None:
    func = torch.ops.aten.bernoulli_.float
    assert isinstance(func, private.OpOverload) and isinstance(func.overloadpacket, private.OpOverloadPacket)
    assert private.similar_overloads(func)[0] is func
    assert torch.ops.aten.bernoulli_.Tensor in private.similar_overloads(func)


def test_higher_order_operators_pass_a_key() -> None:
    from lowtide.interception import _register

    _register()  # lets them pass for good
    operators = torch._ops._higher_order_ops.values()
    keys = [operator.non_fallthrough_keys for operator in operators]
    assert keys and all(one.raw_repr() == one.remove(KEY).raw_repr() for one in keys)
    private.let_higher_order_operators_pass(KEY)


class Counting(private.TorchDispatchMode):
    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        Counting.calls += 1
        return func(*args, **(kwargs or {}))


def test_modes_are_known_and_left() -> None:
    Counting.calls = 0
    with Counting() as mode:
        assert private.mode_stack() == [mode]
        with private.without_dispatch_modes():
            torch.ones(2) + 1
            assert private.mode_stack() == []
        assert Counting.calls == 0
        torch.ones(2) + 1
    assert Counting.calls == 2 and private.mode_stack() == []


def test_without_torch_functions_no_mode_for_them_is_asked() -> None:
    with torch.device("meta"):
        assert torch.ones(2).device.type == "meta"
        with private.without_torch_functions():
            assert torch.ones(2).device.type == "cpu"


def test_defined_operations_grow_where_one_is_defined() -> None:
    before = private.defined_operations()
    with torch.library._scoped_library("lowtide_defined", "DEF") as library:
        library.define("one(Tensor x) -> Tensor")
        _, names = private.defined_operations()
        assert names - before[1] == {"lowtide_defined::one"} and before[0] > 0
