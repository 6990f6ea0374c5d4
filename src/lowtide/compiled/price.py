"""What a candidate cut of a joint graph takes and costs, known before anything runs.

Calls are timed by themselves; where one kernel takes several, it counts what each adds (`kernel_costs`). No
kernel of a candidate is compiled for that.
What the two halves of a cut allocate is read off what their backend runs (`lowtide.compiled.lower`).
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from lowtide import accelerator
from lowtide.compiled.cut import Halves
from lowtide.compiled.joint import CallCost, Joint, JointCall, Key, describe
from lowtide.compiled.lower import Generated, HalfBytes, HalvesBytes, Size, Traffic
from lowtide.compiled.moving import Way, arriving_bytes
from lowtide.compiled.steps import Step, step_of
from lowtide.compiled.timeline import GraphCall, Moment, Timeline
from lowtide.compiled.vector_costs import kernel_costs
from lowtide.plan import make
from lowtide.plan.data import Decision, Offload, Plan
from lowtide.private import OpOverload, inductor, partitioning, tree_leaves
from lowtide.trace.costs.roofline import calibrate
from lowtide.trace.costs.specs import OpSpec, described_call
from lowtide.trace.costs.timing import measure_costs


def room_for_timing(joint: Joint, free_bytes: int = 0) -> int:
    """Bytes that a graph's calls may be timed in, before any of its activations are there.

    Args:
        joint: the graph.
        free_bytes: known to be free; else they are what every budget has room for, the largest call and all
            that is returned.
    """
    returned = {joint.key_of.get(node) for node in joint.outputs[1] if isinstance(node, fx.Node)}
    least = sum(joint.bytes[key] for key in returned if key is not None)
    return max([free_bytes, least, *(joint.bytes_at(call, joint.size) for call in joint.calls)])


def costs_of(
    joint: Joint, time_budget: float = 0.7, memory_limit_bytes: int | None = None
) -> dict[str, CallCost]:
    """A `CallCost` for every call of a graph, by the name of its node. Equal calls that are no part of a
    generated kernel are timed once, on made-up inputs.

    Args:
        joint: the graph.
        time_budget: seconds.
        memory_limit_bytes: the most that the timing may take, scratch of single calls aside.
    """
    found: dict[str, CallCost] = {}
    specs: dict[str, OpSpec] = {}
    keys: dict[str, str] = {}  # of calls that no generated kernel takes
    inlined: dict[str, dict[str, float]] = {}
    for call in joint.calls:
        name, spec = call.node.name, spec_of(call.node, joint.size)
        inlined[name] = {one.name: _within(one, joint.size) for one in call.inlined}
        if spec is None:
            found[name] = CallCost(0.0, 0, parts=inlined[name])
        elif joint.fusible is not None and joint.fusible(call.node):
            parts = inlined[name] | {name: _within(call.node, joint.size)}
            moving = _moving_seconds(joint, call, memory_limit_bytes)
            found[name] = CallCost(moving + sum(parts.values()), 0, parts=parts)
        else:
            keys[name] = repr(spec)
            specs.setdefault(keys[name], spec)
    measured = measure_costs(specs, time_budget=time_budget, memory_limit_bytes=memory_limit_bytes)
    for call in joint.calls:
        if call.node.name in keys:
            own = measured[keys[call.node.name]]
            here = _device_of(call.node).type == joint.device.type
            scratch = own.scratch_bytes if here else 0
            surplus = own.surplus_bytes if here and len(call.writes) == 1 else 0
            parts = inlined[call.node.name] | {call.node.name: own.seconds}
            found[call.node.name] = CallCost(own.seconds, scratch, surplus, parts)
    return found


def _within(node: fx.Node, size_of: Size) -> float:
    """What an element-wise call adds to a kernel that has its inputs: what a CPU computes for it. Elsewhere
    it adds nothing: such calls take the time of their traffic, beside which a GPU computes.
    """
    value, packet = node.meta.get("val"), getattr(node.target, "overloadpacket", None)
    if not isinstance(value, torch.Tensor) or value.device.type != "cpu" or packet is None:
        return 0.0
    name = packet.__name__
    power = node.args[1] if name == "pow" else None
    if not value.is_floating_point() or (isinstance(power, int | float) and float(power).is_integer()):
        return 0.0  # whole powers are products
    return math.prod(map(size_of, value.shape)) * kernel_costs().functions.get(name, 0.0)


def _device_of(node: fx.Node) -> torch.device:
    """What a call runs on."""
    return partitioning.device_of([node, *node.all_input_nodes])


def _moving_seconds(joint: Joint, call: JointCall, memory_limit_bytes: int | None) -> float:
    """Time of a generated kernel's traffic."""
    moved = sum(joint.bytes[key] for key in (*call.reads, *call.writes))
    machine = calibrate(_device_of(call.node), memory_limit_bytes=memory_limit_bytes)
    return moved / machine.bytes_per_second


