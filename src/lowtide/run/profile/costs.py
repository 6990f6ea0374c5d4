"""What the operations of a profiled step cost: seconds and scratch bytes, measured while it runs.

In: a call that is about to run. Out: a `MeasuredCost`, which calls share that cost the same: the median of a
few runs says how long they take, the most of any how much they allocate beside their results.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch

from lowtide import accelerator, private
from lowtide.interception import proceed, unseen
from lowtide.meter import Peak, measurable, peaks
from lowtide.meter.allocator import Moments
from lowtide.ops import Call, enter, has_plain_storage, is_wrapper, op_info, written_tensors
from lowtide.trace.clock import Clock
from lowtide.trace.results import tensors_inside
from lowtide.trace.tracer import CostFigures

RUNS = 5
"""How many runs of calls that cost the same are measured: more of them say little more."""
_TIDY_SECONDS = 0.1
"""The most seconds that a profile waits for the threads of one collective to let go of its buffers."""

_POLLS, _SAME_POLLS = 100, 4
"""How often it asks within that time what they still hold, and after how many equal answers it stops asking.
"""


class MeasuredCost:
    """Seconds and scratch bytes, measured of calls that cost the same.

    Attributes:
        is_collective: whether the calls are collectives, functional or in place.
        on_copies: whether the calls are functional collectives: `CostMeter.run` gives them copies of tensors.
        in_place: whether the calls are collectives that write into a tensor that they are given.
        writes: whether the calls are functional collectives that write into an argument and return it.
        warm, cold: the seconds of each run, or a function that reads them. Cold runs are the first ones of
            operations that run twice, and the first run of all.
        scratch_bytes: the most of any warm run, or of the cold ones where there are none: a cold run may
            search for the fastest kernel (cuDNN), in memory that no later run takes.
        blocks: what a run asks CUDA's allocator for (`lowtide.graph.Operation.blocks`); empty elsewhere.
        reproduced: how many second runs gave the same bytes as the first.

    The C++ recorder (`run/record/cpp/listen.h`) adds runs: their seconds.
    """

    __slots__ = (
        "blocks",
        "cold",
        "in_place",
        "is_collective",
        "on_copies",
        "reproduced",
        "scratch_bytes",
        "warm",
        "writes",
    )

    def __init__(
        self,
        is_collective: bool = False,
        in_place: bool = False,
        on_copies: bool = False,
        writes: bool = False,
    ) -> None:
        self.is_collective, self.in_place = is_collective, in_place
        self.on_copies, self.writes = on_copies, writes
        self.scratch_bytes = self.reproduced = 0
        self.blocks: tuple[int, ...] = ()
        self.warm: list[Callable[[], float] | float] = []
        self.cold: list[Callable[[], float] | float] = []

    def trusted(self, name: str) -> bool:
        """Whether operations of this form, and of this name, need no second run any more: what is not of ATen
        may depend on more than its arguments.
        """
        return self.reproduced >= RUNS and name.startswith("aten.")

    def note_scratch(self, scratch_bytes: int, warm: bool) -> None:
        """A run took so much scratch."""
        if warm and not self.warm and not self.is_collective:
            self.scratch_bytes = 0
        if warm or not self.warm or self.is_collective:
            self.scratch_bytes = max(self.scratch_bytes, scratch_bytes)

    def read(self) -> CostFigures:
        """The median of the warm runs, of cold ones where there are none; their most scratch; the blocks."""
        runs = self.warm or self.cold
        seconds = statistics.median(run() if callable(run) else run for run in runs) if runs else 0.0
        return seconds, self.scratch_bytes, self.blocks


class CostMeter:
    """Measures what the operations of one step cost, each as often as it takes.

    Args:
        device: whose memory and time are measured.

    Attributes:
        make_room: is called with the bytes that measuring takes beside the step's own, before it takes them.
        left_bytes: what the latest collective in place still holds after a first wait, until user code
            waits for it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.make_room: Callable[[int], object] = lambda nbytes: None
        self.left_bytes = 0
        # bytes come and go in the memory of the step's device: its own meter reads them
        self._meters = measurable(device)
        self._lists = accelerator.is_accelerator(device) and accelerator.allocator() == "native"
        self._known: dict[Any, MeasuredCost] = {}

    @cached_property
    def clock(self) -> Clock:
        """Times the calls."""
        return Clock(self.device)

    @cached_property
    def _peaks(self) -> Callable[[bool], Peak]:
        return peaks(self.device)

    def of(self, call: Call) -> MeasuredCost:
        """The cost of a call, one for all calls of the same overload whose arguments have the same shapes,
        strides, types and numbers, wherever in a tensor they write.
        """
        named = tuple([(name, _form(item)) for name, item in call.kwargs.items()]) if call.kwargs else ()
        args = [_form(item) for item in call.args]
        for place in call.info.where:
            args[place : place + 1] = [None]
        key = (call.info.name, tuple(args), named)
        found = self._known.get(key)
        if found is None:
            space = call.info.name.partition(".")[0]
            functional, in_place = space == "_c10d_functional", space == "c10d" and not call.info.sends
            writes = functional and bool(call.info.written)
            collective = functional or in_place or space == "lowtide_ring"
            found = self._known[key] = MeasuredCost(collective, in_place, functional, writes)
        return found

    def measure(self, cost: MeasuredCost, call: Callable[[], Any], warm: bool = True) -> Any:
        """What ``call`` returns. Its seconds and scratch count for ``cost``, unless that has enough runs."""
        warm = warm and bool(cost.warm or cost.cold)
        runs = cost.warm if warm else cost.cold
        if len(runs) >= RUNS and not cost.is_collective:
            return call()
        if not self._meters:
            result, seconds = self.clock.time(call)
        else:
            # blocks are CUDA's: what a warm run asks for counts, as its scratch does
            lists = self._lists and not (cost.warm if warm else cost.blocks)
            with self._peaks(lists) as seen:
                result, seconds = self.clock.time(call)
                left = max(0, seen.live_bytes)
                if self.device.type == "cpu" and cost.in_place:
                    left = self.left_bytes = _bytes_left(seen)
                elif self.device.type == "cpu" and cost.is_collective:  # Gloo's threads; NCCL has streams
                    left = 0 if cost.writes else sum(tensor.nbytes for tensor in tensors_inside(result))
                    _await_threads(seen, left)
            cost.note_scratch(seen.peak_bytes - left, warm)
            if lists:
                cost.blocks = _blocks_of(seen.timeline)
        runs.append(seconds)
        return result

    def run(
        self, cost: MeasuredCost, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], warm: bool
    ) -> Any:
        """What an operation returns, measured; a collective is waited for, a functional one runs on copies.

        The threads that carry out a collective hold its buffers until they have tidied up, so only copies let
        the step's own tensors end where user code lets go of them.
        """
        if cost.on_copies:
            return self._run_on_copies(cost, func, args, kwargs, warm)
        if cost.in_place:
            return self.measure(cost, lambda: private.wait_for_work(proceed(func, args, kwargs)), warm)
        if cost.is_collective:  # a ring's, which moves through buffers of its own
            self._make_room_for(args, kwargs, cost.scratch_bytes)
        return self.measure(cost, lambda: proceed(func, args, kwargs), warm)

    def _make_room_for(self, args: tuple[Any, ...], kwargs: dict[str, Any], known: int = 0) -> None:
        with unseen():
            self.make_room(max(known, 2 * sum(tensor.nbytes for tensor in tensors_inside((args, kwargs)))))

    def _run_on_copies(
        self, cost: MeasuredCost, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], warm: bool
    ) -> Any:
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []

        def copy_of(tensor: torch.Tensor) -> torch.Tensor:
            copies.append((tensor, tensor.clone()))
            return copies[-1][1]

        self._make_room_for(args, kwargs)
        with unseen():
            given, named = private.tree_map_only(torch.Tensor, copy_of, (args, kwargs))
        result = self.measure(cost, lambda: _wait_for(proceed(func, given, named)), warm)
        written = {id(tensor) for tensor in written_tensors(op_info(func), given, named)}
        with unseen():
            if not written:
                del given, named
                copies.clear()
                self.make_room(sum(tensor.nbytes for tensor in tensors_inside(result)))
                return private.tree_map_only(torch.Tensor, torch.clone, result)
            for tensor, copy in copies:
                if id(copy) in written:
                    tensor.copy_(copy)
        originals = {private.storage_key(copy): tensor for tensor, copy in copies}
        return private.tree_map_only(
            torch.Tensor, lambda tensor: originals[private.storage_key(tensor)], result
        )


