"""What a `Tracer` notes while a step runs: its storages as long as they live, its operations and values."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Literal

import torch

CostFigures = tuple[float, int, tuple[int, ...]]
"""What an operation takes: seconds, scratch bytes, blocks, as `lowtide.graph.Operation` has them."""


class TracedStorage(weakref.ref[torch.UntypedStorage]):
    """A storage of the step, while it lives.

    Attributes:
        key: as of `lowtide.private.storage_key`.
        number: its id in the graph.
        value: the id of its newest value.
        phase: in which phase an operation of the step made it, or empty: it stood before.
        resized: the program resizes it.
        gathered: sharded weights are gathered into it.
    """

    __slots__ = ("gathered", "key", "number", "phase", "resized", "value")
    gathered: bool
    key: int
    number: int
    value: int
    phase: str
    resized: bool


@dataclass(slots=True)
class TracedOperation:
    """As `lowtide.graph.Operation`, of which it has name, reads, writes, phase, module, random, reason,
    source and region; the rest is known at the end.
    """

    name: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    phase: Literal["forward", "backward"]
    module: str
    random: bool
    reason: str
    source: str
    region: int | None


@dataclass(slots=True)
class TracedValue:
    """As `lowtide.graph.Value`, of which it has storage, version, producer, shape and dtype; the rest is
    known at the end.
    """

    storage: int
    version: int
    producer: int | None
    shape: tuple[int, ...]
    dtype: torch.dtype
