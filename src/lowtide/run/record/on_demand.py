"""Evict only when memory is short: for a model whose steps run other operations each time, where no plan
knows what comes.

In: how many bytes are live, and how many may be. Each operation is recorded. A value that autograd saves
stays cached, as a replayed one does (`LiveValue.cached`). Before an operation of the forward, and where
backward asks for a saved tensor, it is looked whether memory is short. Then the copies go that are cheapest
to bring back, for their bytes and for how long they will not be needed: backward asks for the oldest last. A
value whose copy has gone is an evicted one, and is replayed.

The compiled recorder does the same (`cpp/on_demand.h`).
"""

from __future__ import annotations

import heapq
import sys
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from lowtide import private
from lowtide.interception import unseen
from lowtide.private import storage_use_count
from lowtide.run.record.tape import LiveValue, Node

_MORE = 7
"""What goes beyond what is short, as a shift of what may be live: it is asked less often then."""

_OWN = 2
"""References to the storage of a copy that nobody else holds, as Python counts them."""


class Program(Protocol):
    """What the compiled recorder knows of the operations (`lowtide.run.record.native.AnyProgram`)."""

    evict: Callable[..., None] | None
    """its `evict_cheapest`, or `None` where there is no compiled recorder"""

    def learn(self, func: Any) -> None:
        """An operation has come that it did not take."""


class OnDemand:
    """Decides which copies of saved values go when memory is short; one serves one step.

    Args:
        live: how many bytes are live, above those at the step's start.
        room_bytes: how many may be when an operation begins.
        rates: seconds of an operation for each byte that it reads or writes, by the operation's ``id``, since
            its hash is slow; of those not in it, under ``None``.
        program: what the compiled recorder knows of the operations.

    Attributes:
        kept: weak references to values that have a copy, or had one.
        left: how many bytes may be allocated before it is asked how many are live.
    """

    __slots__ = ("_live", "_room_bytes", "kept", "left", "program", "rates")

    def __init__(
        self,
        live: Callable[[], int],
        room_bytes: int,
        rates: Mapping[int | None, float],
        program: Program | None = None,
    ) -> None:
        self._live, self._room_bytes, self.rates, self.program = live, room_bytes, dict(rates), program
        self.kept: list[weakref.ref[LiveValue]] = []
        self.left = 0

    def save(self, value: LiveValue, tensor: torch.Tensor) -> None:
        """Autograd saves a tensor of the value."""
        if value.cached is None:
            with unseen():
                value.keep_cached(private.unseen_alias(tensor))
            self.note_kept(value)

    def note_kept(self, value: LiveValue) -> None:
        """The value has got a copy."""
        self.kept.append(weakref.ref(value))

    def begins(self, func: Any) -> None:
        """An operation of the forward begins, in Python."""
        if self.program is not None:
            self.program.learn(func)
        if self.left < 0:
            self.relieve()

    def relieve(self) -> None:
        """Ask how many bytes are live, and let copies go if these are too many."""
        self.left = self._room_bytes - self._live()
        if self.left < 0:
            evict = None if self.program is None else self.program.evict
            (evict or evict_cheapest)(self.kept, self.rates, (self._room_bytes >> _MORE) - self.left)
            self.left = self._room_bytes - self._live()


def evict_cheapest(
    kept: list[weakref.ref[LiveValue]], rates: Mapping[int | None, float], nbytes: int
) -> None:
    """Let the copies of values go that are cheapest to bring back, until so many bytes have gone.

    Args:
        kept: weak references to the values; those that have no copy are taken out.
        rates: as of `OnDemand`.
        nbytes: how many bytes have to go.
    """
    values = {id(value): value for one in kept if (value := one()) is not None and value.cached is not None}
    kept[:] = map(weakref.ref, values.values())
    mine = [value for value in values.values() if value.node is not None and not _in_use(value)]
    del values
    newest = max((value.node.order for value in mine if value.node is not None), default=0)

    def price(value: LiveValue) -> float:
        assert value.node is not None
        return seconds_to_replay(value, rates) / (max(1, value.nbytes) * (newest - value.node.order + 1))

    heap = [(price(value), place, 0) for place, value in enumerate(mine)]
    heapq.heapify(heap)
    gone = 0
    while heap and nbytes > 0:
        known, place, asked = heapq.heappop(heap)
        value = mine[place]
        if asked != gone and (now := price(value)) > known:  # what it is replayed from has gone meanwhile
            heapq.heappush(heap, (now, place, gone))
            continue
        value.cached = None
        nbytes -= value.nbytes
        gone += 1


def _in_use(value: LiveValue) -> bool:
    """Whether others hold its copy's bytes: the program, or a replay."""
    assert value.cached is not None
    return sys.getrefcount(value.cached) > _OWN or storage_use_count(value.cached.untyped_storage()) > _OWN


def seconds_to_replay(value: LiveValue, rates: Mapping[int | None, float]) -> float:
    """About how long it takes to bring a value back, if its copy is gone."""
    seconds, wanted, seen = 0.0, [value], set[int]()
    while wanted:
        value = wanted.pop()
        node = value.node
        if not isinstance(node, Node) or id(node) in seen:
            continue
        seen.add(id(node))
        nbytes = value.nbytes
        for source in node.inputs:
            nbytes += source.nbytes
            if source.held is None and source.cached is None:
                wanted.append(source)
        seconds += nbytes * (rates.get(id(node.func), rates[None]))
    return seconds
