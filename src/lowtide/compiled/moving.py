"""Moves in compiled code: what forward hands to backward by way of the host or a disk.

A value's way, as operations of our own in the two graphs:

- ``send``, right after its producer, starts copying it to a tier and returns a *ticket*, eight bytes;
- ``settle`` waits for the copy and returns the ticket that is saved in the value's place. It reads the value,
  so that this is held as long as the copy needs it, and counted so by whoever counts what graphs hold;
- ``fetch``, in backward, makes room and starts copying back;
- ``arrive`` waits for that. It writes the room, so that no reader comes before it.

A ticket owns what is stored: autograd lets go of the one when it lets its graph go, and the other goes, too.
When to settle and to fetch follows from the plan's window, as in the eager engine (`lowtide.run.move`).
"""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import fx

from lowtide.compiled.coding import call
from lowtide.errors import PlanError
from lowtide.plan.data import Offload, Plan, decision_of
from lowtide.store.lanes import Transfer
from lowtide.store.stores import Stores
from lowtide.store.tier import StoreError


def check_tiers(tiers: str | Offload | Sequence[str | Offload]) -> tuple[Offload, ...]:
    """The tiers as decisions.

    Raises:
        PlanError: one is no tier.
    """
    found: list[Offload] = []
    for way in (tiers,) if isinstance(tiers, str | Offload) else tuple(tiers):
        decision = Offload(way) if isinstance(way, str) else decision_of(way)
        if not isinstance(decision, Offload):
            raise PlanError(f"tiers: {way!r} is no tier: give 'host', 'disk' or Offload('disk', path=...)")
        found.append(decision)
    return tuple(found)


def tiers_of(plan: Plan) -> dict[int, Offload]:
    """Values that a plan sends away -> where to."""
    return {move.value: move.decision for move in plan.moves if isinstance(move.decision, Offload)}


# ---- what runs -----------------------------------------------------------------------------------


class Stored:
    """What is stored of one value.

    Args:
        x: the value, dense.
        tier, path: where it goes.
    """

    def __init__(self, x: torch.Tensor, tier: str, path: str) -> None:
        self.device = x.device
        self.geometry = tuple(x.shape), tuple(x.stride()), x.dtype
        self._slot = stores().tier(tier, path, x.device).take(x.nbytes)
        self._writing: Transfer | None = self._slot.tier.write(flat(x), self._slot)
        self._reading: dict[int, Transfer] = {}

    def settle(self) -> None:
        """Order the device behind the copy out."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.join()

    def fetch(self, room: torch.Tensor) -> None:
        """Start copying to ``room``."""
        self._reading[room.data_ptr()] = self._slot.tier.read(self._slot, flat(room))

    def arrive(self, room: torch.Tensor) -> None:
        """Order the device behind the copy to ``room``."""
        reading = self._reading.pop(room.data_ptr(), None)
        if reading is None:
            raise StoreError("compiled code waits for a value at a place where none was asked for")
        reading.join()


class _Ticket(bytearray):
    """The memory of a ticket: while a tensor lies on it, its value stays stored."""

    stored: Stored


@cache
def stores() -> Stores:
    """The tiers of all compiled code in a process, opened when they are first used."""
    return Stores()


@cache
def _known() -> weakref.WeakValueDictionary[int, Stored]:
    """Number on a ticket -> what it stands for."""
    return weakref.WeakValueDictionary()


@cache
def _numbers() -> itertools.count[int]:
    return itertools.count(1)


def _ticket(number: int, stored: Stored) -> torch.Tensor:
    memory = _Ticket(number.to_bytes(8, "little"))
    memory.stored = stored
    return torch.frombuffer(memory, dtype=torch.int64)


def _stored(ticket: torch.Tensor) -> Stored:
    found = _known().get(int(ticket))
    if found is None:
        raise StoreError(
            "a value that compiled code has sent away is asked for by a copy of its ticket, and the ticket is "
            "gone: saved-tensor hooks around a compiled step (save_on_cpu and the like) do not go with tiers="
        )
    return found


def flat(x: torch.Tensor) -> torch.Tensor:
    """The bytes of a dense tensor, in the order of its memory."""
    return x.detach().as_strided((x.numel(),), (1,), x.storage_offset()).view(torch.uint8)


@torch.library.custom_op("lowtide::send", mutates_args=())
def send(x: torch.Tensor, tier: str, path: str) -> torch.Tensor:
    """Start copying a dense tensor to a tier."""
    number, stored = next(_numbers()), Stored(x, tier, path)
    _known()[number] = stored
    return _ticket(number, stored)


@torch.library.custom_op("lowtide::settle", mutates_args=())
def settle(ticket: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Wait until ``x`` is stored."""
    stored = _stored(ticket)
    stored.settle()
    return _ticket(int(ticket), stored)


