"""AOTAutograd's joint graph: clean it, say what is forward in it, and cut it in two.

Seen in PyTorch 2.11 to 2.13.
Importing it takes a second, so only the compiled engine does.
"""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

import copy
import operator
import sys
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx
from torch._functorch import config as functorch_config
from torch._functorch import partitioners
from torch._functorch.compile_utils import fx_graph_cse
from torch._inductor import config as inductor_config
from torch.fx.experimental.symbolic_shapes import StrictMinMaxConstraint
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy

from lowtide.private.dispatch import OpOverload


def min_cut(
    module: fx.GraphModule, forward_outputs: int, static: Iterable[int]
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Forward and backward as `torch.compile` cuts them by itself; ``module`` stays as it is."""
    return partitioners.min_cut_rematerialization_partition(
        twin(module),
        (),
        num_fwd_outputs=forward_outputs,
        static_lifetime_input_indices=list(static),
    )


plain_partition = partitioners.min_cut_rematerialization_partition
"""How `torch.compile` cuts a joint graph by itself, as AOTAutograd calls it."""


def twin(module: fx.GraphModule) -> fx.GraphModule:
    """A copy of a graph, over the same modules."""
    return fx.GraphModule(module, copy.deepcopy(module.graph))


REGION = "lowtide_region"
"""Annotation of the calls in a region whose results are to be evicted: its number, 0 for none."""


def region_of(node: fx.Node) -> int:
    """The number of the region that a call is marked to be in, or 0."""
    return (node.meta.get("custom") or {}).get(REGION, 0)


def clean_joint(module: fx.GraphModule) -> None:
    """Remove what is dead or computed twice, and mark what must never run again: collectives, effects, the
    source of what both passes write. What `torch.compile`'s own partitioner does before it decides.
    """
    module.graph.eliminate_dead_code()
    if functorch_config.cse:
        module.graph = fx_graph_cse(module.graph)
    numbers: dict[int, int] = {}  # what enters a region from one with a smaller number is kept
    for node in module.graph.nodes:
        if region_of(node) and not node.meta.get("autograd_backward"):
            node.meta.setdefault("recompute", CheckpointPolicy.PREFER_RECOMPUTE)
            node.meta.setdefault("ac_graph_id", region_of(node))
        if "ac_graph_id" in node.meta:  # PyTorch's own numbers and ours, in one order
            node.meta["ac_graph_id"] = numbers.setdefault(node.meta["ac_graph_id"], len(numbers))
    if partitioners.has_recomputable_ops(module):
        partitioners.cleanup_recompute_tags(module, is_default_partition=False)
    partitioners.force_save_collectives(module)
    partitioners.force_save_effectful_ops(module)
    partitioners.force_save_bw_mutation_src(module)
    module.recompile()


def sides(module: fx.GraphModule, static: Iterable[int], forward_outputs: int) -> tuple[set[str], set[str]]:
    """Names of the nodes that the forward's outputs need, and of those that depend on what backward is given
    or may run in backward only.
    """
    info = partitioners.classify_nodes(module, list(static), forward_outputs)
    return {node.name for node in info.required_fw_nodes}, {node.name for node in info.tangents_closure}


def static_inputs(module: fx.GraphModule, given: Iterable[int]) -> tuple[int, ...]:
    """Positions among a joint graph's primals of what is at one address in every step. PyTorch gives
    those of the inputs before subclasses (DTensor) came apart, each into several.
    """
    given = tuple(given)
    owners: list[int | None] = []
    apart = False
    for node in module.graph.nodes:
        if is_primal(node):
            described: Any = node.meta.get("desc")
            while hasattr(described, "base"):
                described, apart = described.base, True
            owners.append(getattr(described, "idx", None))
    return tuple(at for at, owner in enumerate(owners) if owner in given) if apart else given


def extract(
    module: fx.GraphModule,
    saved: list[fx.Node],
    saved_symbols: list[fx.Node],
    forward_outputs: int,
    static: Iterable[int],
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Forward and backward of a joint graph when exactly ``saved`` goes from one to the other; what backward
    does not read is left out.
    """
    info = partitioners.classify_nodes(module, list(static), forward_outputs)
    apart: dict[str, Any] = {}
    if hasattr(partitioners, "is_opaque_node"):  # from 2.12 on the caller tells them apart
        apart["saved_opaque_nodes"] = [node for node in saved if partitioners.is_opaque_node(node)]
        saved = [node for node in saved if not partitioners.is_opaque_node(node)]
    return partitioners._extract_fwd_bwd_modules(
        module,
        saved,
        saved_sym_nodes=saved_symbols,
        num_fwd_outputs=forward_outputs,
        static_lifetime_input_nodes=info.static_lifetime_input_nodes,
        **apart,
    )


def finish(half: fx.GraphModule, backward: bool) -> fx.GraphModule:
    """What follows on every cut: results of several are taken apart at once, generators are threaded
    through.
    """
    return partitioners.thread_graphsafe_rng_from_hops(partitioners.raise_getitems(half), backward)


is_symbol: Callable[[fx.Node], bool] = partitioners.is_sym_node
"""Whether a node is a size, not a tensor."""


def is_primal(node: fx.Node) -> bool:
    """Whether a placeholder is an input of the forward."""
    return node.op == "placeholder" and not is_tangent(node)


is_tangent: Callable[[fx.Node], bool] = partitioners._is_tangent
"""Whether a placeholder is a gradient that backward is given."""


is_effect: Callable[[fx.Node], bool] = partitioners.is_with_effects
"""Whether a call acts on more than its results."""


def written_after_forward(module: fx.GraphModule) -> set[fx.Node]:
    """The primals that AOTAutograd overwrites outside the graph, once the forward has returned what they
    then hold: an embedding's weight under ``max_norm``, for one.
    """
    (output,) = module.graph.find_nodes(op="output")
    written = [one.mutated_input for one in output.meta.get("desc", ()) if hasattr(one, "mutated_input")]
    return {node for node in module.graph.nodes if is_primal(node) and node.meta.get("desc") in written}


def must_save(node: fx.Node) -> bool:
    """Whether a node's result may not come from a second run."""
    return node.meta.get("recompute") is CheckpointPolicy.MUST_SAVE


should_recompute: Callable[[fx.Node], bool] = partitioners.must_recompute
"""Whether a checkpointed region around the node asks for its result to be evicted."""


def is_item(node: fx.Node) -> bool:
    """Whether a node takes one result out of several."""
    return node.op == "call_function" and node.target is operator.getitem


def storage_of(tensor: Any) -> int | None:
    """The address of a (fake) tensor's storage, or ``None`` where it has none."""
    if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
        return None
    return tensor.untyped_storage()._cdata


def device_of(nodes: Iterable[fx.Node]) -> torch.device:
    """What a graph, or some of its calls, run on: their tensors' device, an accelerator before the host."""
    values = tree_leaves([node.meta.get("val") for node in nodes])
    found = dict.fromkeys(value.device for value in values if isinstance(value, torch.Tensor))
    return next((one for one in found if one.type != "cpu"), torch.device("cpu"))


def laid_out(module: fx.GraphModule, inputs: Iterable[Any]) -> dict[str, tuple[int, ...]]:
    """Names of inputs that lie in another way than the graph says -> their strides.

    Args:
        module: the graph.
        inputs: what it is given, with fixed sizes.
    """
    given = [node for node in module.graph.nodes if node.op == "placeholder"]
    return {
        node.name: tuple(value.stride())
        for node, value in zip(given, inputs, strict=True)
        if isinstance(value, torch.Tensor) and tuple(value.stride()) != tuple(node.meta["val"].stride())
    }


def hint(size: Any) -> int:
    """A size as a number; one that is not known is taken for the size that it was first seen with."""
    if isinstance(size, int):
        return size
    node = size.node
    if node.has_hint():
        return int(node.hint)
    seen, expression = node.shape_env.backed_var_to_val, node.expr
    return int(expression.xreplace({one: seen.get(one, _UNKNOWN) for one in expression.free_symbols}))


UNKNOWN_SIZE = 4096
"""What a size is taken for that follows from data, as `partitioners._size_of` takes it."""

_UNKNOWN = sympy.Integer(UNKNOWN_SIZE)


@dataclass(frozen=True)
class FreeSize:
    """A size for which a graph holds at more than one value.

    Attributes:
        symbol: its name in the graph's expressions.
        seen: the value with which it was traced.
        most: the largest that it may have, or ``None`` where nothing is said.
        declared: whether the user has said so (``mark_dynamic(..., max=)``), and refuses guards.
    """

    symbol: Any
    seen: int
    most: int | None
    declared: bool


def free_sizes(module: fx.GraphModule) -> tuple[list[FreeSize], list[str]]:
    """The sizes that a graph leaves open, in the order of its inputs, and the names of those that follow from
    data, of which nothing is known.
    """
    return free_sizes_of(node.meta.get("val") for node in module.graph.nodes)


def free_sizes_of(values: Iterable[Any]) -> tuple[list[FreeSize], list[str]]:
    """As `free_sizes`, of tensors and numbers."""
    found: dict[Any, FreeSize] = {}
    unknown: dict[str, None] = {}
    for value in values:
        for size in _sizes(value):
            shapes = size.node.shape_env
            for symbol in sorted(size.node.expr.free_symbols, key=str):
                if symbol not in shapes.backed_var_to_val:
                    unknown[str(symbol)] = None
                elif symbol not in found:
                    upper = shapes.var_to_range[symbol].upper
                    most = int(upper) if upper.is_Integer and upper < sys.maxsize - 1 else None
                    seen = int(shapes.backed_var_to_val[symbol])
                    found[symbol] = FreeSize(symbol, seen, most, symbol in _declared_symbols(shapes))
    return list(found.values()), list(unknown)


def _declared_symbols(shapes: Any) -> set[Any]:
    """Symbols whose range the user has given."""
    found: set[Any] = set()
    for tracked in shapes.tracked_fakes or ():
        sizes: Any = getattr(tracked.fake, "shape", ())
        limits: Any = getattr(tracked.symbolic_context, "constraint_sizes", ())
        for size, limit in zip(sizes, limits, strict=False):
            if isinstance(limit, StrictMinMaxConstraint) and isinstance(size, torch.SymInt):
                found |= size.node.expr.free_symbols
    return found


def _sizes(value: Any) -> list[torch.SymInt]:
    if isinstance(value, torch.SymInt):
        return [value]
    if isinstance(value, torch.Tensor):
        return [size for size in value.shape if isinstance(size, torch.SymInt)]
    return [size for part in value for size in _sizes(part)] if isinstance(value, (tuple, list)) else []


class SizesAt:
    """Sizes as numbers, with values for the free ones.

    Args:
        values: symbol -> value.
    """

    def __init__(self, values: dict[Any, int]) -> None:
        self.values = {symbol: sympy.Integer(value) for symbol, value in values.items()}
        self._known: dict[Any, int] = {}

    def __call__(self, size: Any) -> int:
        if isinstance(size, int):
            return size
        expression = size.node.expr
        known = self._known.get(expression)
        if known is None:
            number = expression.xreplace(self.values)
            known = self._known[expression] = int(number) if number.is_number else hint(size)
        return known


def guard(module: fx.GraphModule, holds: Any) -> None:
    """What is compiled of a graph serves sizes for which a relation among their symbols holds, as it does for
    those seen; the first call with others compiles anew.
    """
    shapes = next(size.node.shape_env for node in module.graph.nodes for size in _sizes(node.meta.get("val")))
    shapes.evaluate_expr(holds)


_MOST_READS = 8  # one kernel, whoever reads its result
_MOST_COMPUTED = 30  # more than once
_HEAVY = frozenset({"exp", "log", "log10", "log1p", "log2", "sigmoid", "tanh"})
"""What kernels on a CPU do not compute more than once."""


def is_written(node: fx.Node, reads: int, computes: Collection[fx.Node], users: int) -> bool:
    """Whether Inductor writes an element-wise result to memory, which it could compute within its readers.

    Args:
        node: whose result it is.
        reads: how many tensors a kernel reads for it.
        computes: the nodes that a kernel computes for it, itself included.
        users: how many nodes read it.
    """
    if reads > _MOST_READS:
        return True
    if users < 2:
        return False
    names = {one.target.overloadpacket.__name__ for one in computes if isinstance(one.target, OpOverload)}
    heavy = node.meta["val"].device.type == "cpu" and not names.isdisjoint(_HEAVY)
    return heavy or reads > inductor_config.realize_reads_threshold or len(computes) > _MOST_COMPUTED


def is_product(node: fx.Node) -> bool:
    """Whether a node is a matrix product, which runs as a call of its own."""
    return node.op == "call_function" and node.target in _PRODUCTS


_PRODUCTS = frozenset({torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default})


def products_added(node: fx.Node) -> list[fx.Node]:
    """The products that Inductor may take into this sum, which then is one call, ``addmm``."""
    if node.op != "call_function" or node.target is not torch.ops.aten.add.Tensor:
        return []
    return [
        one
        for one in node.all_input_nodes
        if one.op == "call_function" and one.target is torch.ops.aten.mm.default and len(one.users) == 1
    ]


def default_fusible() -> Callable[[fx.Node], bool]:
    """Whether Inductor generates code for a node and may fuse it with others, as its partitioner guesses."""
    return partitioners.get_default_op_list().is_fusible