class OpenCollectives:
    """The functional collectives of a profiled step that have begun, until user code waits for them.

    What each of them moves through counts as scratch of its own operation; beside other operations it shows
    up nowhere in the graph.

    Attributes:
        groups: the process groups of those that may run again.
        begun: what has begun, by the storages of what it returned.
    """

    def __init__(self) -> None:
        self.groups: list[Any] = []
        self.begun: dict[int, tuple[tuple[str, MeasuredCost], object]] = {}
        self._most: dict[str, int] = {}  # by operation, the most scratch of one that others overlapped

    def begins(self, call: Call, cost: MeasuredCost, results: list[Any], may_run_again: bool) -> None:
        """A collective with this cost has begun, and has returned ``results``; a ring has ended, too."""
        for tensor in results if cost.on_copies else ():
            if isinstance(tensor, torch.Tensor) and has_plain_storage(tensor):
                enter(self.begun, tensor.untyped_storage(), (call.info.name, cost))
        group = private.process_group_of(call.func, call.args, call.kwargs) if may_run_again else None
        if group is not None and group not in self.groups:
            self.groups.append(group)

    def waits(self, call: Call, result: Any) -> Any:
        """User code has waited for a collective, or got a wrapper that will wait: returns ``result``."""
        if not is_wrapper(result):
            for key in call.keys:
                self.begun.pop(key, None)
        return result

    def operation_begins(self) -> None:
        """Another operation is about to run beside the collectives that are under way."""
        for (name, cost), _ in self.begun.values():
            self._most[name] = max(self._most.get(name, 0), cost.scratch_bytes)

    @property
    def overlapping_bytes(self) -> int:
        """The bytes of collectives that run beside other operations: of the largest gather and the largest
        reduce-scatter, since when each ends depends on the other ranks.
        """
        return sum(self._most.values())


