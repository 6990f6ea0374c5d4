"""The tape of a step, for what Python records: special operations, scopes, verified steps.

``core`` is the tape itself (``cpp/tape.h``): which value each storage shows, and the nodes. C++ records plain
operations on it alone. A storage shows one value at a time: a recorded operation wrote it, or it is a source,
or nothing has written it yet (it is blank).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from lowtide import private
from lowtide.ops import Call, OpInfo, covers_storage, is_sparse
from lowtide.run.record.engine import EVICTED, engine
from lowtide.run.record.special import (
    Input,
    Overwrite,
    SparseInput,
    SpecialCall,
    Unread,
    copy_of,
    why_not_reproduced,
)
from lowtide.run.tensor_bytes import Geometry, digest, reach


class Unrecordable(Exception):
    """An argument cannot be described by value and geometry."""


class Node:
    """An operation that Python is about to record.

    Attributes:
        special: the call.
        core: the node on the tape, once `Tape.begin` has made it.
        inputs: the values that it reads, each once.
    """

    __slots__ = ("core", "inputs", "special")

    def __init__(self, special: SpecialCall) -> None:
        self.special, self.inputs = special, list[Any]()
        self.core: Any = None

    def place_of(self, value: Any) -> int:
        """The place of a value among the inputs."""
        for place, known in enumerate(self.inputs):
            if known is value:
                return place
        self.inputs.append(value)
        return len(self.inputs) - 1


class Tape:
    """Records the operations of one step.

    Args:
        verify: whether what an operation reads is compared with what was written, by digests.
        gathered: keys of the storages that sharded weights are gathered into, each time the same bytes.

    Attributes:
        core: the tape in C++.
        findings: names of the operations that did not reproduce, with the reason. What they wrote is kept.
    """

    def __init__(self, verify: bool = False, gathered: Iterable[int] = ()) -> None:
        self.core = engine().Tape(verify)
        self.core.single_rank = not private.may_shard()
        self.verify = verify
        for key in gathered:
            self.core.gather(key)
        self.findings: dict[str, str] = {}
        self._outer: list[tuple[int, int]] = []  # units of FSDP around the one that runs, and their runs
        self._runs = 0

    # ---- units of FSDP ---------------------------------------------------------------------------

    def unit_begins(self, unit: int, gathered: Iterable[torch.Tensor] = ()) -> None:
        """A unit of FSDP begins: its weights are there until it ends, and again in its backward.

        Args:
            unit: which.
            gathered: what its weights were gathered into.
        """
        core = self.core
        for tensor in gathered:
            if not core.is_gathered(key := private.storage_key(tensor)):
                core.forget(key)
                core.gather(key)
        self._outer.append((core.unit, core.run))
        if unit != core.unit:  # else one of several modules of the unit
            self._runs += 1
            core.unit, core.run = unit, self._runs

    def unit_ends(self) -> None:
        """The unit has ended; the one around it goes on."""
        if self._outer:
            self.core.unit, self.core.run = self._outer.pop()

    # ---- operations ------------------------------------------------------------------------------

    def refills(self, tensor: torch.Tensor) -> bool:
        """Whether a write to the tensor gathers a sharded weight: it writes the bytes of before."""
        return self.core.is_gathered(private.storage_key(tensor))

    def overwritten_by(self, call: Call) -> list[torch.Tensor]:
        """The tensors that a call overwrites with other bytes."""
        return [tensor for tensor in call.overwritten if not self.refills(tensor)]

    def is_constant(self, sparse: torch.Tensor) -> bool:
        """Whether a replay may read a tensor that is not strided by reference: a sparse input or buffer."""
        return is_sparse(sparse)

    def node_of(self, call: Call, reads_blank: bool = False) -> Node | None:
        """The node of a call about to be made, or ``None`` where it cannot be replayed.

        Args:
            call: the call.
            reads_blank: whether the call may read memory that was filled part by part. It may where a plan
                is followed: in the profiled step nothing overwrote what the call read.
        """
        info = call.info
        if (call.reason and not info.collective) or info.uninitialized or call.writes_others:
            return None
        if any(map(self.refills, call.written)) or not all(map(self.is_constant, call.others)):
            return None
        read = (tensor for tensor in call.inputs if id(tensor) not in call.unread)
        reads_blank = reads_blank or not self.core.any_blank
        if not reads_blank and any(self.core.is_blank(private.storage_key(t)) for t in read):
            return None
        device = next((t.device for t in (*call.inputs, *call.others)), None)
        special = SpecialCall(call.func, device or torch.device(call.kwargs.get("device") or "cpu"))
        node = Node(special)
        try:
            special.args = [self._argument(item, call, node) for item in call.args]
            special.kwargs = {name: self._argument(item, call, node) for name, item in call.kwargs.items()}
        except Unrecordable:
            return None
        return node

    def _argument(self, item: Any, call: Call, node: Node) -> Any:
        """An argument of a call with references in place of tensors. Adds to the node what the call reads and
        overwrites.
        """
        if isinstance(item, (tuple, list)):
            return [self._argument(part, call, node) for part in item]
        if not isinstance(item, torch.Tensor):
            return item
        if call.others and is_sparse(item):
            return SparseInput(item)
        overwrites = id(item) in call.redone
        if id(item) in call.unread:
            if not overwrites:
                return Unread(item)
            made = Overwrite(None, item, 0)
        else:
            value = self.value_of(item)
            place = node.place_of(value)
            if not overwrites:
                return Input(place, Geometry(item))
            if value.is_source:
                raise Unrecordable
            made = Overwrite(place, item, value.extent)
        node.special.written.append(made)
        return made

    def begin(self, node: Node, call: Call, pins: bool, governor: Any = None) -> None:
        """The call of a node is about to run.

        Args:
            node, call: the recorded call.
            pins: a plan or a scope runs it again, so that what it reads is held from now on.
            governor: may evict copies that are held so.
        """
        node.core = self.core.node(node.special, node.inputs, torch.is_grad_enabled())
        if pins:
            read = [tensor for tensor in call.inputs if id(tensor) not in call.unread]
            self.core.pin(node.core, read, governor)

    def copies_of(self, overwritten: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Each tensor that a call is about to overwrite, with a copy: a second run starts from it. None where
        nothing is verified.
        """
        return [(tensor, copy_of(tensor)) for tensor in overwritten] if self.verify else []

    def before_overwriting(self, overwritten: Sequence[torch.Tensor]) -> None:
        """A call is about to overwrite tensors: replays that start from them get a copy."""
        for tensor in overwritten:
            if self.core.replayable(private.storage_key(tensor)) is not None:
                self.core.before_update(tensor)
            else:
                self.core.before_change(private.storage_key(tensor))

    def forget(self, overwritten: Sequence[torch.Tensor], info: OpInfo) -> None:
        """A call has overwritten tensors: their storages show other values now."""
        for tensor in overwritten:
            key = private.storage_key(tensor)
            stays_blank = info.fills and not covers_storage(tensor) and self.core.is_blank(key)
            self.core.forget(key)
            if stays_blank:
                self.core.note_blank(tensor)

    def reproduces(
        self,
        node: Node,
        call: Call,
        flat: list[Any],
        before: list[tuple[torch.Tensor, torch.Tensor]],
        around: Callable[[Callable[[], Any]], Any] = lambda run: run(),
    ) -> bool:
        """Whether a second run of an operation gives the bytes of the first.

        Args:
            node: of the operation.
            call, flat, before, around: as of `lowtide.run.record.special.why_not_reproduced`.
        """
        reason = why_not_reproduced(node.special, call, flat, before, around)
        if reason:
            self.note_finding(call.info.name, reason)
        return not reason

    def note_finding(self, name: str, reason: str) -> None:
        """The operation with that name does not reproduce."""
        self.findings.setdefault(name, reason)

    def link(
        self, node: Node, call: Call, fresh: Sequence[tuple[int, torch.Tensor]], plans: Sequence[int] = ()
    ) -> None:
        """Note what a call that has run wrote as replayable by its node, which is complete then.

        Args:
            node, call: the recorded call.
            fresh: tensors on storages that it made, one for each, with their positions among the results.
            plans: what the plan says of each fresh tensor, then of each overwritten one; by default all go.
        """
        special, loose = node.special, call.loose
        special.positions = tuple(position for position, _ in fresh)
        redone = [tensor for tensor in call.written if id(tensor) in call.redone]
        plans = plans or (EVICTED,) * (len(fresh) + len(redone))
        for (position, tensor), plan in zip(fresh, plans, strict=False):
            self.register(node.core, tensor, 0 if position in loose else reach(tensor), plan)
        for one, tensor, plan in zip(special.written, redone, plans[len(fresh) :], strict=False):
            self.register(node.core, tensor, max(one.extent, reach(tensor)), plan)

    # ---- values ----------------------------------------------------------------------------------

    def register(self, core: Any, tensor: torch.Tensor, extent: int, plan: int = EVICTED) -> Any:
        """The value of ``tensor``, which the node ``core`` brings back; its first ``extent`` bytes were
        written.
        """
        value = self.core.wrote(core, tensor, extent, plan)
        if self.verify:
            value.digest = digest(tensor, extent)
        return value

    def value_of(self, tensor: torch.Tensor) -> Any:
        """The value that a tensor shows.

        Raises:
            Unrecordable: it was moved by a codec that loses too much to replay from.
        """
        value = self.core.value_of(tensor)
        if value.is_source:
            return value
        if not self.is_as_written(value, tensor):
            return self.written_unseen(value, tensor)
        if not getattr(value.node.special, "replayable_from", True):
            raise Unrecordable
        return value

    def is_as_written(self, value: Any, tensor: torch.Tensor) -> bool:
        """Whether a tensor shows the bytes of its replayable value. It is not looked into where nothing is
        verified.
        """
        return not self.verify or value.digest is None or digest(tensor, value.extent) == value.digest

    def written_unseen(self, value: Any, tensor: torch.Tensor) -> Any:
        """The value of a tensor that code which the dispatcher does not see has overwritten. Operations that
        read the old value cannot be replayed, since no copy of it exists.

        Args:
            value: the old value; ``tensor`` shows the new one.
        """
        self.note_finding(value.node.name, "its result was written by code that the dispatcher does not see")
        for other in self.core.replayables():
            if any(read is value for read in other.node.inputs):
                self.note_finding(
                    other.node.name,
                    "what it had read was overwritten by code that the dispatcher does not see",
                )
        self.core.spoil(value)
        return self.core.source(tensor, True)

    def before_resize(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """A storage is about to be resized within the forward."""
        if nbytes < storage.nbytes():
            self.core.before_change(private.storage_address(storage), True)
