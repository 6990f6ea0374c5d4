"""A graph that Dynamo has captured, kept so that it can be compiled again later.

Seen in PyTorch 2.13 to 2.13, not tried with earlier ones.
Importing it takes seconds; only the compiled engine does.
"""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

import contextlib
import contextvars
import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._dynamo.utils import preserve_rng_state
from torch._guards import TracingContext, tracing

from lowtide.private.partitioning import SizesAt


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

    def compile(self, backend: Callable[[fx.GraphModule, list[Any]], Any]) -> Any:
        """What a backend makes of the graph, in the modes that it was captured in. It stays as it is."""

        def in_its_modes() -> Any:
            with contextlib.ExitStack() as modes:
                modes.enter_context(tracing(self._context))
                modes.enter_context(preserve_rng_state())
                modes.enter_context(torch.set_grad_enabled(self._grad))
                for kind, enabled, dtype in self._autocast:
                    modes.enter_context(torch.autocast(kind, dtype, enabled))
                return backend(_twin(self._module), list(self._inputs))

        # PyTorch's settings are a thread's own, and autograd has threads
        return self._variables.copy().run(in_its_modes)


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


keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph  # type: ignore
"""Whether the backward that runs was called with ``retain_graph``."""


def _autocast() -> list[tuple[str, bool, torch.dtype]]:
    """Kinds of devices -> whether operations on them run in a lower precision now, and which."""
    device = torch.accelerator.current_accelerator()
    kinds = ["cpu", *([device.type] if device is not None else [])]
    return [(one, torch.is_autocast_enabled(one), torch.get_autocast_dtype(one)) for one in kinds]


def _twin(module: fx.GraphModule) -> fx.GraphModule:
    twin = fx.GraphModule(module, copy.deepcopy(module.graph))
    twin.meta = dict(module.meta)
    for name in ("_param_name_to_source", "_source_to_user_stacks"):
        if hasattr(module, name):
            setattr(twin, name, getattr(module, name))
    for node, other in zip(module.graph.nodes, twin.graph.nodes, strict=True):
        other.meta.pop("grapharg", None)  # it holds the real tensor
        if hasattr(node, "_dynamo_source"):
            other._dynamo_source = node._dynamo_source
    return twin
