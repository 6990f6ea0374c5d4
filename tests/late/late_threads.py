"""Jobs of lowtide's own threads that begin late, by a seed."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

from lowtide.extensions.moves.store.lanes import ThreadLane

CHANCE = random.Random()


def install() -> None:
    """From now on some of them wait for up to 2 ms."""
    do: Any = ThreadLane.do

    def late(lane: ThreadLane, work: Callable[[], object]) -> Any:
        seconds = CHANCE.random() * 0.01 - 0.008

        def job() -> None:
            if seconds > 0:
                time.sleep(seconds)
            work()

        return do(lane, job)

    ThreadLane.do = late  # type: ignore[method-assign]
