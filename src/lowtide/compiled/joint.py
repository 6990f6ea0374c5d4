"""A joint graph as the planner sees it: which operations there are, what they read and write by storage.

In: the FX graph in which AOTAutograd has traced forward and backward as one. Out: a `Joint`, plain lists of
`JointCall`, keyed by storage; views are no calls. Under Inductor most element-wise calls never write memory:
they are computed again inside each kernel that reads them. Such calls are left out, and their readers read
what these calls read.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import fx

from lowtide import accelerator
from lowtide.ops import op_info
from lowtide.private import OpOverload, partitioning, schema_of

Key = str
"""Name of the node that first has a storage: what the storage is called here."""


@dataclass(eq=False)
class JointCall:
    """An operation of the joint graph.

    Attributes:
        node: the FX node that calls it.
        reads, writes: storages, each once.
        forward: whether it is part of the forward.
        inlined: nodes that are computed within it.
        reason: why it may not run again, or nothing.
    """

    node: fx.Node
    reads: tuple[Key, ...]
    writes: tuple[Key, ...]
    forward: bool
    inlined: tuple[fx.Node, ...] = ()
    reason: str = ""


@dataclass(frozen=True)
class CallCost:
    """Seconds and bytes of one run of a call.

    Attributes:
        seconds: its time.
        scratch_bytes: what it takes beyond its results.
        surplus_bytes: what the storage of its one result takes beyond what the graph says.
        parts: names of the nodes that it computes -> what each adds, of a fused one without its traffic.
    """

    seconds: float
    scratch_bytes: int
    surplus_bytes: int = 0
    parts: Mapping[str, float] = field(default_factory=dict)


@dataclass
class Joint:
    """One joint graph.

    Args:
        module: the graph, cleaned (`lowtide.private.partitioning.clean_joint`).
        forward_outputs: how many of its outputs are the forward's.
        static: positions of inputs that lie at the same address in every step (parameters, buffers).
        fusible: whether a node is computed inside the kernels that read it, where that pays; ``None`` where
            every call runs by itself.
        size: a size as a number, where the graph leaves it open.
        counted: whose memory counts; ``None`` for the device that the graph runs on. A graph on the host that
            is a part of a card's step takes none of it.

    Attributes:
        device: whose memory counts.
    """

    module: fx.GraphModule
    forward_outputs: int
    static: tuple[int, ...]
    fusible: Callable[[fx.Node], bool] | None = None
    size: Callable[[Any], int] = partitioning.hint
    counted: torch.device | None = None
    key_of: dict[fx.Node, Key] = field(default_factory=dict, init=False)
    bytes: dict[Key, int] = field(default_factory=dict, init=False)
    root: dict[Key, fx.Node] = field(default_factory=dict, init=False)
    calls: list[JointCall] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.nodes = list(self.module.graph.nodes)
        self.names = {node.name: node for node in self.nodes}
        self.device = self.counted or partitioning.device_of(self.nodes)
        self.place = {node.name: at for at, node in enumerate(self.nodes)}
        self._find_storages()
        self.in_forward, self.after_tangents = partitioning.sides(
            self.module, self.static, self.forward_outputs
        )
        self.virtual = self._find_virtual()
        self.masks = self._find_masks()
        self._find_calls()

    # ---- storages --------------------------------------------------------------------------------

    def _find_storages(self) -> None:
        by_address: dict[int, Key] = {}
        for node in self.nodes:
            value = node.meta.get("val")
            if node.op == "output" or not isinstance(value, torch.Tensor):
                continue
            address = partitioning.storage_of(value)
            if address is None:
                continue
            key = by_address.setdefault(address, node.name)
            self.key_of[node] = key
            if key == node.name:
                self.root[key] = node
                self.bytes[key] = self.bytes_of(key, self.size)

    def bytes_at(self, call: JointCall, size_of: Callable[[Any], int]) -> int:
        """What a call touches, for other sizes than the joint's own."""
        return sum(self.bytes_of(key, size_of) for key in dict.fromkeys((*call.reads, *call.writes)))

    def bytes_of(self, key: Key, size_of: Callable[[Any], int]) -> int:
        """A storage's bytes, for other sizes than the joint's own; none where it lies on another device."""
        value = self.root[key].meta["val"]
        return size_of(value.untyped_storage().nbytes()) if accelerator.is_on(value, self.device) else 0

    def is_view(self, node: fx.Node) -> bool:
        """Whether a node only looks at a storage that is there."""
        key = self.key_of.get(node)
        return key is not None and self.root[key] is not node and not _writes_in_place(node)

    @cached_property
    def outputs(self) -> tuple[list[Any], list[Any]]:
        """What forward and backward return."""
        found = list(self.nodes[-1].args[0])  # type: ignore[arg-type]
        return found[: self.forward_outputs], found[self.forward_outputs :]

    @cached_property
    def overwritten(self) -> set[Key]:
        """The storages that the step writes to in place, such as a buffer's at the end of forward."""
        written = [node.all_input_nodes[0] for node in self.nodes if _writes_in_place(node)]
        written += partitioning.written_after_forward(self.module)
        return {self.key_of[node] for node in written if node in self.key_of}

    def outputs_of(self, forward: bool) -> dict[Key, None]:
        """The storages that the forward or the backward returns."""
        nodes = self.outputs[0 if forward else 1]
        return dict.fromkeys(self.key_of[node] for node in nodes if node in self.key_of)

    @cached_property
    def primals(self) -> list[fx.Node]:
        """The forward's inputs, in order."""
        return [node for node in self.nodes if partitioning.is_primal(node)]

    @cached_property
    def tangents(self) -> list[fx.Node]:
        """The gradients that backward is given."""
        return [node for node in self.nodes if node.op == "placeholder" and partitioning.is_tangent(node)]

    def inputs_in(self, storages: Collection[Key] | None = None) -> set[str]:
        """Names of the inputs of a half that lie in these storages, or of the graph's own inputs."""
        nodes = self.primals if storages is None else self.nodes
        return {node.name for node in nodes if storages is None or self.key_of.get(node) in storages}

    @cached_property
    def readers(self) -> dict[Key, list[JointCall]]:
        """Storages -> the calls of the backward that read them."""
        found: dict[Key, list[JointCall]] = {}
        for call in self.calls:
            for key in () if call.forward else call.reads:
                found.setdefault(key, []).append(call)
        return found

    def written_over(self, call: JointCall) -> set[Key]:
        """What a kernel of the backward writes where something lay that it alone reads there: results as
        large as one of its operands, and of the same type. The forward's inputs stay.
        """
        if call.forward or self.fusible is None or not self.fusible(call.node):
            return set()
        given = {self.key_of[node] for node in self.primals if node in self.key_of}
        alone = [key for key in call.reads if self.readers[key] == [call] and key not in given]
        free = Counter(self._kind(key) for key in alone)
        found: set[Key] = set()
        for key in call.writes:
            if free[self._kind(key)]:
                free[self._kind(key)] -= 1
                found.add(key)
        return found

    def _kind(self, key: Key) -> tuple[int, torch.dtype]:
        return self.bytes[key], self.root[key].meta["val"].dtype

    @cached_property
    def structure(self) -> str:
        """A digest of what is called and how that is named, whatever the sizes."""
        facts = [(node.op, node.name, str(node.target)) for node in self.nodes]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]

    @property
    def facts(self) -> list[Any]:
        """What a cut follows from: the structure, and each storage's bytes and type, in JSON's words."""
        kinds = [(key, self.bytes[key], str(node.meta["val"].dtype)) for key, node in self.root.items()]
        return [self.structure, self.forward_outputs, sorted(kinds)]

    # ---- what never reaches memory ---------------------------------------------------------------

    def _find_virtual(self) -> set[fx.Node]:
        """Nodes whose results no kernel writes to memory.

        A fusible result is written where an operation reads it that is no generated kernel, and where it is
        returned. One of the forward is also written where a reader comes beyond such an operation: a plan
        may store it for that reader. One of the backward is computed again there, unless that takes too much.
        """
        if self.fusible is None:
            return set()
        fusible = {
            node
            for node in self.nodes
            if node.op == "call_function"
            and node in self.key_of
            and self.root[self.key_of[node]] is node
            and not _writes_in_place(node)
            and self.fusible(node)
        }
        level: dict[fx.Node, int] = {}
        for node in self.nodes:
            before = max((level[source] for source in node.all_input_nodes), default=0)
            own = node.op == "call_function" and node not in fusible and self._computes(node)
            level[node] = before + own
        returned = {node for part in self.outputs for node in part if isinstance(node, fx.Node)}
        kept = {self.key_of[node] for node in returned if node in self.key_of}
        readers: Counter[Key] = Counter()
        for node in self.nodes:
            if node.op != "call_function" or not self._computes(node):
                continue
            keys = {self.key_of[source] for source in node.all_input_nodes if source in self.key_of}
            readers.update(keys)
            for key in keys:
                far = level[node] != level[self.root[key]]
                if node not in fusible or (far and self._side(node) and self._side(self.root[key])):
                    kept.add(key)
        virtual: set[fx.Node] = set()
        within: dict[fx.Node, tuple[set[Key], set[fx.Node]]] = {}  # what a kernel reads for it, and computes
        for node in self.nodes:
            if node not in fusible or (key := self.key_of[node]) in kept or _name(node) in _REDUCTIONS:
                continue
            reads, computes = set[Key](), {node}
            for source in node.all_input_nodes:
                base = self.root[self.key_of[source]] if source in self.key_of else source
                more = within.get(base, ({self.key_of[base]} if base in self.key_of else set(), set()))
                reads |= more[0]
                computes |= more[1]
            if self._side(node) or not partitioning.is_written(node, len(reads), computes, readers[key]):
                virtual.add(node)
                within[node] = reads, computes
        return virtual

    def _computes(self, node: fx.Node) -> bool:
        """Whether a call is more than a view, a size or a part of several results."""
        return not (self.is_view(node) or partitioning.is_item(node) or partitioning.is_symbol(node))

    def _side(self, node: fx.Node) -> bool:
        return node.name in self.in_forward

    # ---- calls -----------------------------------------------------------------------------------

    def _find_calls(self) -> None:
        parts: dict[fx.Node, list[Key]] = {}
        for node in self.nodes:
            if partitioning.is_item(node) and (key := self.key_of.get(node)) and self.root[key] is node:
                maker: Any = node
                while partitioning.is_item(maker):
                    maker = maker.args[0]
                parts.setdefault(maker, []).append(key)
        for node in self.nodes:
            if node.op != "call_function" or not self._computes(node) or node in self.virtual:
                continue
            own = self.key_of.get(node)
            writes = (own,) if own is not None and self.root[own] is node else tuple(parts.get(node, ()))
            self.calls.append(self._call(node, writes))
        for node in self.masks:
            self.calls.append(self._call(node, (self.key_of[node],)))
        self.calls.sort(key=lambda call: self.place[call.node.name])

    def _call(self, node: fx.Node, writes: tuple[Key, ...]) -> JointCall:
        """The call that a node makes. It reads storages that are in memory; inputs that no kernel writes to
        memory are computed within it.
        """
        forward = self._side(node)
        reads: dict[Key, None] = {}
        inlined: dict[fx.Node, None] = {}
        stack = node.all_input_nodes[::-1]
        while stack:
            source = stack.pop()
            key = self.key_of.get(source)
            base = self.root[key] if key is not None else source
            if key is not None and (base not in self.virtual or (base in self.masks and not forward)):
                reads[key] = None
            elif base not in inlined and (key is not None or partitioning.is_symbol(source)):
                inlined[base] = None
                stack += base.all_input_nodes[::-1]
        within = tuple(one for one in inlined if one in self.virtual)
        reason = next((why for one in (node, *within) if (why := self._why_fixed(one))), "")
        if not reason and not self.overwritten.isdisjoint(reads):
            reason = "it reads what the step overwrites"
        return JointCall(node, tuple(reads), writes, forward, within, reason)

    def _why_fixed(self, node: fx.Node) -> str:
        """Why a call may not run again, or nothing."""
        target = node.target
        if _writes_in_place(node):
            return "it writes to what it is given"
        if partitioning.is_effect(node):
            return "it has effects"
        if partitioning.must_save(node) or any(
            partitioning.must_save(user) for user in node.users if partitioning.is_item(user)
        ):
            return "its result must be kept"
        if _name(node) in _UNTAGGED_DRAWS:
            return "it draws random numbers"
        if isinstance(target, OpOverload):
            info = op_info(target)
            once = info.why_once(node.args)
            return "it draws random numbers" if info.draws(node.args, node.kwargs) else once
        return ""

    def _find_masks(self) -> list[fx.Node]:
        """Masks that are drawn: a byte an element to store, and slow to draw again."""
        found: list[fx.Node] = []
        drawn: set[fx.Node] = set()
        for node in self.nodes:
            if node in self.virtual and (
                _name(node) == "inductor_random" or any(one in drawn for one in node.all_input_nodes)
            ):
                if node.meta["val"].dtype == torch.bool and self._side(node):
                    found.append(node)
                else:
                    drawn.add(node)
        return found


