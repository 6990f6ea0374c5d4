"""Which ranks have a limit: each says so in the store in which the processes met, and those that are about to
exchange bytes and plans look there first. A rank without a limit takes part in no exchange, so that its next
collective would meet another one.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

import torch.distributed as dist

from lowtide.errors import PlanError
from lowtide.private import distributed

BEHIND_SECONDS = 10.0
"""How far behind a rank may be that takes part in the collectives of the same step."""

AHEAD_SECONDS = 300.0
"""How far behind a rank may be where a plan is made before the first step."""

_POLL_SECONDS = 0.05


class Presence:
    """A limit of this rank, of which the other ranks can know.

    Args:
        what: the limited model's name.

    Example:
        >>> Presence("Linear").refuse_absent([0, 1])  # without a process group there are no ranks
    """

    def __init__(self, what: str) -> None:
        self._store, self._what = distributed.store(), what
        if self._store is not None:
            self._store.add(self._key(dist.get_rank()), 1)

    def _key(self, rank: int) -> str:
        return f"lowtide/limits/{self._what}/{rank}"

    def close(self) -> None:
        """The limit is removed."""
        if self._store is not None:
            self._store.add(self._key(dist.get_rank()), -1)
            self._store = None

    def refuse_absent(self, ranks: Iterable[int], seconds: float = BEHIND_SECONDS) -> None:
        """Refuse to go on where one of the ranks has no limit on a model of this name.

        Args:
            ranks: their places in the world.
            seconds: how long to wait for one that is behind.

        Raises:
            PlanError: one has none; it says which.
        """
        store, until, absent = self._store, time.monotonic() + seconds, list(ranks)
        while store is not None:
            absent = [rank for rank in absent if store.add(self._key(rank), 0) <= 0]
            if not absent:
                return
            if time.monotonic() > until:
                raise PlanError(_refusal(absent, self._what))
            time.sleep(_POLL_SECONDS)


def _refusal(absent: list[int], what: str) -> str:
    """What to do about ranks without a limit.

    >>> _refusal([1, 3], "GPT")[:52]
    'ranks 1 and 3 have no memory limit on this GPT, and '
    """
    *most, last = map(str, absent)
    names = f"ranks {', '.join(most)} and {last} have" if most else f"rank {last} has"
    return (
        f"{names} no memory limit on this {what}, and other ranks of the same step have one. Ranks that "
        "exchange tensors plan together: call lowtide.limit_memory on every rank, or on none. Each rank may "
        "have a budget of its own"
    )
