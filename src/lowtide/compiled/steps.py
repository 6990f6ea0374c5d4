"""All compiled graphs of a step as one `StepGraph`: their forwards and backwards in the order in which they
ran, and what stands and happens between them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from lowtide.compiled.costs import Cost
from lowtide.compiled.joint import Call, Joint, Key
from lowtide.graph import Event, Operation, Saved, StepGraph, Storage, Value
from lowtide.private import partitioning

Phase = Literal["forward", "backward"]

NOTHING = Cost(0.0, 0)

Place = tuple[int, Key]
"""A storage of a step: the graph's number and the storage's name in it."""


@dataclass(frozen=True)
class Outside:
    """What stands beside the compiled graphs' own memory, in bytes.

    Attributes:
        forward: while each graph's forward runs.
        backward: while each graph's backward runs; what its gradients lie in included.
    """

    forward: tuple[int, ...]
    backward: tuple[int, ...]

    @property
    def least(self) -> int:
        """What stands throughout."""
        return min((*self.forward, *self.backward))


@dataclass
class Step:
    """A step graph, and which of its values are whose.

    Attributes:
        graph: for the planner.
        value_of: storage -> value.
    """

    graph: StepGraph
    value_of: dict[Place, int] = field(default_factory=dict)

    def stored(self, values: frozenset[int], number: int) -> list[Key]:
        """The storages of one graph that a plan stores."""
        return [key for (k, key), value in self.value_of.items() if k == number and value in values]


class StepBuilder:
    """Writes down a step.

    Args:
        joints: its graphs, in the order of their forwards.
        costs: of each graph's calls.
        outside: what stands beside them.
        device: which the budget is about.
        order: what happens in which order: ``("forward", n)`` and ``("backward", n)`` of graph ``n``, and
            ``("gap", bytes)`` for the most that stands between two of them. ``None`` for one graph alone.
    """

    def __init__(
        self,
        joints: Sequence[Joint],
        costs: Sequence[Sequence[Cost]],
        outside: Outside,
        device: str = "cpu",
        order: Sequence[tuple[str, int]] | None = None,
    ) -> None:
        self.joints, self.costs, self.outside, self.device = joints, costs, outside, device
        self.order = order or [("forward", 0), ("backward", 0)]
        self.operations: list[Operation] = []
        self.storages: list[Storage] = []
        self.values: list[Value] = []
        self.saved: list[Saved] = []
        self.events: list[Event] = []
        self.of: dict[Place, int] = {}
        self.standing = outside.least
        self.around: int | None = None  # the storage of what stands outside for a while
        self.asks: dict[tuple[int, str], list[int]] = {}  # reader -> saved tensors

    def build(self) -> Step:
        """The step."""
        phase: Phase = "forward"
        for kind, number in self.order:
            if kind == "gap":
                most = number - self.standing
                if most > 0:
                    self._operate("outside", (), phase, cost=Cost(0.0, most), reason="outside")
            elif kind == "forward":
                phase = "forward"
                self._stand(self.outside.forward[number], phase)
                self._forward(number, self.joints[number])
            else:
                phase = "backward"
                self._stand(self.outside.backward[number], phase)
                self._backward(number, self.joints[number])
        graph = StepGraph(
            tuple(self.operations),
            tuple(self.storages),
            tuple(self.values),
            tuple(self.saved),
            tuple(self.events),
            resident_bytes=self.outside.least,
            plain_seconds=sum(op.seconds for op in self.operations),
            device=self.device,
        )
        made = {place: value for place, value in self.of.items() if graph.values[value].producer is not None}
        return Step(graph, made)

    # ---- what stands outside ---------------------------------------------------------------------

    def _stand(self, bytes_: int, phase: Phase) -> None:
        """From here on another number of bytes stands outside the graphs."""
        if bytes_ == self.standing:
            return
        if self.around is not None:
            self.events.append(Event("free", self.around))
            self.around = None
        if bytes_ > self.outside.least:
            self.around = len(self.storages)
            self._operate("outside", (), phase, [bytes_ - self.outside.least], reason="outside")
        self.standing = bytes_

    def _operate(
        self,
        name: str,
        reads: tuple[int, ...],
        phase: Phase,
        sizes: Sequence[int] = (),
        cost: Cost = NOTHING,
        module: str = "",
        reason: str = "",
    ) -> range:
        """An operation whose results have these sizes; says which values they are."""
        index, first = len(self.operations), len(self.values)
        for size in sizes:
            self.values.append(Value(len(self.values), len(self.storages), 0, index))
            self.storages.append(Storage(len(self.storages), size, phase, index))
        writes = range(first, len(self.values))
        self.operations.append(
            Operation(
                index,
                name,
                reads,
                tuple(writes),
                phase,
                module,
                replayable=not reason,
                reason=reason,
                seconds=cost.seconds,
                scratch_bytes=cost.scratch_bytes,
            )
        )
        self.events.append(Event("op", index))
        return writes

    # ---- a graph ---------------------------------------------------------------------------------

    def _value(self, number: int, key: Key) -> int:
        """The value of a storage; one that no call made stood before."""
        place = (number, key)
        if place not in self.of:
            storage, value = len(self.storages), len(self.values)
            self.storages.append(Storage(storage, 0, "input", None, key))  # it counts as standing outside
            self.values.append(Value(value, storage, 0, None))
            self.of[place] = value
        return self.of[place]

    def _call(self, number: int, joint: Joint, call: Call, cost: Cost) -> None:
        made = self._operate(
            str(call.node.target),
            tuple(self._value(number, key) for key in call.reads),
            "forward" if call.forward else "backward",
            [joint.bytes[key] + cost.surplus_bytes for key in call.writes],
            cost,
            module_of(call),
            call.reason,
        )
        self.of.update(zip(((number, key) for key in call.writes), made, strict=True))

    def _free(self, number: int, keys: Sequence[Key]) -> None:
        for key in keys:
            value = self.values[self._value(number, key)]
            if value.producer is not None:
                self.events.append(Event("free", value.storage))

    def _forward(self, number: int, joint: Joint) -> None:
        calls = [(call, self.costs[number][at]) for at, call in enumerate(joint.calls) if call.forward]
        ends = _ends([call for call, _ in calls])
        returned = {joint.key_of.get(node) for node in joint.outputs[0] if node is not None}
        readers: dict[Key, list[Call]] = {}
        for call in joint.calls:
            if not call.forward:
                for key in call.reads:
                    readers.setdefault(key, []).append(call)
        made = {key for call, _ in calls for key in call.writes}
        for at, (call, cost) in enumerate(calls):
            self._call(number, joint, call, cost)
            for key in call.writes:
                for reader in readers.get(key, ()):
                    self._save(number, joint, key, reader, call)
            self._free(number, [key for key in ends.get(at, ()) if key not in returned])
        self._free(number, [key for key in dict.fromkeys(returned) if key in made])

    def _save(self, number: int, joint: Joint, key: Key, reader: Call, maker: Call) -> None:
        tensor = joint.root[key].meta["val"]
        index = len(self.saved)
        self.saved.append(
            Saved(
                index,
                self.of[number, key],
                droppable=True,
                module=module_of(maker),
                dtype=str(tensor.dtype).removeprefix("torch."),
                forced=partitioning.should_recompute(joint.root[key]),
            )
        )
        self.events.append(Event("pack", index))
        self.asks.setdefault((number, reader.node.name), []).append(index)

    def _backward(self, number: int, joint: Joint) -> None:
        calls = ordered_backward(joint)
        cost = {id(call): self.costs[number][at] for at, call in enumerate(joint.calls)}
        ends = _ends(calls)
        returned = {joint.key_of.get(node) for node in joint.outputs[1] if node is not None}
        released: set[int] = set()
        of_value: dict[int, list[int]] = {}
        for saved in self.saved:
            of_value.setdefault(saved.value, []).append(saved.id)
        for at, call in enumerate(calls):
            tensors = self.asks.get((number, call.node.name), [])
            for tensor in tensors:
                self.events.append(Event("unpack", tensor))
                value = self.saved[tensor].value
                if value not in released:  # what it rests on may go now
                    released.add(value)
                    self.events += [Event("release", one) for one in of_value[value]]
            self._call(number, joint, call, cost[id(call)])
            self.events += [Event("done", tensor) for tensor in tensors]
            self._free(number, [key for key in ends.get(at, ()) if key not in returned])


def ordered_backward(joint: Joint) -> list[Call]:
    """The calls of the backward in the order in which they run: what rests on gradients in the order of the
    joint graph, everything else where it is first read.
    """
    maker = {key: call for call in joint.calls if not call.forward for key in call.writes}
    done: set[int] = set()
    order: list[Call] = []

    def emit(call: Call) -> None:
        if id(call) in done:
            return
        done.add(id(call))
        for key in call.reads:
            if key in maker:
                emit(maker[key])
        order.append(call)

    for call in joint.calls:
        if not call.forward and call.node.name in joint.after_tangents:
            emit(call)
    for call in joint.calls:
        if not call.forward:
            emit(call)
    return order


def _ends(calls: Sequence[Call]) -> dict[int, list[Key]]:
    """Position -> storages that no later call of these touches."""
    last: dict[Key, int] = {}
    for at, call in enumerate(calls):
        for key in (*call.reads, *call.writes):
            last[key] = at
    ends: dict[int, list[Key]] = {}
    made = {key for call in calls for key in call.writes}
    for key, at in last.items():
        if key in made:
            ends.setdefault(at, []).append(key)
    return ends


def module_of(call: Call) -> str:
    """Qualified name of the module in which a call was made."""
    stack = call.node.meta.get("nn_module_stack") or call.node.meta.get("fwd_nn_module_stack") or {}
    names = [entry[0] if isinstance(entry, tuple) else str(entry) for entry in stack.values()]
    if not names:
        return ""
    name = re.sub(r"^L\['\w+'\]|^L__self__", "", str(names[-1]))  # whatever forward calls its first argument
    return name.replace("._modules['", ".").replace("']", "").lstrip("._")
