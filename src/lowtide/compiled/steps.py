"""Write all compiled graphs of a step down as one `StepGraph`.

Forwards and backwards stand in the order in which they ran; between them stands what ran outside. The graph's
live bytes are those of the recorded step at every moment. What is live at a moment is one storage, written
anew for each; a storage that goes in or out of graphs and dies within the step is written down by itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from torch import fx

from lowtide.compiled.joint import CallCost, Joint, JointCall, Key, lazily
from lowtide.compiled.timeline import Moment, Timeline
from lowtide.graph import GAP_OP, Event, EventKind, Operation, Saved, StepGraph, Storage, Value
from lowtide.private import partitioning

Phase = Literal["forward", "backward"]

NOTHING = CallCost(0.0, 0)

Place = tuple[int, Key]
"""A storage of a step: the graph's number and the storage's name in it."""


@dataclass
class Step:
    """A step graph, and which of its values are whose.

    Attributes:
        graph: for the planner.
        value_of: storage that a call makes -> value.
        ends: of each moment, how many events there are up to its end.
    """

    graph: StepGraph
    value_of: dict[Place, int] = field(default_factory=dict)
    ends: list[int] = field(default_factory=list)

    def keys_of(self, values: frozenset[int], number: int) -> list[Key]:
        """The storages of one graph that a plan stores."""
        return [key for (k, key), value in self.value_of.items() if k == number and value in values]


def step_of(joints: Sequence[Joint], costs: Sequence[Mapping[str, CallCost]], timeline: Timeline) -> Step:
    """Write down a step.

    Args:
        joints: its graphs, in the order of their forwards.
        costs: of each graph's calls, by the names of their nodes.
        timeline: what happens in which order, and what is live meanwhile.
    """
    shared = _Shared(joints, costs, timeline)
    levels = [moment.bytes - shared.bytes_at(moment) for moment in timeline.moments]
    writer = _Writer(joints, costs, shared, min(levels))
    phase: Phase = "forward"
    ends: list[int] = []
    for moment, level in zip(timeline.moments, levels, strict=True):
        if moment.kind != "gap":
            phase = moment.kind
        writer.begin(moment, level, phase)
        if moment.call is not None:
            writer.half(moment.call, phase)
        ends.append(len(writer.events))
    graph = StepGraph(
        tuple(writer.operations),
        tuple(writer.storages),
        tuple(writer.values),
        tuple(writer.saved),
        tuple(writer.events),
        resident_bytes=writer.least,
        plain_seconds=sum(op.seconds for op in writer.operations),
        device=timeline.device,
    )
    return Step(graph, writer.made, ends)


class _Shared:
    """The storages that go in and out of graphs and die within the step: results of graphs, and tensors
    that a backward is handed and that nobody else holds when it has ended. Every other storage that goes in
    or out is live throughout the step.

    Args:
        joints, costs, timeline: as of `step_of`.
    """

    def __init__(
        self, joints: Sequence[Joint], costs: Sequence[Mapping[str, CallCost]], timeline: Timeline
    ) -> None:
        self._joints, self._costs, self._timeline = joints, costs, timeline
        self.makes = [
            {key: call.node.name for call in joint.calls if call.forward for key in call.writes}
            for joint in joints
        ]

    @cached_property
    def sizes(self) -> dict[int, int]:
        """Their numbers -> bytes."""
        found: dict[int, int] = {}
        for call, joint, makes, costs in zip(
            self._timeline.calls, self._joints, self.makes, self._costs, strict=True
        ):
            for key in call.lies.keys() & makes.keys():
                found[call.lies[key]] = joint.bytes[key] + costs[makes[key]].surplus_bytes
        for moment in self._timeline.moments:
            for place, number in self.own(moment).items():
                found.setdefault(number, self._joints[place[0]].bytes[place[1]])
        return found

    def own(self, moment: Moment) -> dict[Place, int]:
        """What a backward is the last to hold, and its numbers."""
        return {} if moment.call is None else {(moment.call, key): n for key, n in moment.own.items()}

    def number_of(self, place: Place) -> int | None:
        """The number of a shared storage; ``None`` for any other."""
        number = self._timeline.calls[place[0]].lies.get(place[1])
        return number if number in self.sizes else None

    def inputs_of(self, moment: Moment) -> list[Place]:
        """The shared storages among the inputs of a moment's graph."""
        if moment.call is None:
            return []
        joint = self._joints[moment.call]
        nodes = joint.primals if moment.kind == "forward" else joint.tangents
        keys = dict.fromkeys(joint.key_of[node] for node in nodes if node in joint.key_of)
        return [place for key in keys if self.number_of(place := (moment.call, key)) is not None]

    def bytes_at(self, moment: Moment) -> int:
        """How many of a moment's bytes are theirs."""
        there = moment.alive.difference(self.own(moment).values())
        return sum(size for number, size in self.sizes.items() if number in there)


