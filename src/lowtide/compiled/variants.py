"""Ways to cut one joint graph, each with what it holds, takes and costs, known before anything runs."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import fx

from lowtide.compiled.coding import coded
from lowtide.compiled.costs import Size, costs_of, half_seconds, parts_of, room_for_timing
from lowtide.compiled.cut import Halves, cut
from lowtide.compiled.joint import Joint, Key
from lowtide.compiled.liveness import Profile, Traffic
from lowtide.compiled.moving import moved
from lowtide.compiled.prediction import Predict, Profiles, predict_calls, predict_generated
from lowtide.compiled.recording import Call, Moment, Timeline
from lowtide.compiled.steps import Step, step_of
from lowtide.plan import make
from lowtide.plan.data import Compress, Decision, Offload, Plan
from lowtide.private import partitioning

_NO_MOVES: Mapping[Key, Decision] = MappingProxyType({})


@dataclass(frozen=True, eq=False)
class Variant:
    """A joint graph cut in two.

    Attributes:
        stored: storages that forward hands to backward; ``None`` for the cut of `torch.compile` itself.
        halves: forward and backward.
        kept: the storages that are handed over -> bytes, inputs of the graph among them.
        at: what the halves do to memory, for sizes as numbers.
        size: those at hand.
        seconds: forecast of both.
    """

    stored: frozenset[Key] | None
    halves: Halves
    kept: dict[Key, int]
    at: Profiles
    size: Size
    seconds: float

    @property
    def copied(self) -> int:
        """Bytes of copies in another layout that are handed over in place of the graph's inputs."""
        return sum(self.at(self.size)[0].copied.values())

    @property
    def forward_bytes(self) -> int:
        """The most live bytes while forward runs, above what stood."""
        return self.at(self.size)[0].peak_bytes

    def backward_bytes(self, lent: frozenset[Key] | None = None) -> int:
        """The most live bytes while backward runs, what it was handed included.

        Args:
            lent: storages that others hold to its end, which are not counted; by default the graph's inputs.
        """
        return self.at(self.size, lent)[1].peak_bytes


