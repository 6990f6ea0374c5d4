"""A value that moves between forward and backward, as planner, simulator and executor see it."""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.plan.data.decisions import Moving, Shard, stages


@dataclass(frozen=True, slots=True)
class Move:
    """A value that moves between forward and backward.

    Attributes:
        value: its id.
        decision: where it goes.
        bytes: of its storage.
        encoded_bytes: the most bytes that it takes after compressing or sharding; `bytes` without either.
        codec_scratch_bytes: the most that encoding or decoding allocates on the way.
        encode_seconds, decode_seconds: time of those.
        replayable_from: whether operations may run again from what comes back.
        fetched: its place in the order in which backward is predicted to unpack the moved values, from 0; -1
            when it never does.
        born, gone: half-open lifetime of what is stored, in events of the step.
        place: where in the plan's slab the value comes back to, -1 for memory of its own.
        arrival: where in the slab its encoded form arrives from a tier, likewise.
        shape, dtype: of the tensor through which it is written, by which the executor checks that it is the
            one that was planned for.
    """

    value: int
    decision: Moving
    bytes: int
    encoded_bytes: int
    codec_scratch_bytes: int = 0
    encode_seconds: float = 0.0
    decode_seconds: float = 0.0
    replayable_from: bool = True
    fetched: int = -1
    born: int = 0
    gone: int = 0
    place: int = -1
    arrival: int = -1
    shape: tuple[int, ...] = ()
    dtype: str = ""

    @property
    def encoded(self) -> bool:
        """Whether it takes another form on the device."""
        return stages(self.decision)[0] is not None

    @property
    def tier(self) -> str:
        """The tier that it goes to; empty when it stays on the device."""
        then = stages(self.decision)[1]
        return then.tier if then is not None else ""

    @property
    def shard(self) -> Shard | None:
        """Over what it is sharded, if it is."""
        first, _ = stages(self.decision)
        return first if isinstance(first, Shard) else None

    @property
    def link_in(self) -> str:
        """The tier or group that it comes back from ahead of need; empty for neither."""
        return self.tier or (self.shard.group if self.shard else "")

    @property
    def bytes_in(self) -> int:
        """What comes back over that link."""
        return self.encoded_bytes if self.tier else self.bytes

    @property
    def gather_bytes(self) -> int:
        """What gathering its parts may allocate on the way: Gloo copies its input and its output."""
        return self.encoded_bytes * (self.shard.size + 1) if self.shard else 0

    @property
    def ahead_bytes(self) -> int:
        """Bytes that fetching it ahead takes: what a tier stores of it, or the gathered value; nothing can be
        done ahead for what waits encoded on the device.
        """
        if self.tier:
            return self.encoded_bytes
        return self.bytes + self.gather_bytes if self.shard else 0

    @property
    def arriving_bytes(self) -> int:
        """Bytes that come from a tier and are not the value yet."""
        return self.encoded_bytes if self.encoded and self.tier else 0

    @property
    def place_bytes(self) -> int:
        """Bytes of the value that has come back; a gathered one has its padding behind it."""
        return self.encoded_bytes * self.shard.size if self.shard else self.bytes
