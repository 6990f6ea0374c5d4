"""What two halves of a joint graph do to memory, before any kernel is compiled."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

from torch import fx

from lowtide.compiled.coding import scratch_bytes
from lowtide.compiled.costs import Cost, Size
from lowtide.compiled.generated import Scratch, profile_generated
from lowtide.compiled.joint import Call, Joint, Key, described
from lowtide.compiled.liveness import Profile, profile
from lowtide.private import inductor

Profiles = Callable[..., tuple[Profile, Profile]]
"""What two halves do to memory, for sizes as numbers, and by what others hold to its end of what the backward
is handed: storages by name, or the graph's inputs.
"""

Predict = Callable[[fx.GraphModule, fx.GraphModule], Profiles]


def lent_to(joint: Joint, lent: Collection[Key] | None = None) -> set[str]:
    """Names of the inputs of a half that others hold, too: those in these storages, or the graph's inputs."""
    nodes = joint.primals if lent is None else joint.nodes
    return {node.name for node in nodes if lent is None or joint.key_of.get(node) in lent}


def predict_calls(joint: Joint, costs: Mapping[str, Cost]) -> Predict:
    """Predict graphs that run call by call."""
    inputs = lent_to(joint)
    calls = {call.node.name: call for call in joint.calls}
    more = {name: cost.surplus_bytes for name, cost in costs.items() if cost.surplus_bytes}
    returned = {joint.key_of.get(node) for node in joint.outputs[0] if isinstance(node, fx.Node)}

    def predict(forward: fx.GraphModule, backward: fx.GraphModule) -> Profiles:
        handed = {node.name for node in backward.graph.nodes}

        def profiles(size_of: Size, lent: Collection[Key] | None = None, /) -> tuple[Profile, Profile]:
            def at(count: int, call: Call) -> int:
                if size_of is joint.size:
                    return count
                here, there = joint.bytes_at(call, joint.size), joint.bytes_at(call, size_of)
                return -(-count * there // here) if here else count

            def scratch(node: fx.Node) -> int:
                if node.name not in costs:
                    return scratch_bytes(node.target, described(node)[0])
                return at(costs[node.name].scratch_bytes, calls[node.name])

            surplus = {calls[name].writes[0]: at(count, calls[name]) for name, count in more.items()}
            unseen = returned.difference(handed, lent or ())
            loss = sum(count for key, count in surplus.items() if key in unseen)
            first = profile(forward, inputs, scratch, size_of, surplus)
            second = profile(backward, lent_to(joint, lent), scratch, size_of, surplus)
            return first, replace(second, peak_bytes=second.peak_bytes + loss)

        return profiles

    return predict


def predict_generated(joint: Joint, options: dict[str, object]) -> Predict:
    """Predict graphs that Inductor generates code for."""
    inputs, known = lent_to(joint), dict[str, int]()

    def predict(forward: fx.GraphModule, backward: fx.GraphModule) -> Profiles:
        first, strides = inductor.generated(forward, False, options)
        donated = inductor.donated_inputs(forward, backward, joint.forward_outputs)
        second, _ = inductor.generated(backward, True, options, strides, donated)
        scratch = Scratch(known), Scratch(known)

        @functools.cache
        def forward_at(size_of: Size) -> Profile:
            return profile_generated(first, forward, inputs, scratch[0].run(), size_of)

        def profiles(size_of: Size, lent: Collection[Key] | None = None, /) -> tuple[Profile, Profile]:
            one = forward_at(size_of)
            held = lent_to(joint, lent) - one.copied.keys()
            return one, profile_generated(second, backward, held, scratch[1].run(), size_of, strides)

        return profiles

    return predict
