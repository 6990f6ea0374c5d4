"""Write all compiled graphs of a step down as one `StepGraph`.

Forwards and backwards stand in the order in which they ran; between them stands what ran outside.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import fx

from lowtide.compiled.costs import Cost
from lowtide.compiled.joint import Call, Joint, Key, lazily
from lowtide.compiled.recording import Moment
from lowtide.graph import Event, EventKind, Operation, Saved, StepGraph, Storage, Value
from lowtide.private import partitioning

Phase = Literal["forward", "backward"]

NOTHING = Cost(0.0, 0)

Place = tuple[int, Key]
"""A storage of a step: the graph's number and the storage's name in it."""


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


def step_of(
    joints: Sequence[Joint],
    costs: Sequence[Mapping[str, Cost]],
    moments: Sequence[Moment],
    device: str,
) -> Step:
    """Write down a step.

    Args:
        joints: its graphs, in the order of their forwards.
        costs: of each graph's calls, by the names of their nodes.
        moments: what happens in which order, and what stands meanwhile.
        device: which the budget is about.
    """
    least = min(moment.bytes for moment in moments if moment.call is not None)
    writer = _Writer(joints, costs, least)
    phase: Phase = "forward"
    for moment in moments:
        if moment.call is not None:
            phase = "forward" if moment.kind == "forward" else "backward"
            writer.stand(moment.bytes, phase)
            writer.half(moment.call, phase)
        elif moment.bytes > writer.standing:
            passing = Cost(0.0, moment.bytes - writer.standing)
            writer.operate("outside", (), phase, cost=passing, reason="outside")
    graph = StepGraph(
        tuple(writer.operations),
        tuple(writer.storages),
        tuple(writer.values),
        tuple(writer.saved),
        tuple(writer.events),
        resident_bytes=least,
        plain_seconds=sum(op.seconds for op in writer.operations),
        device=device,
    )
    made = {place: value for place, value in writer.of.items() if graph.values[value].producer is not None}
    return Step(graph, made)


class _Writer:
    """The tables of a step graph, while they grow.

    Args:
        joints, costs: as of `step_of`.
        least: bytes that stand throughout.
    """

    def __init__(self, joints: Sequence[Joint], costs: Sequence[Mapping[str, Cost]], least: int) -> None:
        self.joints, self.costs = joints, costs
        self.operations: list[Operation] = []
        self.storages: list[Storage] = []
        self.values: list[Value] = []
        self.saved: list[Saved] = []
        self.events: list[Event] = []
        self.of: dict[Place, int] = {}
        self.least = self.standing = least
        self._around = 0  # the storage of what stands for a while, where more than the least does
        self._asked: dict[tuple[int, str], list[int]] = {}  # reader -> saved tensors
        self._of_value: dict[int, list[int]] = {}  # saved tensors that backward has not asked for yet

    def stand(self, bytes_: int, phase: Phase) -> None:
        """From here on another number of bytes stands outside the graphs."""
        if bytes_ == self.standing:
            return
        if self.standing > self.least:
            self._tell("free", self._around)
        if bytes_ > self.least:
            self._around = len(self.storages)
            self.operate("outside", (), phase, [bytes_ - self.least], reason="outside")
        self.standing = bytes_

    def operate(
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
        self._tell("op", index)
        return writes

    def half(self, number: int, phase: Phase) -> None:
        """A graph's forward or backward."""
        joint, forward = self.joints[number], phase == "forward"
        calls = [call for call in joint.calls if call.forward] if forward else ordered_backward(joint)
        outputs = [node for node in joint.outputs[0 if forward else 1] if node is not None]
        returned = dict.fromkeys(joint.key_of[node] for node in outputs if node in joint.key_of)
        ends: dict[int, list[Key]] = {}
        last = {key: at for at, call in enumerate(calls) for key in (*call.reads, *call.writes)}
        for key, at in last.items():
            if key not in returned:
                ends.setdefault(at, []).append(key)
        for at, call in enumerate(calls):
            asked = self._asked.get((number, call.node.name), [])
            for one in asked:
                self._tell("unpack", one)
                self._tell("release", *self._of_value.pop(self.saved[one].value, []))
            cost, module = self.costs[number][call.node.name], module_of(call)
            made = self.operate(
                str(call.node.target),
                tuple(self._value(number, key) for key in call.reads),
                phase,
                [joint.bytes[key] + cost.surplus_bytes for key in call.writes],
                cost,
                module,
                call.reason,
            )
            self.of.update(zip(((number, key) for key in call.writes), made, strict=True))
            self._tell("done", *asked)
            for key in call.writes if forward else ():
                for reader in joint.readers.get(key, ()):
                    self._save(number, joint.root[key], self.of[number, key], module, reader)
            self._free(number, ends.get(at, ()), phase)
        if forward:  # what is returned counts as standing outside
            self._free(number, returned, phase)

    def _tell(self, kind: EventKind, *numbers: int) -> None:
        self.events += [Event(kind, number) for number in numbers]

    def _value(self, number: int, key: Key) -> int:
        """The value of a storage; one that no call made stood before."""
        place = (number, key)
        if place not in self.of:
            storage, self.of[place] = len(self.storages), len(self.values)
            self.storages.append(Storage(storage, 0, "input", None, key))  # it counts as standing outside
            self.values.append(Value(self.of[place], storage, 0, None))
        return self.of[place]

    def _free(self, number: int, keys: Iterable[Key], phase: Phase) -> None:
        for key in keys:
            storage = self.storages[self.values[self._value(number, key)].storage]
            if storage.kind == phase:  # what a backward is handed is autograd's
                self._tell("free", storage.id)

    def _save(self, number: int, node: fx.Node, value: int, module: str, reader: Call) -> None:
        index, dtype = len(self.saved), str(node.meta["val"].dtype).removeprefix("torch.")
        forced = partitioning.should_recompute(node)
        self.saved.append(Saved(index, value, True, module, dtype=dtype, forced=forced))
        self._tell("pack", index)
        self._asked.setdefault((number, reader.node.name), []).append(index)
        self._of_value.setdefault(value, []).append(index)


def ordered_backward(joint: Joint) -> list[Call]:
    """The calls of the backward in the order in which they run: what rests on gradients in the order of the
    joint graph, everything else where it is first read.
    """
    calls = [call for call in joint.calls if not call.forward]
    maker = {key: call for call in calls for key in call.writes}
    return lazily(
        sorted(calls, key=lambda call: call.node.name not in joint.after_tangents),
        lambda call: [maker[key] for key in call.reads if key in maker],
        lambda call: joint.place[call.node.name],
    )


def module_of(call: Call) -> str:
    """Qualified name of the module in which a call was made."""
    stack = call.node.meta.get("nn_module_stack") or call.node.meta.get("fwd_nn_module_stack") or {}
    names = [entry[0] if isinstance(entry, tuple) else str(entry) for entry in stack.values()]
    name = re.sub(r"^L\['\w+'\]|^L__self__", "", str(names[-1]) if names else "")  # forward's first argument
    return name.replace("._modules['", ".").replace("']", "").lstrip("._")
