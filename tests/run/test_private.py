"""Every private PyTorch interface that lowtide leans on does what it is leaned on for; a release that moves one fails here, by name."""

from __future__ import annotations

import copy
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lowtide import private


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
    assert private.storage_key(x) == private.storage_key(x[1:]) == private.storage_key(x.view(2, 2)) == private.storage_key(x.detach())
    assert private.storage_key(x) != private.storage_key(x.clone())


def test_versioned_alias_shares_the_counter() -> None:
    x = torch.ones(4)
    alias = private.versioned_alias(x)
    assert private.storage_key(alias) == private.storage_key(x) and alias.grad_fn is None and not alias.requires_grad
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
    assert private.suggested_memory_format(torch.ones(2, 3, 1, 1).as_strided((2, 3, 1, 1), (3, 1, 3, 3))) is torch.channels_last


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
    assert private.has_kernel(aten.mul.out, "cpu") and private.has_kernel(aten.native_layer_norm.default, "cpu")
    assert not private.has_kernel(aten.native_layer_norm.out, "cpu")  # generated: it is made of the other one
    assert not private.has_kernel(aten.mul.out, "hpu")


@pytest.mark.skipif(not hasattr(private, "storage_use_count"), reason="not used")
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

    from lowtide.run.tape import digest

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


def test_modes_can_be_left_and_entered_again() -> None:
    outer, middle, inner = Counts(), Counts(), Counts()
    with outer, middle, inner:
        assert private.dispatch_modes() == [outer, middle, inner]
        assert private.top_mode() is inner and private.modes_deep() == 3
        assert private.leave_top() == 2
        assert private.dispatch_modes() == [outer, middle]
        private.enter_modes([inner])
        taken = private.leave_mode(middle)
        assert private.dispatch_modes() == [outer]
        torch.ones(1)
        private.enter_modes(taken)
        assert private.dispatch_modes() == [outer, middle, inner]
        torch.ones(2)
    assert private.dispatch_modes() == [] and private.top_mode() is None
    assert len(outer.names) == 2 * len(inner.names) == 2 * len(middle.names)


def test_leaving_a_mode_that_is_not_there_leaves_none_behind() -> None:
    mode = Counts()
    with mode:
        private.enter_modes(private.leave_mode(Counts()))
        assert private.dispatch_modes() == [mode]


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


def test_fake_errors_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    from torch._subclasses import fake_tensor

    before = fake_tensor.log.disabled
    with private.fake_errors_untold():
        fake_tensor.log.error("a stack that nobody asked for")
    assert not caplog.records
    assert fake_tensor.log.disabled is before


def test_waiting_for_a_collective_on_fake_tensors_makes_no_copy() -> None:
    with private.fake_mode():
        fake = torch.ones(3)
    assert private.wait_for_collective(fake) is fake
    real = torch.ones(3)
    assert torch.equal(private.wait_for_collective(real), real)


def test_is_given_up_asks_the_modes() -> None:
    class Giving(TorchDispatchMode):
        def gives_up(self, tensor: torch.Tensor) -> bool:
            return tensor.numel() > 1

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    one, two = torch.ones(1), torch.ones(2)
    assert not private.is_given_up(two)
    with Giving():
        assert private.is_given_up(two)
        assert not private.is_given_up(one)


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


def test_every_function_is_tested_here() -> None:
    text = "".join(file.read_text() for file in Path(__file__).parent.glob("test_private*.py"))
    names = [n for n, f in vars(private).items() if inspect.isfunction(f) and f.__module__ == private.__name__ and not n.startswith("_")]
    assert [n for n in names if f"private.{n}" not in text] == []


def test_private_interfaces_stay_in_one_place() -> None:
    """The tape and the recorder take nothing private from PyTorch but through `lowtide.private`."""
    import re

    run = Path(inspect.getfile(private)).parent / "run"
    private_name = re.compile(r"torch\._C\.(?!_set_grad_enabled)|torch\._dynamo|torch\._functorch")
    lines = [(file.name, line.strip()) for file in run.glob("*.py") for line in file.read_text().splitlines()]
    found = [line for line in lines if private_name.search(line[1])]
    assert found == []


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
        fakes = [torch.ones(2), torch.ones(2, device="cuda") if torch.cuda.is_available() else torch.ones(3), torch.ones(4)[1:]]
    watches = [weakref.ref(fake.untyped_storage()) for fake in fakes]
    assert all(storage is not None and storage.device.type == "meta" for storage in (watch() for watch in watches))
    del fakes
    assert all(watch() is None for watch in watches)


def test_a_fake_tensor_takes_other_data() -> None:
    mode = private.fake_mode()
    tensor, data = mode.from_tensor(torch.ones(2)), mode.from_tensor(torch.ones(2, dtype=torch.float64))
    private.set_fake_data(tensor, data)
    assert tensor.dtype == torch.float64 and private.storage_key(tensor) == private.storage_key(data)
    assert private.is_traced(tensor) and not private.is_traced(torch.ones(2))


def test_only_pytorch_is_told_what_is_fake() -> None:
    fake, own = private.fake_mode().from_tensor(torch.ones(2)), torch._subclasses.FakeTensor
    with private.fakes_untold():
        assert not isinstance(fake, torch._subclasses.FakeTensor) and isinstance(fake, own)
        assert torch._meta_registrations.device_hint(fake) == "cpu" and device_hint_elsewhere(fake) == "meta"
        with pytest.raises(AttributeError, match="nothing"):
            _ = torch._subclasses.nothing
    assert torch._subclasses.FakeTensor is own and not hasattr(torch._subclasses, "__getattr__")
    assert private.own_backend()


def device_hint_elsewhere(tensor: torch.Tensor) -> str:
    return "cpu" if isinstance(tensor, torch._subclasses.FakeTensor) else "meta"
