"""Moves in compiled code: what forward hands to backward through the host or a disk.

What a value goes through, as operations of our own in the two graphs:

- ``send``, right after its producer, starts copying it to a tier and returns a *ticket*, eight bytes;
- ``settle`` waits for the copy and returns the ticket that is saved in the value's place. It reads the value,
  so that whoever counts what graphs hold counts this for as long as the copy needs it;
- ``fetch``, in backward, starts copying back and returns a ticket for what arrives;
- ``arrive`` waits for that and returns the value.

When to settle and to fetch follows from the plan's window, as in `lowtide.extensions.moves.engine`.
Inductor orders calls anew, so that little memory is held: tickets are small, so they come early, and values
come late. What must not move earlier takes one more argument (``after``), which does not exist before.

A ticket owns what is stored: autograd lets go of the one when it lets its graph go, and the other goes, too.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import fx

from lowtide.compiled.cut import Halves, Pieces, call, cut, geometry, hand_over
from lowtide.compiled.joint import Joint, Key
from lowtide.errors import PlanError, expect
from lowtide.extensions.moves.store.lanes import Transfer
from lowtide.extensions.moves.store.slab import Lease
from lowtide.extensions.moves.store.stores import Stores
from lowtide.extensions.moves.store.tier import StoreError
from lowtide.ops import covers_storage
from lowtide.plan.data import Offload, decision_of
from lowtide.private import partitioning


def check_tiers(tiers: str | Offload | Sequence[str | Offload]) -> tuple[Offload, ...]:
    """The tiers as decisions.

    Raises:
        PlanError: one is no tier.
    """
    found: list[Offload] = []
    given = isinstance(tiers, str | Offload | Sequence)
    expect(given, "compile(tiers=)", tiers, "'host', 'disk' or Offload('disk', path=...)")
    for tier in (tiers,) if isinstance(tiers, str | Offload) else tuple(tiers):
        decision = Offload(tier) if isinstance(tier, str) else decision_of(tier)
        if not isinstance(decision, Offload):
            raise PlanError(f"tiers: {tier!r} is no tier: give 'host', 'disk' or Offload('disk', path=...)")
        found.append(decision)
    return tuple(found)


# ---- what runs -----------------------------------------------------------------------------------


class Stored:
    """A saved value that waits in a tier.

    Args:
        x: the value, dense.
        tier, path: where it goes.
    """

    def __init__(self, x: torch.Tensor, tier: str, path: str) -> None:
        self._device = x.device
        self._geometry = tuple(x.shape), tuple(x.stride()), x.dtype
        self._tier = stores().tier(tier, path, x.device)
        lease = self._tier.take(x.nbytes)
        self._lease: Lease | None = lease
        self._writing: Transfer | None = self._tier.write(_flat(x), lease)

    def settle(self) -> None:
        """Order the device behind the copy out."""
        lease, writing = self._lease, self._writing
        if writing is None:
            return
        self._lease = self._writing = None  # an error's frames hold tickets: none may lead back to the error
        writing.join()
        self._lease = lease

    def fetch(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Arriving:
        """Start copying back."""
        if self._geometry != (tuple(size), tuple(stride), dtype):
            raise StoreError(
                f"a value left as {self._geometry} and is asked for as {size}, {stride}, {dtype}"
            )
        assert self._lease is not None
        room = torch.empty_strided(size, stride, dtype=dtype, device=self._device)
        return Arriving(room, self._tier.read(self._lease, _flat(room)))


class Arriving:
    """A value on its way back, and the memory that it comes to."""

    def __init__(self, room: torch.Tensor, reading: Transfer) -> None:
        self._coming: tuple[torch.Tensor, Transfer] | None = (room, reading)

    def arrive(self) -> torch.Tensor:
        """The value, for which the device waits; given out once."""
        assert self._coming is not None
        room, reading = self._coming
        self._coming = None
        reading.join()
        return room


class _Memory(bytearray):
    """The memory of a ticket: what it stands for lives as long as a tensor lies here."""

    owned: Stored | Arriving


@cache
def stores() -> Stores:
    """The tiers of all compiled code in a process, opened when they are first used."""
    return Stores()


@cache
def _known() -> weakref.WeakValueDictionary[int, Stored | Arriving]:
    """Number on a ticket -> the stored or arriving value that the ticket stands for."""
    return weakref.WeakValueDictionary()


@cache
def _numbers() -> itertools.count[int]:
    return itertools.count(1)


def _ticket(owned: Stored | Arriving) -> torch.Tensor:
    number = next(_numbers())
    memory = _Memory(number.to_bytes(8, "little"))
    memory.owned = _known()[number] = owned
    return torch.frombuffer(memory, dtype=torch.int64)


def _on(ticket: torch.Tensor) -> Any:
    found = _known().get(int(ticket))
    if found is None:
        raise StoreError(
            "the ticket of a moved value is gone: saved-tensor hooks (save_on_cpu and the like) do not "
            "work with tiers=, leave one of them out"
        )
    return found


def _flat(x: torch.Tensor) -> torch.Tensor:
    """The bytes of a dense tensor, in the order of its memory."""
    return x.detach().as_strided((x.numel(),), (1,), x.storage_offset()).view(torch.uint8)


@torch.library.custom_op("lowtide::send", mutates_args=())
def send(x: torch.Tensor, tier: str, path: str) -> torch.Tensor:
    """Start copying a dense tensor to a tier."""
    return _ticket(Stored(x, tier, path))


@torch.library.custom_op("lowtide::settle", mutates_args=())
def settle(ticket: torch.Tensor, x: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """Wait until ``x`` is stored, once ``after`` is there."""
    stored: Stored = _on(ticket)
    stored.settle()
    return _ticket(stored)


@torch.library.custom_op("lowtide::fetch", mutates_args=())
def fetch(
    ticket: torch.Tensor, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, after: torch.Tensor
) -> torch.Tensor:
    """Start copying back what a ticket stands for, once ``after`` is there."""
    stored: Stored = _on(ticket)
    return _ticket(stored.fetch(size, stride, dtype))


@torch.library.custom_op("lowtide::arrive", mutates_args=())
def arrive(
    ticket: torch.Tensor, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """The value that was fetched."""
    arriving: Arriving = _on(ticket)
    return arriving.arrive()


@send.register_fake
@settle.register_fake
@fetch.register_fake
def _(*_: Any) -> torch.Tensor:
    """The ticket that they return."""
    return torch.empty(1, dtype=torch.int64, device="cpu")


@arrive.register_fake
def _(ticket: Any, size: Any, stride: Any, dtype: Any, device: Any) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=device)


def arriving_bytes(operation: Any, args: Sequence[Any]) -> int:
    """By how much a call changes what is on its way back: more where it fetches, less where something
    arrives, whose memory is a result from then on.
    """
    if operation is torch.ops.lowtide.fetch.default:
        return math.prod(args[1]) * args[3].itemsize
    if operation is torch.ops.lowtide.arrive.default:
        return -math.prod(args[1]) * args[3].itemsize
    return 0


# ---- where it stands in the graphs ---------------------------------------------------------------


@dataclass(frozen=True)
class Way:
    """How a joint graph is cut.

    Attributes:
        stored: storages that forward hands to backward; ``None`` for the cut of `torch.compile` itself.
        tiers: those that wait elsewhere, and where.
        window_bytes: as of `with_moves`.
    """

    stored: frozenset[Key] | None
    tiers: tuple[tuple[Key, Offload], ...] = ()
    window_bytes: int = 0

    def halves(self, joint: Joint) -> Halves:
        """Forward and backward of a joint graph."""
        if self.stored is None:
            return partitioning.min_cut(joint.module, joint.forward_outputs, joint.static)
        halves = cut(joint, self.stored)
        if not self.tiers:
            return halves
        return with_moves(*halves, joint.forward_outputs, dict(self.tiers), self.window_bytes)

    @property
    def facts(self) -> list[Any]:
        """All of it, in JSON's words."""
        stored = None if self.stored is None else sorted(self.stored)
        return [stored, [(key, one.tier, one.path) for key, one in self.tiers], self.window_bytes]

    @classmethod
    def of_facts(cls, facts: Any) -> Way:
        """The way whose `facts` these are.

        Raises:
            TypeError, ValueError: they are none's.
        """
        stored, tiers, window_bytes = facts
        moved = tuple((key, Offload(tier, path)) for key, tier, path in tiers)
        return cls(None if stored is None else frozenset(stored), moved, window_bytes)


