"""What a plan rests on outside the step: what codecs make of values, and how fast tiers, codecs and groups
are.

The planner takes both as plain data. `Supply` is who knows; in a process that runs steps that is
`lowtide.run.links`, which nothing else of this folder reaches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from lowtide.plan.decisions import Moving
from lowtide.plan.traffic import Link


class Codec(Protocol):
    """A codec of the user's own; the planner hands it on and knows its name."""

    name: str


@dataclass(frozen=True, slots=True)
class CodecFacts:
    """What a codec makes of values.

    Attributes:
        name: by which plans know it.
        gentler: the codec that is used instead where backward is not linear in the value; empty for none.
        replayable_from: whether an operation may be replayed from what comes back.
        scratch: from a value's elements and the device to the most that is allocated beyond what is returned.
        encoded_bytes: from a value's elements and the name of its dtype to the most bytes that it takes.
    """

    name: str
    gentler: str
    replayable_from: bool
    scratch: Callable[[int, str], int]
    encoded_bytes: Callable[[int, str], int]


class Supply(Protocol):
    """Who knows codecs and speeds."""

    def codec_facts(self, name: str, own: Sequence[Codec] = ()) -> CodecFacts:
        """The codec of that name, one of ``own`` first."""
        ...

    def link_speeds(
        self, ways: Sequence[Moving], own: Sequence[Codec], device: str, room_bytes: int | None = None
    ) -> dict[str, Link]:
        """The speeds of the tiers and codecs that ``ways`` name, from and to ``device``, measured in at most
        ``room_bytes``.
        """
        ...


def supply() -> Supply:
    """Who knows in this process."""
    from lowtide.run import links

    return links