def _blocks_of(timeline: Moments) -> tuple[int, ...]:
    """What was asked for and given back, as `lowtide.graph.Operation.blocks` has it. Of equal blocks the last
    one is taken to go first.
    """
    blocks: list[int] = []
    unfreed = defaultdict[int, list[int]](list)  # by bytes, the number of each
    asked = live = 0
    for _, now in timeline:
        change, live = now - live, now
        if change > 0:
            asked += 1
            unfreed[change].append(asked)
            blocks.append(change)
        elif unfreed[-change]:  # what was there before is no block of this run
            blocks.append(-unfreed[-change].pop())
    return tuple(blocks)


def _wait_for(result: Any) -> Any:
    return private.tree_map_only(torch.Tensor, private.wait_for_collective, result)


def _await_threads(seen: Peak, left: int) -> None:
    """Wait until the threads that carried out a collective hold nothing but the ``left`` bytes that it
    returns: what they let go of later would look like scratch of another operation.
    """
    deadline = time.perf_counter() + _TIDY_SECONDS
    while seen.live_bytes > left and time.perf_counter() < deadline:
        time.sleep(0)


def _bytes_left(seen: Peak) -> int:
    """Bytes that are left once the threads that carried out a collective have let go of their buffers."""
    left, same = max(0, seen.live_bytes), 0
    for _ in range(_POLLS):
        time.sleep(_TIDY_SECONDS / _POLLS)
        before, left = left, max(0, seen.live_bytes)
        same = same + 1 if left == before else 0
        if same == _SAME_POLLS:
            break
    return left


def _form(item: Any) -> Any:
    """What an argument adds to the key of an operation's form."""
    if isinstance(item, torch.Tensor):
        if item.layout is torch.strided and not item.is_nested:
            return (item.shape, item.dtype, item.stride())
        if item.is_nested and item.layout is torch.strided:  # it has no shape, and PyTorch aborts where asked
            return (item.numel(), item.dtype)
        if item.layout is torch.sparse_coo:  # one that is not coalesced is sorted first, in a copy
            return (item.shape, item.dtype, private.stored_elements(item), item.is_coalesced())
        return (item.shape, item.dtype, None)
    if isinstance(item, (tuple, list)):
        return tuple([_form(part) for part in item])
    return item if isinstance(item, (int, float, bool, str, torch.dtype)) else type(item)


def may_be_meeting(call: Call) -> bool:
    """Whether a call in a backward may be autograd's engine's: it adds the gradients of two nodes."""
    return call.info.name == "aten.add.Tensor" and len(call.args) == 2 and not call.kwargs
