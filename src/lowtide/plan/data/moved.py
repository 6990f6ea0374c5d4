"""What codecs make of values, and a moved value as the planner and the executor see it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from lowtide.plan.data.decisions import Moving, Shard, stages


@dataclass(frozen=True, slots=True)
class Moved:
    """A moved value as the simulator sees it.

    Attributes:
        value: its id.
        decision: where it goes.
        bytes: of its storage.
        encoded_bytes: after compressing or sharding; `bytes` without.
        codec_scratch_bytes: the most that encoding or decoding allocates on the way.
        gather_bytes: what a gather may allocate on the way: Gloo's copies of its input and output.
        encode_seconds, decode_seconds: time of those.
    """

    value: int
    decision: Moving
    bytes: int
    encoded_bytes: int
    codec_scratch_bytes: int = 0
    gather_bytes: int = 0
    encode_seconds: float = 0.0
    decode_seconds: float = 0.0

    @property
    def encoded(self) -> bool:
        """Whether it takes another form on the device."""
        return stages(self.decision)[0] is not None

    @property
    def tier(self) -> str:
        """The tier that it goes to, or the group that it is sharded over; empty when it stays on the
        device.
        """
        then = stages(self.decision)[1]
        return then.tier if then is not None else ""

    @property
    def ahead_bytes(self) -> int:
        """Bytes that fetching it ahead takes."""
        return ahead_bytes(self.decision, self.bytes, self.encoded_bytes)

    @property
    def arriving_bytes(self) -> int:
        """Bytes that come from a tier and are not the value yet."""
        return self.encoded_bytes if self.encoded and self.tier else 0

    @property
    def beside_slab_bytes(self) -> int:
        """Bytes that fetching it ahead takes where it comes into a slab: what a gather allocates on the
        way.
        """
        return 0 if self.tier else self.gather_bytes


def gather_bytes(decision: Moving, encoded_bytes: int) -> int:
    """What gathering the parts of a sharded value may allocate on the way: Gloo copies its input and its
    output.
    """
    first, _ = stages(decision)
    return encoded_bytes * (first.size + 1) if isinstance(first, Shard) else 0


def ahead_bytes(decision: Moving, bytes_: int, encoded_bytes: int) -> int:
    """Bytes that fetching a value ahead takes: what a tier stores of it, or the gathered value; nothing can
    be done ahead for what waits encoded on the device."""
    first, then = stages(decision)
    if then is not None:
        return encoded_bytes
    return bytes_ + gather_bytes(decision, encoded_bytes) if isinstance(first, Shard) else 0


class Codec(Protocol):
    """What the planner asks of a codec, see `lowtide.store.coding.Codec`."""

    name: str
    gentler: str
    replayable_from: bool

    def scratch(self, elements: int, device: str = "cpu") -> int:
        """The most that is allocated beyond what is returned."""
        ...

    def encoded_bytes(self, form: Any) -> int:
        """The most bytes that a value of this form takes."""
        ...
