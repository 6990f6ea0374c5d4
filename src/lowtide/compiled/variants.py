"""Ways to cut one joint graph, each with what it holds, takes and costs, known before anything runs."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import fx

from lowtide.compiled.costs import Cost, costs_of, surplus_of
from lowtide.compiled.cut import Halves, cut
from lowtide.compiled.generated import profile_generated
from lowtide.compiled.joint import Joint, Key
from lowtide.compiled.liveness import Profile, profile
from lowtide.compiled.scratch import Bench, Scratch
from lowtide.compiled.steps import Outside, StepBuilder
from lowtide.plan import make
from lowtide.private import inductor, partitioning

_NO_LIMIT = 1 << 62


@dataclass(frozen=True, eq=False)
class Variant:
    """A joint graph cut in two.

    Attributes:
        stored: storages that forward hands to backward; ``None`` for the cut of `torch.compile` itself.
        kept: the storages that are handed over -> bytes, inputs of the graph among them.
        forward_bytes: the most live bytes while forward runs, above what stood.
        backward_bytes: the same for backward, what it was handed included, by whether others hold the graph's
            inputs and its outputs beyond it.
        seconds: forecast of what runs again.
        copied: bytes of copies in another layout that are handed over in place of the graph's inputs.
    """

    stored: frozenset[Key] | None
    kept: dict[Key, int]
    forward_bytes: int
    backward_bytes: dict[tuple[bool, bool], int]
    seconds: float
    copied: int = 0


@dataclass
class Menu:
    """The ways to cut a joint graph that were looked at.

    Args:
        joint: the graph.
        options: Inductor's settings; ``None`` where graphs run call by call.
    """

    joint: Joint
    options: dict[str, object] | None
    costs: list[Cost] = field(init=False)
    found: dict[frozenset[Key] | None, Variant] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        (self.costs,) = costs_of([self.joint])
        self._bench = Bench()
        self._by_kept: dict[frozenset[Key], Variant] = {}
        self._plans: dict[int | None, tuple[frozenset[Key], int]] = {}
        self._step = StepBuilder([self.joint], [self.costs], Outside((0,), (0,))).build()

    @property
    def known(self) -> list[Variant]:
        """Those that were looked at."""
        return list(self._by_kept.values())

    def look(self, between: int) -> None:
        """Look at the cut of `torch.compile`, the smallest one, that which stores all that backward reads,
        and so many between these two.
        """
        self.variant(None)
        least, most = self._planned(None)[1], self._planned(_NO_LIMIT)[1]
        self.variant(self.smallest())
        for number in range(1, between + 1):
            self.variant(self._planned(least + (most - least) * number // (between + 1))[0])
        self.variant(self._planned(_NO_LIMIT)[0])

    def smallest(self) -> frozenset[Key]:
        """What is stored where the graph alone takes the least memory."""
        return self._planned(None)[0]

    def _planned(self, target: int | None) -> tuple[frozenset[Key], int]:
        """What is stored where the graph alone is to take ``target`` bytes, and what it takes so."""
        if target not in self._plans:
            step = self._step
            plan = make(step.graph, target, progress=False)
            self._plans[target] = frozenset(step.stored(plan.stored, 0)), plan.predicted_peak_bytes
        return self._plans[target]

    def variant(self, stored: frozenset[Key] | None) -> Variant:
        """The cut that stores these; with ``None`` that of `torch.compile` itself."""
        if stored not in self.found:
            joint = self.joint
            halves = (
                partitioning.min_cut(joint.module, joint.forward_outputs, joint.static)
                if stored is None
                else cut(joint, stored)
            )
            kept = kept_by(joint, halves[0])
            key = frozenset(kept)  # sets that differ in what backward never reads are one cut
            if key not in self._by_kept:
                self._by_kept[key] = self._made(stored, kept, halves)
            self.found[stored] = self._by_kept[key]
        return self.found[stored]

    def _made(self, stored: frozenset[Key] | None, kept: dict[Key, int], halves: Halves) -> Variant:
        names = {node.name for node in halves[1].graph.nodes if node.op == "call_function"}
        again = [
            cost
            for call, cost in zip(self.joint.calls, self.costs, strict=True)
            if call.forward and call.node.name in names and call.writes
        ]
        first, backward_bytes = self._peaks(halves)
        seconds, copied = sum(cost.seconds for cost in again), sum(first.copied.values())
        return Variant(stored, kept, first.peak_bytes, backward_bytes, seconds, copied)

    def _peaks(self, halves: Halves) -> tuple[Profile, dict[tuple[bool, bool], int]]:
        """Of the forward, and of the backward by what others hold of what it is handed."""
        forward, backward = halves
        joint, size = self.joint, self.joint.size
        static = {joint.primals[at].name for at in joint.static}
        inputs = {node.name for node in joint.primals}
        returned = {joint.key_of.get(node) for node in joint.outputs[0] if isinstance(node, fx.Node)}
        outputs = {node.name for node in joint.nodes if joint.key_of.get(node, "") in returned}
        lent = {
            (one, two): static | (inputs if one else set()) | (outputs - inputs if two else set())
            for one in (False, True)
            for two in (False, True)
        }
        if self.options is None:
            calls = zip(joint.calls, self.costs, strict=True)
            scratch = {call.node.name: cost.scratch_bytes for call, cost in calls}

            def of(node: fx.Node) -> int:
                return scratch.get(node.name, 0)

            more = surplus_of(joint, self.costs)
            return profile(forward, inputs, of, size, more), {
                who: profile(backward, names, of, size, more).peak_bytes for who, names in lent.items()
            }
        text, strides = inductor.generated(forward, False, self.options)
        first = profile_generated(text, forward, inputs, Scratch(self._bench).run(), size)
        donated = inductor.donated_inputs(forward, backward, joint.forward_outputs)
        text, _ = inductor.generated(backward, True, self.options, strides, donated)
        scratch, copied = Scratch(self._bench), first.copied
        return first, {
            who: profile_generated(
                text, backward, names - copied.keys(), scratch.run(), size, strides
            ).peak_bytes
            for who, names in lent.items()
        }


def kept_by(joint: Joint, forward: fx.GraphModule) -> dict[Key, int]:
    """The storages that a forward hands to its backward -> bytes."""
    output = next(iter(reversed(forward.graph.nodes)))
    saved = [joint.names.get(getattr(node, "name", "")) for node in output.args[0][joint.forward_outputs :]]
    keys = dict.fromkeys(joint.key_of[node] for node in saved if node is not None and node in joint.key_of)
    return {key: joint.bytes[key] for key in keys}
