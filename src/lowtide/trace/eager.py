"""Record one real training step, operation by operation, while it runs.

It is an `Interceptor`: every operation of the step comes here, and what autograd saves and asks for comes
from who stands between (`lowtide.run.profile.profiler`), which runs each forward operation twice. The second
run, warm, is what an operation's seconds and scratch are taken from.
"""

from __future__ import annotations

import statistics
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from lowtide import private
from lowtide.interception import Interceptor, proceed, unseen
from lowtide.meter import Peak, measurable, peak
from lowtide.meter.resident import plain_parts
from lowtide.ops import Call, enter, is_sparse, op_info, tensors_of, written_tensors
from lowtide.trace.clock import Clock
from lowtide.trace.results import tensors_inside
from lowtide.trace.tracer import Tracer

HIDDEN = "it was made by code that the dispatcher does not see"
"""Why a value has to stay that a compiled submodule, say, returned."""
_ELSEWHERE = "it reads a tensor that is neither strided nor stood before the step"
_REENTRANT = "CheckpointFunctionBackward"
"""Name of the autograd node of a reentrant ``torch.utils.checkpoint``."""
_RUNS = 5
"""So many runs of what costs the same are measured; more of them say little more."""
_TIDY_SECONDS = 0.1
"""At most so long a look waits for the threads of one collective to let go of its buffers."""
_ASKS = ("aten._local_scalar_dense.default", "aten.is_nonzero.default", "aten.equal.default")


