"""What may be decided for a saved value, what planner, simulator and executor know of one that moves, and how
fast tiers, codecs and groups are (`Link`); what a plan decides in one module (`ModuleRow`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from lowtide.errors import PlanError, expect, is_count


@dataclass(frozen=True, slots=True)
class Keep:
    """The value stays on the device from forward to backward."""

    kind: Literal["keep"] = "keep"


@dataclass(frozen=True, slots=True)
class Recompute:
    """The value is evicted in forward, and recomputed when backward needs it."""

    kind: Literal["recompute"] = "recompute"


TIERS = ("host", "disk")
"""Names of the tiers; `lowtide.extensions.moves.store.stores` opens them."""
WITH_PATH = ("disk",)
"""Names of those whose bytes lie in a folder that the user may name."""


@dataclass(frozen=True, slots=True)
class Offload:
    """The value is moved to another tier.

    Attributes:
        tier: ``host`` or ``disk``.
        path: the folder for the disk tier's file; empty for the system's folder for temporary files.
    """

    tier: str = "host"
    path: str = ""
    kind: Literal["offload"] = "offload"

    def __post_init__(self) -> None:
        expect(isinstance(self.path, str), "Offload(path=)", self.path, "a folder's name, as a text")
        if self.tier not in TIERS:
            names = " or ".join(map(repr, TIERS))
            raise PlanError(f"Offload({self.tier!r}): there is no such tier, give {names}")
        if self.path and self.tier not in WITH_PATH:
            names = " or ".join(map(repr, WITH_PATH))
            raise PlanError(
                f"Offload({self.tier!r}, path={self.path!r}): the {self.tier} tier has no path; leave it "
                f"out, or give {names}"
            )


@dataclass(frozen=True, slots=True)
class Compress:
    """The value is kept in an encoded form.

    Attributes:
        codec: a codec's name, see `lowtide.extensions.moves.store.codec`.
    """

    codec: str
    kind: Literal["compress"] = "compress"

    def __post_init__(self) -> None:
        expect(isinstance(self.codec, str), "Compress(codec=)", self.codec, "a codec's name, as in 'int8'")


@dataclass(frozen=True, slots=True)
class Shard:
    """Each rank of a group keeps a part of a value that all ranks hold alike. The parts are gathered ahead of
    need: ZeRO-R's P_a.

    Attributes:
        group: the name under which the stores know the process group.
        size: how many ranks it has.
    """

    group: str
    size: int
    kind: Literal["shard"] = "shard"

    def __post_init__(self) -> None:
        expect(isinstance(self.group, str), "Shard(group=)", self.group, "its name in Stores(groups=)")
        expect(is_count(self.size, 1), "Shard(size=)", self.size, "the number of ranks, 1 or more")


@dataclass(frozen=True, slots=True)
class Chain:
    """Two decisions in order: shard, then offload is P_a+cpu; compress, then offload moves fewer bytes."""

    first: Shard | Compress
    then: Offload
    kind: Literal["chain"] = "chain"

    def __post_init__(self) -> None:
        expect(isinstance(self.first, Shard | Compress), "Chain(first=)", self.first, "a Shard or a Compress")
        expect(isinstance(self.then, Offload), "Chain(then=)", self.then, "an Offload")


Decision = Keep | Recompute | Offload | Compress | Shard | Chain


Moving = Offload | Compress | Shard | Chain


_DECISIONS: dict[str, Any] = {
    kind.__name__.lower(): kind for kind in (Keep, Recompute, Offload, Compress, Shard, Chain)
}


def form_and_tier(decision: Moving) -> tuple[Shard | Compress | None, Offload | None]:
    """What happens to the value on the device, and the tier that the result goes to."""
    if isinstance(decision, Chain):
        return decision.first, decision.then
    return (None, decision) if isinstance(decision, Offload) else (decision, None)


def decision_of(way: str | Moving) -> Moving:
    """A decision, also from its short name: ``host``, ``disk``, or a codec's name.

    Raises:
        PlanError: it is neither.

    >>> decision_of("disk")
    Offload(tier='disk', path='', kind='offload')
    """
    if isinstance(way, str):
        return Offload(way) if way in TIERS else Compress(way)
    if isinstance(way, Offload | Compress | Shard | Chain):
        return way
    raise PlanError(
        f"{way!r} is no way to move a value: give 'host', 'disk', a codec's name, or an Offload, Compress, "
        "Shard or Chain"
    )


def decision_from_json(data: dict[str, Any]) -> Any:
    """The decision whose fields these are."""
    fields = {name: decision_from_json(x) if isinstance(x, dict) else x for name, x in data.items()}
    return _DECISIONS[fields["kind"]](**fields)


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
        return form_and_tier(self.decision)[0] is not None

    @property
    def tier(self) -> str:
        """The tier that it goes to; empty when it stays on the device."""
        then = form_and_tier(self.decision)[1]
        return then.tier if then is not None else ""

    @property
    def shard(self) -> Shard | None:
        """The group that the value is sharded over, or ``None``."""
        first, _ = form_and_tier(self.decision)
        return first if isinstance(first, Shard) else None

    @property
    def link_in(self) -> str:
        """The tier or group that the value comes back from ahead of need; empty for neither."""
        return self.tier or (self.shard.group if self.shard else "")

    @property
    def bytes_in(self) -> int:
        """The bytes that come back over `link_in`."""
        return self.encoded_bytes if self.tier else self.bytes

    @property
    def gather_bytes(self) -> int:
        """The most that gathering the value's parts allocates: Gloo copies its input and its output."""
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
        """Bytes of the value once it has come back, with the padding of a gathered one."""
        return self.encoded_bytes * self.shard.size if self.shard else self.bytes


@dataclass(frozen=True, slots=True)
class Link:
    """How fast a tier, a codec or a group is.

    Attributes:
        write_bytes_per_second, read_bytes_per_second: of one transfer at a time; beside a computation on a
            CPU, without one on a device that copies by itself.
        latency_seconds: of each transfer.
        busy: share of a transfer's time that it takes from the operations that run meanwhile; 0 where the
            device copies by itself.
    """

    write_bytes_per_second: float
    read_bytes_per_second: float
    latency_seconds: float = 0.0
    busy: float = 0.0

    def seconds_out(self, bytes_: int) -> float:
        """Seconds that writing so many bytes takes."""
        return self.latency_seconds + bytes_ / self.write_bytes_per_second

    def seconds_in(self, bytes_: int) -> float:
        """Seconds that reading so many bytes takes."""
        return self.latency_seconds + bytes_ / self.read_bytes_per_second

    def there_and_back(self, bytes_: int) -> float:
        """Seconds that writing and reading so many bytes take, the latencies aside."""
        return bytes_ * (1 / self.write_bytes_per_second + 1 / self.read_bytes_per_second)


Links = Mapping[str, Link]
"""tier, codec or group name -> its speed"""


def codecs_behind(name: str) -> tuple[str, ...]:
    """The codecs that a name may come to mean."""
    return ("mask", "positive") if name == "auto" else (name,)


@dataclass(frozen=True, slots=True)
class ModuleRow:
    """One line of a plan's table.

    Attributes:
        module: qualified module name.
        saved_bytes: bytes that autograd would keep there.
        kept_bytes: bytes that the plan keeps there, values kept only for replays included.
        replayed_operations: how many operations run again in backward.
        extra_seconds: time of those.
    """

    module: str
    saved_bytes: int
    kept_bytes: int
    replayed_operations: int
    extra_seconds: float
