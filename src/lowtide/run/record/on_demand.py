"""Evict only when memory is short: for a model whose steps run other operations each time, where no plan
knows what comes.

In: how many bytes are live, and how many may be. Each operation is recorded. A value that autograd saves
stays cached, as a replayed one does (`LiveValue.cached`). Before an operation of the forward, and where
backward asks for a saved tensor, the recorder checks whether memory is short. If it is, the cached copies go
that are cheapest to bring back, for their bytes and for how long nobody will need them: backward asks for the
oldest last. A value whose copy has gone is an evicted one, and is replayed.

The C++ recorder, where there is one, does the same by itself (`cpp/on_demand.h`), and prices a value
anew only where a bound on its price says that it may be the cheapest.
"""

from __future__ import annotations

import heapq
import sys
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

from lowtide import private
from lowtide.interception import unseen
from lowtide.private import storage_use_count
from lowtide.run.record.tape import LiveValue, Node

_MORE = 7
"""What is evicted beyond what is short, as a shift of the bytes that may be live: the next check comes later
then.
"""

_OWN = 2
"""References to the storage of a copy that nobody else holds, as Python counts them."""


class OnDemand:
    """Decides which copies of saved values go when memory is short; one serves one step.

    Args:
        live: how many bytes are live, above those at the step's start.
        room_bytes: how many may be when an operation begins.
        rates: seconds of an operation for each byte that it reads or writes, by the operation's ``id``, since
            its hash is slow; of those not in it, under ``None``.
        learn: called with each operation of the forward that begins in Python.
    """

    def __init__(
        self,
        live: Callable[[], int],
        room_bytes: int,
        rates: Mapping[int | None, float],
        learn: Callable[[Any], None] | None = None,
    ) -> None:
        self._live, self._room_bytes, self._rates, self._learn = live, room_bytes, rates, learn
        self._kept: list[weakref.ref[LiveValue]] = []
        self._left = 0  # bytes that may be allocated until the live ones are counted again

    def save(self, value: LiveValue, tensor: torch.Tensor) -> None:
        """Autograd saves a tensor of the value."""
        if value.cached is None:
            with unseen():
                value.keep_cached(private.unseen_alias(tensor))
            self.note_kept(value)

    def note_kept(self, value: LiveValue) -> None:
        """The value has a cached copy now."""
        self._kept.append(weakref.ref(value))

    def begins(self, func: Any) -> None:
        """An operation of the forward begins, in Python."""
        if self._learn is not None:
            self._learn(func)
        self.relieve_if_short()

    def wrote(self, nbytes: int) -> None:
        """An operation has allocated so much."""
        self._left -= nbytes

    def relieve_if_short(self) -> None:
        """As `relieve`, if so much was allocated since the last count that memory may be short."""
        if self._left < 0:
            self.relieve()

    def relieve(self) -> None:
        """Count the live bytes, and drop cached copies if they are too many."""
        self._left = self._room_bytes - self._live()
        if self._left < 0:
            self.evict((self._room_bytes >> _MORE) - self._left)
            self._left = self._room_bytes - self._live()

    def evict(self, nbytes: int) -> None:
        """Drop the cached copies that are cheapest to bring back, until so many bytes are gone."""
        found = [value for one in self._kept if (value := one()) is not None and value.cached is not None]
        values = {id(value): value for value in found if isinstance(value.node, Node)}
        del found
        self._kept = list(map(weakref.ref, values.values()))
        mine = [value for value in values.values() if not _in_use(value)]
        newest = max((value.node.order for value in values.values() if value.node is not None), default=0)
        del values

        def price(value: LiveValue) -> float:
            assert value.node is not None
            age = newest - value.node.order + 1
            return seconds_to_replay(value, self._rates) / (max(1, value.nbytes) * age)

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