def spec_of(node: fx.Node, size_of: Size = partitioning.hint) -> OpSpec | None:
    """A call without its tensors; ``None`` for what is no operation (a size, a region of its own)."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return None
    args, kwargs = describe(node)
    value = node.meta.get("val")
    known = {address for address in map(partitioning.storage_of, _leaves((args, kwargs))) if address}
    fresh = {
        partitioning.storage_of(one): size_of(one.untyped_storage().nbytes())
        for one in _leaves(value)
        if partitioning.storage_of(one) not in known and partitioning.storage_of(one) is not None
    }
    return described_call(node.target, args, kwargs, size_of, sum(fresh.values()))


def _leaves(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


# ---- of a half ------------------------------------------------------------------------------------


def half_seconds(
    half: fx.GraphModule,
    traffic: Traffic,
    parts: Mapping[str, float],
    device: str,
    memory_limit_bytes: int | None = None,
) -> float:
    """Time of a half: what its calls compute, and what its generated kernels move.

    Args:
        half: forward or backward.
        traffic: of its generated kernels.
        parts: names of nodes -> what they take, of a fused one without its traffic.
        device: where it runs.
        memory_limit_bytes: the most that measuring the device may take, where nobody has.
    """
    calls = [node.name for node in half.graph.nodes if node.op == "call_function"]  # an input has its maker's
    seconds = sum(parts.get(name, 0.0) for name in calls)
    if traffic.bytes:
        machine = calibrate(device, memory_limit_bytes=memory_limit_bytes)
        seconds += traffic.bytes / machine.bytes_per_second
    if (traffic.masks_written or traffic.masks_read) and torch.device(device).type == "cpu":
        costs = kernel_costs()
        seconds += traffic.masks_written * costs.mask_written + traffic.masks_read * costs.mask_read
    return seconds


def parts_of(costs: Mapping[str, CallCost]) -> dict[str, float]:
    """Seconds of every node that these calls compute, by name; a fused one's traffic is not in them."""
    return {name: seconds for cost in costs.values() for name, seconds in cost.parts.items()}


# ---- halves that run call by call ------------------------------------------------------------------