@torch.library.custom_op("lowtide::fetch", mutates_args=())
def fetch(
    ticket: torch.Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """Start copying back what a ticket stands for, into memory of its own."""
    stored = _stored(ticket)
    if stored.geometry != (tuple(size), tuple(stride), dtype):
        raise StoreError(f"a value was sent away as {stored.geometry}, and {size}, {stride}, {dtype} is asked for")
    room = torch.empty_strided(size, stride, dtype=dtype, device=device)
    stored.fetch(room)
    return room


@torch.library.custom_op("lowtide::arrive", mutates_args=("room",))
def arrive(room: torch.Tensor, ticket: torch.Tensor) -> None:
    """Wait until ``room`` has what was asked for."""
    _stored(ticket).arrive(room)


@send.register_fake
def _(x: torch.Tensor, tier: str, path: str) -> torch.Tensor:
    return torch.empty(1, dtype=torch.int64, device="cpu")


@settle.register_fake
def _(ticket: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(ticket)


@fetch.register_fake
def _(
    ticket: torch.Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=device)


@arrive.register_fake
def _(room: torch.Tensor, ticket: torch.Tensor) -> None:
    return None


# ---- where it stands in the graphs ---------------------------------------------------------------


def moved(
    forward: fx.GraphModule,
    backward: fx.GraphModule,
    forward_outputs: int,
    tiers: Mapping[str, Offload],
    window_bytes: int,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Hand some saved values over by way of a tier.

    Args:
        forward, backward: the halves of a joint graph, changed in place.
        forward_outputs: how many of the forward's outputs are the caller's; the others are saved.
        tiers: name of a saved node -> where it goes. What is not saved, is returned anyway or does not lie
            densely stays as it is.
        window_bytes: the most that waits for its copy out at one time, and the most that is fetched ahead.
    """
    output = next(iter(reversed(forward.graph.nodes)))
    given: list[Any] = list(output.args[0])
    returned, saved = given[:forward_outputs], given[forward_outputs:]
    going = [
        node
        for node in saved
        if getattr(node, "name", "") in tiers and node not in returned and is_dense(node.meta["val"])
    ]
    tickets = _sent(forward.graph, going, tiers, window_bytes, output)
    output.args = ([*returned, *(tickets.get(node, node) for node in saved)], *output.args[1:])
    inputs = {node.name: node for node in backward.graph.nodes if node.op == "placeholder"}
    _fetched(backward.graph, {inputs[node.name]: tickets[node] for node in going}, window_bytes)
    for module in (forward, backward):
        module.graph.lint()
        module.recompile()
    return forward, backward


def is_dense(value: torch.Tensor) -> bool:
    """Whether every element of the storage is one of the tensor's."""
    return value.untyped_storage().nbytes() == value.numel() * value.dtype.itemsize


def _sent(
    graph: fx.Graph,
    going: Sequence[fx.Node],
    tiers: Mapping[str, Offload],
    window_bytes: int,
    output: fx.Node,
) -> dict[fx.Node, fx.Node]:
    """The tickets of values; the oldest copies are waited for while more than the window is under way."""
    place = {node: at for at, node in enumerate(graph.nodes)}
    tickets: dict[fx.Node, fx.Node] = {}
    waiting: deque[tuple[fx.Node, fx.Node]] = deque()
    room = window_bytes

    def finish(value: fx.Node, ticket: fx.Node) -> int:
        tickets[value] = call(graph, f"{value.name}_stored", torch.ops.lowtide.settle.default, (ticket, value))
        return _nbytes(value)

    for value in sorted(going, key=place.__getitem__):
        decision = tiers[value.name]
        arguments = value, decision.tier, decision.path
        with graph.inserting_after(value):
            ticket = call(graph, f"{value.name}_sent", torch.ops.lowtide.send.default, arguments)
        waiting.append((value, ticket))
        room -= _nbytes(value)
        with graph.inserting_before(ticket.next):
            while room < 0:
                room += finish(*waiting.popleft())
    with graph.inserting_before(output):
        for pair in waiting:
            finish(*pair)
    return tickets


def _fetched(graph: fx.Graph, tickets: Mapping[fx.Node, fx.Node], window_bytes: int) -> None:
    """Fetch values before they are read, the next ones ahead as far as the window allows."""
    place = {node: at for at, node in enumerate(graph.nodes)}
    first = {value: min(value.users, key=place.__getitem__) for value in tickets}
    coming = deque(sorted(tickets, key=lambda value: place[first[value]]))
    order = list(coming)
    early: dict[fx.Node, fx.Node] = {}
    room = window_bytes
    given: dict[fx.Node, fx.Node] = {}
    for value, ticket in tickets.items():
        with graph.inserting_before(value):
            given[value] = graph.placeholder(ticket.name)
        given[value].meta["val"] = ticket.meta["val"]

    def begin(value: fx.Node) -> fx.Node:
        found = value.meta["val"]
        arguments = given[value], list(found.shape), list(found.stride()), found.dtype, found.device
        return call(graph, f"{value.name}_room", torch.ops.lowtide.fetch.default, arguments)

    def ahead() -> None:
        nonlocal room
        while coming and _nbytes(coming[0]) <= room:
            room -= _nbytes(coming[0])
            early[coming[0]] = begin(coming[0])
            coming.popleft()

    start = next((node for node in graph.nodes if node.op == "call_function"), None)
    if start is not None:
        with graph.inserting_before(start):
            ahead()
    for value in order:
        with graph.inserting_before(first[value]):
            here = early.pop(value, None)
            if here is None:
                coming.remove(value)
                here = begin(value)
            else:
                room += _nbytes(value)
            value.replace_all_uses_with(here)
            call(graph, f"{value.name}_here", torch.ops.lowtide.arrive.default, (here, given[value]))
            ahead()
        graph.erase_node(value)


def _nbytes(node: fx.Node) -> int:
    return node.meta["val"].untyped_storage().nbytes()
