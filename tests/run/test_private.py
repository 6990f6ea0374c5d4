"""Every private PyTorch interface that lowtide leans on does what it is leaned on for; a release that moves
one fails here, by name.
"""

from __future__ import annotations

import copy
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lowtide import interception, private
from lowtide.interception import Interceptor, proceed


class Counts(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.found: list[Any] = []
        self.look: Any = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        if self.look is not None:
            self.found.append(self.look(args[0]))
        return func(*args, **(kwargs or {}))


def test_in_backward() -> None:
    seen: list[bool] = []
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(lambda g: seen.append(private.in_backward()))
    assert not private.in_backward()
    y.sum().backward()
    assert seen == [True] and not private.in_backward()


def test_in_backward_is_the_threads_own() -> None:
    import threading

    seen: list[bool] = []

    def hook(grad: torch.Tensor) -> None:
        thread = threading.Thread(target=lambda: seen.append(private.in_backward()))
        thread.start()
        thread.join()

    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(hook)
    y.sum().backward()
    assert seen == [False]


def test_storage_key_is_of_the_storage() -> None:
    x = torch.ones(4)
    assert (
        private.storage_key(x)
        == private.storage_key(x[1:])
        == private.storage_key(x.view(2, 2))
        == private.storage_key(x.detach())
    )
    assert private.storage_key(x) != private.storage_key(x.clone())


def test_versioned_alias_shares_the_counter() -> None:
    x = torch.ones(4)
    alias = private.versioned_alias(x)
    assert (
        private.storage_key(alias) == private.storage_key(x)
        and alias.grad_fn is None
        and not alias.requires_grad
    )
    before = alias._version
    x.add_(1)
    assert alias._version == before + 1


def test_versioned_alias_shares_the_counter_inside_a_dispatch_mode() -> None:
    x = torch.ones(4)
    mode = Counts()
    mode.look = private.versioned_alias
    with mode:
        torch.sin(x)
    (alias,) = mode.found
    before = alias._version
    x[1:].mul_(2)
    assert alias._version > before
    with mode:
        x.zero_()
    assert alias._version > before + 1


def test_a_plain_detach_inside_a_dispatch_mode_does_not() -> None:
    """Why `versioned_alias` is there. If this fails, it can be made simpler."""
    x = torch.ones(4)
    mode = Counts()
    mode.look = torch.Tensor.detach
    with mode:
        torch.sin(x)
    before = mode.found[0]._version
    x.add_(1)
    assert mode.found[0]._version == before


def test_version_witness_tells_of_writes_and_holds_nothing() -> None:
    import weakref

    x = torch.ones(1000)
    storage = weakref.ref(x.untyped_storage())
    witness = private.version_witness(x)
    before = witness._version
    assert witness.untyped_storage().nbytes() == 0
    x[3] = 5.0
    assert witness._version == before + 1
    assert x[3] == 5.0 and x.numel() == 1000
    del x
    assert storage() is None


def test_suggested_memory_format_is_what_kernels_go_by() -> None:
    x = torch.ones(2, 3, 4, 5)
    assert private.suggested_memory_format(x) is torch.contiguous_format
    assert private.suggested_memory_format(x.to(memory_format=torch.channels_last)) is torch.channels_last
    assert (
        private.suggested_memory_format(torch.ones(2, 3, 1, 1).as_strided((2, 3, 1, 1), (3, 1, 3, 3)))
        is torch.channels_last
    )


def test_replaying_is_below_autograd_and_autocast() -> None:
    x = torch.ones(4, 4, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (x @ x).dtype is torch.bfloat16
        with private.replaying():
            y = x @ x
            assert y.dtype is torch.float32 and not y.requires_grad
        assert (x @ x).dtype is torch.bfloat16 and (x @ x).requires_grad


def test_replaying_ends_with_an_error_too() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with pytest.raises(KeyError), private.replaying():
            raise KeyError
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.bfloat16 and torch.is_grad_enabled()


def test_has_kernel() -> None:
    aten = torch.ops.aten
    assert private.has_kernel(aten.mul.out, "cpu") and private.has_kernel(
        aten.native_layer_norm.default, "cpu"
    )
    assert not private.has_kernel(aten.native_layer_norm.out, "cpu")  # generated: it is made of the other one
    assert not private.has_kernel(aten.mul.out, "hpu")


def test_storage_use_count() -> None:
    x = torch.ones(4)
    storage = x.untyped_storage()
    before = private.storage_use_count(storage)
    view = x[1:]
    assert private.storage_use_count(storage) == before + 1
    del view
    assert private.storage_use_count(storage) == before


def test_is_compiled() -> None:
    model = torch.nn.Linear(2, 2)
    assert not private.is_compiled(model)
    assert private.is_compiled(torch.compile(model, backend="eager"))
    twin = copy.deepcopy(model)
    twin.compile(backend="eager")
    assert private.is_compiled(twin)
    assert not private.is_compiled(torch.nn.Sequential(model))


def test_compiled_call_names_what_a_call_goes_through() -> None:
    ran: list[str] = []
    first, second = torch.compile(torch.nn.Linear(2, 2), backend="eager"), torch.nn.Linear(2, 2)
    second.compile(backend="eager")
    for module in (first, second):
        name = private.compiled_call(module)
        call = module.__dict__[name]
        module.__dict__[name] = lambda x, call=call: (ran.append("called"), call(x))[1]
        module(torch.ones(1, 2))
    assert ran == ["called", "called"]


class Backend:
    def __init__(self) -> None:
        self.compiled = 0

    def __call__(self, module: Any, inputs: Any) -> Any:
        self.compiled += 1
        return module


def test_out_of_dynamo() -> None:
    torch._dynamo.reset()
    seen: list[bool] = []

    @private.skipped_by_dynamo
    def skipped(x: torch.Tensor) -> torch.Tensor:
        with private.out_of_dynamo() as compiled:
            seen.append(compiled)
            return inner(x)

    def inner(x: torch.Tensor) -> torch.Tensor:
        return x.sin().cos()

    def outer(x: torch.Tensor) -> torch.Tensor:
        return skipped(x)

    with private.out_of_dynamo() as compiled:
        assert not compiled
    backend = Backend()
    torch.compile(outer, backend=backend)(torch.ones(3))
    assert seen == [True] and backend.compiled == 0
    torch.compile(inner, backend=backend)(torch.ones(3))
    assert backend.compiled == 1


def test_skipped_by_dynamo_breaks_the_graph() -> None:
    torch._dynamo.reset()

    @private.skipped_by_dynamo
    def skipped(x: torch.Tensor) -> torch.Tensor:
        return x

    def outer(x: torch.Tensor) -> torch.Tensor:
        return skipped(x.sin()).cos()

    backend = Backend()
    torch.compile(outer, backend=backend)(torch.ones(3))
    assert backend.compiled == 2
    with pytest.raises(Exception, match=r"lowtide runs it|disable"):
        torch.compile(outer, backend=backend, fullgraph=True)(torch.ones(4))


def test_keep_dynamo_out() -> None:
    from torch._dynamo import trace_rules

    from lowtide.run.digest import digest

    private.keep_dynamo_out()
    before = len(trace_rules.SKIP_DIRS)
    private.keep_dynamo_out()
    assert len(trace_rules.SKIP_DIRS) == before
    assert trace_rules.check(digest.__code__)


def test_a_mode_that_ignores_compile_internals_leaves_compiled_calls_compiled() -> None:
    torch._dynamo.reset()

    class Ignores(Counts):
        @classmethod
        def ignore_compile_internals(cls) -> bool:
            return True

    backend = Backend()
    function = torch.compile(lambda x: x.sin().cos(), backend=backend)
    with Ignores():
        function(torch.ones(3))
    assert backend.compiled == 1


def test_at_backward_end() -> None:
    order: list[str] = []
    x = torch.ones(2, requires_grad=True)
    y = x * 2

    def hook(grad: torch.Tensor) -> None:
        order.append("begin")
        private.at_backward_end(lambda: order.append("end"))

    y.register_hook(hook)
    x.register_post_accumulate_grad_hook(lambda p: order.append("leaf"))
    y.sum().backward()
    assert order == ["begin", "leaf", "end"]


def test_at_backward_end_lets_errors_out() -> None:
    x = torch.ones(2, requires_grad=True)
    y = x * 2

    def fail() -> None:
        raise KeyError("out")

    y.register_hook(lambda g: private.at_backward_end(fail))
    with pytest.raises(KeyError, match="out"):
        y.sum().backward()


def test_fake_tensors_refuse_to_give_an_address() -> None:
    with private.fake_mode() as mode:
        fake = mode.from_tensor(torch.ones(4))
        made = torch.empty(3) + torch.ones(3)
    for tensor in (fake, made):
        with pytest.raises(RuntimeError, match=r"data pointer|data_ptr|access"):
            tensor.data_ptr()


def test_without_fake_mode() -> None:
    with private.fake_mode():
        assert type(torch.ones(2)) is not torch.Tensor
        with private.without_fake_mode():
            assert type(torch.ones(2)) is torch.Tensor


def test_call_turns_lazy_conjugation_on_inside_a_mode() -> None:
    class Calls(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return private.call(func, args, kwargs or {})

    x = torch.randn(4, 4, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
    expected = torch.linalg.pinv(x)
    with Calls():
        assert torch.equal(torch.linalg.pinv(x), expected)


def test_fake_mode_takes_real_constants() -> None:
    constant = torch.ones(4)
    with private.fake_mode():
        assert (torch.empty(4) + constant).shape == (4,)


def test_an_unseen_alias_is_not_dispatched() -> None:
    class Counting(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            Counting.calls += 1
            return func(*args, **(kwargs or {}))

    x = torch.ones(3, requires_grad=True)
    y = x * 2
    with Counting():
        alias = private.unseen_alias(y)
    assert Counting.calls == 0
    assert not alias.requires_grad and alias.data_ptr() == y.data_ptr()
    y.add_(1)
    assert alias._version == y._version


def test_waiting_for_a_collective_on_fake_tensors_makes_no_copy() -> None:
    with private.fake_mode():
        fake = torch.ones(3)
    assert private.wait_for_collective(fake) is fake
    real = torch.ones(3)
    assert torch.equal(private.wait_for_collective(real), real)


def test_is_given_up_asks_the_interceptors() -> None:
    class Giving(Interceptor):
        def gives_up(self, tensor: torch.Tensor) -> bool:
            return tensor.numel() > 1

        def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return proceed(func, args, kwargs)

    one, two = torch.ones(1), torch.ones(2)
    assert not private.is_given_up(two)
    with Giving():
        assert private.is_given_up(two)
        assert not private.is_given_up(one)


def test_node_key_tells_whose_turn_it_is() -> None:
    class Turns(Interceptor):
        def __init__(self) -> None:
            self.nodes: set[Any] = set()

        def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            self.nodes.add(private.node_key())
            return proceed(func, args, kwargs)

    assert private.node_key() is None
    x = torch.ones(3, requires_grad=True)
    with Turns() as turns:
        (x.sin() * x.cos()).sum().backward()
    assert {key[0] for key in turns.nodes if key} >= {"SinBackward0", "CosBackward0", "MulBackward0"}


def test_answers_itself_where_a_type_dispatches() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    assert private.answers_itself(TwoTensor(torch.ones(2), torch.ones(2))) and not private.answers_itself(
        torch.ones(2)
    )


def test_transformed_where_torch_func_or_a_trace_runs() -> None:
    found: list[bool] = []

    def f(x: torch.Tensor) -> torch.Tensor:
        found.append(private.transformed())
        return x.sum()

    torch.func.grad(f)(torch.ones(3))
    torch.vmap(f)(torch.ones(3, 2))
    assert found == [True, True] and not private.transformed()


def test_a_borrowed_storage_holds_nothing() -> None:
    import weakref

    x = torch.arange(4.0)
    storage = weakref.ref(x.untyped_storage())
    other = private.borrowed_storage(x.untyped_storage())
    assert (
        other.data_ptr() == x.data_ptr()
        and other.nbytes() == 16
        and other._cdata != x.untyped_storage()._cdata
    )
    del x
    assert storage() is None


def test_a_fake_tensor_is_known() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        assert private.is_fake(torch.ones(1))
    assert not private.is_fake(torch.ones(1))


def test_an_assertion_on_the_device_raises() -> None:
    private.assert_on_device(torch.tensor(True), "fine")
    with pytest.raises(RuntimeError, match="not fine"):
        private.assert_on_device(torch.tensor(False), "not fine")


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


def test_without_modes_nothing_is_seen() -> None:
    class Counting(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            Counting.calls += 1
            return func(*args, **(kwargs or {}))

    with Counting():
        with private.without_modes():
            torch.ones(2) + 1
        assert Counting.calls == 0
        torch.ones(2) + 1
        assert Counting.calls == 2


def test_in_torch_checkpoint() -> None:
    """And the name of the node that the other kind leaves, which `StepTracer` goes by."""
    from torch.utils.checkpoint import checkpoint

    from lowtide.trace import eager

    found: list[bool] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        found.append(private.in_torch_checkpoint())
        return x.exp()

    x = torch.randn(3, requires_grad=True)
    function(x)
    checkpoint(function, x, use_reentrant=False)
    with torch.autograd.graph.save_on_cpu():
        function(x)
    assert found == [False, True, False]
    assert checkpoint(function, x, use_reentrant=True).grad_fn.name() == eager._REENTRANT


def test_in_custom_backward_and_carried() -> None:
    found = []

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):  # type: ignore[no-untyped-def]
            ctx.save_for_backward(weight)
            return x * weight

        @staticmethod
        def backward(ctx, grad):  # type: ignore[no-untyped-def]
            (weight,) = ctx.saved_tensors
            found.append((private.in_custom_backward(), vars(weight)))
            return grad * weight, None

    def unpack(packed: torch.Tensor) -> torch.Tensor:
        alias = packed.data
        alias.mark = 3  # type: ignore[attr-defined]
        return private.carried(alias)

    x, weight = torch.ones(2, requires_grad=True), torch.full((2,), 5.0, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
        y = Product.apply(x, weight)
    y.sum().backward()
    assert found == [(True, {"mark": 3})] and not private.in_custom_backward()
    assert x.grad is not None and x.grad.tolist() == [5.0, 5.0]


def test_version() -> None:
    tensor = torch.zeros(1).add_(1)
    with torch.inference_mode():
        made = torch.zeros(1).add_(1)
    assert (private.version(tensor), private.version(made)) == (1, 0)


def test_every_function_is_tested_here() -> None:
    text = "".join(file.read_text() for file in Path(__file__).parent.glob("test_private*.py"))
    names = [
        n
        for n, f in vars(private).items()
        if inspect.isfunction(f) and f.__module__ == private.__name__ and not n.startswith("_")
    ]
    assert [n for n in names if f"private.{n}" not in text] == []


def test_private_interfaces_stay_in_their_places() -> None:
    """What runs steps takes nothing private from PyTorch but through `lowtide.private` and
    `lowtide.interception`.
    """
    import re

    package = Path(inspect.getfile(private)).parent
    private_name = re.compile(
        r"torch\._C\.(?!_set_grad_enabled)|torch\._dynamo|torch\._functorch|torch\._dispatch"
    )
    files = [*package.glob("*.py"), *(package / "run").glob("*.py"), package / "trace" / "eager.py"]
    lines = [(file.name, line.strip()) for file in files for line in file.read_text().splitlines()]
    found = {name for name, line in lines if private_name.search(line)}
    assert found == {Path(inspect.getfile(module)).name for module in (private, interception)}


def test_is_fake_of_tells_whose_fake_it_is() -> None:
    class Pretends:
        @property
        def __class__(self) -> Any:  # type: ignore[override]
            raise AssertionError("asked for more than its type")

    mine, other = private.fake_mode(), private.fake_mode()
    fake = mine.from_tensor(torch.ones(2))
    assert private.is_fake_of(fake, mine) and not private.is_fake_of(fake, other)
    assert not private.is_fake_of(torch.ones(2), mine) and not private.is_fake_of(Pretends(), mine)


def test_the_storage_of_a_fake_is_of_the_meta_device_and_ends_with_it() -> None:
    import weakref

    mode = private.fake_mode()
    with mode:
        fakes = [
            torch.ones(2),
            torch.ones(2, device="cuda") if torch.cuda.is_available() else torch.ones(3),
            torch.ones(4)[1:],
        ]
    watches = [weakref.ref(fake.untyped_storage()) for fake in fakes]
    assert all(
        storage is not None and storage.device.type == "meta" for storage in (watch() for watch in watches)
    )
    del fakes
    assert all(watch() is None for watch in watches)


def test_watchers_are_interceptors_and_dispatch_modes() -> None:
    class Passing(Interceptor):
        def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return proceed(func, args, kwargs)

    assert private.watchers() == []
    with Passing() as passing, Counts() as counts:
        assert private.watchers() == [passing, counts]


def test_is_fake_mode_active() -> None:
    assert not private.is_fake_mode_active()
    with private.fake_mode(), Counts():
        assert private.is_fake_mode_active()
        with private.without_fake_mode():
            assert not private.is_fake_mode_active()
