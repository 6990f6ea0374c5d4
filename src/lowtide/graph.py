"""The step graph: what one training step does to memory, as pure data.

A step is one forward and backward of a model on one micro-batch. The tracer records it as operations,
storages, values (one version of one storage: what an operation wrote), saved tensors (what autograd keeps
from forward to backward) and one ordered list of events. Nothing here holds a tensor, imports torch or does
I/O, so a graph can be saved, compared and planned on anywhere.

The events leave out what autograd holds: they show each storage's natural life, which is how long user code
itself needs it. What autograd would add is known from the ``pack`` and
``release`` events, and `lowtide.plan.simulate` puts the two together for any set of decisions.
"""

from __future__ import annotations

import gc
import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from operator import attrgetter
from typing import Any, Literal, NamedTuple

GRAPH_FORMAT = 7

GAP_OP = "outside"
"""Name of the operation that stands for what runs between the compiled graphs of a step."""

StorageKind = Literal["parameter", "buffer", "input", "gradient", "gathered", "forward", "backward"]
"""Where a storage comes from: it existed before the step (``parameter``, ``buffer``, ``input``,
``gradient``), or an operation of the ``forward`` or ``backward`` phase allocated it. ``gathered`` ones hold
sharded weights whole: they exist before the step, and user code fills and empties them, each time with the
same bytes. A replay that reads one may run where it is filled."""

EventKind = Literal["op", "free", "empty", "fill", "pack", "unpack", "done", "release"]
"""What an event says; ``Event.index`` is an operation's index for ``op``, a storage's id for ``free``,
``empty`` and ``fill``, a saved tensor's id otherwise.

``op``       the operation runs: the storages whose ``producer`` it is are allocated before it, its scratch
             comes and goes within it
``free``     the last natural reference to the storage is gone (references that autograd would hold do not
             count)
``empty``    user code frees the storage's bytes itself, by resizing it to nothing
``fill``     it has given the storage its bytes again
``pack``     autograd saves a tensor
``unpack``   a backward node unpacks a saved tensor
``done``     what that ``unpack`` returned is no longer referenced
``release``  autograd gives the saved tensor up for good
"""


class Event(NamedTuple):
    """One moment of the step."""

    kind: EventKind
    index: int


@dataclass(frozen=True, slots=True)
class Storage:
    """A block of device memory.

    Attributes:
        id: position in ``StepGraph.storages``.
        bytes: its size on the device that the budget is about: 0 for a storage of another one.
        kind: see `StorageKind`.
        producer: index of the operation that allocates it, or ``None`` when it existed before the step.
        name: a parameter's or buffer's qualified name, else empty.
    """

    id: int
    bytes: int
    kind: StorageKind
    producer: int | None = None
    name: str = ""


@dataclass(frozen=True, slots=True)
class Value:
    """One version of one storage.

    Attributes:
        id: position in ``StepGraph.values``.
        storage: id of the storage it lives in.
        version: 0 for what the allocating operation wrote, one more for each later in-place write.
        producer: index of the operation that wrote this version, or ``None`` when it existed before the step.
        storable: whether holding a reference to the storage keeps this value: false for a version that is
            overwritten later in the step, and for storages whose bytes user code frees or resizes itself.
        shape, dtype: of the tensor through which it was written; empty where they are not known.
    """

    id: int
    storage: int
    version: int
    producer: int | None
    storable: bool = True
    shape: tuple[int, ...] = ()
    dtype: str = ""


