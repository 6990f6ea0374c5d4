"""Run operations one at a time, on inputs made up to have the same layout, and time them."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from lowtide import accelerator, private
from lowtide.meter import available, counting_allocator, peak, storages
from lowtide.ops import op_info, tensors_of, written_tensors
from lowtide.private import tree_leaves, tree_map
from lowtide.progress import current
from lowtide.trace.clock import Clock
from lowtide.trace.costs.roofline import Roofline, calibrate, outside_modes, present
from lowtide.trace.costs.specs import OpCost, OpSpec, TensorSpec, likely_flops, runnable, staging_bytes

K = TypeVar("K", bound=Hashable)

_PATTERN = 1 << 16  # made-up numbers repeat after so many
_HELD_BYTES = 64 << 20  # a little more than a processor's cache
_MIN_RUNS, _MAX_RUNS = 2, 25
_HEAVY = 2  # times its share, and the run to warm up counts
_ALONE = 6  # times what each would get if all got the same, and an operation runs only once
_PATIENCE = 9  # times the time budget, before operations are estimated: what counts most has been run by then
_GROUPED = "aten._grouped_mm.default"
_QUESTIONS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


def measure_costs(
    specs: Mapping[K, OpSpec],
    *,
    time_budget: float = 0.7,
    memory_limit_bytes: int | None = None,
    roofline: Roofline | None = None,
) -> dict[K, OpCost]:
    """Time operations one at a time, outside autograd and every mode.

    Each is run once to warm up and at least twice more, long ones fewer times. Estimated by a roofline are
    other namespaces than ATen's (collectives among them), devices that are not there, inputs that the
    operation rejects, what would not fit, and what would take beyond nine times the time budget. An estimate
    is corrected by what the largest run call of the same operation took of its own. Random state is as
    before, and no memory stays.

    Args:
        specs: a signature for each distinct operation.
        time_budget: seconds for all of them together, calibration apart; a few heavy ones may take nine
            times that.
        memory_limit_bytes: the most that an operation's inputs and outputs may take, with what is held beside
            them (see `Bench`); its scratch is not known before and comes on top.
        roofline: what estimates use; ``None`` calibrates the device.
    """
    if not specs:
        return {}
    costs: dict[K, OpCost] = {}
    bench = Bench(memory_limit_bytes)
    with _undisturbed(any(accelerator.is_accelerator(_device_of(spec)) for spec in specs.values())):
        guess = {key: estimate(spec, roofline, memory_limit_bytes) for key, spec in specs.items()}
        order = _heavy_first(specs, guess)
        begin, long = time.perf_counter(), _ALONE * time_budget / len(order)
        took: dict[Any, float] = {}  # of an operation's estimate, by the overload
        for done, key in enumerate(current().each("timing operations", order)):
            spec, cost = specs[key], guess[key]
            spent = time.perf_counter() - begin
            expected = cost.seconds * took.get(spec.func, 1.0)
            may_run = runnable(spec.func) and all(map(present, _devices(spec)))
            fits = memory_limit_bytes is None or spec.input_bytes() + spec.output_bytes <= memory_limit_bytes
            found = None
            if may_run and fits and spent + expected < _PATIENCE * time_budget:
                share = max(0.0, time_budget - spent) / (len(order) - done)
                found = bench.try_timing(spec, share, long)
            if found is not None:
                took[spec.func] = found.seconds / cost.seconds
            costs[key] = found or OpCost(expected, cost.scratch_bytes, "estimated")
    return costs


def measure_scratch(spec: OpSpec) -> int:
    """What one operation takes beyond its results, by running it once as `measure_costs` does; 0 where it
    rejects what was made up for it, or its device is not there.
    """
    if not runnable(spec.func) or not all(map(present, _devices(spec))):
        return 0
    with _undisturbed(accelerator.is_accelerator(_device_of(spec))):
        found = Bench().try_timing(spec, 0.0, 0.0)
    return 0 if found is None else found.scratch_bytes


def estimate(spec: OpSpec, roofline: Roofline | None = None, memory_limit_bytes: int | None = None) -> OpCost:
    """An operation's time by a roofline, without running it. Its scratch is not known (0), but for what a
    collective moves through.

    Args:
        spec: the operation.
        roofline: the device; ``None`` calibrates the one that the operation is on.
        memory_limit_bytes: the most that this may take.
    """
    leaves = spec.tensors()
    if roofline is None:
        dtype = next((leaf.dtype for leaf in leaves if leaf.dtype.is_floating_point), torch.float32)
        roofline = calibrate(_device_of(spec), dtype, memory_limit_bytes)
    written = spec.output_bytes or max((leaf.bytes for leaf in leaves), default=0)
    moved = sum(leaf.bytes for leaf in leaves) + written
    return OpCost(roofline.seconds(likely_flops(spec), moved), staging_bytes(spec), "estimated")


def _heavy_first(specs: Mapping[K, OpSpec], guess: Mapping[K, OpCost]) -> list[K]:
    """The overloads with the heaviest calls first; of one overload the light calls, which say how far the
    estimates of the heavy ones are off.
    """
    heaviest: dict[Any, float] = {}
    for key, spec in specs.items():
        heaviest[spec.func] = max(heaviest.get(spec.func, 0.0), guess[key].seconds)
    place = {func: at for at, func in enumerate(sorted(heaviest, key=lambda func: -heaviest[func]))}
    return sorted(specs, key=lambda key: (place[specs[key].func], guess[key].seconds))


class Bench:
    """Builds an operation's inputs and runs it.

    In a step an output lands in memory that was used before, but not lately. So the last outputs are held
    here, a little more than the processor's cache, and what they free is what the next run writes to. Timed
    so, the operations of a GPT-2's forward add up to 0.76-1.02 of what they take within the step; into the
    same hot memory every time they add up to 0.74-0.89, into fresh pages to 1.5.

    Args:
        memory_limit_bytes: the most that an operation's inputs and outputs may take with what is held.
    """

    def __init__(self, memory_limit_bytes: int | None = None) -> None:
        self._limit, self._may_hold = memory_limit_bytes, _HELD_BYTES
        self._held: deque[torch.UntypedStorage] = deque()
        self._held_bytes = 0
        self._patterns: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}

    def try_timing(self, spec: OpSpec, share: float, long: float) -> OpCost | None:
        """As `time`; ``None`` where the operation rejects what was made up for it."""
        try:
            return self.time(spec, share, long)
        except Exception:  # whatever a kernel says of inputs that it was not made for
            return None

    def time(self, spec: OpSpec, share: float, long: float) -> OpCost:
        """Run an operation once to warm up, then at least twice, more often while that takes less than
        ``share`` seconds together. One that takes ``long`` seconds runs only once.
        """
        device = _device_of(spec)
        if self._limit is not None:
            room = self._limit - spec.input_bytes() - spec.output_bytes
            self._may_hold = max(0, min(_HELD_BYTES, room))
            self._let_go()
        clock = Clock(device)
        leaves = spec.tensors()
        inputs = {
            key: self._storage([leaf for leaf in leaves if leaf.storage_key == key])
            for key in {leaf.storage_key for leaf in leaves}
        }
        args, kwargs = tree_map(lambda leaf: _argument(leaf, inputs), (spec.args, spec.kwargs))
        _fit(spec, args)
        known = {private.storage_key(data): data for data in inputs.values()}
        # what it writes to is filled again before every run
        written = written_tensors(op_info(spec.func), args, kwargs)
        dirty = [(known[private.storage_key(tensor)], tensor.dtype) for tensor in written]

        def run() -> tuple[float, Any]:
            for data, dtype in dirty:
                self._fill(data, dtype)
            out, seconds = clock.time(lambda: spec.func(*args, **kwargs))
            return seconds(), out

        def watched() -> tuple[float, int, int, bool]:
            """Seconds of a run, its scratch in bytes, what its outputs take beyond what was expected, and
            whether the watching took time itself.
            """
            with peak(device) as seen:
                seconds, out = run()
                live = seen.live_bytes if seen.source != "profiler" else 0
            own = _own(out, known)
            made = sum(s.nbytes() for s in own)
            fresh = max(live if accelerator.is_accelerator(device) else 0, made)
            self._hold(own, device)
            scratch, surplus = max(0, seen.peak_bytes - fresh), max(0, made - spec.output_bytes)
            return seconds, scratch, surplus, seen.source == "profiler"

        begin = time.perf_counter()
        warm, scratch, surplus, slower = watched()
        if warm > long and not slower:
            return OpCost(warm, scratch, "measured", surplus)
        first, scratch, surplus, slower = watched()
        times = [] if slower else [first]
        if warm > _HEAVY * share and not slower:
            times.append(warm)  # what runs so long does not notice that it is the first
        while len(times) < _MIN_RUNS or (len(times) < _MAX_RUNS and time.perf_counter() - begin < share):
            seconds, out = run()
            self._hold(_own(out, known), device)
            del out
            times.append(seconds)
        return OpCost(statistics.median(times), scratch, "measured", surplus)

    def _hold(self, fresh: list[torch.UntypedStorage], device: torch.device) -> None:
        """Hold an output's own storages and let the oldest go; a GPU's allocator hands them out again
        itself.
        """
        if accelerator.is_accelerator(device):
            return
        self._held.extend(fresh)
        self._held_bytes += sum(s.nbytes() for s in fresh)
        self._let_go()

    def _let_go(self) -> None:
        while self._held_bytes > self._may_hold:
            self._held_bytes -= self._held.popleft().nbytes()

    def _storage(self, leaves: list[TensorSpec]) -> torch.Tensor:
        """One storage as bytes, filled so that every leaf reads harmless numbers."""
        size = max(max(leaf.storage_bytes, leaf.extent_bytes) for leaf in leaves)
        data = torch.empty(-(-size // 16) * 16, dtype=torch.uint8, device=leaves[0].device)
        floating = [leaf.dtype for leaf in leaves if leaf.dtype.is_floating_point or leaf.dtype.is_complex]
        self._fill(data, (floating or [leaves[0].dtype])[0])
        return data

    def _fill(self, data: torch.Tensor, dtype: torch.dtype) -> None:
        """Numbers between 0.06 and 0.94, without order: finite, no denormals, also good as probabilities and
        under a root. Integers are zero, an index that is valid everywhere; masks let everything through.
        """
        if dtype == torch.bool:
            data.fill_(1)
            return
        if not (dtype.is_floating_point or dtype.is_complex):
            data.zero_()
            return
        key = (dtype, data.device)
        if key not in self._patterns:
            drawn = torch.rand(_PATTERN, generator=torch.Generator().manual_seed(0))
            numbers = drawn.mul_(0.875).add_(0.0625).to(dtype.to_real())
            self._patterns[key] = numbers.to(data.device).view(torch.uint8)
        pattern = self._patterns[key][: data.numel()]
        whole = data.numel() // max(1, pattern.numel())
        data[: whole * pattern.numel()].view(whole, -1).copy_(pattern.expand(whole, -1))
        data[whole * pattern.numel() :].copy_(pattern[: data.numel() - whole * pattern.numel()])


def _argument(leaf: Any, inputs: Mapping[int, torch.Tensor]) -> Any:
    if isinstance(leaf, torch.Generator):
        return torch.Generator(leaf.device)  # user code's own generator stays where it is
    if not isinstance(leaf, TensorSpec):
        return leaf
    empty = torch.empty(0, dtype=leaf.dtype, device=leaf.device)
    return empty.set_(inputs[leaf.storage_key].untyped_storage(), leaf.offset, leaf.shape, leaf.stride)


def _fit(spec: OpSpec, args: Any) -> None:
    """Write to arguments that say how much there is to do: groups are of equal size, and lengths are one.
    Indices stay zero, and masks true.
    """
    if str(spec.func) == _GROUPED and len(args) > 2 and args[2] is not None:
        first, second, ends = args[:3]
        rows = second.shape[-1] if first.dim() == 3 else first.shape[0 if second.dim() == 3 else 1]
        ends.copy_(torch.arange(1, len(ends) + 1, device=ends.device) * rows // len(ends))
    elif not _QUESTIONS.isdisjoint(spec.func.tags) and "index" not in str(spec.func):
        for tensor in tensors_of(args):
            if not (tensor.is_floating_point() or tensor.is_complex()):
                tensor.fill_(1)


def _own(out: Any, known: Mapping[int, object]) -> list[torch.UntypedStorage]:
    """The storages of an operation's results that are not its inputs'."""
    return [s for s in storages(tensors_of(out)) if private.storage_address(s) not in known]


def _devices(spec: OpSpec) -> set[torch.device]:
    named = {leaf for leaf in tree_leaves((spec.args, spec.kwargs)) if isinstance(leaf, torch.device)}
    return named | {leaf.device for leaf in spec.tensors()}


def _device_of(spec: OpSpec) -> torch.device:
    return next(filter(accelerator.is_accelerator, _devices(spec)), torch.device("cpu"))


@contextmanager
def _undisturbed(beside_cpu: bool) -> Iterator[None]:
    """Below autograd, out of every mode, with the random state as before, and the meter installed once for
    all.
    """
    counted = available()
    if counted:
        counting_allocator().install()
    try:
        devices = accelerator.all_devices() if beside_cpu else []
        with outside_modes(), torch.random.fork_rng(devices), torch.no_grad(), private.below_autograd():
            yield
    finally:
        if counted:
            counting_allocator().uninstall()
