"""Inductor: compile a graph with a partitioner of our own, and see what it would generate.

Seen in PyTorch 2.11 to 2.13.
Importing it takes seconds, so only the compiled engine does.
"""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

import copy
import functools
import gc
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd as aot_autograd
from torch._dynamo.backends.debugging import boxed_nop as boxed_nop
from torch._dynamo.exc import BackendCompilerFailed as BackendCompilerFailed
from torch._dynamo.exc import Unsupported as Unsupported
from torch._dynamo.utils import counters, detect_fake_mode, preserve_rng_state
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd import graph_compile
from torch._inductor import compile_fx as _compile_fx
from torch._inductor import config as inductor_config
from torch._inductor.codecache import CppPythonBindingsCodeCache
from torch._inductor.codegen.wrapper import PythonWrapperCodegen
from torch._inductor.custom_graph_pass import CustomPartitionerFn as CustomPartitionerFn
from torch._inductor.debug import DebugContext
from torch._inductor.exc import CppCompileError, InvalidCxxCompiler
from torch._inductor.graph import GraphLowering
from torch._inductor.ir import IRNode
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from lowtide.private.kernels import compile_kernels


def compile_with(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    options: dict[str, Any],
    inner: Callable[..., Any] | None = None,
    at_once: bool = False,
) -> Any:
    """What Inductor makes of a graph, with these settings in its forward and its backward.

    Args:
        module: Dynamo's graph.
        inputs: its (fake) inputs.
        options: Inductor's settings.
        inner: compiles the halves in place of `compile_half`.
        at_once: whether the backward is compiled now, and not when it is first run.
    """
    more = {"force_non_lazy_backward_lowering": True} if at_once else {}
    with functorch_config.patch(more):
        return _compile_fx.compile_fx(
            module, inputs, inner_compile=inner or compile_half, config_patches=options or None
        )


NoCompiler = (CppCompileError, InvalidCxxCompiler)
"""What `cpp_kernel` raises where there is no C++ compiler, or it fails."""


def cpp_kernel(types: Sequence[str], source: str) -> Callable[..., None]:
    """A C++ function ``kernel``, compiled as Inductor compiles those that it generates, and kept where it
    keeps them.

    Args:
        types: of its arguments: ``const float*`` of a tensor, ``const int64_t`` of a number.
        source: its text, which may use all that generated kernels may.
    """
    return CppPythonBindingsCodeCache.load_pybinding(types, source)


UNCACHED = {"fx_graph_cache": False}
"""Settings with which a graph is neither looked up on disk nor kept there, and its partitioner is asked.
Kernels are still shared. With `force_disable_caches` each half gets a folder of its own, which stays.
"""

UNVECTORISED = {"cpp.simdlen": 1}
"""Settings with which a CPU's kernels are scalar loops alone. What calls them stays the same, and a lowering
takes two thirds of the time.
"""


def compile_half(half: fx.GraphModule, inputs: Sequence[Any], **how: Any) -> Any:
    """What Inductor makes of a forward or a backward, its C++ kernels compiled together."""
    with reading(compile_kernels) if writes_python({}) else nullcontext():
        return _compile_fx.compile_fx_inner(half, inputs, **how)


@contextmanager
def reading(look: Callable[[str], None]) -> Iterator[None]:
    """A context: ``look`` is called with the Python text of what Inductor generates in it, or finds in its
    cache, before the kernels are compiled that the text names.
    """
    before = GraphLowering.save_output_code

    def seen(text: str) -> None:
        if before is not None:
            before(text)
        look(text)

    GraphLowering.save_output_code = staticmethod(seen)
    try:
        yield
    finally:
        GraphLowering.save_output_code = before


def writes_python(options: dict[str, Any]) -> bool:
    """Whether what calls the kernels is generated as Python with these options."""
    return not (in_force("cpp_wrapper", options) or in_force("fx_wrapper", options))


def cache_folder() -> Path | None:
    """Where compiled artefacts are kept on disk, or ``None`` where nothing is."""
    graphs = inductor_config.fx_graph_cache and not inductor_config.force_disable_caches
    return Path(cache_dir()) if graphs and functorch_config.enable_autograd_cache else None


def cache_hits() -> int:
    """How often compiled code came from the disk in this process, its partitioner unasked."""
    return counters["aot_autograd"]["autograd_cache_hit"]


def mode_options(mode: str) -> dict[str, Any]:
    """The settings that a ``mode`` of `torch.compile` stands for.

    Raises:
        RuntimeError: there is no such mode; names those that there are.
    """
    return dict(torch._inductor.list_mode_options(mode))


def in_force(name: str, options: dict[str, Any]) -> Any:
    """A setting of Inductor with these options: as they give it, else as the process has it."""
    return options[name] if name in options else functools.reduce(getattr, name.split("."), inductor_config)


def unknown_options(options: dict[str, Any]) -> list[str]:
    """Names among ``options`` that Inductor has no setting for."""
    known = inductor_config.get_config_copy()
    return [name for name in options if name.replace("-", "_") not in known]


Strides = dict[str, tuple[int, ...]]
"""Names of what a forward returns -> strides that Inductor gives it."""