@dataclass(frozen=True, slots=True)
class Operation:
    """One ATen (or custom) call of the step. Calls that only make views are not operations.

    Attributes:
        index: position in ``StepGraph.operations``, and the order in which they ran.
        name: the overload's qualified name, for example ``aten.addmm.default``.
        reads: ids of the values it reads, each once, in argument order. Values read only through a mutated
            argument count unless the operation overwrites the argument without looking at it.
        writes: ids of the values it writes: version 0 of new storages, and new versions of storages it
            mutates.
        phase: ``forward`` or ``backward``.
        module: qualified name of the module it ran in, empty for the root or outside every module.
        random: whether it draws random numbers (a replay restores the generator's state).
        replayable: whether a second run with equal inputs gives bitwise equal outputs and has no other
            effect.
        reason: why it is not replayable, else empty.
        seconds: time of one run, measured or estimated.
        scratch_bytes: the most it allocates beyond its outputs while it runs.
        source: file and line of the user code that called it, as in ``train.py:31``, where that is known.
        region: number of the region of a checkpointing scope that evicts what it writes; ``None`` outside
            of scopes, and where a scope's policy keeps what it writes.
        blocks: what one run asks the device's allocator for, results included, in order: bytes, or a
            negative number, which gives a block back: -1 the first that it asked for, -2 the second. Empty
            where that was not recorded; it is on CUDA.
    """

    index: int
    name: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    phase: Literal["forward", "backward"]
    module: str = ""
    random: bool = False
    replayable: bool = True
    reason: str = ""
    seconds: float = 0.0
    scratch_bytes: int = 0
    source: str = ""
    region: int | None = None
    blocks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Saved:
    """A tensor that autograd keeps from forward to backward. Several may lie in one value.

    Attributes:
        id: position in ``StepGraph.saved``, in the order of packing.
        value: id of the value it lies in.
        droppable: whether an executor may give it up: false outside the model's forward and for parameters,
            buffers and the like, which stay anyway.
        module: qualified name of the module that saved it.
        shape: the tensor's shape.
        dtype: its dtype, for example ``float32``.
        forced: whether a checkpointing scope evicts it: it was made in the region that saves it.
    """

    id: int
    value: int
    droppable: bool
    module: str = ""
    shape: tuple[int, ...] = ()
    dtype: str = ""
    forced: bool = False


