"""AOTAutograd's joint graph: clean it, say what is forward in it, and cut it in two.

Seen in PyTorch 2.13 to 2.13, not tried with earlier ones.
Importing it takes a second, so only the compiled engine does.
"""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx
from torch._functorch import config as functorch_config
from torch._functorch import partitioners
from torch._functorch.compile_utils import fx_graph_cse
from torch.utils.checkpoint import CheckpointPolicy


def min_cut(
    module: fx.GraphModule, forward_outputs: int, static: Iterable[int]
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Forward and backward as `torch.compile` cuts them by itself; ``module`` stays as it is."""
    return partitioners.min_cut_rematerialization_partition(
        fx.GraphModule(module, copy.deepcopy(module.graph)),
        (),
        num_fwd_outputs=forward_outputs,
        static_lifetime_input_indices=list(static),
    )


def clean_joint(module: fx.GraphModule) -> None:
    """Remove what is dead or computed twice, and mark what must never run again: collectives, effects, the
    source of what both passes write. What `torch.compile`'s own partitioner does before it decides.
    """
    module.graph.eliminate_dead_code()
    if functorch_config.cse:
        module.graph = fx_graph_cse(module.graph)
    if partitioners.has_recomputable_ops(module):
        partitioners.cleanup_recompute_tags(module, is_default_partition=False)
    partitioners.force_save_collectives(module)
    partitioners.force_save_effectful_ops(module)
    partitioners.force_save_bw_mutation_src(module)
    module.recompile()


def forward_names(module: fx.GraphModule, static: Iterable[int], forward_outputs: int) -> set[str]:
    """Names of the nodes that the forward's outputs need."""
    info = partitioners.classify_nodes(module, list(static), forward_outputs)
    return {node.name for node in info.required_fw_nodes}


def tangent_names(module: fx.GraphModule, static: Iterable[int], forward_outputs: int) -> set[str]:
    """Names of the nodes that rest on what backward is given, or may run in backward only."""
    info = partitioners.classify_nodes(module, list(static), forward_outputs)
    return {node.name for node in info.tangents_closure}


def extract(
    module: fx.GraphModule,
    saved: list[fx.Node],
    saved_symbols: list[fx.Node],
    saved_opaque: list[fx.Node],
    forward_outputs: int,
    static: Iterable[int],
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Forward and backward of a joint graph when exactly ``saved`` goes from one to the other; what backward
    does not read is left out.
    """
    info = partitioners.classify_nodes(module, list(static), forward_outputs)
    return partitioners._extract_fwd_bwd_modules(
        module,
        list(saved),
        saved_sym_nodes=list(saved_symbols),
        saved_opaque_nodes=list(saved_opaque),
        num_fwd_outputs=forward_outputs,
        static_lifetime_input_nodes=info.static_lifetime_input_nodes,
    )


def finish(forward: fx.GraphModule, backward: fx.GraphModule) -> tuple[fx.GraphModule, fx.GraphModule]:
    """What follows on every cut: results of several are taken apart at once, generators are threaded
    through.
    """
    forward, backward = partitioners.raise_getitems(forward), partitioners.raise_getitems(backward)
    return (
        partitioners.thread_graphsafe_rng_from_hops(forward, is_backward=False),
        partitioners.thread_graphsafe_rng_from_hops(backward, is_backward=True),
    )


def is_symbol(node: fx.Node) -> bool:
    """Whether a node is a size, not a tensor."""
    return partitioners.is_sym_node(node)


def is_opaque(node: fx.Node) -> bool:
    """Whether a node is an object that the graph only hands on."""
    return partitioners.is_opaque_node(node)


def is_primal(node: fx.Node) -> bool:
    """Whether a placeholder is an input of the forward."""
    return node.op == "placeholder" and not is_tangent(node)


def is_tangent(node: fx.Node) -> bool:
    """Whether a placeholder is a gradient that backward is given."""
    return partitioners._is_tangent(node)


def is_effect(node: fx.Node) -> bool:
    """Whether a call acts on more than its results."""
    return partitioners.is_with_effects(node)


def must_save(node: fx.Node) -> bool:
    """Whether a node's result may not come from a second run."""
    return node.meta.get("recompute") is CheckpointPolicy.MUST_SAVE


def should_recompute(node: fx.Node) -> bool:
    """Whether a checkpointed region around the node asks for its result to be given up."""
    return partitioners.must_recompute(node)


def is_item(node: fx.Node) -> bool:
    """Whether a node takes one result out of several."""
    return node.op == "call_function" and node.target is operator.getitem


def storage_of(tensor: Any) -> int | None:
    """The address of a (fake) tensor's storage, or ``None`` where it has none."""
    if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
        return None
    return tensor.untyped_storage()._cdata


def hint(size: Any) -> int:
    """A size as a number; one that is not known is taken for the size that it was first seen with."""
    if isinstance(size, int):
        return size
    node = size.node
    if node.has_hint():
        return int(node.hint)
    return int(node.shape_env.size_hint(node.expr, allow_none=True) or _UNKNOWN_SIZE)


_UNKNOWN_SIZE = 4096  # as partitioners._size_of takes it


def default_fusible() -> Callable[[fx.Node], bool]:
    """Whether Inductor generates code for a node and may fuse it with others, as its partitioner guesses."""
    return partitioners.get_default_op_list().is_fusible
