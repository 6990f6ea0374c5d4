"""Profile one step: run it for real, in little memory, and record its `StepGraph`.

In: a model's forward and its arguments; the caller computes the loss and calls backward, as in any step. Out,
when backward has ended: the `StepGraph`. Every block keeps its inputs (copy on write); everything else is
evicted when autograd packs it, and replayed in backward. Long blocks, and what lies outside of them, are
divided where few bytes cross. So only the program itself holds the step's tensors, and a storage is freed
when the program releases it. Each forward operation runs twice: that verifies its replay, and times it warm.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch

from lowtide import private
from lowtide.errors import TraceError
from lowtide.graph import StepGraph
from lowtide.interception import interceptors, unseen
from lowtide.meter.cuda import standing_workspace_bytes
from lowtide.ops import Call, enter
from lowtide.run.compiled_submodules import left_alone
from lowtide.run.digest import Geometry, on_a_copy
from lowtide.run.record.directors import RegionDirector
from lowtide.run.record.handles import Evicted, Kept, unpack
from lowtide.run.record.recorder import Recorder
from lowtide.run.record.tape import LiveValue
from lowtide.run.watch import StepWatch, weakly
from lowtide.trace.eager import StepTracer, apart
from lowtide.trace.results import tensors_inside
from lowtide.trace.untouched import untouched, without_history


class Profiler:
    """Profiles one step.

    Args:
        model: its forward is the region that can be planned.
        device: whose memory the graph is about.
        verify: run every operation twice and compare.
        on_end: called with this once backward has ended.

    Attributes:
        verified: every operation ran twice and was compared.
        recorder: its findings name the operations that did not reproduce; what they wrote stayed.
        peak_bytes: most live bytes of the step, above those at its start; ``None`` where that cannot be
            measured, or the step is not over.
        saved: what autograd holds now, by the numbers of the saved tensors.
        watch: follows its backward.
        blind: backward ran on a thread whose operations are not intercepted.
        ended: whether ``on_end`` was called.
        began: when, by `time.perf_counter`.
    """

    def __init__(
        self,
        model: torch.nn.Module | None,
        device: torch.device,
        *,
        verify: bool = True,
        on_end: Callable[[Profiler], None] | None = None,
    ) -> None:
        self._workspace_bytes = standing_workspace_bytes(device)
        self.tracer = StepTracer(model, device)
        self.recorder = _LittleMemory(self, verify)
        self.tracer.at_scope = self.recorder.at_scope
        self.verified = verify
        self.began = time.perf_counter()
        self._on_end = on_end
        self._stack = ExitStack()
        self.saved: weakref.WeakValueDictionary[int, _Saved] = weakref.WeakValueDictionary()
        self._saved_in: dict[int, list[int]] = {}  # storage: its saved tensors
        self._written: list[tuple[int, weakref.ref[torch.UntypedStorage], Geometry]] = []
        self.tracer.after_write = self._overwritten
        self.watch = StepWatch(weakly(self._backward_ends), device, weakly(self.left))
        self.peak_bytes: int | None = None
        self.blind = self.ended = False

    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the forward, which is the region that can be planned. What its caller does until backward has
        ended belongs to the step, too.
        """
        tracer, recorder = self.tracer, self.recorder
        try:
            with ExitStack() as stack:
                stack.callback(recorder.close)
                for tensor in tensors_inside((args, kwargs)):
                    tracer.given(tensor)
                stack.enter_context(tracer.following_modules())
                model = tracer.model
                if model is not None:
                    for block in _blocks(model):
                        stack.callback(block.register_forward_pre_hook(recorder.at_block).remove)
                        stack.callback(block.register_forward_hook(recorder.at_block).remove)
                    stack.enter_context(left_alone(model.modules(), tracer))
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(recorder.pack, unpack))
                stack.enter_context(recorder)
                tracer.start()
                self._stack.callback(tracer.stop)
                self._stack.callback(private.before_storage_resizes(self._resizes))
                result = forward(*args, **kwargs)
            tracer.in_region = False
            self.watch.forward_ends(tensors_inside(result))
        except BaseException as error:
            self.close()
            if isinstance(error, RuntimeError) and "support saved tensor hooks" in str(error):
                raise TraceError(
                    "the model's forward takes gradients with torch.func (grad, vjp, jacrev, hessian), "
                    "under which PyTorch allows no hooks on saved tensors: use "
                    "torch.autograd.grad(..., create_graph=True) there, or put the limit on the modules "
                    "around it"
                ) from error
            if "HigherOrderOp" in type(error).__name__:
                raise TraceError(
                    "the model's forward calls torch.cond or another higher-order operator on its "
                    "submodules, which PyTorch compiles, and not with hooks on them: put the limit on the "
                    "modules around it"
                ) from error
            raise
        return result

    def beside(self, result: Any, alone: Callable[[], None]) -> None:
        """Abandon this look, and call ``alone``, if backward runs only through this other ``result``."""

        def ends() -> None:
            if not (self.watch.backwards or self.watch.began):
                self.close()
                alone()

        for tensor in tensors_inside(result):
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(lambda *_: private.at_backward_end(ends))

    def _backward_ends(self, _: StepWatch) -> None:
        if self.tracer.closed:
            return
        self.blind |= self.tracer not in interceptors()
        if self.tracer.unreleased == 0:
            self.close()
            self.ended = True
            if self._on_end is not None:
                self._on_end(self)

    def _resizes(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """The program is about to resize a storage: what was saved in it is kept from here on."""
        number = self.tracer.resizes(storage, nbytes)
        if number is not None:
            private.unshare(storage)
            with unseen():
                for one in self._saved_in.get(number, ()):
                    if saved := self.saved.get(one):
                        saved.keep(storage)

    def holds(self, saved: _Saved) -> None:
        """Autograd holds it from here on."""
        self.saved[saved.number] = saved
        storage = self.tracer.values[self.tracer.saved[saved.number].value].storage
        self._saved_in.setdefault(storage, []).append(saved.number)

    def _overwritten(self, written: list[torch.Tensor]) -> None:
        """An operation has written to what may have been saved before."""
        self.settle()
        for tensor in written:
            number = self.tracer.known(tensor)
            if number in self._saved_in:
                where = (weakref.ref(tensor.untyped_storage()), Geometry(tensor))
                self._written += [(one, *where) for one in self._saved_in[number]]

    def settle(self) -> None:
        """Keep what was saved and then overwritten past its version counter, which has moved by now if it
        does: a plain step reads what was written.
        """
        suspects, self._written = self._written, []
        for number, reference, where in suspects:
            saved, storage = self.saved.get(number), reference()
            if saved is None or storage is None or not saved.is_behind():
                continue
            with unseen():
                # chunks of one storage have counters of their own (recurrent layers write to the others)
                if saved.lies_in(where, storage.nbytes()):
                    self.tracer.behind.add(number)
                    saved.keep(storage)

    def released(self, number: int) -> None:
        """Autograd has released a saved tensor."""
        self.tracer.releases(number)
        self.left()

    def left(self) -> None:
        """Close once the last saved tensor is released, unless backward runs and will do so."""
        if self.tracer.unreleased == 0 and not (self.tracer.in_region or private.in_backward()):
            self.close()

    def close(self) -> None:
        """End the look: the step is over, or given up."""
        if not self.tracer.closed:
            self.tracer.closed = True
            self.peak_bytes = self.watch.peak_bytes
            self.watch.close()
            self._stack.close()

    def graph(self) -> StepGraph:
        """The step; gradients that it left in the model have their parameters' names."""
        self.close()
        self.tracer.name_gradients()
        graph = self.tracer.graph()
        return replace(graph, resident_bytes=graph.resident_bytes + self._workspace_bytes)


class _Saved:
    """What autograd holds in place of a saved tensor; it is deleted when the saved tensor is released."""

    __slots__ = ("__weakref__", "held", "look", "number")

    def __init__(self, look: Profiler, number: int, held: Kept | Evicted) -> None:
        self.look, self.number, self.held = look, number, held
        look.holds(self)

    def is_behind(self) -> bool:
        """Whether it is evicted, and its version counter says that it was not overwritten."""
        return isinstance(self.held, Evicted) and private.version(self.held.witness) == self.held.version

    def lies_in(self, where: Geometry, nbytes: int) -> bool:
        """Whether what is written at ``where`` in its storage of ``nbytes`` is a part of it."""
        return not isinstance(self.held, Evicted) or where.overlaps(self.held.ref, nbytes)

    def keep(self, storage: torch.UntypedStorage) -> None:
        """Keep the tensor, which lies in ``storage``."""
        if isinstance(self.held, Evicted):
            self.held = self.held.as_kept(storage)

    def unpack(self) -> torch.Tensor:
        """The tensor, on a storage object of its own."""
        self.look.watch.backward_begins()
        self.look.settle()
        try:
            with unseen():
                return self._unpack()
        except BaseException:  # backward ends here without a hook
            self.look.close()
            raise

    def _unpack(self) -> torch.Tensor:
        tracer = self.look.tracer
        tracer.unpacks(self.number)
        tensor = self.held.unpack()
        if isinstance(self.held, Kept):
            tracer.hands_out(self.number, None)
            return tensor
        alone = self.held.ref.over(private.borrowed_storage(tensor.untyped_storage()))
        owner = [tensor]  # holds the bytes for as long as the alias is there
        tracer.hands_out(self.number, alone.untyped_storage(), owner.clear)
        return alone

    def __del__(self) -> None:
        self.look.released(self.number)


def profile_aside(
    modules: list[torch.nn.Module],
    device: torch.device,
    step: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    loss_of: Callable[[StepTracer, Any], torch.Tensor | None],
    verify: bool = True,
) -> tuple[Profiler, StepGraph]:
    """Profile a step that is no training step: gradients, buffers, module attributes and random states are
    restored afterwards.

    Args:
        modules: the modules that the step may change; the forward of the first can be planned.
        device, verify: as of `Profiler`.
        step, args, kwargs: the forward.
        loss_of: the loss in the forward's result; ``None`` where it has run its own backward.
    """
    with untouched(modules) as gradients, torch.enable_grad():
        look = Profiler(modules[0] if modules else None, device, verify=verify)
        look.tracer.gradients = gradients
        given, named = without_history((args, kwargs))
        result = look.run(step, given, named)
        try:
            loss = loss_of(look.tracer, result)
            if loss is not None:
                del result
                loss.backward()
                if look.tracer.saved and not any(event.kind == "unpack" for event in look.tracer.events):
                    raise TraceError(
                        "the loss does not depend on the model: its backward did not reach the model at all. "
                        "A loss_fn is given the model's output and has to compute the loss from that"
                    )
            return look, look.graph()
        finally:
            look.close()


def _blocks(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The outermost members of the model's lists of modules, or its children, without single layers."""
    return _no_layers(_members(model)) or _no_layers(model.children())


def _no_layers(modules: Iterable[torch.nn.Module]) -> list[torch.nn.Module]:
    """Those that have children and take hooks, which TorchScript's do not."""
    return [
        module
        for module in modules
        if next(module.children(), None) is not None and not isinstance(module, torch.jit.ScriptModule)
    ]


def _members(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    children = list(module.children())
    if len(children) > 1 and isinstance(module, (torch.nn.ModuleList, torch.nn.Sequential)):
        yield from children
    else:
        for child in children:
            yield from _members(child)


class _LittleMemory(Recorder):
    """Evicts everything, and keeps copies of the inputs of blocks.

    Args:
        look: its tracer knows which tensors the step made.
        verify: as of `lowtide.run.record.recorder.Recorder`.
    """

    def __init__(self, look: Profiler, verify: bool) -> None:
        super().__init__(RegionDirector(), verify=verify)
        self.check = False  # what ran twice needs no digests
        self._look, self._tracer = look, look.tracer
        self._ends: dict[int, object] = {}
        self._evicted: set[LiveValue] = set()
        self._evicted_bytes = self._kept_bytes = 0

    def _packed(self, tensor: torch.Tensor) -> Any:
        if self._tracer.closed:
            return Kept(tensor)
        self._look.settle()
        with unseen():
            number, droppable = self._tracer.packs(tensor)
            return _Saved(self._look, number, self._held_or_evicted(tensor, droppable))

    def _held_or_evicted(self, tensor: torch.Tensor, droppable: bool) -> Kept | Evicted:
        key = private.storage_key(tensor)
        entry = self.tables.given.get(key)
        # what is blank is written after it was saved, as rrelu does with its noise: there is nothing to copy
        if (
            key in self.tables.blank
            or self._tracer.is_resized(tensor)
            or (entry is None and not (droppable and self._tracer.made(tensor)))
        ):
            return Kept(tensor)
        value = entry[0] if entry is not None else self._value_of(tensor)
        if value.node is not None and value not in self._evicted:
            self._divide(value)
        return self._evict(value, tensor)

    def _divide(self, evicted: LiveValue) -> None:
        """Begin a region where few bytes cross.

        That is once the region's evicted bytes are more than all kept ones, and than four times those that
        the program still holds of it.
        """
        self._evicted.add(evicted)
        self._evicted_bytes += evicted.nbytes
        if self._evicted_bytes > self._kept_bytes:
            crossing_bytes = sum(value.nbytes for value, _ in self.tables.given.values())
            if self._evicted_bytes > 4 * crossing_bytes:
                self.boundary()

    def _second_run(self, call: Callable[[], Any]) -> Any:
        return self._tracer.measured_run(call, warm=True)

    def _call_of(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """The tracer's, which has passed the operation on."""
        call = self._tracer.call
        return call if call is not None and call.args is args else super()._call_of(func, args, kwargs)

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return apart(func, args, kwargs, lambda run: self._tracer.measured_run(run, warm=False))

    def _value_of(self, tensor: torch.Tensor) -> LiveValue:
        """As the recorder's, but tensors that the step made are kept as copies, so that the originals are
        freed when the program releases them.

        Not those of a backward inside the forward. Every plan keeps them, and autograd adds in place to what
        no saved tensor holds.
        """
        key = private.storage_key(tensor)
        if key in self.tables.given or not self._tracer.made(tensor) or self._tracer.made_in_backward(tensor):
            return super()._value_of(tensor)
        reference = self.tables.held.get(key)
        value = reference() if reference is not None else None
        if value is None:
            value = LiveValue.stored(on_a_copy(tensor, lazy=not self._tracer.is_resized(tensor)))
            self._kept_bytes += value.nbytes
            held = self.tables.held
            held[key] = weakref.ref(value)
            enter(self._ends, tensor.untyped_storage(), None, lambda: held.pop(key, None))
        return value

    def may_keep(self, tensor: torch.Tensor) -> bool:
        """As the recorder's, but nothing that the step made: it would be kept until backward."""
        return self._tracer.stands(tensor)

    def boundary(self) -> None:
        """As the recorder's, but kept values stay registered: they are copied when they are overwritten."""
        self.tables.given.clear()
        self._evicted.clear()
        self._evicted_bytes = 0

    def close(self) -> None:
        """As the recorder's."""
        self._watch()
        super().close()

    def at_block(self, *_: Any) -> None:
        """A block begins or has ended."""
        self.boundary()

    def at_scope(self) -> None:
        """A checkpointing scope begins or has ended, where the program itself keeps what crosses: a region
        begins there if that is small beside what is evicted.
        """
        if self._evicted_bytes > 2 * sum(value.nbytes for value, _ in self.tables.given.values()):
            self.boundary()

    def _copy_on_write(self, written: list[torch.Tensor]) -> None:
        super()._copy_on_write([tensor for tensor in written if not self._tracer.made(tensor)])
