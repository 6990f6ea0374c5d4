"""A graph that Dynamo has captured, kept so that it can be compiled again later.

Seen in PyTorch 2.13 to 2.13, not tried with earlier ones.
Importing it takes seconds; only the compiled engine does.
"""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

import contextlib
import contextvars
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import fx
from torch._dynamo.utils import preserve_rng_state
from torch._functorch import aot_autograd
from torch._guards import TracingContext, tracing
from torch._inductor import compile_fx
from torch.fx.graph import CodeGen

from lowtide.private.hollow import keeps_graph as keeps_graph
from lowtide.private.partitioning import SizesAt, free_sizes_of


class Captured:
    """What a backend of `torch.compile` was called with, without any real tensor but single numbers.

    Args:
        module: the graph.
        inputs: its example inputs.
    """

    def __init__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> None:
        self._context = TracingContext.try_get()
        self._variables = contextvars.copy_context()
        self._grad, self._autocast = torch.is_grad_enabled(), _autocast()
        self._module = _twin(module)
        self._traced = _Traced()
        given = [node for node in module.graph.nodes if node.op == "placeholder"]
        self._inputs = [  # a number that Dynamo has made a tensor of is read, so it has to be there
            node.meta.get("example_value", one) if isinstance(one, torch.Tensor) and one.dim() else one
            for node, one in zip(given, inputs, strict=True)
        ]

    @property
    def open_sizes(self) -> tuple[int, ...]:
        """Positions of the inputs that are sizes which the graph leaves open."""
        return tuple(at for at, one in enumerate(self._inputs) if isinstance(one, (int, torch.SymInt)))

    def sizes_at(self, numbers: Sequence[int]) -> SizesAt:
        """The graph's sizes as numbers, where its `open_sizes` have these values."""
        sizes = [self._inputs[at] for at in self.open_sizes]
        pairs = zip(sizes, numbers, strict=True)
        return SizesAt({size.node.expr: n for size, n in pairs if isinstance(size, torch.SymInt)})

    @property
    def facts(self) -> list[Any]:
        """What tells graphs apart before they are traced, in JSON's words; all but constants in them."""
        given = [
            [str(x) for x in (one.shape, one.stride(), one.dtype, one.device, one.requires_grad)]
            if isinstance(one, torch.Tensor)
            else str(one)
            for one in self._inputs
        ]
        sizes = [str(one) for one in free_sizes_of(self._inputs)]
        return [str(self._module.graph), given, sizes, self._grad, str(self._autocast)]

    def compile(self, backend: Callable[[fx.GraphModule, list[Any]], Any]) -> Any:
        """What a backend makes of the graph, in the modes that it was captured in. It stays as it is.

        AOTAutograd traces it once, the first time, and Inductor passes over the joint graph once.
        """

        def in_its_modes() -> Any:
            with contextlib.ExitStack() as modes:
                modes.enter_context(tracing(self._context))
                modes.enter_context(preserve_rng_state())
                modes.enter_context(torch.set_grad_enabled(self._grad))
                for kind, enabled, dtype in self._autocast:
                    modes.enter_context(torch.autocast(kind, dtype, enabled))
                modes.enter_context(self._traced.in_force())
                return backend(_twin(self._module), list(self._inputs))

        # PyTorch's settings are a thread's own, and autograd has threads
        return self._variables.copy().run(in_its_modes)


@dataclass
class _Traced:
    """What AOTAutograd has traced of a graph, to be cut and compiled again.

    Attributes:
        capture: the trace, with a joint graph that nobody has cut; ``None`` before, and where it has parts
            that are compiled by themselves or inputs of several tensors, which compiling changes.
        given: what the trace found out about the graph's inputs: these, what they stand for, and metadata.
        passed: whether Inductor's passes went over the joint graph.
    """

    capture: Any = None
    given: tuple[Any, ...] = ()
    passed: bool = False

    @contextlib.contextmanager
    def in_force(self) -> Iterator[None]:
        """A context: the graph is traced in it if it has not been, and else taken from here."""
        trace, pass_over = aot_autograd.aot_stage1_graph_capture, compile_fx._recursive_joint_graph_passes

        def traced(state: Any, function: Any) -> Any:
            if self.capture is None:
                found = trace(state, function)
                if (
                    state.needs_autograd
                    and found.maybe_subclass_meta is None
                    and _is_flat(found.graph_module)
                ):
                    self.capture = _apart(found, graph_module=_twin(found.graph_module))
                    self.given = state.flat_args, state.flat_args_descs, _apart(state.fw_metadata)
                return found
            args, descriptions, metadata = self.given
            state.flat_args, state.flat_args_descs, state.fw_metadata = args, descriptions, _apart(metadata)
            return _apart(self.capture, graph_module=_twin(self.capture.graph_module))

        def passed_over(module: fx.GraphModule, *args: Any, **kwargs: Any) -> fx.GraphModule:
            if self.passed:
                return module
            found = pass_over(module, *args, **kwargs)
            if self.capture is not None:
                self.capture.graph_module, self.passed = _twin(found), True
            return found

        with (
            patch.object(aot_autograd, "aot_stage1_graph_capture", traced),
            patch.object(compile_fx, "_recursive_joint_graph_passes", passed_over),
        ):
            yield


def _is_flat(module: fx.GraphModule) -> bool:
    """Whether a graph calls no graphs of its own."""
    return not any(isinstance(one, fx.GraphModule) for one in module.children())


def _apart(facts: Any, **other: Any) -> Any:
    """A copy whose lists and tables are copies, too, with these attributes in place of its own."""
    twin = copy.copy(facts)
    for name, value in vars(facts).items():
        setattr(twin, name, other.get(name, copy.copy(value) if isinstance(value, list | dict) else value))
    return twin


def is_whole_step(module: fx.GraphModule) -> bool:
    """Whether a captured graph is all of a step: it returns a single number that has a gradient, a loss, and
    nothing that it is given has been computed with one.
    """
    output = next(iter(reversed(module.graph.nodes)))
    returned = [node.meta.get("example_value") for node in output.all_input_nodes]
    given = [node.meta.get("example_value") for node in module.graph.nodes if node.op == "placeholder"]
    return any(
        isinstance(value, torch.Tensor)
        and value.requires_grad
        and all(isinstance(size, int) and size == 1 for size in value.shape)
        for value in returned
    ) and all(not isinstance(value, torch.Tensor) or value.is_leaf for value in given)


def _autocast() -> list[tuple[str, bool, torch.dtype]]:
    """Kinds of devices -> whether operations on them run in a lower precision now, and which."""
    device = torch.accelerator.current_accelerator()
    kinds = ["cpu", *([device.type] if device is not None else [])]
    return [(one, torch.is_autocast_enabled(one), torch.get_autocast_dtype(one)) for one in kinds]


def _twin(module: fx.GraphModule) -> fx.GraphModule:
    how = module.graph._codegen  # nobody changes it, and PyTorch warns of its own trees where it is copied
    module.graph._codegen = CodeGen()
    try:
        graph = copy.deepcopy(module.graph)
    finally:
        module.graph._codegen = how
    graph.set_codegen(how)
    twin = fx.GraphModule(module, graph)
    twin.meta = dict(module.meta)
    for name in ("_param_name_to_source", "_source_to_user_stacks"):
        if hasattr(module, name):
            setattr(twin, name, getattr(module, name))
    for node, other in zip(module.graph.nodes, twin.graph.nodes, strict=True):
        other.meta.pop("grapharg", None)  # it holds the real tensor
        if hasattr(node, "_dynamo_source"):
            other._dynamo_source = node._dynamo_source
    return twin