def _writes_in_place(node: fx.Node) -> bool:
    target = node.target
    return isinstance(target, OpOverload) and schema_of(target).is_mutable and bool(node.all_input_nodes)


def _name(node: fx.Node) -> str:
    return schema_of(node.target).name.partition("::")[2] if isinstance(node.target, OpOverload) else ""


_REDUCTIONS = frozenset({
    "sum", "mean", "var", "var_mean", "std", "amax", "amin", "max", "min", "argmax", "argmin", "any", "all",
    "prod",
    "prepare_softmax_online", "cumsum", "_softmax", "_log_softmax",
})  # fmt: skip
"""Kernels end with these, so their results are written."""


_UNTAGGED_DRAWS = frozenset({"inductor_seed", "inductor_seeds", "inductor_randint_seed"})
"""Operations that draw random numbers and are not tagged so."""


T = TypeVar("T", bound=Hashable)


def lazily(wanted: Iterable[T], needs: Callable[[T], Iterable[T]], place: Callable[[T], int]) -> list[T]:
    """The wanted items in their order, each right behind the items that it needs and that have not come
    before.
    """
    order: dict[T, None] = {}
    for one in wanted:
        needed: set[T] = set()
        stack = [] if one in order else [*needs(one)]
        while stack:
            other = stack.pop()
            if other not in order and other not in needed:
                needed.add(other)
                stack += needs(other)
        order |= dict.fromkeys([*sorted(needed, key=place), one])
    return list(order)


def describe(node: fx.Node) -> tuple[Any, dict[str, Any]]:
    """A call's arguments with (fake) tensors and numbers in place of nodes."""
    return fx.node.map_arg((node.args, node.kwargs), lambda source: source.meta.get("val"))  # type: ignore