def memory_by_call(
    module: fx.GraphModule,
    device: torch.device,
    lent: Collection[str],
    scratch: Callable[[fx.Node], int] = lambda node: 0,
    size_of: Callable[[Any], int] = partitioning.hint,
    surplus: Mapping[str, int] = MappingProxyType({}),
) -> HalfBytes:
    """Live bytes of ``module`` run call by call.

    Args:
        module: forward or backward.
        device: whose memory counts.
        lent: names of inputs that are live anyway, before and after: parameters, the user's tensors.
        scratch: bytes that a call takes beyond its results while it runs.
        size_of: a size as a number, where the graph leaves it open.
        surplus: names of nodes -> what their storages take beyond what the graph says.
    """
    nodes = list(module.graph.nodes)
    readers = {node: len(node.users) for node in nodes}  # that are still to run
    holders: Counter[int] = Counter()
    size: dict[int, int] = {}
    resident: set[int] = set()
    live = 0

    def take(node: fx.Node) -> None:
        nonlocal live
        for storage, count in _storages(node.meta.get("val"), size_of, device).items():
            if storage not in resident:
                if not holders[storage]:
                    size[storage] = count + surplus.get(node.name, 0)
                    live += size[storage]
                holders[storage] += 1

    def let_go(node: fx.Node) -> None:
        nonlocal live
        for storage in _storages(node.meta.get("val"), size_of, device):
            if storage not in resident:
                holders[storage] -= 1
                if not holders[storage]:
                    live -= size[storage]

    given = [node for node in nodes if node.op == "placeholder"]
    for node in given:
        if node.name in lent:
            resident.update(_storages(node.meta.get("val"), size_of, device))
    for node in given:
        take(node)
    peak = live
    for node in nodes:
        if node.op == "output":
            break
        if node.op in ("call_function", "get_attr"):
            live += arriving_bytes(node.target, node.args)
            take(node)
            peak = max(peak, live + (scratch(node) if node.op == "call_function" else 0))
        for source in node.all_input_nodes:
            readers[source] -= 1
            if not readers[source]:
                let_go(source)
        if not node.users:
            let_go(node)
    return HalfBytes(peak, live)


def _storages(value: Any, size_of: Callable[[Any], int], device: torch.device) -> dict[int, int]:
    found: dict[int, int] = {}
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor) and accelerator.is_on(leaf, device):
            address = partitioning.storage_of(leaf)
            if address is not None:
                found[address] = size_of(leaf.untyped_storage().nbytes())
    return found


