"""What is in memory when: every byte of a step, with what it is and who made it.

In: a step graph, and a plan for it or none. Out: a `Timeline`. A *tick* is one operation that runs, in order:
of the forward, of the backward, or one that a plan runs again. A `Span` is one block of memory from the
tick that allocates it to the tick before which it is gone. At every tick the bytes of the spans add up to
what `lowtide.plan.simulate` says, to the byte.
"""

from __future__ import annotations

import itertools
import math
import re
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lowtide.extensions.moves.simulate import simulate_plan
from lowtide.graph import Saved, StepGraph, Storage
from lowtide.plan.data import Plan, form_and_tier
from lowtide.plan.data.decisions import Compress, Decision, Keep, Recompute
from lowtide.plan.simulate import Simulator
from lowtide.plan.simulate.walk import LiveCopies

KINDS = ("parameter", "optimizer", "gradient", "input", "activation", "recomputed", "moved", "temporary")
"""What a span can be, in the order in which pictures stack them. ``recomputed`` are copies that backward got
by running operations again, ``moved`` what waits encoded or is on its way from or to another place,
``temporary`` everything that lives for a moment: gradients of activations, and the scratch of operations."""

_SHOWN_AS = {"buffer": "parameter", "gathered": "parameter"}
"""Kinds of what exists before the step, where they have another name here."""
_NAMES = {"gathered": "gathered weights"}

Phase = Literal["forward", "backward", "replay"]


class Tick(NamedTuple):
    """One operation that runs.

    Attributes:
        seconds: when it begins, since the step began.
        operation: its name, such as ``aten.addmm``.
        module: qualified name of the module it ran in.
        phase: ``replay`` for one that a plan runs again.
    """

    seconds: float
    operation: str
    module: str
    phase: Phase


class Span(NamedTuple):
    """One block of memory.

    Attributes:
        born: the first tick at which it is there.
        gone: the first tick at which it is not.
        bytes: its size.
        kind: one of `KINDS`.
        module: qualified name of the module that it belongs to.
        name: a parameter's name, or the operation that wrote it.
        form: shape and dtype of what autograd saved there, such as ``8x256x384 float32``.
        decision: what the plan does with it, for what autograd saves: ``kept``, ``recomputed``,
            ``offloaded``, ``compressed`` or ``sharded``; else empty.
    """

    born: int
    gone: int
    bytes: int
    kind: str
    module: str
    name: str
    form: str = ""
    decision: str = ""


@dataclass(frozen=True)
class Timeline:
    """A step as ticks, and everything that is in memory meanwhile.

    Attributes:
        ticks: the operations that run, in order.
        spans: the blocks of memory.
        seconds: length of the step.
    """

    ticks: tuple[Tick, ...]
    spans: tuple[Span, ...]
    seconds: float

    def bytes_by_kind(self) -> NDArray[np.int64]:
        """The most live bytes of each of `KINDS` within each tick: shape (kinds, ticks)."""
        change = np.zeros((len(KINDS), len(self.ticks) + 1), dtype=np.int64)
        for span in self.spans:
            row = KINDS.index(span.kind)
            change[row, span.born] += span.bytes
            change[row, span.gone] -= span.bytes
        return np.cumsum(change, axis=1)[:, :-1]

    def live_bytes(self) -> NDArray[np.int64]:
        """The most live bytes within each tick: shape (ticks,)."""
        return self.bytes_by_kind().sum(axis=0)

    @property
    def peak_tick(self) -> int:
        """The tick at which most is in memory; 0 for a step without operations."""
        return int(np.argmax(self.live_bytes())) if self.ticks else 0

    @property
    def peak_bytes(self) -> int:
        """The most live bytes at any tick."""
        return int(self.live_bytes().max(initial=0))

    def holders(self, tick: int) -> list[Span]:
        """What is in memory at a tick, the largest first."""
        return sorted((s for s in self.spans if s.born <= tick < s.gone), key=lambda s: -s.bytes)


def timeline(graph: StepGraph, plan: Plan | None = None, optimizer_bytes: int = 0) -> Timeline:
    """The step of ``graph`` under ``plan``, or as PyTorch runs it.

    Args:
        graph: the step.
        plan: a plan that was made for it.
        optimizer_bytes: what of the graph's resident bytes is the optimizer's state.

    Raises:
        PlanError: the plan does not fit the graph.
    """
    return _Walker(graph, plan, optimizer_bytes).timeline()


def short(operation: str) -> str:
    """An operation's name without its overload.

    >>> short("aten.addmm.default"), short("fetch")
    ('aten.addmm', 'fetch')
    """
    return ".".join(operation.split(".")[:2])


