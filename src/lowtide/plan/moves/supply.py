"""What a plan rests on outside the step: what codecs make of values, and how fast tiers, codecs and groups
are.

The planner takes both as plain data. `Supply` is who knows; in a process that runs steps that is
`lowtide.run.move.links`, which nothing else of this folder reaches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from lowtide.plan.data import Codec, CodecFacts, Link, Moving


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
    from lowtide.run.move import links

    return links