def generated(
    module: fx.GraphModule,
    backward: bool,
    options: dict[str, Any] | None = None,
    strides: Strides | None = None,
    donated: Sequence[int] = (),
) -> tuple[str, Strides]:
    """The Python text that Inductor would run for a forward or a backward: which buffers it allocates,
    hands on and frees, and in which order. Kernels are called there and not defined, so none is compiled;
    ``module`` stays as it is.

    Args:
        module: the graph.
        backward: whether it is one.
        options: Inductor's settings.
        strides: of inputs that a forward has laid out in another way than the graph says.
        donated: positions of a backward's inputs that its code may write over, see `donated_inputs`.
    """
    twin = fx.GraphModule(module, copy.deepcopy(module.graph))
    given = [node for node in twin.graph.nodes if node.op == "placeholder"]
    mode = detect_fake_mode([node.meta["val"] for node in given]) or FakeTensorMode(
        allow_non_fake_inputs=True
    )
    for node in given:
        value, other = node.meta["val"], (strides or {}).get(node.name)
        if isinstance(value, torch.Tensor) and other is not None and value.stride() != other:
            with mode:
                node.meta["val"] = value.as_strided(value.size(), other)
    inputs = [node.meta["val"] for node in given]
    output = next(iter(reversed(twin.graph.nodes)))
    names = [getattr(node, "name", "") for node in tree_leaves(output.args[0])]
    output.meta.setdefault("user_visible_output_idxs", [])
    with (
        _without_garbage_collection(),
        inductor_config.patch({**(options or {}), **_UNWRITTEN, **_unmeasured()}),
        preserve_rng_state(),
        torch.no_grad(),
        DebugContext(),
        V.set_fake_mode(mode),
        patch.object(mode, "allow_non_fake_inputs", True),  # states of generators are real
        _compile_fx.maybe_disable_comprehensive_padding(inputs),
    ):
        _compile_fx.view_to_reshape(twin)
        _compile_fx.fake_tensor_prop(twin, inputs)
        _compile_fx._recursive_record_original_output_strides(twin)
        _compile_fx._recursive_post_grad_passes(twin, is_inference=False)
        lowering = GraphLowering(
            twin,
            example_inputs=inputs,
            shape_env=mode.shape_env,
            is_inference=False,
            is_backward=backward,
            **_decompositions(),
        )
        lowering.bw_donated_idxs = list(donated)
        lowering.freeze_runtime_asserts()
        define_nothing = patch.object(PythonWrapperCodegen, "define_kernel", lambda *_, **__: None)
        with V.set_graph_handler(lowering), V.set_extern_kernel_nodes([]), define_nothing:
            lowering.run(*inputs)
            found = dict(zip(names, map(_strides, lowering.graph_outputs or ()), strict=False))
            wrapper, _ = lowering.codegen()
    return wrapper.value, {name: one for name, one in found.items() if name and one is not None}


_UNWRITTEN = {
    "size_asserts": False,
    "alignment_asserts": False,
    "benchmark_harness": False,
    "cpp_wrapper": False,
    "fx_wrapper": False,
    "compile_threads": 1,
}
"""Settings of Inductor that add text, or write it in another language, and take no memory; and those with
which no Triton kernel is sent to be compiled by other processes as soon as its text is there.
"""


def _unmeasured() -> dict[str, Any]:
    """Settings with which a lowering measures nothing: products are the library's, and no kernel is compiled
    to see whether it is faster so. What compiling chooses then may take other memory; its text is read.
    """
    silent = {
        "max_autotune": False,
        "max_autotune_gemm": False,
        "coordinate_descent_tuning": False,
        "triton.mix_order_reduction_autotune_split_size": False,
        "triton.autotune_at_compile_time": False,
        "benchmark_fusion": False,
        "benchmark_combo_kernel": False,
        "benchmark_epilogue_fusion": False,
        "aten_distributed_optimizations.collective_estimator": "analytical",
        "aten_distributed_optimizations.compute_estimator": "analytical",
    }
    return {name: value for name, value in silent.items() if _exists(name)}


def _exists(name: str) -> bool:
    """Whether Inductor of this PyTorch has a setting of that name."""
    try:
        in_force(name, {})
    except AttributeError:
        return False
    return True


def _decompositions() -> dict[str, Any]:
    """Where a lowering finds decompositions, which it is told from PyTorch 2.12 on."""
    told = "get_decomp_fn" in inspect.signature(GraphLowering.__init__).parameters
    return {"get_decomp_fn": _compile_fx.select_decomp_table} if told else {}


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """What a lowering makes, it keeps until it ends: looking for garbage in between finds none."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def donated_inputs(forward: fx.GraphModule, backward: fx.GraphModule, forward_outputs: int) -> list[int]:
    """Positions of a backward's inputs that nobody else holds: saved values that share no storage with what
    goes into the forward, is returned by it, or leaves the backward.

    Args:
        forward, backward: the halves.
        forward_outputs: how many of the forward's outputs are its caller's.
    """
    if not functorch_config.donated_buffer:
        return []
    returned, leaving = (next(iter(reversed(half.graph.nodes))).args[0] for half in (forward, backward))
    given = [node for node in forward.graph.nodes if node.op == "placeholder"]
    taken = [node for node in backward.graph.nodes if node.op == "placeholder"]
    saved = {node.name for node in returned[forward_outputs:] if isinstance(node, fx.Node)}
    found = graph_compile.collect_fw_donated_buffer_idxs(
        list(map(_value, given)),
        list(map(_value, returned[:forward_outputs])),
        list(map(_value, leaving)),
        list(map(_value, taken)),
    )
    return [at for at in found if taken[at].name in saved]


def _value(node: Any) -> Any:
    """A node's tensor; ``None`` for sizes, which PyTorch 2.11 takes for tensors."""
    found = node.meta.get("val") if isinstance(node, fx.Node) else None
    return found if isinstance(found, torch.Tensor) else None


def _strides(out: Any) -> tuple[int, ...] | None:
    """How an output is laid out, where that is known in numbers."""
    if not isinstance(out, IRNode) or not out.has_tensor_output():
        return None
    found = out.get_layout().stride
    return tuple(map(int, found)) if all(getattr(one, "is_number", True) for one in found) else None
