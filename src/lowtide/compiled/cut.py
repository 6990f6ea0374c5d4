"""Cut a joint graph in two where a plan says, and put what runs again right before its first reader."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from lowtide.compiled.joint import Joint, Key, lazily
from lowtide.private import partitioning

Halves = tuple[fx.GraphModule, fx.GraphModule]
"""Forward and backward."""


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
    if joint.fusible is not None:
        _keep_products_apart(backward, joint)
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


def _keep_products_apart(backward: fx.GraphModule, joint: Joint) -> None:
    """Let products run where they stand, though their results are added to something later.

    Inductor makes one call, ``addmm``, of a product and a sum, and runs it where the sum stands: what the
    product reads would live until then. The gradient of tied weights is such a sum, at the end of backward,
    and the gradient of the logits would be live through all of it. A product times one is none to Inductor,
    and the same bits.
    """
    graph = backward.graph
    nodes = list(graph.nodes)
    at = {node: number for number, node in enumerate(nodes)}
    inputs = joint.inputs_in()
    last: dict[int, int] = {}  # storages -> where they are read last
    for node in nodes:
        for source in node.all_input_nodes:
            if (storage := partitioning.storage_of(source.meta.get("val"))) is not None:
                last[storage] = at[node]
    for node in nodes:
        products = [one for one in partitioning.products_added(node) if _lengthens(one, at, last, inputs)]
        for product in partitioning.products_added(node) if products else ():
            with graph.inserting_after(product):
                apart = call(graph, f"{product.name}_apart", torch.ops.aten.mul.Tensor, product, 1)
            node.replace_input_with(product, apart)
    backward.recompile()


def _lengthens(
    product: fx.Node, at: Mapping[fx.Node, int], last: Mapping[int, int], inputs: Collection[str]
) -> bool:
    """Whether more bytes would live longer than fewer, if a product ran where its only reader stands."""
    (reader,) = product.users
    read = {
        partitioning.storage_of(one.meta["val"]): one.meta["val"].untyped_storage().nbytes()
        for one in product.all_input_nodes
        if one.name not in inputs
    }
    longer = sum(
        partitioning.hint(count)
        for storage, count in read.items()
        if storage is not None and last[storage] < at[reader]
    )
    between = any(
        partitioning.is_product(one) for one, place in at.items() if at[product] < place < at[reader]
    )
    return between and longer > partitioning.hint(product.meta["val"].untyped_storage().nbytes())


# ---- saved values in another form ----------------------------------------------------------------

Pieces = Mapping[fx.Node, Sequence[fx.Node]]
"""Values -> what goes in their place."""


def hand_over(
    forward: fx.GraphModule,
    backward: fx.GraphModule,
    forward_outputs: int,
    fits: Callable[[fx.Node], bool],
    send: Callable[[list[fx.Node], fx.Node], Pieces],
    receive: Callable[[Pieces], None],
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Hand some saved values over in another form.

    Args:
        forward, backward: the halves of a joint graph, changed in place.
        forward_outputs: how many of the forward's outputs are the caller's; the others are saved.
        fits: whether a saved value may go so. What is returned anyway stays as it is.
        send: makes in the forward, before its output, what goes in the place of these values.
        receive: gives the readers in the backward, of these inputs, what they read instead.
    """
    output = next(iter(reversed(forward.graph.nodes)))
    given: list[Any] = list(output.args[0])
    returned, saved = given[:forward_outputs], given[forward_outputs:]
    going = [one for one in saved if isinstance(one, fx.Node) and one not in returned and fits(one)]
    parts = send(sorted(going), output)
    handed = [part for one in saved for part in parts.get(one, [one])]
    output.args = ([*returned, *handed], *output.args[1:])
    inputs = {node.name: node for node in backward.graph.nodes if node.op == "placeholder"}
    received = {
        inputs[node.name]: [_placeholder(inputs[node.name], part) for part in parts[node]] for node in going
    }
    receive(received)
    for value in received:
        backward.graph.erase_node(value)
    for module in (forward, backward):
        module.graph.lint()
        module.recompile()
    return forward, backward


def _placeholder(before: fx.Node, part: fx.Node) -> fx.Node:
    with before.graph.inserting_before(before):
        twin = before.graph.placeholder(part.name)
    twin.meta["val"] = part.meta["val"]
    return twin


def call(graph: fx.Graph, name: str, target: Callable[..., Any], *args: Any) -> fx.Node:
    """A call in a graph, with what it gives."""
    node = graph.create_node("call_function", target, args, name=name)
    values = [one.meta["val"] if isinstance(one, fx.Node) else one for one in args]
    with torch.no_grad():
        node.meta["val"] = target(*values)
    return node


def geometry(node: fx.Node) -> tuple[list[int], list[int], torch.dtype]:
    """Sizes, strides and type of what a node gives."""
    value = node.meta["val"]
    return list(value.shape), list(value.stride()), value.dtype
