"""A graph that Dynamo captured, compiled as often as a step's plan has ways to cut it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from lowtide.compiled.joint import Joint, Key
from lowtide.compiled.recording import Recording
from lowtide.compiled.variants import Menu, cut_as
from lowtide.errors import PlanError
from lowtide.private import inductor, partitioning
from lowtide.private.captured import Captured

Run = Callable[..., Any]

Sizes = tuple[int, ...]
"""The sizes that a call gives to a graph which leaves them open."""


class Region:
    """One captured graph.

    Called, it asks ``choose`` which of its compiled forms runs with these sizes. The first one runs call by
    call under the cut that takes the least memory, and is what a step is recorded with.

    Args:
        captured: the graph.
        options: Inductor's settings; ``None`` under ``aot_eager``.
        choose: says what a call runs.
        recording: the recording that is under way, if any.
    """

    def __init__(
        self,
        captured: Captured,
        options: dict[str, Any] | None,
        choose: Callable[[Region, Sizes], Run],
        recording: Callable[[], Recording | None],
    ) -> None:
        self.captured, self.options = captured, options
        self._choose, self._recording = choose, recording
        self._open = captured.open_sizes
        self.menu: Menu | None = None  # none for what has no backward
        self._stored: frozenset[Key] = frozenset()
        self._static: frozenset[Key] = frozenset()
        self._menus: dict[Sizes, Menu] = {}
        self._compiled: dict[frozenset[Key] | None, Run] = {}
        self.smallest: Run = self._compile_call_by_call()
        if self.menu is None:
            self.smallest = captured.compile(lambda module, inputs: plainly(module, inputs, options))

    def __call__(self, *args: Any) -> Any:
        return self._choose(self, tuple(args[at] for at in self._open))(*args)

    def menu_at(self, sizes: Sizes) -> Menu:
        """Ways to cut the graph, with what they take at these sizes."""
        assert self.menu is not None
        if not sizes:
            return self.menu
        if sizes not in self._menus:
            one = self.menu.joint
            size_of = self.captured.sizes_at(sizes)
            joint = Joint(one.module, one.forward_outputs, one.static, one.fusible, size_of)
            self._menus = {sizes: Menu(joint, self.options)}
        return self._menus[sizes]

    def run_as(self, stored: frozenset[Key] | None) -> Run:
        """The graph compiled so that ``stored`` goes from forward to backward, or as `torch.compile` does."""
        if stored not in self._compiled:
            assert self.menu is not None
            cutter = None if stored is None else Cutter(stored, signature(self.menu.joint), self.options)
            self._compiled[stored] = self.captured.compile(
                lambda module, inputs: plainly(module, inputs, self.options, cutter)
            )
        return self._compiled[stored]

    # ---- call by call ----------------------------------------------------------------------------

    def _compile_call_by_call(self) -> Run:
        def halved(
            module: fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **more: Any
        ) -> tuple[fx.GraphModule, fx.GraphModule]:
            joint = joint_of(module, num_fwd_outputs, more.get("static_lifetime_input_indices"), self.options)
            if plain_only(joint):
                return partitioning.min_cut(joint.module, num_fwd_outputs, joint.static)
            self.menu = Menu(joint, self.options)
            self._stored = self.menu.smallest()
            self._static = frozenset(joint.key_of[joint.primals[at]] for at in joint.static)
            return self.menu.halves(self._stored)

        def forward(module: fx.GraphModule, inputs: Any, **_: Any) -> Run:
            return self._told_of_forward(module, inductor.boxed_nop(module, inputs))

        def backward(module: fx.GraphModule, inputs: Any, **_: Any) -> Run:
            return self._told_of_backward(module, inductor.boxed_nop(module, inputs))

        def either(module: fx.GraphModule, inputs: Any, *, is_backward: bool = False, **_: Any) -> Run:
            return (backward if is_backward else forward)(module, inputs)

        if self.options is None:
            backend = inductor.aot_autograd(
                fw_compiler=forward,
                bw_compiler=backward,
                inference_compiler=inductor.boxed_nop,
                partition_fn=halved,
                keep_inference_input_mutations=True,
            )
            return self.captured.compile(backend)
        settings = {**self.options, "custom_partitioner_fn": Halving(halved), "force_disable_caches": True}
        return self.captured.compile(
            lambda module, inputs: inductor.compile_with(module, inputs, settings, either)
        )

    def _told_of_forward(self, module: fx.GraphModule, run: Run) -> Run:
        names = [node.name for node in module.graph.nodes if node.op == "placeholder"]
        output = next(iter(reversed(module.graph.nodes)))
        returned = [getattr(node, "name", "") for node in output.args[0]]

        def told(args: list[Any]) -> Any:
            recording = self._recording()
            if recording is None or self.menu is None:
                return run(args)
            call = recording.forward(self, self._static, self._by_key(names, args))
            found = run(args)
            count = self.menu.joint.forward_outputs
            outputs = self._by_key(returned[:count], found[:count])
            saved = self._by_key(returned[count:], found[count:])
            recording.forward_ended(call, outputs, saved)
            return found

        told._boxed_call = True  # type: ignore[attr-defined]
        return told

    def _told_of_backward(self, module: fx.GraphModule, run: Run) -> Run:
        names = [node.name for node in module.graph.nodes if node.op == "placeholder"]

        def told(args: list[Any]) -> Any:
            recording = self._recording()
            call = recording.backward(self, self._by_key(names, args)) if recording is not None else None
            found = run(args)
            if recording is not None and call is not None:
                recording.backward_ended(call)
            return found

        told._boxed_call = True  # type: ignore[attr-defined]
        return told

    def _by_key(self, names: Sequence[str], tensors: Sequence[Any]) -> dict[Key, torch.Tensor]:
        assert self.menu is not None
        joint, found = self.menu.joint, {}
        for name, tensor in zip(names, tensors, strict=True):
            node = joint.names.get(name)
            if node is not None and node in joint.key_of and _lies_plainly(tensor):
                found[joint.key_of[node]] = tensor
        return found


class Halving(inductor.CustomPartitionerFn):
    """A function as Inductor's partitioner; nothing that it cuts is ever cached."""

    def __init__(self, halve: Callable[..., tuple[fx.GraphModule, fx.GraphModule]]) -> None:
        self._halve = halve

    def __deepcopy__(self, memo: dict[int, Any]) -> Halving:
        return self

    def __call__(self, gm: fx.GraphModule, joint_inputs: Any, **more: Any) -> Any:
        more.pop("compiler", None)
        return self._halve(gm, joint_inputs, **more)

    def uuid(self) -> None:
        """Nothing to know it by."""
        return None


