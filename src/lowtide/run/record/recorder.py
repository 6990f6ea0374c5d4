"""Record a running forward on the tape, and evict the tensors that autograd saves.

`Recorder` is the interceptor and the pair of saved-tensor hooks of one forward. A director
(`lowtide.run.record.directors`) decides what is recorded and which results stay: one follows a plan, another
a scope's rule.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from lowtide import private, writes
from lowtide.errors import PlanError
from lowtide.interception import Interceptor, proceed, unseen
from lowtide.ops import Call, OpInfo, covers_storage, enter, has_plain_storage, is_sparse, is_wrapper, op_info
from lowtide.run.digest import digest, on_a_copy, reach
from lowtide.run.move import TransferEngine
from lowtide.run.record import tape
from lowtide.run.record.cpp_recorder import cpp_recorder
from lowtide.run.record.directors import Director, PlanDirector, RegionDirector
from lowtide.run.record.handles import AroundUnpack, Attributed, Evicted, Kept, Wrapped, unpack
from lowtide.run.record.on_demand import OnDemand
from lowtide.run.record.replay import flat_results, run_first
from lowtide.run.record.tape import Fetch, LiveValue, Node, Ref, Tables, Unrecordable, Writer
from lowtide.run.record.verify import copy_of, why_not_reproduced

CAPTURED = (
    "a limited step (or a recomputing scope) runs while a CUDA graph is captured: the graph would keep this "
    "step's memory and random numbers for all replays, and no later step would be held to a budget. Capture "
    "the model without a limit (handle.remove() before, and no checkpointing scope in it), or run limited "
    "steps outside of torch.cuda.graph and torch.cuda.make_graphed_callables"
)


class Recorder(Interceptor):
    """Intercepts the operations of one forward, or of one checkpointing scope in a forward.

    Args:
        director: decides what is recorded and what stays.
        verify: run every recorded operation twice and compare, and check evicted values for writes that the
            dispatcher did not see.
        check: compare every replayed tensor with the digest of the original, as ``verify`` does, too.
        around_unpack: makes the call that brings an evicted tensor back.
        mover: carries out the plan's moves.
        gathered: keys of the storages that sharded weights are gathered into, each time the same bytes.
        program: the plan's, as the C++ recorder knows it (`lowtide.run.record.cpp_recorder`), or ``None``.
            Verifying and checking are done in Python.
        on_demand: evicts values when memory is short, or ``None``: those go at once that do not stay.

    Attributes:
        findings: names of the operations that did not reproduce, with the reason. What they wrote is kept.

    Raises:
        PlanError: a CUDA graph is being captured.
    """

    def __init__(
        self,
        director: Director,
        *,
        verify: bool = False,
        check: bool = False,
        around_unpack: AroundUnpack | None = None,
        mover: TransferEngine | None = None,
        gathered: Collection[int] = (),
        program: Any = None,
        on_demand: OnDemand | None = None,
    ) -> None:
        private.keep_dynamo_out()
        if private.is_capturing():
            raise PlanError(CAPTURED)
        self.director = director
        self.verify = verify
        self.check = check or verify
        self.around_unpack = around_unpack
        self.mover = mover
        self.on_demand = on_demand
        self.gathered = gathered
        self.findings: dict[str, str] = {}
        self.tables = Tables()
        self._starts = writes.Watch()
        self._ran = [0, 0]
        self._wanted = False  # whether the director wants the latest operation recorded
        if program is not None and not self.check:
            self.cpp = cpp_recorder().Core(
                tables=self.tables,
                director=director,
                pack=weakref.WeakMethod(self.pack),
                program=program,
                on_demand=on_demand,
            )

    @property
    def governs(self) -> bool:
        """As long as it is active."""
        return True

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Intercept operations and saved tensors; afterwards only autograd's graph holds the tape."""
        with ExitStack() as stack:
            stack.callback(self.close)
            stack.callback(private.before_storage_resizes(self._storage_resizes))
            cpp = self.cpp if self.mover is None else None
            # hooks that come and go would show a checkpoint around them other tensors in its second forward
            stays = private.torch_checkpoint() is not None
            pack = cpp.pack if cpp is not None else self.pack
            back = cpp_recorder().unpack if self.cpp is not None else unpack
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, back))
            if cpp is not None and not stays:  # it takes them out while nothing is evicted
                cpp.hooks_found()
                stack.callback(cpp.hooks_end)
            stack.enter_context(self)
            yield

    def boundary(self) -> None:
        """Begin a segment: earlier values are its inputs, and are kept where replays need them."""
        self._watch()
        self.tables.given.clear()
        self.tables.held.clear()

    def _watch(self) -> None:
        """Have `lowtide.writes` watch what the segment that ends knows, since its tables are cleared now.

        A held value that replays start from is copied before its storage is overwritten. An evicted value
        whose storage lives on is read from that storage once that was overwritten.
        """
        held = self.tables.held
        self._starts.add({k: v for k, v in held.items() if k not in self.gathered} if self.gathered else held)
        alive: dict[int, weakref.ref[LiveValue]] = {}
        for key, (value, storage) in self.tables.given.items():
            if value.evicted and value.readers:
                value.shown, alive[key] = storage, weakref.ref(value)
        self._starts.add(alive)

    @contextmanager
    def region(self, director: RegionDirector) -> Iterator[None]:
        """A scope inside this recorder's forward: a segment with a director of its own.

        Not under a plan, which has decisions for the scope's operations.
        """
        before = self.director
        if not isinstance(before, PlanDirector):
            self.boundary()
            self.director = director
        try:
            yield
        finally:
            self.director = before

    def close(self) -> None:
        """Forget all values; those that saved tensors need are held by autograd's graph."""
        self.boundary()
        self.tables.blank.clear()
        if self.cpp is not None:
            self.cpp.replays.watch = self._starts
        del self._starts  # evicted tensors keep it

    @property
    def ran(self) -> tuple[int, int]:
        """How many operations have run: without gradients, and with them."""
        others = self.cpp.ran if self.cpp is not None else (0, 0)
        return self._ran[0] + others[0], self._ran[1] + others[1]

    # ---- operations ------------------------------------------------------------------------------

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operation, and record it if the director wants that; a backward inside the forward is not
        recorded.
        """
        info = op_info(func)
        if info.is_view or info.waits or private.in_backward():
            return self._call(func, args, kwargs)
        self._ran[torch.is_grad_enabled()] += 1
        self._wanted = self.director.evicts(func, args, kwargs)
        call = self._call_of(func, args, kwargs)
        node = self._prepare(call)
        overwritten = [tensor for tensor in call.overwritten if not self.refills(tensor)]
        before = [(t, copy_of(t)) for t in overwritten] if self.verify and node is not None else []
        self._copy_on_write(overwritten)
        if self.on_demand is not None:
            self.on_demand.begins(func)
        result = run_first(node, self._call, call)
        flat = flat_results(result)
        if info.collective and node is not None:
            flat = [private.wait_for_collective(tensor) for tensor in flat]  # it may be read below
        fresh = call.fresh(flat)
        if not fresh and not call.written:
            return result
        stays = self.director.stays(info, len(fresh) + len(call.written))
        if self.on_demand is not None:
            self.on_demand.wrote(sum(flat[at].untyped_storage().nbytes() for at in fresh))
        if info.uninitialized:
            for position in fresh:
                enter(self.tables.blank, flat[position].untyped_storage(), None)
        self._forget(overwritten, info)
        if self.mover is not None and isinstance(self.director, PlanDirector) and self.director.moves:
            with unseen():
                self._move(self.mover, self.director, call, fresh, flat)
        if node is None:
            return result
        if self.verify and not info.collective:
            reason = why_not_reproduced(node, call, flat, before, self._second_run)
            if reason:
                self._note_not_reproduced(info.name, reason)
                return result
        self._link(node, call, fresh, flat, stays)
        return result

    def refills(self, tensor: torch.Tensor) -> bool:
        """Whether a write to the tensor gathers a sharded weight: it writes the bytes of before."""
        return bool(self.gathered) and private.storage_key(tensor) in self.gathered

    def _call_of(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """What the call does to its tensors."""
        return Call(func, args, kwargs)

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return proceed(func, args, kwargs)

    def _second_run(self, call: Callable[[], Any]) -> Any:
        """Make the call of a second run."""
        return call()

    def _forget(self, overwritten: list[torch.Tensor], info: OpInfo) -> None:
        """Forget the values of tensors that were overwritten."""
        for tensor in overwritten:
            key = private.storage_key(tensor)
            if not info.fills or covers_storage(tensor):
                self.tables.blank.pop(key, None)
            self._drop_cached(key)
            self.tables.given.pop(key, None)
            self.tables.held.pop(key, None)

    def _drop_cached(self, key: int) -> None:
        """A storage changes: the value in it is no longer there, and is replayed."""
        if self.on_demand is not None and (entry := self.tables.given.get(key)) is not None:
            entry[0].cached = None

    def _prepare(self, call: Call) -> Node | None:
        """The node of a call about to be made, or ``None`` where it cannot be replayed."""
        if not self._wanted or any(map(self.refills, call.written)):
            return None
        if not all(map(self.may_keep, call.others)):
            return None
        blank = () if self._follows_plan() else self.tables.blank
        node = tape.node_of(call, self.tables.order, blank, self._value_of)
        self.tables.order += node is not None
        return node

    def _follows_plan(self) -> bool:
        """Whether a plan asks for the operation's replay, which knows that nothing overwrites later what it
        reads: memory that was filled part by part is not blank then.
        """
        return isinstance(self.director, PlanDirector) and not self.director.departed

    def may_keep(self, tensor: torch.Tensor) -> bool:
        """Whether a replay may keep a tensor that is not strided: a sparse input or buffer."""
        return is_sparse(tensor)

    def _link(
        self, node: Node, call: Call, fresh: list[int], flat: list[Any], stays: tuple[bool, ...]
    ) -> None:
        """Register what the call wrote and does not stay as recomputable by its node."""
        tape.link(node, call, [(position, flat[position]) for position in fresh], self._register, stays)

    def _move(
        self, mover: TransferEngine, director: PlanDirector, call: Call, fresh: list[int], flat: list[Any]
    ) -> None:
        """Store the values just written that the plan moves, and register their `Fetch`."""
        wrote = [flat[position] for position in fresh] + call.written
        moves = director.moves_of(wrote)
        if call.info.collective and any(number >= 0 for number in moves):  # its results are copied below
            wrote = [private.wait_for_collective(tensor) for tensor in wrote]
        for place, (number, tensor) in enumerate(zip(moves, wrote, strict=True)):
            if number < 0:
                continue
            fetch = Fetch(mover.out(number, tensor), mover, self.tables.order - 0.5)
            is_loose = place < len(fresh) and fresh[place] in call.loose
            value = self._register(fetch, tensor, 0 if is_loose else reach(tensor))
            if not fetch.exact:
                value.digest = None
            fetch.output = weakref.ref(value)

    def _register(self, node: Writer, tensor: torch.Tensor, extent: int) -> LiveValue:
        """Register the value of ``tensor`` as recomputable by ``node``; its first ``extent`` bytes were
        written.
        """
        value = LiveValue.written(node, tensor, extent, self.verify)
        enter(self.tables.given, tensor.untyped_storage(), value)
        return value

    def _value_of(self, tensor: torch.Tensor) -> LiveValue:
        """The present value of a tensor; one that is not recomputable is held from here on."""
        key = private.storage_key(tensor)
        entry = self.tables.given.get(key)
        if entry is not None:
            value = entry[0]
            if self.verify and value.digest is not None and digest(tensor, value.extent) != value.digest:
                value = self._written_behind(value, tensor)
            if isinstance(value.node, Fetch) and not value.node.stored.replayable_from:
                raise Unrecordable  # its codec loses too much to replay from
            return value
        value = self._held_value(key)
        if value is None:
            value = LiveValue.hold(tensor)
            self.tables.held[key] = weakref.ref(value)
        return value

    def _held_value(self, key: int) -> LiveValue | None:
        """The value that is held of a storage, if it was neither written nor emptied since."""
        reference = self.tables.held.get(key)
        value = reference() if reference is not None else None
        return value if value is not None and value.unchanged and value.emptied is None else None

    def _storage_resizes(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """A storage is about to be resized within the forward."""
        if private.storage_address(storage) in self.gathered:
            return
        self._drop_cached(private.storage_address(storage))
        reference = self.tables.held.get(private.storage_address(storage))
        value = reference() if reference is not None else None
        if value is not None and nbytes < storage.nbytes():
            value.before_emptying()

    def _written_behind(self, value: LiveValue, tensor: torch.Tensor) -> LiveValue:
        """Code that the dispatcher does not see has overwritten ``tensor``: hold its present value."""
        replayable = [known for known, _ in self.tables.given.values()]
        new = tape.written_unseen(value, tensor, replayable, self._note_not_reproduced)
        key = private.storage_key(tensor)
        self.tables.given.pop(key, None)
        self.tables.held[key] = weakref.ref(new)
        return new

    def _copy_on_write(self, written: list[torch.Tensor]) -> None:
        """Give recorded readers of a held tensor a copy before it is overwritten."""
        for tensor in written:
            value = self._held_value(private.storage_key(tensor))
            if value is not None and value.held is not None and value.readers > 0:
                value.held = on_a_copy(value.held)
                value.version = private.version(value.held)

    def _note_not_reproduced(self, name: str, reason: str) -> None:
        self.findings.setdefault(name, reason)

    # ---- saved tensors ---------------------------------------------------------------------------

    def pack(self, tensor: torch.Tensor) -> Any:
        """Autograd saves ``tensor``: keep or evict it."""
        if private.is_transformed():
            return Kept(tensor)
        if is_wrapper(tensor):
            return Wrapped(tensor, self.pack)
        if not has_plain_storage(tensor):
            return Kept(tensor)
        packed = self._pack_plain(tensor)
        return Attributed(tensor, packed) if tensor.__dict__ else packed

    def _pack_plain(self, tensor: torch.Tensor) -> Any:
        # parameters are the commonest, and no plan evicts them
        known = (
            None if type(tensor) is torch.nn.Parameter else self.tables.given.get(private.storage_key(tensor))
        )
        if known is None:
            return Kept(tensor, self.mover)
        if not self.check:
            return self._evict(known[0], tensor)
        with unseen():  # digests are operations
            return self._evict(known[0], tensor)

    def _evict(self, value: LiveValue, tensor: torch.Tensor) -> Kept | Evicted:
        if self.verify and value.digest is not None and digest(tensor, value.extent) != value.digest:
            self._written_behind(value, tensor)
            return Kept(tensor)
        checked = value.digest
        exact = value.node is None or value.node.exact
        if not exact:
            checked = None
        elif self.check and checked is None:
            checked = value.digest = digest(tensor, value.extent)
        value.evicted = True
        checked = checked if self.check else None
        if self.on_demand is not None:
            self.on_demand.save(value, tensor)
        return Evicted(
            Ref(value, tensor), tensor, checked, self.around_unpack, self.mover, self._starts, self.on_demand
        )
