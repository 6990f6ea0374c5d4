"""Profile one step: run it for real, and record its `StepGraph`.

In: a model's forward and its arguments; the caller computes the loss and calls backward, as in any step. Out,
when backward has ended: the `StepGraph`. What autograd saves lies in storages of its own, over the same
bytes. So only user code itself holds the tensors, and a storage ends when user code releases it. A governor
holds the budget meanwhile. Each forward operation runs twice, until five runs were equal at equal
sizes: that verifies its replay, and times it warm. On the CPU the C++ recorder runs whatever replays plainly
(`run/record/cpp/listen.h`), and Python the rest, on the same tape and the same lists.
"""

from __future__ import annotations

import random
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import torch

from lowtide import accelerator, private
from lowtide.errors import PlanError
from lowtide.graph import StepGraph, Storage, collect_rarely, no_collection
from lowtide.interception import Interceptor, interceptors, proceed, register_ahead, unseen
from lowtide.meter import counting_allocator, measurable
from lowtide.meter.resident import plain_parts, resident_workspace_bytes
from lowtide.ops import (
    SAYS_WHERE,
    WRITES_PART,
    Call,
    has_plain_storage,
    is_nested_without_layout,
    is_sparse,
    is_wrapper,
)
from lowtide.plan.data import module_in_words
from lowtide.run.forwards import Forwards, left_alone
from lowtide.run.messages import unsupported_forward
from lowtide.run.profile.costs import RUNS, CostMeter, MeasuredCost, OpenCollectives, may_be_meeting
from lowtide.run.profile.saved import ProfiledTape, SavedTensor, SavedTensors
from lowtide.run.record.engine import EVICTED, NONE, engine
from lowtide.run.record.handles import Attributed, Wrapped, kept, unpack
from lowtide.run.record.recorder import CAPTURED
from lowtide.run.record.special import flat_results, run_first
from lowtide.run.record.tape import Node
from lowtide.run.tensor_bytes import Geometry, digest, digest_address, digest_of_shown
from lowtide.run.watch import StepWatch, weakly
from lowtide.trace.modules import calling_line
from lowtide.trace.results import tensors_inside, tensors_returned
from lowtide.trace.tracer import (
    OUTSIDE,
    CostFigures,
    TracedOperation,
    TracedStorage,
    TracedValue,
    Tracer,
)
from lowtide.trace.untouched import Gradients

_ELSEWHERE = "it reads a tensor that is neither strided nor was resident before the step"
_REENTRANT = "CheckpointFunctionBackward"  # the autograd node of a reentrant ``torch.utils.checkpoint``


class _Outcome(NamedTuple):
    """An operation that has run.

    Attributes:
        result: what it returned.
        flat: the same as a flat list.
        fresh: the tensors on storages that it made, one for each, with their positions in that list.
        made: these tensors, and the parts of sparse ones.
        returned: whether it returned tensors.
        node: replays it, or ``None``.
    """

    result: Any
    flat: list[Any]
    fresh: list[tuple[int, torch.Tensor]]
    made: list[torch.Tensor]
    returned: bool
    node: Node | None


