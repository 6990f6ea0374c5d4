"""What searches of stages have found, kept for whoever plans the same stages again: for another budget, with
other resident bytes or other outputs held, for one layer more, or at other prices of their operations."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import lru_cache

from lowtide.plan.simulate import Bytes

_MOST_BYTES = 64 << 20
"""What is kept of the memory of configurations."""

_MOST_FRONTS = 512


@dataclass(frozen=True, eq=False)
class Configuration:
    """One way to run a segment.

    Attributes:
        kept: for every unit of the segment, whether its outputs are stored.
        held_bytes: bytes that it adds to the step's memory from the end of its forward to the beginning of
            its window.
        late_bytes: those of them that the program itself holds to the end of the step's forward.
        seconds: what its replays cost.
        replayed: positions, among the segment's operations, of those that run again.
        profile: bytes that it adds at every event of its forward and its window.
        forward_most, window_most: most live bytes in its forward and its window when nothing else is kept,
            less those before its forward.
    """

    kept: int
    held_bytes: int
    late_bytes: int
    seconds: float
    replayed: tuple[int, ...]
    profile: Bytes
    forward_most: int
    window_most: int


@dataclass(frozen=True, eq=False)
class Front:
    """The configurations of a stretch of stages that no other one beats, in places relative to it: alike
    stretches share them.

    Attributes:
        operations: how many it has.
        units: per unit, its operation's position, and the places of the outputs in question among what that
            writes.
        configurations: bits of ``kept`` are units.
    """

    operations: int
    units: tuple[tuple[int, tuple[int, ...]], ...]
    configurations: list[Configuration]


class Known:
    """Memory of configurations by the content of their stretch, and fronts by content and prices; the oldest
    go.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._walked: OrderedDict[Hashable, dict[int, Configuration]] = OrderedDict()
        self._fronts: OrderedDict[Hashable, Front] = OrderedDict()
        self.searched = 0
        """fronts that were not known"""

    @property
    def configurations(self) -> int:
        """How many there are."""
        with self._lock:
            return sum(map(len, self._walked.values()))

    def walked(self, content: Hashable) -> dict[int, Configuration]:
        """Configurations of a stretch by ``kept``, at whatever prices they were walked through; new ones are
        added.
        """
        with self._lock:
            found = self._walked.setdefault(content, {})
            self._walked.move_to_end(content)
            return found

    def front(self, key: Hashable, search: Callable[[], Front]) -> Front:
        """The front of that content, prices and effort; ``search`` finds it where it is not known."""
        with self._lock:
            if key in self._fronts:
                self._fronts.move_to_end(key)
                return self._fronts[key]
            self.searched += 1
        found = search()
        with self._lock:
            self._fronts[key] = found
            while len(self._fronts) > _MOST_FRONTS:
                self._fronts.popitem(last=False)
            while len(self._walked) > 1 and sum(map(_bytes, self._walked.values())) > _MOST_BYTES:
                self._walked.popitem(last=False)
        return found


def _bytes(walked: dict[int, Configuration]) -> int:
    one = next(iter(walked.values()), None)
    return len(walked) * (one.profile.nbytes + 512) if one is not None else 0


@lru_cache(maxsize=1)
def known_stages() -> Known:
    """What this process has found."""
    return Known()