class ByCall:
    """What halves do to memory that run call by call.

    Args:
        joint: the graph.
        costs: of its calls, by the names of their nodes.
        halves: forward and backward.
    """

    priced = True

    def __init__(self, joint: Joint, costs: Mapping[str, CallCost], halves: Halves) -> None:
        self._joint, self._costs, self._halves = joint, costs, halves
        self._calls = {call.node.name: call for call in joint.calls}

    def __call__(self, size_of: Size, lent: Collection[Key] | None = None, /) -> tuple[HalfBytes, HalfBytes]:
        joint, calls, (forward, backward) = self._joint, self._calls, self._halves

        def at(count: int, call: JointCall) -> int:
            if size_of is joint.size:
                return count
            here, there = joint.bytes_at(call, joint.size), joint.bytes_at(call, size_of)
            return -(-count * there // here) if here else count

        def scratch(node: fx.Node) -> int:
            cost = self._costs.get(node.name)
            return at(cost.scratch_bytes, calls[node.name]) if cost else 0

        surplus = {
            calls[name].writes[0]: at(cost.surplus_bytes, calls[name])
            for name, cost in self._costs.items()
            if cost.surplus_bytes
        }
        handed = {node.name for node in backward.graph.nodes}
        returned = {joint.key_of.get(node) for node in joint.outputs[0] if isinstance(node, fx.Node)}
        not_handed = returned.difference(handed, lent or ())
        loss = sum(count for key, count in surplus.items() if key in not_handed)
        first = memory_by_call(forward, joint.device, joint.inputs_in(), scratch, size_of, surplus)
        second = memory_by_call(backward, joint.device, joint.inputs_in(lent), scratch, size_of, surplus)
        return first, replace(second, peak_bytes=second.peak_bytes + loss)


# ---- candidate cuts -------------------------------------------------------------------------------

_NO_MOVES: Mapping[Key, Decision] = MappingProxyType({})


@dataclass(frozen=True, eq=False)
class CandidateCut:
    """A joint graph cut in two.

    Attributes:
        way: how it is cut.
        halves: forward and backward.
        saved_bytes: the storages that forward hands to backward -> bytes, inputs of the graph among them.
        code: what the backend runs for the halves.
        at: what the halves do to memory, for sizes as numbers.
        size: those at hand.
        seconds_of: both halves, from what they do to memory.
    """

    way: Way
    halves: Halves
    saved_bytes: dict[Key, int]
    code: ByCall | Generated
    at: HalvesBytes
    size: Size
    seconds_of: Callable[[tuple[HalfBytes, HalfBytes]], float]

    @functools.cached_property
    def seconds(self) -> float:
        """Forecast of both halves' time."""
        return self.seconds_of(self.at(self.size))

    @property
    def copied_bytes(self) -> int:
        """Bytes of copies in another layout that are handed over in place of the graph's inputs."""
        return sum(self.at(self.size)[0].copied.values())

    @property
    def forward_bytes(self) -> int:
        """The most live bytes while forward runs, above what was live."""
        return self.at(self.size)[0].peak_bytes

    def backward_bytes(self, lent: frozenset[Key] | None = None) -> int:
        """The most live bytes while backward runs, what it was handed included.

        Args:
            lent: storages that others hold to its end, which are not counted; by default the graph's inputs.
        """
        return self.at(self.size, lent)[1].peak_bytes


class CandidateCuts:
    """The candidate cuts of a joint graph. Each is lowered and read when it is first asked what it takes.

    Args:
        joint: the graph.
        options: Inductor's settings; ``None`` where graphs run call by call.
        free_bytes: as of `room_for_timing`.

    Attributes:
        device: whose memory counts.
    """

    def __init__(self, joint: Joint, options: dict[str, object] | None, free_bytes: int = 0) -> None:
        self.joint, self.options = joint, options
        self._room = room_for_timing(joint, free_bytes)
        self.device = str(joint.device)
        self._runs_on = str(partitioning.device_of(joint.nodes))
        self._known_scratch: dict[str, int] = {}
        self._found: dict[Way, CandidateCut] = {}
        self._by_saved: dict[Way, CandidateCut] = {}

    def timeline_alone(self, resident_bytes: int = 0) -> Timeline:
        """The step that is this graph, whose backward is the last to hold the gradients that it is given.

        Args:
            resident_bytes: what is resident beside what the graph allocates.
        """
        joint = self.joint
        # autograd makes zeros for outputs without a gradient: all tangents are live when backward begins
        tangents = sorted({key for node in joint.tangents if (key := joint.key_of.get(node))})
        loss = min(tangents, key=joint.bytes.__getitem__, default="")  # the least one
        lies = {key: number for number, key in enumerate(tangents)}
        backward = Moment("backward", 0, resident_bytes, alive=frozenset(lies.values()), own=lies)
        calls, moments = [GraphCall(0, self, lies=lies)], [Moment("forward", 0, resident_bytes), backward]
        return Timeline(self.device, resident_bytes, calls, moments, frozenset(tangents) - {loss})

    @property
    def priced(self) -> list[CandidateCut]:
        """The candidates whose halves were lowered, so that their bytes and seconds are known."""
        return [one for one in self._by_saved.values() if one.code.priced]

    @functools.cached_property
    def costs(self) -> dict[str, CallCost]:
        """Of its calls, timed when they are first asked for."""
        return costs_of(self.joint, memory_limit_bytes=self._room)

    @functools.cached_property
    def _step(self) -> Step:
        return step_of([self.joint], [self.costs], self.timeline_alone())

    @functools.cached_property
    def plain(self) -> CandidateCut:
        """The cut of `torch.compile` itself."""
        return self.candidate(None)

    @functools.cached_property
    def smallest(self) -> frozenset[Key]:
        """What is stored where the graph alone takes the least memory."""
        return frozenset(self._step.keys_of(make(self._step.graph, None, progress=False).stored, 0))

    def price_extremes(self) -> None:
        """Price the cut of `torch.compile`, the smallest one, and that which stores all that backward
        reads.
        """
        everything = make(self._step.graph, policy="keep_all", progress=False)
        for stored in (None, self.smallest, frozenset(self._step.keys_of(everything.stored, 0))):
            one = self.candidate(stored)
            one.at(one.size)

    def of(self, plan: Plan, step: Step, number: int) -> CandidateCut:
        """The cut that a plan of a step asks for in the call of this ``number``."""
        names = {value: key for (call, key), value in step.value_of.items() if call == number}
        moves = {names[move.value]: move.decision for move in plan.moves}
        return self.candidate(frozenset(step.keys_of(plan.stored, number)).union(moves), moves, plan)

    def candidate(
        self,
        stored: frozenset[Key] | None,
        moves: Mapping[Key, Decision] = _NO_MOVES,
        plan: Plan | None = None,
    ) -> CandidateCut:
        """The candidate that stores these storages; with ``None`` the cut of `torch.compile` itself.

        Args:
            stored: storages.
            moves: those that wait elsewhere.
            plan: where values wait elsewhere: says for how many at once there is room, and what they cost.
        """
        tiers = tuple((key, how) for key, how in sorted(moves.items()) if isinstance(how, Offload))
        way = Way(stored, tiers, plan.window_bytes if plan and tiers else 0)
        if way not in self._found:
            joint = self.joint
            halves = Way(stored).halves(joint)
            saved_bytes = saved_by(joint, halves[0])
            # sets that differ in what backward never reads are one cut
            same = replace(way, stored=frozenset(saved_bytes))
            if same not in self._by_saved:
                if tiers:
                    halves = way.halves(joint)
                more = plan.transfer_seconds if plan and tiers else 0.0
                code, seconds = self._code(halves, stored), functools.partial(self._seconds, halves, more)
                at: HalvesBytes = functools.cache(code)
                self._by_saved[same] = CandidateCut(way, halves, saved_bytes, code, at, joint.size, seconds)
            self._found[way] = self._by_saved[same]
        return self._found[way]

    def _code(self, halves: Halves, stored: frozenset[Key] | None) -> ByCall | Generated:
        if self.options is None:
            return ByCall(self.joint, self.costs, halves)
        more = inductor.UNVECTORISED if stored is None else {}  # lowered where a share asks for its peak
        return Generated(self.joint, {**self.options, **more}, self._known_scratch, halves)

    def _seconds(self, halves: Halves, more: float, memory: tuple[HalfBytes, HalfBytes]) -> float:
        """Seconds of two halves, by the traffic of their kernels, plus ``more`` seconds for moves."""
        both, parts = zip(halves, memory, strict=True), parts_of(self.costs)
        return more + sum(
            half_seconds(half, seen.traffic, parts, self._runs_on, self._room) for half, seen in both
        )

    def likely_seconds(self, candidate: CandidateCut) -> float:
        """Seconds of a cut whose kernels have not been generated: of its single calls, and of the masks that
        forward hands to backward. To be compared with those of other cuts of the graph.
        """
        alone = {name: cost.seconds for name, cost in self.costs.items()}
        dtypes = {key: self.joint.root[key].meta["val"].dtype for key in candidate.saved_bytes}
        masks = sum(count for key, count in candidate.saved_bytes.items() if dtypes[key] == torch.bool)
        both = zip(candidate.halves, (Traffic(masks_written=masks), Traffic(masks_read=masks)), strict=True)
        return sum(half_seconds(half, traffic, alone, self._runs_on, self._room) for half, traffic in both)

    def zeros_bytes(self, candidate: CandidateCut, zeros: frozenset[Key]) -> int:
        """What the gradients that autograd makes up for outputs beside the loss add to a cut's peak."""
        inputs = {self.joint.key_of[node] for node in self.joint.primals if node in self.joint.key_of}
        without = candidate.backward_bytes(frozenset(inputs) | zeros)
        return max(0, candidate.backward_bytes() - max(without, candidate.forward_bytes))


def saved_by(joint: Joint, forward: fx.GraphModule) -> dict[Key, int]:
    """The storages that a forward hands to its backward -> bytes."""
    output = next(iter(reversed(forward.graph.nodes)))
    saved = [joint.names.get(getattr(node, "name", "")) for node in output.args[0][joint.forward_outputs :]]
    keys = dict.fromkeys(joint.key_of[node] for node in saved if node is not None and node in joint.key_of)
    return {key: joint.bytes[key] for key in keys}