class Menu:
    """The ways to cut a joint graph that were looked at.

    Args:
        joint: the graph.
        options: Inductor's settings; ``None`` where graphs run call by call.
        standing_bytes: what stands beside what the graph allocates, where the graph is a whole step;
            ``None`` where it is a part of one, and its inputs and outputs are counted outside.
        budget: that of a whole step.

    Attributes:
        device: of its first tensor.
        timeline: of a step that is the graph alone.
        step: the same for the planner.
    """

    def __init__(
        self,
        joint: Joint,
        options: dict[str, object] | None,
        standing_bytes: int | None = None,
        budget: str | int | None = None,
    ) -> None:
        self.joint, self.options, self.standing_bytes = joint, options, standing_bytes
        self._room = room_for_timing(joint, budget, standing_bytes or 0)
        self.costs = costs_of(joint, memory_limit_bytes=self._room)
        self._parts = parts_of(self.costs)
        values = (node.meta["val"] for node in joint.primals)
        self.device = str(next((value.device for value in values if hasattr(value, "device")), "cpu"))
        # autograd makes zeros for outputs without a gradient: all tangents stand when backward begins
        tangents = sorted({key for node in joint.tangents if (key := joint.key_of.get(node))})
        loss = min(tangents, key=joint.bytes.__getitem__, default="")  # the least one
        self._zeros = frozenset(tangents) - {loss}
        self.timeline = _alone(self, standing_bytes or 0, tangents)
        self.step = step_of([joint], [self.costs], self.timeline)
        self._predict: Predict = (
            predict_calls(joint, self.costs) if options is None else predict_generated(joint, options)
        )
        self._found: dict[object, Variant] = {}
        self._by_kept: dict[object, Variant] = {}

    @property
    def known(self) -> list[Variant]:
        """Those that were looked at."""
        return list(self._by_kept.values())

    def look(self) -> None:
        """Look at the cut of `torch.compile`, the smallest one, and that which stores all that backward
        reads.
        """
        everything = make(self.step.graph, policy="keep_all", progress=False)
        for stored in (None, self.smallest, frozenset(self.step.stored(everything.stored, 0))):
            self.variant(stored)

    @functools.cached_property
    def smallest(self) -> frozenset[Key]:
        """What is stored where the graph alone takes the least memory."""
        return frozenset(self.step.stored(make(self.step.graph, None, progress=False).stored, 0))

    def zeros_bytes(self, variant: Variant) -> int:
        """What the gradients that autograd makes up for outputs beside the loss add to a cut's peak."""
        inputs = {self.joint.key_of[node] for node in self.joint.primals if node in self.joint.key_of}
        without = variant.backward_bytes(frozenset(inputs) | self._zeros) if self._zeros else 0
        return max(0, variant.backward_bytes() - max(without, variant.forward_bytes)) if self._zeros else 0

    def plain(self) -> Halves:
        """The halves as `torch.compile` cuts them by itself."""
        return partitioning.min_cut(self.joint.module, self.joint.forward_outputs, self.joint.static)

    def of(self, plan: Plan, step: Step, number: int) -> Variant:
        """The cut that a plan of a step asks for in the call of this ``number``."""
        names = {value: key for (call, key), value in step.value_of.items() if call == number}
        moves = {names[move.value]: move.decision for move in plan.moves}
        return self.variant(frozenset(step.stored(plan.stored, number)).union(moves), moves, plan)

    def variant(
        self,
        stored: frozenset[Key] | None,
        moves: Mapping[Key, Decision] = _NO_MOVES,
        plan: Plan | None = None,
    ) -> Variant:
        """The cut that stores these; with ``None`` that of `torch.compile` itself.

        Args:
            stored: storages.
            moves: those that wait in another form, or elsewhere.
            plan: where values wait elsewhere: says for how many at once there is room, and what they cost.
        """
        way = frozenset(moves.items()), plan.window_bytes if plan and moves else 0
        if (stored, way) not in self._found:
            joint = self.joint
            halves = self.plain() if stored is None else cut(joint, stored)
            kept = kept_by(joint, halves[0])
            same = frozenset(kept), way  # sets that differ in what backward never reads are one cut
            if same not in self._by_kept:
                codecs = {key: how.codec for key, how in moves.items() if isinstance(how, Compress)}
                tiers = {key: how for key, how in moves.items() if isinstance(how, Offload)}
                if codecs:
                    halves = coded(*halves, joint.forward_outputs, codecs)
                if tiers:
                    halves = moved(*halves, joint.forward_outputs, tiers, way[1])
                at: Profiles = functools.cache(self._predict(*halves))
                seconds = self.seconds(halves, at(joint.size))
                seconds += plan.transfer_seconds if plan and moves else 0.0
                self._by_kept[same] = Variant(stored, halves, kept, at, joint.size, seconds)
            self._found[stored, way] = self._by_kept[same]
        return self._found[stored, way]

    def seconds(self, halves: Halves, profiles: tuple[Profile, Profile]) -> float:
        """Time of two halves, by what their kernels are given."""
        both = zip(halves, profiles, strict=True)
        return sum(
            half_seconds(half, seen.traffic, self._parts, self.device, self._room) for half, seen in both
        )

    def likely_seconds(self, halves: Halves) -> float:
        """The same by single calls and the masks that are handed over, where nobody has seen the kernels; to
        be compared with other halves of the graph.
        """
        alone = {name: cost.seconds for name, cost in self.costs.items()}
        masks = sum(
            count
            for key, count in kept_by(self.joint, halves[0]).items()
            if self.joint.root[key].meta["val"].dtype == torch.bool
        )
        both = zip(halves, (Traffic(masks_written=masks), Traffic(masks_read=masks)), strict=True)
        return sum(half_seconds(half, traffic, alone, self.device, self._room) for half, traffic in both)


def _alone(menu: Menu, standing: int, tangents: Sequence[Key]) -> Timeline:
    """A step that is one graph alone, whose backward is the last to hold the gradients that it is given."""
    lies = {key: number for number, key in enumerate(tangents)}
    forward = Moment("forward", 0, standing)
    backward = Moment("backward", 0, standing, alive=frozenset(lies.values()), own=lies)
    return Timeline(menu.device, standing, [Call(0, menu, lies=lies)], [forward, backward])


def kept_by(joint: Joint, forward: fx.GraphModule) -> dict[Key, int]:
    """The storages that a forward hands to its backward -> bytes."""
    output = next(iter(reversed(forward.graph.nodes)))
    saved = [joint.names.get(getattr(node, "name", "")) for node in output.args[0][joint.forward_outputs :]]
    keys = dict.fromkeys(joint.key_of[node] for node in saved if node is not None and node in joint.key_of)
    return {key: joint.bytes[key] for key in keys}