class Profiler(Interceptor):
    """Profiles one step.

    Args:
        model: its forward can be planned.
        device: whose memory and time are measured.
        verify: run each operation twice and compare, until five runs were equal at the same sizes.
        on_end: called with this once backward has ended.
        gradients: as of `lowtide.trace.tracer.Tracer`.
        governor: makes what holds the step's budget (``Governor`` of ``run/record/cpp/governor.h``), from
            where the live bytes are read; or returns ``None``.
        forwards: those of a step that runs their backwards itself: what `run` runs is then the whole step.
            ``None`` where that is the first forward, and its caller runs others (`run_another`) and backward.

    Raises:
        PlanError: a CUDA graph is being captured.

    Attributes:
        verified: whether operations were verified so.
        tracer: writes the step down.
        tape: brings back what autograd saved; its findings name the operations that did not reproduce.
        saved: what autograd holds of the step.
        costs: what operations take.
        watch: follows the step's backward.
        peak_bytes: most live bytes of the step, above those at its start; ``None`` where that cannot be
            measured, or the step is not over.
        backward_unseen: backward ran on a thread whose operations are not intercepted.
        ended: whether ``on_end`` was called.
        runs_backwards: the step runs its backwards itself, as a pipeline's does.
        began: when the step began, by `time.perf_counter`.
        may_differ: what the forward does may change from step to step: it asked for values, Python drew
            random numbers, or it was given integers that no operation reads, as lengths made a list are.
        checkpoints: how many parts of the forward are under ``torch.utils.checkpoint``.
        nested: where the forward first made a nested tensor whose bytes nobody counts, if it did.
        given: digests of the tensors that the forward was given, where other ranks may be given the same.
        collectives: the collectives that have begun, and what they hold beside other operations.
        forward_spans: of each forward, its first operation and the first one after it.
        early: outputs of later forwards that backwards came through before any came through the first one.
    """

    def __init__(
        self,
        model: torch.nn.Module | None,
        device: torch.device,
        *,
        verify: bool = True,
        on_end: Callable[[Profiler], None] | None = None,
        forwards: Forwards | None = None,
        gradients: Gradients | None = None,
        governor: Callable[[Any], Any] = lambda live_source: None,
    ) -> None:
        if accelerator.is_capturing():
            raise PlanError(CAPTURED)
        self._workspace_bytes = resident_workspace_bytes(device)
        self.tracer = Tracer(model, device, gradients)
        self.tape = ProfiledTape(self.tracer, verify)
        self.costs = CostMeter(device)
        self.verified, self.began = verify, time.perf_counter()
        self.peak_bytes: int | None = None
        self.backward_unseen = self.ended = self.may_differ = False
        self.checkpoints, self.early, self.nested, self._ran_here = 0, 0, "", [0, 0]
        self.given: tuple[int, ...] = ()
        self.collectives = OpenCollectives()
        self.forward_spans: list[tuple[int, int]] = []
        self._first_saved: int | None = None  # by the first forward, so many tensors; once another begins
        self._forwards, self._on_end = forwards, on_end
        self.runs_backwards = self._goes_on = forwards is not None  # such a step ends when `run` does
        self._stack, self._has_scopes = ExitStack(), False
        self.saved = SavedTensors(self.tracer)
        self._checkpoint_calls: Any = weakref.WeakSet()
        self._reentrant_calls: set[Any] = set()
        self._nodes: dict[int, Any] = {}  # operation: the autograd node whose turn it was
        self._opaque: dict[Any, MeasuredCost] = {}  # of calls whose operations nobody saw
        # the last but one, since it opens a meter
        self.watch = StepWatch(weakly(self._backward_ends), device, weakly(self._close_if_released))
        self.governor = governor(self.watch.live_source()) if self.watch.is_measured else None
        if self.governor is not None:
            self.costs.make_room = self.governor.want
        self.cpp = self.core = _engine().ProfileRecorder(
            tape=self.tape.core,
            governor=self.governor,
            pack=weakref.WeakMethod(self.pack),
            tracer=self.tracer,
            begun=self.collectives.begun,
            written=self.saved.written,
            register_storage=self.tracer.register,
            end_storage=self.tracer.end_storage,
            note_node=weakly(self.note_node),
            note_meeting=weakly(self.note_meeting),
            note_others=weakly(self.note_others),
            note_overwritten=weakly(self.saved.note_overwritten),
            keep_overwritten=weakly(self.saved.keep_overwritten),
            note_finding=weakly(self.tape.note_finding),
            digest=digest,
            few_digest=digest_address(),
            meter=counting_allocator().register_addresses if device.type == "cpu" else [],
            runs=RUNS,
        )

    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the forward, which can be planned. What its caller does until backward has ended belongs to the
        step, too.
        """
        with self._closed_by_errors():
            with ExitStack() as stack:
                if private.may_shard():
                    self.given = tuple(map(digest_of_shown, tensors_inside((args, kwargs))))
                self.tracer.note_given(tensors_inside((args, kwargs)))
                self.tracer.governor = self.governor
                integers, drawn = self.tracer.integers_in((args, kwargs)), random.getstate()
                if self._forwards is None:
                    stack.enter_context(self._forward())
                else:
                    stack.enter_context(self._forwards.within(self._forward))
                self.start()
                self._stack.callback(self.stop)
                self._stack.callback(collect_rarely())
                self._stack.callback(private.before_storage_resizes(self.saved.before_resize))
                result = forward(*args, **kwargs)
                unread = bool(integers) and self.tracer.leaves_unread(integers)
                self.may_differ |= unread or random.getstate() != drawn
            self.watch.forward_ends(tensors_returned(result))
        if self._forwards is not None:
            self._goes_on = False
            self.watch.ends()
        return result

    def run_another(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run another forward of the step, before any backward through its first one."""
        watch = self.watch

        def reaches(*_: object) -> None:
            if watch.backwards:  # none has to wait for the first forward once a backward has ended
                watch.backward_begins()
            else:
                private.at_backward_end(ends)

        def ends() -> None:
            if watch.backwards or watch.began:
                return
            self.early += 1
            if self.tracer.unreleased == 0:
                self.close()

        if self._first_saved is None:
            self._first_saved = len(self.tracer.saved)
        with self._closed_by_errors(), self._forward():
            result = forward(*args, **kwargs)
        for tensor in tensors_returned(result):
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(reaches)
        return result

    @contextmanager
    def _closed_by_errors(self) -> Iterator[None]:
        """A step whose forward raises is given up."""
        try:
            yield
        except BaseException as error:
            self.close()
            if (refused := unsupported_forward(error)) is not None:
                raise refused from error
            raise

    @contextmanager
    def _forward(self) -> Iterator[None]:
        """What runs in the block is a forward that can be planned."""
        tracer = self.tracer
        with tracer.forward(), ExitStack() as stack:
            stack.callback(self._forward_ends, len(tracer.operations))
            stack.enter_context(tracer.following_modules())
            if (model := tracer.model) is not None:
                if private.may_shard():
                    self._note_gathered(private.gathered(model))
                    stack.enter_context(private.around_units(model, self._unit_begins, self.tape.unit_ends))
                if compiled := private.compiled_among(model.modules()):
                    stack.enter_context(left_alone(compiled, self.opaque_call))
            pack = self.pack
            stack.enter_context(private.saving(pack, unpack))
            self.core.pack_hook = pack
            self.core.in_forward = True
            stack.callback(setattr, self.core, "in_forward", False)
            yield

    def _forward_ends(self, begin: int) -> None:
        """The forward is over, which began with this operation."""
        self.forward_spans.append((begin, len(self.tracer.operations)))
        if self._has_scopes:  # whose operations wait to run again, whether anybody needs them or not
            self.tape.core.forget_unasked()
        else:
            self.tape.core.forget_ended()

    def _note_gathered(self, gathered: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Note storages that weights are gathered into, with the names of the weights."""
        for name, tensor in gathered:
            self.tape.note_gathered(self.tracer.gathers(tensor, name))

    def _unit_begins(self, unit: int, gathered: Iterable[tuple[str, torch.Tensor]]) -> None:
        """A unit of FSDP begins, whose weights have been gathered."""
        self._note_gathered(gathered)
        self.tape.unit_begins(unit)

    @property
    def decides(self) -> bool:
        """While the forward runs."""
        return self.tracer.in_forward and not self.tracer.closed

    # ---- operations ------------------------------------------------------------------------------

    @property
    def ran(self) -> tuple[int, int]:
        """How many operations its forward ran, without and with gradients."""
        others = self.core.ran
        return self._ran_here[0] + others[0], self._ran_here[1] + others[1]

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operation, measured, and write it down; in the forward, record it on the tape."""
        tracer = self.tracer
        if tracer.closed:
            return proceed(func, args, kwargs)
        self.saved.keep_overwritten()
        call, in_forward = Call(func, args, kwargs), tracer.in_forward and not private.in_backward()
        if call.info.waits:
            return self.collectives.waits(call, proceed(func, args, kwargs))
        self.collectives.operation_begins()
        if tracer.in_forward:
            self.may_differ |= call.info.reads_values
            self._note_checkpoint()
        reads, cost = tracer.read_by(call), self.costs.of(call)
        evicted = tracer.evicted_by_scope(call) if tracer.scopes else None
        reason = "" if not call.others or all(map(self.tape.is_constant, call.others)) else _ELSEWHERE
        records = in_forward and not call.info.is_view
        if records:
            self._ran_here[torch.is_grad_enabled()] += 1
        ran = (
            self._run_recorded(call, cost, bool(evicted))
            if records
            else self._run(call, cost, warm=not in_forward)
        )
        if not ran.made and not call.written:
            return ran.result
        left_bytes = self.costs.left_bytes if cost.in_place else 0
        index = tracer.add_writer(call, reads, ran.made, cost, reason, ran.returned, evicted, left_bytes)
        if call.info.collective:
            self.collectives.begins(call, cost, ran.flat, may_run_again=records)
        if ran.node is not None:
            plan = EVICTED if evicted else NONE  # a scope around it decides, in this step, too
            self.tape.link(ran.node, call, ran.fresh, [plan] * (len(ran.fresh) + len(call.written)))
        if private.in_backward():
            self.note_node(index)
            if may_be_meeting(call):
                self.note_meeting(index, args[0])
        if call.written:
            self.saved.note_overwritten(call.written)
        return ran.result

    def _run(self, call: Call, cost: MeasuredCost, warm: bool) -> _Outcome:
        """Run an operation that no replay runs again."""
        result = self.costs.run(cost, call.func, call.args, call.kwargs, warm)
        return self._outcome(call, result, flat_results(result), None)

    def _run_recorded(self, call: Call, cost: MeasuredCost, evicted: bool) -> _Outcome:
        """Run an operation of the forward, with a node for its replays; where that has yet to be trusted, run
        it twice. One that does not reproduce gets no node.

        Args:
            call, cost: the operation.
            evicted: a scope around it evicts what it writes.
        """
        node = self.tape.node_of(call)
        overwritten = self.tape.overwritten_by(call)
        before = self.tape.copies_of(overwritten) if node is not None else []
        if node is not None:
            self.tape.begin(node, call, evicted, self.governor)
            node.core.collective = call.info.collective
        self.tape.before_overwriting(overwritten)
        special = None if node is None else node.special
        result = run_first(special, lambda f, a, k: self.costs.run(cost, f, a, k, warm=False), call)
        flat = flat_results(result)
        if call.info.collective and node is not None:
            flat = [private.wait_for_collective(tensor) for tensor in flat]  # it may be read below
        ran = self._outcome(call, result, flat, node)
        if not ran.made and not call.written:
            return ran
        self.tape.forget(overwritten, call.info)
        if call.info.uninitialized:
            for tensor in ran.made:
                self.tape.core.note_blank(tensor)
        twice = self.verified and not call.info.collective and not cost.trusted(call.info.name)
        if node is not None and twice and not self._has_room(ran.made):
            return ran if cost.reproduced else ran._replace(node=None)  # else it was never seen to reproduce
        if node is not None and twice:
            again = lambda run: self.costs.measure(cost, run)  # noqa: E731
            if not self.tape.reproduces(node, call, flat, before, again):
                return ran._replace(node=None)
            cost.reproduced += 1
        return ran

    def _has_room(self, made: list[torch.Tensor]) -> bool:
        """Whether a second run, which makes tensors like these once more, keeps within the budget."""
        if self.governor is None or self.governor.is_open:
            return True
        return self.governor.relieve(sum(tensor.untyped_storage().nbytes() for tensor in made)) <= 0

    def _outcome(self, call: Call, result: Any, flat: list[Any], node: Node | None) -> _Outcome:
        fresh = [(position, flat[position]) for position in call.fresh(flat)]
        made, returned = [tensor for _, tensor in fresh], True
        if len(made) < len(flat):
            self._note_nested(call.info.name, () if call.info.is_view else flat)
            if parts := self._parts_of_sparse(flat):
                given = (part for one in call.others if is_sparse(one) for part in plain_parts(one))
                call.keys |= set(map(private.storage_key, given))
                made += [parts[position] for position in call.fresh(parts)]
            returned = bool(made) or any(isinstance(t, torch.Tensor) and has_plain_storage(t) for t in flat)
        return _Outcome(result, flat, fresh, made, returned, node)

    def note_others(self, name: str, results: list[torch.Tensor]) -> list[torch.Tensor]:
        """What an operation of that name made that C++ has run, from those results that are no plain tensors
        to it.
        """
        self._note_nested(name, results)
        return [*filter(has_plain_storage, results), *self._parts_of_sparse(results)]

    def _parts_of_sparse(self, results: Iterable[Any]) -> list[torch.Tensor]:
        """The parts of the sparse tensors that an operation returned, as storages that it made. In the
        forward there are none: an operation that makes sparse tensors alone is none of a plan's, since the
        recorder passes it by.
        """
        sparse = [t for t in results if isinstance(t, torch.Tensor) and is_sparse(t)]
        parts = [part for tensor in sparse for part in plain_parts(tensor)]
        self.tape.note_sparse(parts)
        return [] if self.tracer.in_forward and not private.in_backward() else parts

    def _note_nested(self, name: str, results: Iterable[Any]) -> None:
        if self.nested or private.in_backward():
            return
        if any(isinstance(t, torch.Tensor) and is_nested_without_layout(t) for t in results):
            modules = self.tracer.modules
            self.nested = f"{name}, {module_in_words(modules[-1] if modules else '')}"

    def _note_checkpoint(self) -> None:
        around = private.torch_checkpoint()
        if around is not None and around not in self._checkpoint_calls:
            self._checkpoint_calls.add(around)
            self.checkpoints += 1

    def note_node(self, index: int) -> None:
        """Note the autograd node whose turn an operation runs in."""
        self._nodes[index] = node = private.node_key()
        if node is not None and node[0] == _REENTRANT and node not in self._reentrant_calls:
            self._reentrant_calls.add(node)
            self.checkpoints += 1

    def note_meeting(self, index: int, first: torch.Tensor) -> None:
        """Note an operation that adds something to ``first``, if it adds the gradients of two nodes.

        Their sum is made in place: the engine adds the second gradient to the first, which is the one that is
        read first and which another node made, where nobody else holds it. A view holds its base, and the
        engine adds out of place where anybody holds the bytes.
        """
        node, tracer = self._nodes[index], self.tracer
        if node is not None:
            reads = tracer.operations[index].reads
            producer = tracer.values[reads[0]].producer if reads else None
            made = None if producer is None else self._nodes.get(producer)
            if made not in (None, node) and private.base_of(first) is first:
                tracer.meetings.add(index)

    def opaque_call(self, call: Callable[[], Any]) -> Any:
        """Run code whose operations are not intercepted (a compiled submodule). Each tensor that the code
        returns, or that autograd saves in it, is written down as the result of one opaque operation.
        """
        tracer = self.tracer
        cost = self._opaque.setdefault(len(tracer.operations), MeasuredCost())
        with tracer.opaque_call():
            result = self.costs.measure(cost, call)
            for tensor in tensors_inside(result):
                tracer.value_of(tensor)
        return result

    @contextmanager
    def scope(self, director: Any) -> Iterator[None]:
        """A checkpointing scope within the step. What is there when it begins stays, as where scopes run
        without a limit; and what is left of it when it ends, unless another scope is around it.
        """
        self._has_scopes = True
        self.tape.core.boundary()
        with self.tracer.scope(director):
            yield
        if not self.tracer.scopes:
            self.tape.core.boundary()

    # ---- saved tensors ---------------------------------------------------------------------------

    def pack(self, tensor: torch.Tensor) -> Any:
        """Autograd saves ``tensor``."""
        if private.is_transformed():
            return kept(tensor)
        if is_wrapper(tensor):
            return Wrapped(tensor, self.pack)
        if self.tracer.closed or not has_plain_storage(tensor):
            return kept(tensor)
        self.saved.keep_overwritten()
        with unseen():
            number, droppable = self.tracer.packs(tensor)
            packed = self.saved.add(
                SavedTensor(self, number, self._packed(tensor, droppable), Geometry(tensor))
            )
        return Attributed(tensor, packed) if tensor.__dict__ else packed

    def _packed(self, tensor: torch.Tensor, droppable: bool) -> Any:
        """What is kept of a saved tensor, which a plan may evict if it is ``droppable``: its value on the
        tape, or a tensor on a storage of its own: the program's storage ends where the program lets go.
        """
        storage, tape = self.tracer.storage_of(tensor), self.tape
        key = private.storage_key(tensor)
        if storage is None or storage.resized or tape.core.is_blank(key):
            return kept(tensor)
        packed = self.core.save(tensor)
        if packed is not None:
            return packed
        if (value := tape.core.replayable(key)) is not None:
            tape.written_unseen(value, tensor)
        return kept(tape.apart(tensor) if droppable and storage.phase else tensor)

    def backward_asks(self, number: int) -> None:
        """Backward asks for a saved tensor: it has begun, if one of the first forward."""
        if self._first_saved is None or number < self._first_saved:
            self.watch.backward_begins()
        self.saved.keep_overwritten()

    def unpacks(self, number: int) -> None:
        """The saved tensor of this number is about to come back."""
        self.tracer.unpacks(number)
        self.collectives.operation_begins()

    def release(self, number: int) -> None:
        """Autograd has released a saved tensor."""
        self.tracer.releases(number)
        self._close_if_released()

    # ---- the end ---------------------------------------------------------------------------------

    def _backward_ends(self, _: StepWatch) -> None:
        if self.tracer.closed:
            return
        self.backward_unseen |= self not in interceptors()
        # of a step that runs its backwards itself autograd's graph may be kept: it is over all the same
        released = self.tracer.unreleased == 0 or self._forwards is not None
        if released and not self._goes_on:
            self.ends()

    def ends(self) -> None:
        """The step is over: its profile is handed on, once."""
        on_end, self._on_end = self._on_end, None
        self.close()
        self.ended = True
        if on_end is not None:
            on_end(self)

    def _close_if_released(self) -> None:
        """Close once the last saved tensor is released, unless backward runs and will do so."""
        under_way = self._goes_on or self.tracer.in_forward or private.in_backward()
        if self.tracer.unreleased == 0 and not under_way:
            self.close()

    def close(self) -> None:
        """End the profile: the step is over, or given up."""
        if not self.tracer.closed:
            self.tracer.close()
            self.saved.written.clear()
            self.peak_bytes = self.watch.peak_bytes
            self.watch.close()
            self._stack.close()
            self.tape.core.forget_unasked()
            self.core.pack_hook = None  # a cycle that the garbage collector does not see
        # else it may be handed on yet, or its step is one whose saved tensors take memory beside later steps
        if not (self.watch.backwards or self.early or self.tracer.unreleased):
            self._on_end = None

    def graph(self) -> StepGraph:
        """The step; gradients that it left in the model have their parameters' names."""
        self.close()
        self.tracer.name_gradients()

        def cost_of(one: Any) -> CostFigures:
            cost = one if isinstance(one, MeasuredCost) else self._opaque.get(one[1], MeasuredCost())
            return cost.read()

        with no_collection():
            graph = self.tracer.graph(cost_of)
        return replace(graph, resident_bytes=graph.resident_bytes + self._workspace_bytes)


@cache
def _engine() -> Any:
    """The C++ recorder, which knows the classes of a profiled step."""
    module = engine()
    module.know_traced(  # all that it reads of Python's objects are slots of these
        tracer=Tracer,
        reference=TracedStorage,
        storage=Storage,
        version=TracedValue,
        operation=TracedOperation,
        cost=MeasuredCost,
        calling_line=calling_line,
        says_where=list(SAYS_WHERE),
        writes_part=list(WRITES_PART),
        outside=OUTSIDE,
    )
    return module


def load_ahead(device: torch.device) -> None:
    """Do now what the first limited step of a process would wait for, a tenth of a second. On a machine where
    the C++ recorder has to be compiled first, that is left to the step.
    """
    if register_ahead():
        _engine()
        digest_address()
        measurable(device)
