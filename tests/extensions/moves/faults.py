"""Transfers and gathers that begin late, or fail, or are counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from lowtide.extensions.moves.store.disk import Disk
from lowtide.extensions.moves.store.host import Host
from lowtide.extensions.moves.store.stores import Replicas

PLACES = (
    (Disk, "_write", "write"),
    (Disk, "_read", "read"),
    (Host, "_write", "write"),
    (Host, "_read", "read"),
    (Replicas, "gather", "gather"),
)


def before_each(patch: pytest.MonkeyPatch, fault: Callable[[str], object]) -> None:
    """Call ``fault`` with ``write``, ``read`` or ``gather`` before each, on the thread that does it."""
    for kind, name, what in PLACES:
        original = getattr(kind, name)

        def late(*given: Any, original: Any = original, what: str = what) -> Any:
            fault(what)
            return original(*given)

        patch.setattr(kind, name, late)


def gathered(patch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of every gather from now on."""
    found: list[int] = []
    original = Replicas.gather

    def counted(replicas: Replicas, part: Any, out: Any) -> Any:
        found.append(out.numel())
        return original(replicas, part, out)

    patch.setattr(Replicas, "gather", counted)
    return found