def in_words(decision: Decision) -> str:
    """What a decision does with a value.

    >>> from lowtide import Chain, Offload
    >>> in_words(Chain(Compress("mask"), Offload("host"))), in_words(Keep())
    ('offloaded', 'kept')
    """
    if isinstance(decision, Keep | Recompute):
        return "kept" if isinstance(decision, Keep) else "recomputed"
    first, tier = form_and_tier(decision)
    return "offloaded" if tier is not None else "compressed" if isinstance(first, Compress) else "sharded"


def form_of(tensor: Saved, bytes_: int) -> str:
    """Shape and dtype of a saved tensor that lies in a storage of so many bytes.

    >>> q = Saved(0, 0, True, shape=(8, 64), dtype="float32")
    >>> form_of(q, 2048), form_of(q, 3 * 2048)
    ('8x64 float32', 'views such as 8x64 float32')
    """
    if not tensor.dtype:
        return ""
    bits = re.search(r"\d+", tensor.dtype)
    whole = math.prod(tensor.shape) * (int(bits.group()) if bits else 8) >= 8 * bytes_
    form = f"{'x'.join(map(str, tensor.shape)) or 'scalar'} {tensor.dtype}"
    return form if whole else f"views such as {form}"


class _Walker:
    """Puts what the simulator knows of each storage and each replayed copy into spans."""

    def __init__(self, graph: StepGraph, plan: Plan | None, optimizer_bytes: int) -> None:
        self.graph, self.plan = graph, plan
        self.optimizer_bytes = optimizer_bytes
        self.sim = Simulator(graph)
        self.seen: list[LiveCopies] = []
        if plan is None:
            self.result = self.sim.simulate(self.sim.droppable, seen=self.seen)
        else:
            self.result = simulate_plan(self.sim, plan, self.seen)
        self.sources = self.result.sources
        self.slab_bytes = 0 if plan is None else plan.slab_bytes
        self.saved: dict[int, Saved] = {}
        """storage -> the first tensor that autograd saves in it"""
        for tensor in graph.saved:
            self.saved.setdefault(self.sim.storage_of[tensor.value], tensor)
        self.ticks: list[Tick] = []
        self.spans: list[Span] = []
        self.within: list[int] = []
        """tick -> the event that it is part of"""
        self.most: list[int] = []
        """tick -> its most live bytes, the slab aside"""

    def timeline(self) -> Timeline:
        ran = 0.0
        copies: dict[int, int] = {}  # replayed value -> the tick at which its copy was born
        outlives = {held.event: held.bytes for held in self.seen if held.operation < 0}
        for event, held in self._moments():
            if held is not None and held.operation < 0:
                self._change(copies, held.values)
                continue
            index = self.graph.events[event].index if held is None else held.operation
            operation = self.sources.operations[index]
            phase: Phase = operation.phase if held is None else "replay"
            self.ticks.append(Tick(ran, short(operation.name), operation.module, phase))
            self.within.append(event)
            if held is None:
                most = int(self.result.top_bytes[event])
                scratch = most - int(self.result.live_bytes[event])
                ran += operation.seconds
            else:
                self._change(copies, held.values, new=True)
                scratch = held.scratch_bytes
                natural = int(self.result.live_bytes[event]) - outlives[event]
                most = natural + held.bytes + scratch
                ran += operation.seconds + self.graph.replay_overhead_seconds
            self.most.append(most)
            if scratch:
                self._add(len(self.ticks) - 1, len(self.ticks), scratch, "temporary", operation.module,
                          f"scratch of {short(operation.name)}")  # fmt: skip
        self._change(copies, frozenset())
        self._storages()
        self._resident()
        self._moving()
        return self._forecast(ran)

    def _moments(self) -> Iterator[tuple[int, LiveCopies | None]]:
        """(event, ``None`` for the operation itself or what is held while another runs again), in order."""
        place = 0
        for event, (kind, _) in enumerate(self.graph.events):
            while place < len(self.seen) and self.seen[place].event == event:
                yield event, self.seen[place]
                place += 1
            if kind == "op":
                yield event, None

    def _change(self, copies: dict[int, int], now: frozenset[int], new: bool = False) -> None:
        """Other copies are alive from here on: from this tick if it is ``new``, else from the next."""
        at = len(self.ticks) - new
        for value in [value for value in copies if value not in now]:
            self._copy(value, copies.pop(value), at)
        for value in sorted(now):
            copies.setdefault(value, at)

    def _copy(self, value: int, born: int, gone: int) -> None:
        storage = self.graph.storages[self.sim.storage_of[value]]
        # what lies in the slab is counted by `_moving`
        size = 0 if self.sources.slab and value in self.sources.moved else self.sim.value_bytes[value]
        producer = self.graph.operations[self.graph.values[value].producer or 0]
        module, form, decision = self._about(storage, producer.module)
        kind = "moved" if value in self.sources.moved else "recomputed"
        self._add(born, gone, size, kind, module, short(producer.name), form, decision)

    def _about(self, storage: Storage, module: str) -> tuple[str, str, str]:
        """Module, form and decision of what lies in a storage."""
        tensor = self.saved.get(storage.id)
        if tensor is None:
            return module, "", ""
        decision = None if self.plan is None else self.plan.decisions.get(tensor.value)
        return (
            tensor.module or module,
            form_of(tensor, storage.bytes),
            "" if decision is None else in_words(decision),
        )

    def _add(self, born: int, gone: int, size: int, *what: str) -> None:
        if size and born < gone:
            self.spans.append(Span(born, gone, size, *what))

    def _at(self, event: int) -> int:
        """The first tick within or after an event."""
        return bisect_left(self.within, event)

    def _storages(self) -> None:
        """What operations allocate, and inputs that the step lets go."""
        end = len(self.ticks)
        for storage in self.graph.storages:
            until = max(self.sim.natural_end[storage.id], self.result.held_until.get(storage.id, -1))
            gone = end if until >= self.sim.end else self._at(until)
            if storage.producer is None:
                kind = _SHOWN_AS.get(storage.kind, storage.kind)
                gone = gone if kind == "input" else end
                module, _, name = storage.name.rpartition(".")
                for there in self._when_filled(storage, 0, gone):
                    self._add(*there, storage.bytes, kind, module, name or _NAMES.get(storage.kind, kind))
                continue
            operation = self.graph.operations[storage.producer]
            born = self._at(self.sim.op_event[storage.producer])
            module, form, decision = self._about(storage, operation.module)
            if operation.phase == "backward" and until >= self.sim.end:
                module, _, name = storage.name.rpartition(".") if storage.name else (module, "", "")
                name = f"gradient of {name}" if name else short(operation.name)
                what = "gradient", module, name
            else:
                saved = operation.phase == "forward" and storage.id in self.saved
                kind = "activation" if saved else "temporary"
                what = kind, module, short(operation.name), form, decision
            for there in self._when_filled(storage, born, gone):
                self._add(*there, storage.bytes, *what)

    def _when_filled(self, storage: Storage, born: int, gone: int) -> Iterator[tuple[int, int]]:
        """The ticks between ``born`` and ``gone`` at which the storage has its bytes, as (first, end): the
        program may empty and fill it.
        """
        there = storage.id not in self.sim.begin_empty
        for event, filled in self.sim.resizes.get(storage.id, ()):
            at = min(max(born, self._at(event)), gone)
            if there and not filled:
                yield born, at
            born, there = at, filled
        if there:
            yield born, gone

    def _resident(self) -> None:
        """What the graph counts as resident and no storage stands for: the step never touched it."""
        existing = (s for s in self.graph.storages if s.producer is None)
        known = sum(s.bytes for s in existing if s.id not in self.sim.begin_empty)
        rest = self.graph.resident_bytes - known
        state = min(self.optimizer_bytes, max(0, rest))
        gradients = min(self._added_bytes(), max(0, rest - state))
        end = len(self.ticks)
        self._add(0, end, state, "optimizer", "", "optimizer state")
        self._add(0, end, gradients, "gradient", "", "gradients of earlier steps, added to")
        self._add(0, end, rest - state - gradients, "parameter", "", "not used in this step")
        self._add(0, end, self.slab_bytes, "moved", "", "slab for what comes back")

    def _added_bytes(self) -> int:
        """What the step adds to gradients that were resident before it, as under accumulation: then none of
        its own is left at its end.
        """
        made = [s for s in self.graph.storages if s.name and s.producer is not None]
        left = any(self.sim.natural_end[s.id] >= self.sim.end for s in made)
        return 0 if left else sum(s.bytes for s in made)

    def _moving(self) -> None:
        """What transfers hold beside all that: encoded forms, and what is fetched ahead of need."""
        known = Timeline(tuple(self.ticks), tuple(self.spans), 0.0).live_bytes()
        left = np.array(self.most, dtype=np.int64) + self.slab_bytes - known
        edges = [0, *(np.flatnonzero(np.diff(left)) + 1).tolist(), len(left)]
        for born, gone in itertools.pairwise(edges):
            if born < gone:
                self._add(born, gone, int(left[born]), "moved", "", "encoded, or on its way")

    def _forecast(self, ran: float) -> Timeline:
        """The operations' own times, stretched to what the step is forecast to take."""
        whole = self.graph.plain_seconds
        whole += self.plan.predicted_extra_seconds if self.plan is not None else 0.0
        stretch = whole / ran if ran else 1.0
        ticks = tuple(tick._replace(seconds=tick.seconds * stretch) for tick in self.ticks)
        return Timeline(ticks, tuple(sorted(self.spans)), whole)