class StepTracer(Tracer, Interceptor):
    """Records what runs while it is active.

    Args:
        model: names parameters, buffers and modules.
        device: whose memory and time are measured.

    Attributes:
        asks: whether the forward asked for values, which may change what it does from step to step.
        others: limited models whose forward ran within this step.
        checkpoints: how many parts of the forward are under ``torch.utils.checkpoint``.
        call: the one that is passed on to the recorder, or ``None``: it holds tensors.
        after_write: called with the tensors that an operation has just overwritten; their version counters
            have not moved yet.
        opaque: how many compiled submodules are being run.
    """

    def __init__(self, model: torch.nn.Module | None, device: torch.device) -> None:
        super().__init__(model, device)
        self.asks = False
        self.others: list[Any] = []
        self.checkpoints = 0
        self._checkpoint_calls: Any = weakref.WeakSet()
        self._reentrant_calls: set[Any] = set()
        self.opaque = 0
        self.after_write: Callable[[list[torch.Tensor]], None] = lambda written: None
        self.call: Call | None = None
        self.clock = Clock(device)
        # Bytes come and go in the memory of the step's device: its own meter reads them.
        self._meters = measurable(device)
        self._costs: dict[Any, _Cost] = {}
        self._cost = _Cost()  # of the operation at hand
        self._sparse: dict[int, Any] = {}  # storages of the step's own sparse tensors
        self._nodes: list[Any] = []  # for each operation, the autograd node whose turn it was
        self._newest = -1  # the newest operation
        self._meet = -2  # the newest in which autograd's engine added gradients
        self._added_to: dict[int, int] = {}  # storage of such a sum -> the storage that it is written into

    # ---- operations ------------------------------------------------------------------------------

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operation and write it down."""
        return proceed(func, args, kwargs) if self.closed else self._record(func, args, kwargs)

    def run(self, call: Call) -> Any:
        """In the forward the recorder runs it, and measures that."""
        self.asks |= self.in_region and call.info.name in _ASKS
        around = private.torch_checkpoint() if self.in_region else None
        if around is not None and around not in self._checkpoint_calls:
            self._checkpoint_calls.add(around)
            self.checkpoints += 1
        key = _cost_key(call.info.name, call.args, call.kwargs)
        cost = self._costs.get(key)
        if cost is None:
            is_collective = _is_functional_collective(call.func) and not call.info.written
            cost = self._costs[key] = _Cost(is_collective)
        self._cost = cost
        if private.in_backward() or not self.in_region:
            result = apart(call.func, call.args, call.kwargs, lambda run: self.measured(cost, run))
        else:
            self.call = call
            try:
                result = proceed(call.func, call.args, call.kwargs)
            finally:
                self.call = None
        self._cost = cost
        return result

    def stands(self, tensor: torch.Tensor) -> bool:
        """Whether a sparse tensor stood before the step: what reads it can run again."""
        return is_sparse(tensor) and not any(
            private.storage_key(part) in self._sparse or self.made(part) for part in plain_parts(tensor)
        )

    def unfollowed(self, call: Call) -> str:
        """Sparse tensors that stood before the step are read again as they are; no others."""
        return "" if all(map(self.stands, call.others)) else _ELSEWHERE

    def parts_of(self, result: Any) -> list[torch.Tensor]:
        """Of the region's own sparse tensors none: there the recorder counts operations, and what makes such
        tensors is none to it.
        """
        parts = [part for t in tensors_of(result) if is_sparse(t) for part in plain_parts(t)]
        for part in parts:
            enter(self._sparse, part.untyped_storage(), None)
        return parts if private.in_backward() or not self.in_region else []

    def noted(self, call: Call, index: int, fresh: list[torch.Tensor]) -> None:
        """Beside the operation: what it costs, and in which autograd node it runs."""
        node = private.node_key() if private.in_backward() else None
        if node is not None and node[0] == _REENTRANT and node not in self._reentrant_calls:
            self._reentrant_calls.add(node)
            self.checkpoints += 1
        adds = call.info.name == "aten.add.Tensor" and len(call.args) == 2 and not call.kwargs
        if node is not None and adds and self._meets(call.args[0], self.operations[index].reads, node):
            self._meet = index
        self._nodes.append(node)
        self.signatures.append(self._cost)
        if call.written:
            self.after_write(call.written)

    def _meets(self, first: Any, reads: tuple[int, ...], node: Any) -> bool:
        """Whether a gradient that another node made is the first that is read: the engine adds the second to
        it, where nobody else holds it.

        A view holds its base, and the engine adds out of place where anybody holds the bytes.
        """
        producer = self.values[reads[0]].producer if reads else None
        made = None if producer is None else self._nodes[producer]
        return made not in (None, node) and private.base_of(first) is first

    def event(self, kind: Any, index: int) -> None:
        """As the base's, with gradients added in place where autograd's engine would.

        It counts references for that, and a tensor whose storage Python has looked at has one more, so here
        it adds out of place. The first gradient ends with the sum then.
        """
        if self.closed:
            return
        if kind == "op":
            self._newest = index
        if kind == "free":
            index = self._added_to.get(index, index)
            if self._newest == self._meet and self._adds_to(index):
                return
        super().event(kind, index)

    def _adds_to(self, storage: int) -> bool:
        """Whether the newest sum would be written into ``storage``, which ends; from here on it is."""
        operation = self.operations[self._meet]
        first, result = self.values[operation.reads[0]], self.values[operation.writes[0]]
        own, ended = self.storages[result.storage], self.storages[storage]
        if first.storage != storage or own.bytes != ended.bytes or ended.kind != "backward":
            return False
        self.operations[self._meet] = replace(operation, name="aten.add_.Tensor")
        self.storages[own.id], self._added_to[own.id] = replace(own, bytes=0), storage
        version = self.values[self._current[storage]].version + 1
        self.values[result.id] = replace(result, storage=storage, version=version)
        self._current[storage] = self._current[own.id] = result.id
        self._known |= {key: (storage, end) for key, (number, end) in self._known.items() if number == own.id}
        self._meet = -2
        return True

    def _storage_of(self, tensor: torch.Tensor, producer: int | None = None) -> int:
        """As the base's; what shows up while nobody sees operations was written by a hidden one."""
        key = private.storage_key(tensor)
        if not self.opaque or producer is not None or key in self._known or key in self._names:
            return super()._storage_of(tensor, producer)
        index = len(self.operations)
        number = super()._storage_of(tensor, index)
        self._add_operation(HIDDEN, (), [self._current[number]], HIDDEN)
        self._nodes.append(None)
        self.signatures.append(self._costs.setdefault((HIDDEN, index), _Cost()))
        self.event("op", index)
        return number

    def opaque_call(self, call: Callable[[], Any]) -> Any:
        """Run code whose operations nobody sees: what it returns and what autograd saves in it shows up as
        written by one hidden operation each.
        """
        first = len(self.operations)
        self.opaque += 1
        try:
            result = self.measured(self._costs.setdefault((HIDDEN, first), _Cost()), call)
            for tensor in tensors_inside(result):
                self.value_of(tensor)
        finally:
            self.opaque -= 1
        return result

    # ---- costs -----------------------------------------------------------------------------------

    def measured(self, cost: _Cost, call: Callable[[], Any], warm: bool = True) -> Any:
        """What ``call`` returns; its seconds and scratch count for the operations of the kind ``cost``, of
        which a few are enough.
        """
        runs = cost.warm if warm else cost.cold
        if len(runs) >= _RUNS and not cost.is_collective:
            return call()
        if not self._meters:
            result, seconds = self.clock.time(call)
        else:
            with peak(self.device) as seen:
                result, seconds = self.clock.time(call)
                left = max(0, seen.live_bytes)
                if self.device.type == "cpu" and cost.is_collective:  # Gloo's threads; NCCL has streams
                    left = sum(tensor.nbytes for tensor in tensors_inside(result))
                    _await_threads(seen, left)
            cost.scratch_bytes = max(cost.scratch_bytes, seen.peak_bytes - left)
        runs.append(seconds)
        return result

    def measured_run(self, call: Callable[[], Any], warm: bool) -> Any:
        """Measure a run of the forward operation at hand: a second, warm one, which verifies that it
        reproduces, or the first, for those that have no second one.
        """
        return self.measured(self._cost, call, warm)

    def cost_of(self, signature: _Cost) -> tuple[float, int]:
        """The median of the warm runs, cold ones where there are none, and the most scratch."""
        runs = signature.warm or signature.cold
        return statistics.median(read() for read in runs) if runs else 0.0, signature.scratch_bytes