@dataclass(frozen=True)
class StepGraph:
    """One training step as data.

    Attributes:
        operations, storages, values, saved: the parts; each part's ``id`` or ``index`` is its position.
        events: every operation and every change of references, in the order in which they happened.
        resident_bytes: bytes of the storages that existed before the step and count against the budget
            (parameters, buffers, existing gradients, optimizer state), however they are referenced.
        plain_seconds: time of the plain step: the sum over operations, or measured where that was possible.
        overhead_seconds: extra seconds that the executor needs for recording each forward operation when
            anything is evicted.
        replay_overhead_seconds: extra seconds to dispatch one replayed operation.
        device: the device that the budget is about, for example ``cpu`` or ``cuda``.
    """

    operations: tuple[Operation, ...]
    storages: tuple[Storage, ...]
    values: tuple[Value, ...]
    saved: tuple[Saved, ...]
    events: tuple[Event, ...]
    resident_bytes: int = 0
    plain_seconds: float = 0.0
    overhead_seconds: float = 0.0
    replay_overhead_seconds: float = 0.0
    device: str = "cpu"

    def __hash__(self) -> int:
        # what the parts say takes as long to look through as a plan takes to make
        return hash((len(self.operations), len(self.storages), len(self.events), self.resident_bytes))

    def __repr__(self) -> str:
        forward = sum(1 for operation in self.operations if operation.phase == "forward")
        values = {saved.value for saved in self.saved if saved.droppable}
        kept = sum(self.storages[self.values[value].storage].bytes for value in values)
        return (
            f"StepGraph({len(self.operations):,} operations, {forward:,} of them forward; "
            f"{len(self.storages):,} storages; {len(self.saved):,} saved tensors, {kept:,} bytes that a plan "
            f"may evict; {self.device})"
        )

    @property
    def begin_empty(self) -> frozenset[int]:
        """Ids of the storages that exist before the step without bytes: what happens to them first is that
        they are filled.
        """
        first: dict[int, str] = {}
        for kind, index in reversed(self.events):
            if kind in ("empty", "fill"):
                first[index] = kind
        if not first:
            return frozenset()
        existing = {storage.id for storage in self.storages if storage.producer is None}
        return frozenset(sid for sid, kind in first.items() if kind == "fill" and sid in existing)

    def fingerprint(self, sizes: bool = True) -> str:
        """A digest of everything but times, scratch and blocks: two traces of one step share it, in every
        process, and a plan belongs to the graphs that do. Without ``sizes``, steps that run and save the same
        share it, whatever their sizes.
        """
        parts = [
            [[o.name, o.reads, o.writes, o.phase, o.random, o.replayable, o.region] for o in self.operations],
            [[s.bytes if sizes else 0, s.kind, s.producer] for s in self.storages],
            [[v.storage, v.version, v.producer, v.storable] for v in self.values],
            [[s.value, s.droppable, s.forced] for s in self.saved],
            self.events if sizes else (),
            self.resident_bytes if sizes else 0,
        ]
        text = json.dumps(parts, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def with_operations(self, change: Callable[[Operation], Operation], **parts: Any) -> StepGraph:
        """The same step with each operation as ``change`` returns it, and other ``parts`` as given."""
        return replace(self, operations=tuple(map(change, self.operations)), **parts)

    @cached_property
    def has_scopes(self) -> bool:
        """Whether parts of the step ran within checkpointing scopes."""
        regions = set(map(attrgetter("region"), self.operations))
        return any(map(attrgetter("forced"), self.saved)) or not regions <= {None}

    def without_scopes(self) -> StepGraph:
        """The same step with no checkpointing scope that evicts anything; itself where there is none."""
        if not self.has_scopes:
            return self
        saved = tuple(replace(one, forced=False) for one in self.saved)
        return self.with_operations(lambda op: replace(op, region=None), saved=saved)

    def to_json(self) -> dict[str, Any]:
        """This graph as a dictionary of plain values; `from_json` reads it back."""
        return {"format": GRAPH_FORMAT, **asdict(self)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> StepGraph:
        """The graph that `to_json` wrote.

        Raises:
            ValueError: when it is no such dictionary, or its format is another one.
        """
        if not isinstance(data, dict):
            raise ValueError(
                "a step graph is read from the dictionary that to_json() made, not from "
                f"{type(data).__name__}: json.loads it first"
            )
        if data.get("format") != GRAPH_FORMAT:
            raise ValueError(
                f"this step graph has format {data.get('format')!r}; this version of lowtide reads format "
                f"{GRAPH_FORMAT}"
            )

        def rows(kind: type, items: list[dict[str, Any]]) -> tuple[Any, ...]:
            return tuple(
                kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in item.items()}) for item in items
            )

        parts = ("format", "operations", "storages", "values", "saved", "events")
        rest = {k: v for k, v in data.items() if k not in parts}
        return cls(
            operations=rows(Operation, data["operations"]),
            storages=rows(Storage, data["storages"]),
            values=rows(Value, data["values"]),
            saved=rows(Saved, data["saved"]),
            events=tuple(Event(kind, index) for kind, index in data["events"]),
            **rest,
        )


def collect_rarely() -> Callable[[], None]:
    """Have Python look for cyclic garbage less often, until the function that this returns is called. The
    objects that describe a step are no garbage, but every thousand new ones would begin a collection, and now
    and then one of the whole process.
    """
    before = gc.get_threshold()
    if not before[0]:
        return lambda: None
    rarely = max(before[0], 100_000), max(before[1], 10), max(before[2], 100)
    gc.set_threshold(*rarely)

    def end() -> None:
        if gc.get_threshold() == rarely:
            gc.set_threshold(*before)

    return end


@contextmanager
def no_collection() -> Iterator[None]:
    """A context without cyclic garbage collection: graphs and plans are made of many small objects, none of
    them a tensor. Collections meanwhile would take as long as making the objects does.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