class Cutter(inductor.CustomPartitionerFn):
    """Cuts a joint graph where it is told; it can be pickled, so what Inductor makes of it is cached.

    Args:
        stored: storages that go from forward to backward.
        signature: of the joint graph that they are named in.
        options: Inductor's settings; ``None`` under ``aot_eager``.
    """

    def __init__(self, stored: frozenset[Key], signature: str, options: dict[str, Any] | None) -> None:
        self.stored, self.signature = sorted(stored), signature
        self.by_calls = options is None

    def __call__(
        self,
        gm: fx.GraphModule,
        joint_inputs: Sequence[object],
        *,
        num_fwd_outputs: int,
        static_lifetime_input_indices: Sequence[int] | None = None,
        **_: Any,
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        joint = joint_of(gm, num_fwd_outputs, static_lifetime_input_indices, None if self.by_calls else {})
        if signature(joint) != self.signature:
            raise PlanError(
                "a graph was traced in another way than when its step was planned: something that it depends "
                "on changed between two steps. Call handle.set_budget(...) to plan again"
            )
        return cut_as(joint, self.stored)

    def uuid(self) -> str:
        """What the cut follows from, beside the graph."""
        import lowtide

        facts = [lowtide.__version__, torch.__version__, self.signature, self.stored]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def plainly(
    module: fx.GraphModule, inputs: Any, options: dict[str, Any] | None, cutter: Cutter | None = None
) -> Run:
    """A captured graph as its backend compiles it, with a partitioner of ours or its own."""
    if options is None:
        return inductor.aot_autograd(
            fw_compiler=inductor.boxed_nop,
            partition_fn=cutter or partitioning.plain_partition,
            keep_inference_input_mutations=True,
        )(module, inputs)
    more = {} if cutter is None else {"custom_partitioner_fn": cutter}
    return inductor.compile_with(module, inputs, {**options, **more})


def joint_of(
    module: fx.GraphModule, forward_outputs: int, static: Sequence[int] | None, options: object
) -> Joint:
    """A joint graph, cleaned and read."""
    partitioning.clean_joint(module)
    own = partitioning.twin(module)
    fusible = None if options is None else partitioning.default_fusible()
    return Joint(own, forward_outputs, tuple(static or ()), fusible)


def plain_only(joint: Joint) -> bool:
    """Whether there is nothing to decide about a joint graph."""
    return not any(call.forward for call in joint.calls) or not joint.tangents


def signature(joint: Joint) -> str:
    """A digest of a joint graph's calls and their names."""
    facts = [(node.op, node.name, str(node.target)) for node in joint.nodes]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def _lies_plainly(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and partitioning.storage_of(value) is not None
