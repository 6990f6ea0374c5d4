"""What a step overwrites of the state that it found, and the next step overwrites again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

UNSETTLED = (
    "it reads state that the step has overwritten, and that another forward before backward overwrites again"
)
"""Why such an operation is not replayable."""


def settled_operations(
    operations: Sequence[dict[str, Any]],
    values: Sequence[dict[str, Any]],
    saved: Sequence[dict[str, Any]],
    storages: Sequence[dict[str, Any]],
) -> Iterator[dict[str, Any]]:
    """The operations of a trace, where none is replayable that reads what the forward wrote into a tensor
    that was there before (the vectors of a spectral norm, a counter).

    Two forwards may come before one backward (a discriminator's): a replay of the first would find what the
    second wrote. Where autograd itself saved such a value, it allows no second forward, and replays may go on
    from it.

    Args:
        operations, values, saved, storages: as `lowtide.trace.eager.Tracer` takes them down.
    """
    kept = {item["value"] for item in saved}
    unsettled = {
        value["id"]
        for value in values
        if value["version"]
        and storages[value["storage"]]["producer"] is None
        and operations[value["producer"]]["phase"] == "forward"
        and value["id"] not in kept
    }
    for operation in operations:
        if operation["replayable"] and not unsettled.isdisjoint(operation["reads"]):
            operation = {**operation, "replayable": False, "reason": UNSETTLED}
        yield operation
