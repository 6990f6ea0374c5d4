"""Dynamo does what `lowtide.private.dynamo` says."""

from __future__ import annotations

import copy
import inspect
import re
from contextlib import nullcontext
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from lowtide import parallel, private
from lowtide.private import compiling, dynamo


class Backend:
    def __init__(self) -> None:
        self.compiled = 0

    def __call__(self, module: Any, inputs: Any) -> Any:
        self.compiled += 1
        return module


def test_is_compiled() -> None:
    model = torch.nn.Linear(2, 2)
    assert not private.is_compiled(model)
    assert private.is_compiled(torch.compile(model, backend="eager"))
    twin = copy.deepcopy(model)
    twin.compile(backend="eager")
    assert private.is_compiled(twin)
    assert not private.is_compiled(torch.nn.Sequential(model))
    assert private.compiled_among([model, twin]) == [twin]


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


def test_out_of_dynamo() -> None:
    torch._dynamo.reset()
    seen: list[Any] = []

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
    assert seen == [private.Compiling(seen[0].backend, {}, False)] and backend.compiled == 0
    assert "Backend" in seen[0].backend
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
    with pytest.raises(Exception, match=r"handle.remove|disable"):
        torch.compile(outer, backend=backend, fullgraph=True)(torch.ones(4))


def test_skipped_by_dynamo_is_not_compiled_where_it_is_reached_uncompiled() -> None:
    torch._dynamo.reset()

    class Called:
        @private.skipped_by_dynamo
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return x.sin()

    module = torch.nn.Module()
    module.forward = Called()
    backend = Backend()
    assert torch.equal(torch.compile(module, backend=backend)(torch.ones(3)), torch.ones(3).sin())
    assert backend.compiled == 0


@pytest.mark.parametrize("package", dynamo.TRACED)
def test_what_dynamo_may_trace_is_there(package: str) -> None:
    """A file that is renamed or merged would be skipped, and graphs of parallel layers break there."""
    assert all(find_spec(f"{package}.{name}") for name in dynamo.TRACED[package])
    calls = inspect.getsource(private.distributed) + inspect.getsource(parallel.vocabulary)
    asked = set(re.findall(r"is_fake|wait_for_collective|local_tensor", calls))
    homes = {getattr(private, name).__module__.rpartition(".")[2] for name in asked}
    assert asked and homes <= set(dynamo.TRACED["lowtide.private"])


def test_keep_dynamo_out() -> None:
    from torch._dynamo import trace_rules

    from lowtide.interception import interceptors
    from lowtide.models.gpt import GPT

    private.keep_dynamo_out()
    before = len(trace_rules.SKIP_DIRS)
    private.keep_dynamo_out()
    assert len(trace_rules.SKIP_DIRS) == before
    assert trace_rules.check(interceptors.__code__)
    assert not trace_rules.check(GPT.forward.__code__), "a model of ours is compiled like any other"


def test_a_mode_that_ignores_compile_internals_leaves_compiled_calls_compiled() -> None:
    torch._dynamo.reset()

    class Ignores(private.TorchDispatchMode):
        @classmethod
        def ignore_compile_internals(cls) -> bool:
            return True

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    backend = Backend()
    function = torch.compile(lambda x: x.sin().cos(), backend=backend)
    with Ignores():
        function(torch.ones(3))
    assert backend.compiled == 1


def test_compile_settings() -> None:
    model = torch.nn.Linear(2, 2)
    made = torch.compile(model, mode="max-autotune-no-cudagraphs", dynamic=True)
    found, name, options, how = private.compile_settings(made)
    assert found is model
    assert name == "inductor" and options["max_autotune"] and how == {"dynamic": True, "fullgraph": False}
    made = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert private.compile_settings(made) == (model, "aot_eager", {}, {"dynamic": None, "fullgraph": True})
    model.compile(backend="aot_eager", dynamic=False)
    assert private.compile_settings(model) == (
        model, "aot_eager", {}, {"dynamic": False, "fullgraph": False}
    )  # fmt: skip


