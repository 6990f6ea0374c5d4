"""Cut a joint graph in two where a plan says, and put what runs again right before its first reader."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

from torch import fx

from lowtide.compiled.joint import Joint, Key
from lowtide.private import inductor, partitioning

Halves = tuple[fx.GraphModule, fx.GraphModule]
"""Forward and backward."""


class Cutter(inductor.CustomPartitionerFn):
    """What AOTAutograd calls with a joint graph; where that is cut is for each kind of it to say.

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
    opaque = [node for node in nodes if partitioning.is_opaque(node)]
    forward, backward = partitioning.extract(
        joint.module,
        [node for node in nodes if node not in opaque],
        symbols,
        opaque,
        joint.forward_outputs,
        joint.static,
    )
    lazily(backward, joint)
    return partitioning.finish(forward, backward)


def lazily(backward: fx.GraphModule, joint: Joint) -> None:
    """Order a backward: what rests on its gradients in the order of the joint graph, and everything else
    where it is first needed, which is what the planner's simulator does, too.
    """
    graph = backward.graph
    nodes = list(graph.nodes)
    place = {node.name: at for at, node in enumerate(joint.nodes)}
    at = {node: place.get(node.name, number) for number, node in enumerate(nodes)}
    done: set[fx.Node] = set()
    order: list[fx.Node] = []

    def emit(node: fx.Node) -> None:
        needed: set[fx.Node] = set()
        stack = [node]
        while stack:
            one = stack.pop()
            if one not in done and one not in needed:
                needed.add(one)
                stack += one.all_input_nodes
        for one in sorted(needed, key=lambda one: (one.op != "placeholder", one is node, at[one])):
            done.add(one)
            order.append(one)

    for node in nodes:
        if node.op == "placeholder":
            done.add(node)
            order.append(node)
    for node in nodes:
        if node.op == "call_function" and (
            node.name in joint.after_tangents
            or not (node.users or node.name in joint.in_forward)  # what backward calls for its effects
        ):
            emit(node)
    for node in nodes:
        if node.op == "output":
            emit(node)
    for node in reversed(nodes):
        if node not in done:  # what forward did for its effects: numbers drawn, collectives
            graph.erase_node(node)
    moved = order[0]
    for node in order[1:]:
        moved.append(node)
        moved = node
    graph.lint()
    backward.recompile()
