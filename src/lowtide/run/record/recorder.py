"""Record the forwards of a step on its tape, and pack the tensors that autograd saves.

`Recorder` is the interceptor and the pair of saved-tensor hooks of one step, or of one checkpointing scope.
C++ (``cpp/recorder.h``) takes each operation that replays plainly, as the plan's program says or the governor
wants; what it leaves comes to `Recorder.operation`.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch

from lowtide import accelerator, private
from lowtide.errors import PlanError
from lowtide.interception import Interceptor, proceed, unseen
from lowtide.ops import Call, OpInfo, has_plain_storage, is_wrapper, op_info
from lowtide.plan.data import ProgramStep
from lowtide.run.record.engine import EVICTED, EVICTED_FIRST, NONE, STORED, engine, program_of
from lowtide.run.record.handles import AroundUnpack, Attributed, Handle, Wrapped, kept
from lowtide.run.record.special import flat_results, run_first
from lowtide.run.record.tape import Tape
from lowtide.run.tensor_bytes import digest

if TYPE_CHECKING:
    from lowtide.run.record.directors import ScopeDirector

CAPTURED = (
    "a limited step (or a recomputing scope) runs while a CUDA graph is captured: the graph would keep this "
    "step's memory and random numbers for all replays, and no later step would be held to a budget. Capture "
    "the model without a limit (handle.remove() before, and no checkpointing scope in it), or run limited "
    "steps outside of torch.cuda.graph and torch.cuda.make_graphed_callables"
)


class Recorder(Interceptor):
    """Intercepts the operations of one step, or of one checkpointing scope.

    Args:
        director: of a scope, decides what is recorded; ``None`` in a limited step.
        tape: what it records on; a new `Tape` by default. One that verifies has every recorded operation run
            twice and compared, evicted values checked for writes that the dispatcher did not see, and every
            replayed tensor compared with the digest of the original.
        check: compare every replayed tensor with the digest of the original.
        around_unpack: makes the call that brings an evicted tensor back.
        mover: carries out the plan's moves.
        governor: holds the budget (``Governor`` of ``cpp/governor.h``), or ``None``.

    Raises:
        PlanError: a CUDA graph is being captured.
    """

    def __init__(
        self,
        director: ScopeDirector | None = None,
        *,
        tape: Tape | None = None,
        check: bool = False,
        around_unpack: AroundUnpack | None = None,
        mover: Any = None,
        governor: Any = None,
    ) -> None:
        private.keep_dynamo_out()
        if accelerator.is_capturing():
            raise PlanError(CAPTURED)
        self.director, self.governor = director, governor
        self.tape = Tape() if tape is None else tape
        self._checks = check
        self.around_unpack, self.mover = around_unpack, mover
        self._ran = [0, 0]
        self._program: Sequence[ProgramStep] = ()
        self._smaller = False
        self.core = engine().Recorder(
            tape=self.tape.core, governor=governor, pack=weakref.WeakMethod(self.pack), program=None
        )
        if director is None:
            self.core.compares = self.check
            self.cpp = self.core

    @property
    def check(self) -> bool:
        """Whether replayed tensors are compared with digests of the originals; a tape that verifies may do so
        for some operations only.
        """
        return self._checks or self.tape.verify

    @property
    def decides(self) -> bool:
        """While a forward of it runs."""
        return self.core.in_forward

    def follow(self, steps: Sequence[ProgramStep] | None, program: Any = None, smaller: bool = False) -> None:
        """Follow a plan's program in the next forward.

        Args:
            steps: the program; ``None`` where the forward has no plan.
            program: the same, as `lowtide.run.record.engine.program_of` makes it.
            smaller: the step is smaller than the one that was planned for. What the plan evicts then goes
                first when memory is short, where a governor tells when that is.
        """
        self._program, self._smaller = steps or (), smaller
        made = program if program is not None or steps is None else program_of(steps)
        self.core.set_program(made, smaller)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record one forward: intercept operations and saved tensors. Only autograd's graph holds the tape
        afterwards. An interceptor that was started before goes on after the block.
        """
        with ExitStack() as stack:
            if not self.is_active:
                stack.enter_context(self)
            stack.enter_context(self.forward())
            yield

    @contextmanager
    def forward(self) -> Iterator[None]:
        """What runs in the block is a forward of the step."""
        plain = self.mover is None and not self.check and self.around_unpack is None
        pack, back = self.core.hooks() if plain and self.director is None else (self.pack, engine().unpack)
        with ExitStack() as stack:
            stack.callback(self._forward_ends)
            stack.callback(private.before_storage_resizes(self.tape.before_resize))
            stack.enter_context(private.saving(pack, back))
            self.core.in_forward = True
            stack.callback(setattr, self.core, "in_forward", False)
            yield

    @contextmanager
    def scope(self, director: ScopeDirector) -> Iterator[None]:
        """A scope inside this recorder's forward. In another scope it has a director of its own, and what was
        made before is held where its replays read it. Not under a limit, whose plan has decisions for the
        scope's operations.
        """
        before = self.director
        if before is not None:
            self.tape.core.forget_made()
            self.director = director
        try:
            yield
        finally:
            self.director = before

    def ends(self) -> None:
        """The step is over: see no more operations, and hold nothing that no saved tensor needs."""
        self.stop()
        if self.core.handles:
            self.tape.core.forget_unasked()
        else:
            self.tape.core.end()

    def _forward_ends(self) -> None:
        """Forget what nobody can ask for."""
        if self.governor is None:
            self.tape.core.forget_unasked()
        else:
            self.tape.core.forget_ended()

    @property
    def ran(self) -> tuple[int, int]:
        """How many operations have run: without gradients, and with them."""
        others = self.core.ran
        return self._ran[0] + others[0], self._ran[1] + others[1]

    # ---- operations ------------------------------------------------------------------------------

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operation that C++ leaves to Python, and record it if a plan, a scope or the governor may
        have it run again.
        """
        info, backward = op_info(func), private.in_backward()
        records = torch.is_grad_enabled() and self.governor is not None if backward else self.core.in_forward
        if info.is_view or info.waits or not records:
            return self._run_aside(func, args, kwargs)
        self._ran[torch.is_grad_enabled()] += 1
        step = None if backward else self._next(info)
        call, tape = Call(func, args, kwargs), self.tape
        wanted, pins = self._wants(step, info, func, args, kwargs)
        node = tape.node_of(call, reads_blank=self.core.strict) if wanted else None
        overwritten = tape.overwritten_by(call)
        before = tape.copies_of(overwritten) if node is not None else []
        if node is not None:
            tape.begin(node, call, pins, self.governor)
            node.core.collective = info.collective
        tape.before_overwriting(overwritten)
        result = run_first(None if node is None else node.special, proceed, call)
        flat = flat_results(result)
        if info.collective and node is not None:
            flat = [private.wait_for_collective(tensor) for tensor in flat]  # it may be read below
        fresh = [(position, flat[position]) for position in call.fresh(flat)]
        if not fresh and not call.written:
            return result
        if step is not None:
            self.core.advance()
        elif not backward:
            self.core.depart()
        if info.uninitialized:
            for _, tensor in fresh:
                tape.core.note_blank(tensor)
        tape.forget(overwritten, info)
        verifies = node is not None and tape.verify and not info.collective
        if node is not None and verifies and not tape.reproduces(node, call, flat, before):
            node = None
        if node is not None:
            tape.link(node, call, fresh, self._plans(step, len(fresh) + len(call.written)))
        elif not info.uninitialized:
            for _, tensor in fresh:
                tape.core.source(tensor, True)
        if self.mover is not None and step is not None and step.moves:
            with unseen():
                self._move(step, call, fresh)
        return result

    def _run_aside(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation that nobody records."""
        info = op_info(func)
        if self.core.in_forward and info.written:
            call = Call(func, args, kwargs)
            self.tape.before_overwriting(self.tape.overwritten_by(call))
        return proceed(func, args, kwargs)

    def _next(self, info: OpInfo) -> ProgramStep | None:
        """The program's next operation, if it is this one."""
        at = self.core.at
        if not self.core.follows or at >= len(self._program):
            return None
        step = self._program[at]
        return step if step.name == info.name else None

    def _wants(
        self, step: ProgramStep | None, info: OpInfo, func: Any, args: Any, kwargs: Any
    ) -> tuple[bool, bool]:
        """Whether an operation gets a node, and whether that is run again whatever happens."""
        if self.director is not None:
            wanted = self.director.evicts(func, args, kwargs)
            return wanted, wanted
        if step is not None:
            pins = step.replayed and (self.core.strict or self.governor is None)
            return pins or self.governor is not None, pins
        return not info.collective or self.governor is not None, self.governor is None

    def _plans(self, step: ProgramStep | None, writes: int) -> list[int]:
        """What the plan says of each value that an operation wrote."""
        if step is None or len(step.stored) != writes:
            return [EVICTED if self.governor is None else NONE] * writes
        goes = EVICTED if self.core.strict else EVICTED_FIRST
        return [STORED if stored or not step.replayed else goes for stored in step.stored]

    def _move(self, step: ProgramStep, call: Call, fresh: list[tuple[int, torch.Tensor]]) -> None:
        """Have the mover store the values just written that the plan moves. Where these are others than the
        plan's, the step has departed from it.
        """
        wrote = [tensor for _, tensor in fresh] + call.written
        moves = self.mover.moves_of(step.moves, wrote, self._smaller)
        if moves is None:
            self.core.depart()
            return
        if call.info.collective and any(number >= 0 for number in moves):  # its results are copied below
            wrote = [private.wait_for_collective(tensor) for tensor in wrote]
        for place, (number, tensor) in enumerate(zip(moves, wrote, strict=True)):
            if number >= 0:
                is_loose = place < len(fresh) and fresh[place][0] in call.loose
                self.mover.move(self.tape, number, tensor, is_loose)

    # ---- saved tensors ---------------------------------------------------------------------------

    def pack(self, tensor: torch.Tensor) -> Any:
        """Autograd saves ``tensor``: keep or evict it."""
        if private.is_transformed():
            return kept(tensor)
        if is_wrapper(tensor):
            return Wrapped(tensor, self.pack)
        if not has_plain_storage(tensor):
            return kept(tensor)
        with unseen():
            packed = self._pack_plain(tensor)
        return Attributed(tensor, packed) if tensor.__dict__ else packed

    def _pack_plain(self, tensor: torch.Tensor) -> Any:
        # parameters are the commonest, and no plan evicts them
        is_parameter = type(tensor) is torch.nn.Parameter
        value = None if is_parameter else self.tape.core.replayable(private.storage_key(tensor))
        if value is None:
            packed = kept(tensor)
            return packed if self.mover is None else Handle(packed, mover=self.mover)
        tape, checked = self.tape, None
        if not tape.is_as_written(value, tensor):
            tape.written_unseen(value, tensor)
            return kept(tensor)
        if self.check and value.node.exact:
            if value.digest is None:
                value.digest = digest(tensor, value.extent)
            checked = value.digest
        packed = self.core.save(tensor)
        if checked is None and self.around_unpack is None and self.mover is None:
            return packed
        return Handle(packed, checked, self.around_unpack, self.mover)
