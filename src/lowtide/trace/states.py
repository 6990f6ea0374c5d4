"""See the random states that a step keeps: `torch.utils.checkpoint` holds one for every call, five kilobytes of main memory that no operation makes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch

from lowtide import private
from lowtide.trace.seam import Seam

if TYPE_CHECKING:
    from lowtide.trace.eager import Tracer

STATE = "a random state"
"""The name of the storage of one in a step graph."""


@contextmanager
def _replaced() -> Iterator[None]:
    own = torch.random.get_rng_state
    _put(_seen(own))
    try:
        yield
    finally:
        _put(own)


_SEAM = Seam(_replaced)


def states_seen() -> AbstractContextManager[None]:
    """In the block, a tracer that is active on the calling thread is told of every random state that is read (its ``keeps_state``)."""
    return _SEAM.open()


def _put(function: Callable[[], torch.Tensor]) -> None:
    torch.random.get_rng_state = torch.get_rng_state = function


def _seen(own: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    @wraps(own)
    def get_rng_state() -> torch.Tensor:
        state = own()
        for mode in private.dispatch_modes():
            if hasattr(mode, "keeps_state"):
                mode.keeps_state(state)  # type: ignore[attr-defined]
        return state

    return get_rng_state


def take_down(tracer: Tracer, state: torch.Tensor) -> None:
    """Add a random state to a tracer's storages, from its next operation until it ends."""
    number, producer = len(tracer.storages), len(tracer.operations)
    kind = "backward" if private.in_backward() else "forward"
    tracer.storages.append({"id": number, "bytes": state.nbytes, "kind": kind, "producer": producer, "name": STATE})

    def ended() -> None:
        if producer < len(tracer.operations):
            tracer.event("free", number)
        else:
            tracer.storages[number]["producer"] = sys.maxsize

    tracer.watch(state.untyped_storage(), ended)


def without_strays(storages: list[dict[str, Any]], operations: int, device: str) -> list[dict[str, Any]]:
    """Storages as the graph has them: what no operation follows, or what lies in main memory beside a GPU, takes none of the budget."""
    return [
        {**storage, "bytes": 0, "producer": min(storage["producer"], operations - 1)}
        if storage["name"] == STATE and (storage["producer"] >= operations or device != "cpu")
        else storage
        for storage in storages
    ]