def with_moves(
    forward: fx.GraphModule,
    backward: fx.GraphModule,
    forward_outputs: int,
    tiers: Mapping[str, Offload],
    window_bytes: int,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Hand some saved values over through a tier.

    Args:
        forward, backward, forward_outputs: as of `lowtide.compiled.cut.hand_over`.
        tiers: name of a saved node -> where it goes. What does not lie densely stays as it is.
        window_bytes: the most that waits for its copy out at one time, and the most that is fetched ahead.
    """

    def fits(node: fx.Node) -> bool:
        return node.name in tiers and covers_storage(node.meta["val"])

    def send(going: list[fx.Node], output: fx.Node) -> Pieces:
        returned: Any = output.args[0]
        made = [one for one in returned[:forward_outputs] if isinstance(one, fx.Node)]
        last = [
            one for one in made if one.op == "call_function" and isinstance(one.meta["val"], torch.Tensor)
        ]
        return _send_all(going, tiers, window_bytes, output, max(last, default=None))

    def receive(received: Pieces) -> None:
        _add_fetches(backward.graph, {value: ticket for value, (ticket,) in received.items()}, window_bytes)

    return hand_over(forward, backward, forward_outputs, fits, send, receive)


def _send_all(
    going: Sequence[fx.Node],
    tiers: Mapping[str, Offload],
    window_bytes: int,
    output: fx.Node,
    last: fx.Node | None,
) -> dict[fx.Node, list[fx.Node]]:
    """The tickets of values. While more than the window is under way the oldest copies are waited for, and
    those that are left at the end, when what is ``last`` is there.
    """
    graph, room = output.graph, window_bytes
    tickets: dict[fx.Node, list[fx.Node]] = {}
    waiting: deque[tuple[fx.Node, fx.Node]] = deque()

    def finish(after: fx.Node | None) -> int:
        value, ticket = waiting.popleft()
        arguments = ticket, value, after or ticket
        tickets[value] = [call(graph, f"{value.name}_stored", torch.ops.lowtide.settle.default, *arguments)]
        return _nbytes(value)

    for value in going:
        arguments = value, tiers[value.name].tier, tiers[value.name].path
        with graph.inserting_after(value):
            ticket = call(graph, f"{value.name}_sent", torch.ops.lowtide.send.default, *arguments)
        waiting.append((value, ticket))
        room -= _nbytes(value)
        with graph.inserting_before(ticket.next):
            while room < 0:
                room += finish(ticket)
    with graph.inserting_before(output):
        while waiting:
            finish(last)
    return tickets


def _add_fetches(graph: fx.Graph, tickets: Mapping[fx.Node, fx.Node], window_bytes: int) -> None:
    """Fetch values before they are read, and when one has arrived the next, as far as the window allows."""
    first = {value: min(value.users) for value in tickets}
    order = sorted(tickets, key=first.__getitem__)
    coming, early, room = deque(order), dict[fx.Node, fx.Node](), window_bytes

    def begin(after: fx.Node | None) -> None:
        value = coming.popleft()
        ticket, name = tickets[value], f"{value.name}_coming"
        early[value] = call(
            graph, name, torch.ops.lowtide.fetch.default, ticket, *geometry(value), after or ticket
        )

    def ahead(after: fx.Node | None) -> None:
        nonlocal room
        while coming and _nbytes(coming[0]) <= room:
            room -= _nbytes(coming[0])
            begin(after)

    with graph.inserting_before(next(node for node in graph.nodes if node.op != "placeholder")):
        ahead(None)
    for value in order:
        with graph.inserting_before(first[value]):
            if value in early:
                room += _nbytes(value)
            else:
                begin(None)
            arguments = early[value], *geometry(value), value.meta["val"].device
            here = call(graph, f"{value.name}_here", torch.ops.lowtide.arrive.default, *arguments)
            value.replace_all_uses_with(here)
            ahead(here)


def _nbytes(node: fx.Node) -> int:
    return node.meta["val"].untyped_storage().nbytes()