def test_uncompiled() -> None:
    model = torch.nn.Linear(2, 2)
    assert private.uncompiled(model) is model
    assert private.uncompiled(torch.compile(model, backend="eager")) is model
    model.compile(backend="eager")
    assert private.uncompiled(model) is model and not private.is_compiled(model)


def test_compile_in_place_reaches_classes_of_torch_nn() -> None:
    torch._dynamo.reset()
    graphs: list[Any] = []

    def backend(module: Any, inputs: Any) -> Any:
        graphs.append(module)
        return module.forward

    blocks = [torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.GELU()) for _ in range(3)]
    x = torch.ones(1, 2)
    blocks[0].compile(backend=backend)
    blocks[0](x)
    # from PyTorch 2.15 on by itself
    assert len(graphs) == (1 if torch.__version__ >= (2, 15) else 0)
    private.compile_in_place(blocks, backend=backend, **private.counted_apart())
    for block in blocks:
        block(x)
    assert len(graphs) == 1, "blocks of one kind share a graph"


def test_compile_forward_compiles_what_dynamo_passes_over() -> None:
    """The forward of a class of torch.nn, and one of the user's own."""

    class Own(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sin()

    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    x = torch.randn(2, 4)
    for module in (torch.nn.Linear(4, 4), Own()):
        graphs.clear()
        torch._dynamo.reset()
        assert torch.equal(private.compile_forward(module.forward, backend=backend)(x), module(x))
        assert len(graphs) == 1


def test_uncut_by_ddp_leaves_one_graph_where_dynamo_makes_one_for_each_bucket() -> None:
    store = pytest.importorskip("torch.testing._internal.distributed.fake_pg").FakeStore()

    class Layers(torch.nn.Sequential):  # Dynamo leaves the forwards of torch.nn to who calls them
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self:
                x = layer(x)
            return x

    model = Layers(*(torch.nn.Linear(512, 512) for _ in range(4)))
    with private.uncut_by_ddp():
        assert torch._dynamo.config.optimize_ddp, "nothing to leave uncut without ranks"
    dist.init_process_group("fake", store=store, rank=0, world_size=2)
    try:
        parallel = DistributedDataParallel(model, bucket_cap_mb=1)
        graphs = []
        for context in (nullcontext(), private.uncut_by_ddp()):
            torch._dynamo.reset()
            backend = Backend()
            with context:
                torch.compile(parallel, backend=backend)(torch.ones(2, 512))
            graphs.append(backend.compiled)
    finally:
        dist.destroy_process_group()
    assert graphs[0] > 1
    assert graphs[1] == 1


@pytest.mark.parametrize("apart", [True, False])
def test_backends_have_room_beside_each_other(apart: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    if apart and not private.counted_apart():
        pytest.skip("this PyTorch counts recompiles of all backends together")
    if not apart:
        monkeypatch.setattr(compiling, "counted_apart", dict)

    def function(x: torch.Tensor) -> torch.Tensor:
        return x.sin().cos()

    backends = [Backend() for _ in range(3)]
    with torch._dynamo.config.patch(recompile_limit=1, accumulated_recompile_limit=2):
        compiled = [torch.compile(function, backend=one, **compiling.counted_apart()) for one in backends]
        for _ in range(2):
            for call in compiled:
                with private.room_for_backends():
                    call(torch.ones(3))
        assert [one.compiled for one in backends] == [1, 1, 1]
        torch.compile(function, backend=(alone := Backend()))(torch.ones(3))
        assert alone.compiled == 0, "without room there is none: room_for_backends may go"


def test_recompile_limit_hits() -> None:
    torch._dynamo.reset()
    before, backend = private.recompile_limit_hits(), Backend()
    function = torch.compile(lambda x: x.sin(), backend=backend, dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=1):
        function(torch.ones(3))
        assert private.recompile_limit_hits() == before
        function(torch.ones(4))
    assert backend.compiled == 1 and private.recompile_limit_hits() == before + 1