class _Cost:
    """What was measured of calls that cost the same.

    Attributes:
        is_collective: they return what a collective made.
        warm, cold: read the seconds of runs; cold ones are the first of operations that run twice.
        scratch_bytes: the most of any run.
    """

    __slots__ = ("cold", "is_collective", "scratch_bytes", "warm")

    def __init__(self, is_collective: bool = False) -> None:
        self.is_collective, self.scratch_bytes = is_collective, 0
        self.warm: list[Callable[[], float]] = []
        self.cold: list[Callable[[], float]] = []


def _is_functional_collective(func: Any) -> bool:
    return getattr(func, "namespace", "") == "_c10d_functional"


def apart(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[[Callable[[], Any]], Any]
) -> Any:
    """What ``run`` returns for the operation; a functional collective is waited for, and moves copies.

    The threads that carry out a collective hold its buffers until they have tidied up, so only copies let the
    step's own tensors end where the program lets go of them.
    """
    if not _is_functional_collective(func) or op_info(func).waits:
        return run(lambda: proceed(func, args, kwargs))
    copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        copies.append((tensor, tensor.clone()))
        return copies[-1][1]

    with unseen():
        given, named = private.tree_map_only(torch.Tensor, copied, (args, kwargs))
    result = run(lambda: _waited_for(proceed(func, given, named)))
    written = {id(tensor) for tensor in written_tensors(op_info(func), given, named)}
    with unseen():
        if not written:
            return private.tree_map_only(torch.Tensor, torch.clone, result)
        for tensor, copy in copies:
            if id(copy) in written:
                tensor.copy_(copy)
    originals = {private.storage_key(copy): tensor for tensor, copy in copies}
    return private.tree_map_only(torch.Tensor, lambda tensor: originals[private.storage_key(tensor)], result)


def _waited_for(result: Any) -> Any:
    return private.tree_map_only(torch.Tensor, private.wait_for_collective, result)


def _cost_key(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What calls share that take equally long: the overload, and the shapes, strides and types of its
    arguments.
    """
    return (name, tuple(map(_form, args)), tuple((item, _form(kwargs[item])) for item in kwargs))


def _await_threads(seen: Peak, left: int) -> None:
    """Wait until the threads that carried out a collective hold nothing but the ``left`` bytes that it
    returns: what they let go of later would look like scratch of another operation.
    """
    deadline = time.perf_counter() + _TIDY_SECONDS
    while seen.live_bytes > left and time.perf_counter() < deadline:
        time.sleep(0)


def _form(item: Any) -> Any:
    if isinstance(item, torch.Tensor):
        if item.layout is torch.strided and not item.is_nested:
            return (item.shape, item.dtype, item.stride())
        if item.is_nested and item.layout is torch.strided:  # it has no shape, and PyTorch aborts where asked
            return (item.numel(), item.dtype)
        if item.layout is torch.sparse_coo:  # one that is not coalesced is sorted first, in a copy
            return (item.shape, item.dtype, private.stored_elements(item), item.is_coalesced())
        return (item.shape, item.dtype, None)
    if isinstance(item, (tuple, list)):
        return tuple(map(_form, item))
    return item if isinstance(item, (int, float, bool, str, torch.dtype)) else type(item)
