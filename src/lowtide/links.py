"""How fast bytes come and go, as plain numbers: what stores measure and planners weigh."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


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
