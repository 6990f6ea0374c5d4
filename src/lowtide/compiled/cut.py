"""Cut a joint graph in two where a plan says, and put what runs again right before its first reader."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from torch import fx

from lowtide.compiled.joint import Joint, Key, lazily
from lowtide.private import inductor, partitioning

Halves = tuple[fx.GraphModule, fx.GraphModule]
"""Forward and backward."""


class Cutter(inductor.CustomPartitionerFn):
    """The partitioner that AOTAutograd calls; each subclass says where a joint graph is cut.

    Args:
        options: Inductor's settings; ``None`` where graphs run call by call.
    """

    def __init__(self, options: dict[str, Any] | None) -> None:
        self.options = options

    def __deepcopy__(self, memo: dict[int, Any]) -> Cutter:
        return self

    def __call__(
        self,
        gm: fx.GraphModule,
        joint_inputs: Sequence[object],
        *,
        num_fwd_outputs: int,
        static_lifetime_input_indices: Sequence[int] | None = None,
        **_: Any,
    ) -> Halves:
        static = tuple(static_lifetime_input_indices or ())
        partitioning.clean_joint(gm)
        fusible = None if self.options is None else partitioning.default_fusible()
        joint = Joint(partitioning.twin(gm), num_fwd_outputs, static, fusible)
        if not any(call.forward for call in joint.calls) or not joint.tangents:  # nothing to decide
            return partitioning.min_cut(gm, num_fwd_outputs, static)
        return self.halves(joint)

    @abstractmethod
    def halves(self, joint: Joint) -> Halves:
        """Forward and backward of a joint graph."""


def cut(joint: Joint, stored: Iterable[Key]) -> Halves:
    """Forward and backward when ``stored`` and the forward's inputs are what backward may start from.

    Args:
        joint: the graph.
        stored: storages that stay; whatever else backward reads is computed again.
    """
    kept = set(stored)
    nodes = [
        node
        for node in joint.nodes
        if (joint.key_of.get(node) in kept and joint.root[joint.key_of[node]] is node)
        or (partitioning.is_primal(node) and not partitioning.is_symbol(node))
    ]
    symbols = [
        node
        for node in joint.nodes
        if partitioning.is_symbol(node) and node.op != "output" and node.name not in joint.after_tangents
    ]
    outputs, static = joint.forward_outputs, joint.static
    forward, backward = partitioning.extract(joint.module, nodes, symbols, outputs, static)
    _order(backward, joint)
    return partitioning.finish(forward, False), partitioning.finish(backward, True)


def _order(backward: fx.GraphModule, joint: Joint) -> None:
    """Order a backward as the planner's simulator does.

    What rests on its gradients keeps the order of the joint graph; all else comes where it is first needed.
    """
    graph = backward.graph
    nodes = list(graph.nodes)
    at = {node: joint.place.get(node.name, number) for number, node in enumerate(nodes)}
    given = [node for node in nodes if node.op == "placeholder"]
    wanted = [
        node
        for node in nodes
        if node.op == "call_function"
        and (
            node.name in joint.after_tangents
            or not (node.users or node.name in joint.in_forward)  # what backward calls for its effects
        )
    ]
    order = lazily([*given, *wanted, nodes[-1]], lambda node: node.all_input_nodes, at.__getitem__)
    kept = set(order)
    for node in reversed(nodes):
        if node not in kept:  # what forward did for its effects: numbers drawn, collectives
            graph.erase_node(node)
    for before, node in pairwise(order):
        before.append(node)
    graph.lint()
    backward.recompile()
