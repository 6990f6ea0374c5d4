"""What may be decided for a saved value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from lowtide.errors import PlanError, expect, is_count


@dataclass(frozen=True, slots=True)
class Keep:
    """The value stays on the device from forward to backward."""

    kind: Literal["keep"] = "keep"


@dataclass(frozen=True, slots=True)
class Recompute:
    """The value is evicted in forward and its recorded operations run again when backward asks."""

    kind: Literal["recompute"] = "recompute"


TIERS = ("host", "disk")
"""Names of the tiers; `lowtide.store.stores` opens them."""


@dataclass(frozen=True, slots=True)
class Offload:
    """The value's bytes wait in another tier.

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
        if self.path and self.tier != "disk":
            raise PlanError(
                f"Offload({self.tier!r}, path={self.path!r}): the {self.tier} tier has no path; leave it "
                "out, or give 'disk'"
            )


@dataclass(frozen=True, slots=True)
class Compress:
    """The value waits in fewer bytes.

    Attributes:
        codec: a codec's name, see `lowtide.store.codec`.
    """

    codec: str
    kind: Literal["compress"] = "compress"

    def __post_init__(self) -> None:
        expect(isinstance(self.codec, str), "Compress(codec=)", self.codec, "a codec's name, as in 'int8'")


@dataclass(frozen=True, slots=True)
class Shard:
    """Each rank of a group that holds the same value keeps its part, and the parts are gathered ahead of
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
    """One decision after another: shard-then-offload is P_a+cpu, compress-then-offload moves fewer bytes."""

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


def stages(decision: Moving) -> tuple[Shard | Compress | None, Offload | None]:
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