class _Writer:
    """The tables of a step graph, while they grow.

    Args:
        joints, costs: as of `step_of`.
        shared: storages that go in and out of graphs.
        least: bytes that are live throughout.

    Attributes:
        made: storage that a call makes -> value.
    """

    def __init__(
        self, joints: Sequence[Joint], costs: Sequence[Mapping[str, CallCost]], shared: _Shared, least: int
    ) -> None:
        self.joints, self.costs, self.shared, self.least = joints, costs, shared, least
        self.operations: list[Operation] = []
        self.storages: list[Storage] = []
        self.values: list[Value] = []
        self.saved: list[Saved] = []
        self.events: list[Event] = []
        self.made: dict[Place, int] = {}
        self._of: dict[Place, int] = {}
        self._live: int | None = None  # the storage of what is live at this moment
        self._there: dict[int, int] = {}  # shared storages that are there: number -> storage
        self._ending: dict[Key, int] = {}  # those that end within the half that begins: name -> storage
        self._asked: dict[tuple[int, str], list[int]] = {}  # reader -> saved tensors
        self._of_value: dict[int, list[int]] = {}  # saved tensors that backward has not asked for yet

    def begin(self, moment: Moment, level: int, phase: Phase) -> None:
        """A moment begins.

        Args:
            moment: which.
            level: the bytes that are live at it, without shared storages.
            phase: the operations' of this moment.
        """
        if self._live is not None:
            self._event("free", self._live)
        own, reads = self.shared.own(moment), self._reads(moment)
        self._end(number for number in [*self._there] if number not in moment.alive)
        # what this forward has made, or no call reads, is live only where the plan stores it
        self._end(
            number
            for place, number in own.items()
            if number in self._there and (place in self.made or place[1] not in reads)
        )
        index = len(self.operations)
        live = self._new(level - self.least, phase, index)
        self._live = self.values[live].storage
        writes = [live, *(self._enter(place, phase, index) for place in self.shared.inputs_of(moment))]
        self._operation(GAP_OP, (), tuple(writes), phase, reason=GAP_OP)
        self._ending = {
            key: self._there.pop(number) for (_, key), number in own.items() if number in self._there
        }
        for key in self._ending.keys() - reads:
            self._event("free", self._ending.pop(key))

    def _reads(self, moment: Moment) -> set[Key]:
        """The storages that the calls of a moment's half read or return."""
        if moment.call is None:
            return set()
        joint, forward = self.joints[moment.call], moment.kind == "forward"
        return {key for call in joint.calls if call.forward == forward for key in call.reads} | set(
            joint.outputs_of(forward)
        )

    def _end(self, numbers: Iterable[int]) -> None:
        """End these shared storages: from here on they are there only as far as a plan stores them."""
        for number in list(numbers):
            self._event("free", self._there.pop(number))

    def _enter(self, place: Place, phase: Phase, maker: int) -> int:
        """The value of a shared storage for the graph that is given it. A graph cannot compute again what
        another one has made, so that is a version of its own.
        """
        number = self.shared.number_of(place)
        assert number is not None
        if number in self._there:
            version = sum(value.storage == self._there[number] for value in self.values)
            value = len(self.values)
            self.values.append(Value(value, self._there[number], version, maker))
        else:
            value = self._new(self.shared.sizes[number], phase, maker)
            self._there[number] = self.values[value].storage
        self._of[place] = value
        return value

    def _new(self, size: int, phase: Phase, maker: int, node: fx.Node | None = None) -> int:
        """A value in a storage of its own, which the result of this node fills."""
        value, shape, dtype = len(self.values), (), ""
        if node is not None:
            shape = tuple(partitioning.hint(one) for one in node.meta["val"].shape)
            dtype = str(node.meta["val"].dtype).removeprefix("torch.")
        self.values.append(Value(value, len(self.storages), 0, maker, shape=shape, dtype=dtype))
        self.storages.append(Storage(len(self.storages), size, phase, maker))
        return value

    def _operation(
        self,
        name: str,
        reads: tuple[int, ...],
        writes: tuple[int, ...],
        phase: Phase,
        cost: CallCost = NOTHING,
        module: str = "",
        reason: str = "",
        source: str = "",
    ) -> None:
        """The operation that the next event runs."""
        index = len(self.operations)
        self.operations.append(
            Operation(
                index,
                name,
                reads,
                writes,
                phase,
                module,
                replayable=not reason,
                reason=reason,
                seconds=cost.seconds,
                scratch_bytes=cost.scratch_bytes,
                source=source,
            )
        )
        self._event("op", index)

    def half(self, number: int, phase: Phase) -> None:
        """A graph's forward or backward."""
        joint, forward = self.joints[number], phase == "forward"
        calls = [call for call in joint.calls if call.forward] if forward else ordered_backward(joint)
        returned = joint.outputs_of(forward)
        ends: dict[int, list[Key]] = {}
        for key, at in {
            key: at for at, call in enumerate(calls) for key in (*call.reads, *call.writes)
        }.items():
            if key not in returned:
                ends.setdefault(at, []).append(key)
        own: dict[Key, int] = {**self._ending}  # storages that end here
        for at, call in enumerate(calls):
            asked = self._asked.get((number, call.node.name), [])
            for one in asked:
                self._event("unpack", one)
                self._event("release", *self._of_value.pop(self.saved[one].value, []))
            cost, module = self.costs[number][call.node.name], module_of(call)
            index = len(self.operations)
            reads = tuple(self._value(number, key) for key in call.reads)
            over = joint.written_over(call)
            made = {
                key: self._new(
                    joint.bytes[key] + cost.surplus_bytes, phase, index + (key in over), joint.root[key]
                )
                for key in call.writes
            }
            name, ended = str(call.node.target), ends.get(at, ())
            wrote = tuple(made[key] for key in call.writes if key not in over)
            source = line_of(call) if forward else ""
            self._operation(name, reads, wrote, phase, cost, module, call.reason, source)
            self._event("done", *asked)
            if over:  # what it reads makes room first
                self._event("free", *(own.pop(key) for key in ended if key in own))
                self._operation(name, (), tuple(made[key] for key in over), phase, module=module)
            for key, value in made.items():
                self._of[number, key] = self.made[number, key] = value
                own[key] = self.values[value].storage
            for key in call.writes if forward else ():
                for reader in joint.readers.get(key, ()):
                    self._save(number, joint.root[key], self._of[number, key], module, reader)
            self._event("free", *(own.pop(key) for key in ended if key in own))
        for key, storage in own.items():  # what is returned
            other = self.shared.number_of((number, key)) if forward else None
            if other is None:  # counts as resident
                self._event("free", storage)
            else:
                self._there[other] = storage

    def _event(self, kind: EventKind, *numbers: int) -> None:
        self.events += [Event(kind, number) for number in numbers]

    def _value(self, number: int, key: Key) -> int:
        """The value of a storage; one that no call made and nobody was given is live throughout."""
        place = (number, key)
        if place not in self._of:
            storage, self._of[place] = len(self.storages), len(self.values)
            self.storages.append(Storage(storage, 0, "input", None, key))  # it counts as resident
            self.values.append(Value(self._of[place], storage, 0, None))
        return self._of[place]

    def _save(self, number: int, node: fx.Node, value: int, module: str, reader: JointCall) -> None:
        index, dtype = len(self.saved), str(node.meta["val"].dtype).removeprefix("torch.")
        forced = partitioning.should_recompute(node)
        self.saved.append(Saved(index, value, True, module, dtype=dtype, forced=forced))
        self._event("pack", index)
        self._asked.setdefault((number, reader.node.name), []).append(index)
        self._of_value.setdefault(value, []).append(index)


def ordered_backward(joint: Joint) -> list[JointCall]:
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


def module_of(call: JointCall) -> str:
    """Qualified name of the module in which a call was made."""
    stack = call.node.meta.get("nn_module_stack") or call.node.meta.get("fwd_nn_module_stack") or {}
    names = [entry[0] if isinstance(entry, tuple) else str(entry) for entry in stack.values()]
    name = re.sub(r"^L\['\w+'\]|^L__self__", "", str(names[-1]) if names else "")  # forward's first argument
    return name.replace("._modules['", ".").replace("']", "").lstrip("._")


def line_of(call: JointCall) -> str:
    """The innermost line of user code that made a call, as `Operation.source` has it; empty where Dynamo
    noted none.
    """
    lines = re.findall(r'File "([^"]+)", line (\d+)', call.node.meta.get("stack_trace") or "")
    users = [(file.replace("\\", "/"), line) for file, line in lines]
    users = [(file, line) for file, line in users if "/torch/" not in file]
    if not users:
        return ""
    file, line = users[-1]
    _, installed, package = file.rpartition("/site-packages/")
    return f"{package if installed else file.rsplit('/', 1)[-1]}:{line}"
