"""Record a running forward on the tape, and evict the tensors that autograd saves.

`Recorder` is the interceptor and the pair of saved-tensor hooks of one forward. A director
(`lowtide.run.record.directors`) decides what is recorded and which results stay: one follows a plan, another
a scope's rule.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from lowtide import private
from lowtide.errors import PlanError
from lowtide.interception import Interceptor, proceed, unseen
from lowtide.ops import Call, has_plain_storage, is_wrapper, op_info
from lowtide.run.record.cpp_recorder import cpp_recorder
from lowtide.run.record.directors import Director, PlanDirector, ScopeDirector
from lowtide.run.record.handles import AroundUnpack, Attributed, Evicted, Kept, Wrapped, unpack
from lowtide.run.record.replay import flat_results, run_first
from lowtide.run.record.tape import Tape
from lowtide.run.record.values import Fetch, LiveValue, Ref
from lowtide.run.tensor_bytes import digest, reach
from lowtide.run.transfers import TransferEngine

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
        tape: what it records on; a new `Tape` by default. One that verifies has every recorded operation run
            twice and compared, evicted values checked for writes that the dispatcher did not see, and every
            replayed tensor compared with the digest of the original.
        check: compare every replayed tensor with the digest of the original.
        around_unpack: makes the call that brings an evicted tensor back.
        mover: carries out the plan's moves.
        program: the plan's, as the C++ recorder knows it (`lowtide.run.record.cpp_recorder`), or ``None``.
            Verifying and checking are done in Python.
        on_demand: the C++ recorder's ``OnDemand``, which evicts values when memory is short; or ``None``:
            values that do not stay are evicted at once.

    Raises:
        PlanError: a CUDA graph is being captured.
    """

    def __init__(
        self,
        director: Director,
        *,
        tape: Tape | None = None,
        check: bool = False,
        around_unpack: AroundUnpack | None = None,
        mover: TransferEngine | None = None,
        program: Any = None,
        on_demand: Any = None,
    ) -> None:
        private.keep_dynamo_out()
        if private.is_capturing():
            raise PlanError(CAPTURED)
        self.director = director
        self.tape = Tape() if tape is None else tape
        self._checks = check
        self.around_unpack = around_unpack
        self.mover = mover
        self.on_demand = on_demand
        self._ran = [0, 0]
        if program is not None and not self.check:
            self.cpp = cpp_recorder().Recorder(
                tape=self.tape,
                director=director,
                pack=weakref.WeakMethod(self.pack),
                program=program,
                on_demand=on_demand,
            )

    @property
    def check(self) -> bool:
        """Whether replayed tensors are compared with digests of the originals; a tape that verifies may do so
        for some operations only.
        """
        return self._checks or self.tape.verify

    @property
    def governs(self) -> bool:
        """As long as it is active."""
        return True

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Intercept operations and saved tensors; afterwards only autograd's graph holds the tape."""
        with ExitStack() as stack:
            stack.callback(self.close)
            stack.callback(private.before_storage_resizes(self.tape.before_resize))
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

    @contextmanager
    def scope(self, director: ScopeDirector) -> Iterator[None]:
        """A scope inside this recorder's forward: a segment with a director of its own.

        Not under a plan, which has decisions for the scope's operations.
        """
        before = self.director
        if not isinstance(before, PlanDirector):
            self.tape.boundary()
            self.director = director
        try:
            yield
        finally:
            self.director = before

    def close(self) -> None:
        """Forget all values; those that saved tensors need are held by autograd's graph."""
        watch = self.tape.close()
        if self.cpp is not None:
            self.cpp.replays.watch = watch

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
            return proceed(func, args, kwargs)
        self._ran[torch.is_grad_enabled()] += 1
        wanted = self.director.evicts(func, args, kwargs)
        call, tape = Call(func, args, kwargs), self.tape
        node = tape.node_of(call, reads_blank=self._follows_plan()) if wanted else None
        overwritten = tape.overwritten_by(call)
        before = tape.copies_of(overwritten) if node is not None else []
        tape.before_overwriting(overwritten)
        if self.on_demand is not None:
            self.on_demand.operation_begins(func)
        result = run_first(node, proceed, call)
        flat = flat_results(result)
        if info.collective and node is not None:
            flat = [private.wait_for_collective(tensor) for tensor in flat]  # it may be read below
        fresh = [(position, flat[position]) for position in call.fresh(flat)]
        if not fresh and not call.written:
            return result
        stays = self.director.stays(info, len(fresh) + len(call.written))
        if self.on_demand is not None:
            self.on_demand.note_allocated(sum(tensor.untyped_storage().nbytes() for _, tensor in fresh))
        if info.uninitialized:
            for _, tensor in fresh:
                tape.note_uninitialized(tensor)
        tape.forget(overwritten, info)
        if self.mover is not None and isinstance(self.director, PlanDirector) and self.director.moves:
            with unseen():
                self._move(self.mover, self.director, call, fresh)
        if node is None:
            return result
        if tape.verify and not info.collective and not tape.reproduces(node, call, flat, before):
            return result
        tape.link(node, call, fresh, stays)
        return result

    def _follows_plan(self) -> bool:
        """Whether the step follows a plan: then an operation may read memory that was filled part by part,
        since in the profiled step nothing overwrote what it read.
        """
        return isinstance(self.director, PlanDirector) and not self.director.departed

    def _move(
        self, mover: TransferEngine, director: PlanDirector, call: Call, fresh: list[tuple[int, torch.Tensor]]
    ) -> None:
        """Store the values just written that the plan moves, and register their `Fetch`."""
        wrote = [tensor for _, tensor in fresh] + call.written
        moves = director.moves_of(wrote)
        if call.info.collective and any(number >= 0 for number in moves):  # its results are copied below
            wrote = [private.wait_for_collective(tensor) for tensor in wrote]
        for place, (number, tensor) in enumerate(zip(moves, wrote, strict=True)):
            if number < 0:
                continue
            fetch = Fetch(mover.out(number, tensor), mover, self.tape.order - 0.5)
            is_loose = place < len(fresh) and fresh[place][0] in call.loose
            value = self.tape.register(fetch, tensor, 0 if is_loose else reach(tensor))
            if not fetch.exact:
                value.digest = None
            fetch.output = weakref.ref(value)

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
        is_parameter = type(tensor) is torch.nn.Parameter
        known = None if is_parameter else self.tape.replayable.get(private.storage_key(tensor))
        if known is None:
            return Kept(tensor, self.mover)
        if not self.check:
            return self._evict(known[0], tensor)
        with unseen():  # digests are operations
            return self._evict(known[0], tensor)

    def _evict(self, value: LiveValue, tensor: torch.Tensor) -> Kept | Evicted:
        tape = self.tape
        if not tape.is_as_written(value, tensor):
            tape.written_unseen(value, tensor)
            return Kept(tensor)
        checked = None
        if self.check and (value.node is None or value.node.exact):
            if value.digest is None:
                value.digest = digest(tensor, value.extent)
            checked = value.digest
        value.evicted = True
        if self.on_demand is not None:
            self.on_demand.save(value, tensor)
        return Evicted(
            Ref(value, tensor), tensor, checked, self.around_unpack, self.mover, tape.watch, self.on_demand
        )
