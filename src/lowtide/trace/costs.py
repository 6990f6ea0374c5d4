"""What operations cost: seconds and scratch bytes, measured one operation at a time on synthetic inputs, or
estimated by a roofline.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch.utils.flop_counter import flop_registry

from lowtide import private
from lowtide.private import OpOverload, TorchDispatchMode, tree_leaves, tree_map
from lowtide.trace.sizes import family_of, parts, read_off, scratch_of, work_of
from lowtide.trace.specs import OpCost, OpSpec, TensorSpec, flops, runnable

from ..meter import available, counting_allocator, peak, storages
from ..progress import current
from .contents import fit
from .random_state import same_torch_random
from .roofline import Roofline, aside, calibrate, present
from .staging import staging_bytes

K = TypeVar("K", bound=Hashable)

_PATTERN_BYTES = 1 << 18  # 65,536 numbers of four bytes: then they repeat
_PATTERN_BYTES_AT_LEAST = 1 << 10
_PATTERN_SHARE = 64  # a small storage's numbers repeat so often, for making them takes room, too
_HELD_BYTES = 64 << 20
_MIN_RUNS = 2
_HEAVY = 2  # times its share, and it runs only once more after warming up
_PATIENCE = (
    # more than the time budget, in units of it, before operations are estimated: a light one whose estimate
    # is wrong misleads a plan
    8
)
_ALONE = 6  # times what each would get if all got the same, and not even that
_MAX_RUNS = 25
_PART_SECONDS = 0.01  # of a heavier product, as much as takes about so long is run
_PART_BYTES = 1 << 24  # of what moves more bytes, as much as does not live in the processor's cache
_PRECISE = 0.002  # of all operations' time: closer than that one operation's need not be known


class Bench:
    """Builds an operation's inputs and runs it.

    Args:
        standing: tensors that stand in memory anyway. Where room is short, an operation that reads weights
            reads one of these of equal size in place of a copy: in a step, too, its weights stand there once.

    In a step an output lands in memory that was used before, but not lately. So the last outputs are held
    here, a little more than the processor's cache, and what they free is what the next run writes to. Timed
    so, the operations of a GPT-2's forward add up to 0.76-1.02 of what they take within the step; into the
    same hot memory every time they add up to 0.74-0.89, into fresh pages to 1.5.
    """

    def __init__(self, standing: Iterable[torch.Tensor] = ()) -> None:
        self._standing = {
            (t.device, t.dtype, t.untyped_storage().nbytes()): t
            for t in standing
            if t.dtype.is_floating_point
        }
        self._held: deque[torch.UntypedStorage] = deque()
        self._held_bytes = 0
        self._patterns: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}

    def lent(self, spec: OpSpec) -> dict[int, torch.Tensor]:
        """The standing tensors that an operation of known reading may take its inputs from, by the inputs'
        storage keys.
        """
        if (
            spec.func.overloadpacket not in flop_registry
            and spec.func is not torch.ops.aten.embedding.default
        ):
            return {}  # what reads weights, and surely writes to none of its inputs
        found = {
            leaf.storage_key: self._standing.get((leaf.device, leaf.dtype, leaf.storage_bytes))
            for leaf in spec.tensors()
        }
        return {key: tensor for key, tensor in found.items() if tensor is not None}

    def lent_bytes(self, spec: OpSpec) -> int:
        """Bytes that need not be made up for an operation where room is short."""
        return sum(tensor.untyped_storage().nbytes() for tensor in self.lent(spec).values())

    def _hold(self, out: Any, known: set[int], room: int) -> None:
        """Hold an output's own storages and let the oldest go, within ``room`` bytes."""
        fresh = _own(out, known)
        self._held.extend(fresh)
        self._held_bytes += sum(s.nbytes() for s in fresh)
        while self._held_bytes > room:
            self._held_bytes -= self._held.popleft().nbytes()

    def time(
        self,
        spec: OpSpec,
        share: float,
        room: int = _HELD_BYTES,
        short: bool = False,
        long: float = math.inf,
        close: float = 0.0,
    ) -> OpCost:
        """Run an operation once to warm up, then at least twice, more often while that takes less than
        ``share`` seconds together and the runs differ by more than ``close`` of their time; one that takes
        twice its share runs once more only, and one that takes ``long`` seconds not even that.

        Args:
            spec: the operation.
            share: seconds for it.
            room: bytes of earlier outputs that may stay meanwhile.
            short: they are few, and the operation's scratch has to fit in them, too: no output stays until it
                is known, and what it can be lent is not made up.
            long: seconds that no operation may take twice.
            close: how far apart runs may lie, as a share of their time, for no more to be needed.
        """
        room = 0 if _is_cuda(spec) else min(room, _HELD_BYTES)
        self._hold((), set(), 0 if short else room)
        lent = self.lent(spec) if short else {}
        inputs = {
            key: lent[key] if key in lent else self._storage(leaves)
            for key, leaves in _by_storage(spec).items()
        }
        dirty = self._mutated(spec, inputs)
        args, kwargs = tree_map(lambda leaf: self._argument(leaf, inputs), (spec.args, spec.kwargs))
        fit(spec.func, args, spec.trues)
        if short:
            self._patterns.clear()
        run, func = self._run_cuda if _is_cuda(spec) else self._run_cpu, spec.func
        known = {private.storage_key(data) for data in inputs.values()}

        def watched() -> tuple[float, Any, int, bool]:
            """Seconds of a run, its output, its scratch in bytes, and whether the watching took time
            itself.
            """
            with peak(_device_of(spec)) as seen:
                seconds, out = run(func, args, kwargs)
                live = seen.live_bytes if seen.source != "profiler" else 0
            fresh = sum(s.nbytes() for s in _own(out, known))
            return (
                seconds,
                out,
                max(0, seen.peak_bytes - (max(live, fresh) if _is_cuda(spec) else fresh)),
                seen.source == "profiler",
            )

        begin = time.perf_counter()
        warm, out, scratch, slower = watched()
        if warm > long and not slower:
            self._hold(out, known, max(0, room - scratch) if short else room)
            return OpCost(warm, scratch, "measured")
        del out
        self._refill(dirty)
        first, out, scratch, slower = watched()
        room = max(0, room - scratch) if short else room
        self._hold(out, known, room)
        del out
        times = [] if slower else [first]
        if warm > _HEAVY * share and not slower:
            times.append(warm)  # what runs so long does not notice that it is the first
        while len(times) < _MIN_RUNS or (
            len(times) < _MAX_RUNS
            and time.perf_counter() - begin < share
            and max(times) - min(times) > close * statistics.median(times)
        ):
            self._refill(dirty)
            seconds, out = run(func, args, kwargs)
            self._hold(out, known, room)
            del out
            times.append(seconds)
        return OpCost(statistics.median(times), scratch, "measured")

    @staticmethod
    def _run_cpu(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[float, Any]:
        begin = time.perf_counter()
        out = func(*args, **kwargs)
        return time.perf_counter() - begin, out

    @staticmethod
    def _run_cuda(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[float, Any]:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        out = func(*args, **kwargs)
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e-3, out

    def _storage(self, leaves: list[TensorSpec]) -> torch.Tensor:
        """One storage as bytes, filled so that every leaf reads harmless numbers."""
        first = leaves[0]
        size = max(max(leaf.storage_bytes, leaf.extent_bytes) for leaf in leaves)
        data = torch.empty(-(-size // 16) * 16, dtype=torch.uint8, device=first.device)
        floating = [leaf.dtype for leaf in leaves if leaf.dtype.is_floating_point or leaf.dtype.is_complex]
        self._fill(data, (floating or [first.dtype])[0])
        return data

    def _fill(self, data: torch.Tensor, dtype: torch.dtype) -> None:
        if dtype == torch.bool:
            data.fill_(1)
        elif not (dtype.is_floating_point or dtype.is_complex):
            data.zero_()  # integers: an index that is valid everywhere
        else:
            pattern = self._pattern(dtype, data.device, data.numel())
            size = pattern.numel()
            whole = data.numel() // size
            if whole:
                data[: whole * size].view(whole, size).copy_(pattern.expand(whole, size))
            data[whole * size :].copy_(pattern[: data.numel() - whole * size])

    def _pattern(self, dtype: torch.dtype, device: torch.device, size: int) -> torch.Tensor:
        """Bytes of numbers between 0.06 and 0.94, without order: finite, no denormals, also good as
        probabilities and under a root.

        They are a fraction of the storage of ``size`` bytes that they are for: the budget of a small step has
        no room for more.
        """
        key = (dtype, device)
        size = min(size, max(_PATTERN_BYTES_AT_LEAST, min(_PATTERN_BYTES, size // _PATTERN_SHARE)))
        if key not in self._patterns or self._patterns[key].numel() < size:
            self._patterns.pop(key, None)
            real = dtype.to_real()  # complex numbers get both parts
            count = max(1, size // real.itemsize)
            steps = (
                torch.arange(count, dtype=torch.int32).mul_(31153).bitwise_and_(0xFFFF)
            )  # wraps around, which the last 16 bits do not see
            numbers = steps.to(torch.float32).mul_(0.875 / 65536).add_(0.0625)
            self._patterns[key] = numbers.to(real).to(device).view(torch.uint8)
        return self._patterns[key]

    @staticmethod
    def _argument(leaf: Any, inputs: Mapping[int, torch.Tensor]) -> Any:
        if isinstance(leaf, torch.Generator):
            return torch.Generator(leaf.device)  # the program's own generator stays where it is
        if not isinstance(leaf, TensorSpec):
            return leaf
        empty = torch.empty(0, dtype=leaf.dtype, device=leaf.device)
        return empty.set_(inputs[leaf.storage_key].untyped_storage(), leaf.offset, leaf.shape, leaf.stride)

    @staticmethod
    def _mutated(spec: OpSpec, inputs: Mapping[int, torch.Tensor]) -> list[tuple[torch.Tensor, torch.dtype]]:
        """The storages that the operation writes to, to be filled again before every run."""
        found: dict[int, tuple[torch.Tensor, torch.dtype]] = {}
        for at, argument in enumerate(private.schema_of(spec.func).arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = spec.kwargs.get(argument.name, spec.args[at] if at < len(spec.args) else None)
            for leaf in tree_leaves(value):
                if isinstance(leaf, TensorSpec):
                    found[leaf.storage_key] = (inputs[leaf.storage_key], leaf.dtype)
        return list(found.values())

    def _refill(self, dirty: list[tuple[torch.Tensor, torch.dtype]]) -> None:
        for data, dtype in dirty:
            self._fill(data, dtype)


def _own(out: Any, known: set[int]) -> list[torch.UntypedStorage]:
    """The storages of an operation's results that are not its inputs'."""
    return [
        s
        for s in storages(leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor))
        if private.storage_address(s) not in known
    ]


def _by_storage(spec: OpSpec) -> dict[int, list[TensorSpec]]:
    found: dict[int, list[TensorSpec]] = {}
    for leaf in spec.tensors():
        found.setdefault(leaf.storage_key, []).append(leaf)
    return found


def _devices(spec: OpSpec) -> set[torch.device]:
    named = {leaf for leaf in tree_leaves((spec.args, spec.kwargs)) if isinstance(leaf, torch.device)}
    return named | {leaf.device for leaf in spec.tensors()}


def _device_of(spec: OpSpec) -> torch.device:
    return next((d for d in _devices(spec) if d.type == "cuda"), torch.device("cpu"))


def _is_cuda(spec: OpSpec) -> bool:
    return _device_of(spec).type == "cuda"


def estimate(spec: OpSpec, roofline: Roofline | None = None, room: int | None = None) -> OpCost:
    """An operation's time by a roofline, without running it. Its scratch is not known (0), but for what a
    collective moves through.

    Args:
        spec: the operation.
        roofline: the device; ``None`` calibrates the one that the operation is on.
        room: bytes that calibrating may take.
    """
    leaves = spec.tensors()
    if roofline is None:
        dtype = next((leaf.dtype for leaf in leaves if leaf.dtype.is_floating_point), torch.float32)
        roofline = calibrate(_device_of(spec), dtype, room)
    moved = sum(leaf.bytes for leaf in leaves)
    written = spec.output_bytes or (max((leaf.bytes for leaf in leaves), default=0))
    count = flops(spec)
    return OpCost(
        roofline.seconds(count, moved + written),
        staging_bytes(spec),
        "estimated",
        family_of(spec),
        count,
        spec.touched_bytes(),
    )


def measure_costs(
    specs: Mapping[K, OpSpec],
    *,
    cache: MutableMapping[K, OpCost] | None = None,
    counts: Mapping[K, int] | None = None,
    time_budget: float = 0.7,
    memory_limit_bytes: int | None = None,
    held_limit_bytes: int | None = None,
    roofline: Roofline | None = None,
    standing: Iterable[torch.Tensor] = (),
) -> dict[K, OpCost]:
    """Time operations one at a time, on inputs made up to have the same layout, outside autograd and every
    mode.

    Each is run once to warm up and at least twice more, short ones more often where that matters to the
    whole, those that take more than twice their share once more, and those that take six times what each
    would get if all got the same only once in all. Of heavy ones whose parts are alike only a part is run,
    and sizes between, or not far beyond, those that are known are read off (`lowtide.trace.sizes`). What may
    not or cannot be run is estimated: other namespaces than ATen's (collectives among them), devices that are
    not there, inputs that the operation rejects, what would not fit, and what is left when nine times the
    time budget is spent. Random state is as before, and no memory stays.

    Args:
        specs: a signature for each distinct operation.
        cache: costs known from before, by signature; what is measured now is added.
        counts: how often the step runs each, once where it is not said: what counts for much is timed more
            closely.
        time_budget: seconds for all of them together, calibration apart; a few heavy operations may take it
            up to nine times that.
        memory_limit_bytes: the most that an operation's inputs and outputs may take, earlier outputs still
            held included; what needs more is estimated. The operation's scratch is not known before and comes
            on top.
        held_limit_bytes: as the former where earlier outputs are concerned, if that is less: none are held
            for an operation beyond it.
        roofline: what estimates use; ``None`` calibrates the device.
        standing: tensors that stand in memory anyway, to read in place of made-up weights where a limit
            leaves little room.
    """
    costs: dict[K, OpCost] = {key: cache[key] for key in specs if cache is not None and key in cache}
    todo = {key: spec for key, spec in specs.items() if key not in costs}
    if not todo:
        return costs
    bench = Bench(standing)
    with _undisturbed(any(_is_cuda(spec) for spec in todo.values())):
        guess = {
            key: estimate(
                spec, roofline, held_limit_bytes if held_limit_bytes is not None else memory_limit_bytes
            )
            for key, spec in todo.items()
        }
        known = _by_family((*costs.values(), *(cache.values() if cache is not None else ())))
        often = {key: (counts or {}).get(key, 1) for key in todo}
        whole = sum(guess[key].seconds * often[key] for key in todo)
        order = _heavy_first(guess)
        begin, long = time.perf_counter(), _ALONE * time_budget / len(order)
        for done, key in enumerate(current().each("timing operations", order)):
            spec, cost = todo[key], guess[key]
            left = time_budget - (time.perf_counter() - begin)
            told = read_off(known.get(cost.family, ()), cost.flops, cost.bytes) if cost.family else None
            if told is not None:
                cost = replace(cost, seconds=told[0], scratch_bytes=told[1], source="interpolated")
            elif (
                runnable(spec.func) and left > -_PATIENCE * time_budget and all(map(present, _devices(spec)))
            ):
                close = min(1.0, max(0.05, _PRECISE * whole / max(cost.seconds * often[key], 1e-12)))
                timing = _Timing(
                    bench,
                    max(0.0, left) / (len(order) - done),
                    long,
                    close,
                    memory_limit_bytes,
                    held_limit_bytes,
                )
                cost = timing.of(spec, cost)
                known.setdefault(cost.family, []).append(cost)
            costs[key] = cost
            if cache is not None:
                cache[key] = cost
    return costs


def _by_family(costs: Iterable[OpCost]) -> dict[str, list[OpCost]]:
    found: dict[str, list[OpCost]] = {}
    for cost in costs:
        if cost.family:
            found.setdefault(cost.family, []).append(cost)
    return found


def _heavy_first(guess: Mapping[K, OpCost]) -> list[K]:
    """The heavy families first, for where time runs out, little is left to guess; within one the small calls,
    from which others are read off.
    """
    weight: dict[Any, float] = {}
    for key, cost in guess.items():
        family = cost.family or key
        weight[family] = max(weight.get(family, 0.0), cost.seconds)
    place = {key: k for k, key in enumerate(guess)}
    first: dict[Any, int] = {}
    for key, cost in guess.items():
        first.setdefault(cost.family or key, place[key])
    return sorted(
        guess,
        key=lambda key: (
            -weight[guess[key].family or key],
            first[guess[key].family or key],
            work_of(guess[key]),
            place[key],
        ),
    )


@dataclass(frozen=True)
class _Timing:
    """What one operation may take to be timed: seconds and closeness as of `Bench.time`, and the limits of
    `measure_costs`.
    """

    bench: Bench
    share: float
    long: float
    close: float
    memory_limit_bytes: int | None
    held_limit_bytes: int | None

    def of(self, spec: OpSpec, guess: OpCost) -> OpCost:
        """The cost of an operation, run in whole or in part; ``guess`` where it cannot be run."""
        heavy = guess.seconds > 2 * _PART_SECONDS if guess.flops else guess.bytes > 2 * _PART_BYTES
        if heavy:
            share = _PART_SECONDS / guess.seconds if guess.flops else _PART_BYTES / guess.bytes
            smaller = parts(spec, share)
            found = self._scaled(*smaller, guess) if smaller is not None else None
            if found is not None:
                return found
        return self._run(spec, guess) or guess

    def _scaled(self, part: OpSpec, larger: OpSpec, guess: OpCost) -> OpCost | None:
        """The cost of a call of which ``part`` was run; ``None`` where that does not say what it is."""
        first = self._run(part, _sized(part, guess))
        if first is None or not work_of(first):
            return None
        more = first
        if first.scratch_bytes:
            second = self._run(larger, _sized(larger, guess), once=True)
            if second is None:
                return None
            more = second
        scratch = scratch_of(first, more, work_of(guess))
        if scratch is None:
            return None
        return replace(
            guess,
            seconds=first.seconds * work_of(guess) / work_of(first),
            scratch_bytes=scratch,
            source="scaled",
        )

    def _run(self, spec: OpSpec, guess: OpCost, once: bool = False) -> OpCost | None:
        """Run it, or ``None`` where it does not fit or rejects what was made up for it."""
        limits = [limit for limit in (self.memory_limit_bytes, self.held_limit_bytes) if limit is not None]
        taken = spec.input_bytes() + spec.output_bytes
        short = min(limits, default=taken + _HELD_BYTES) < taken + _HELD_BYTES
        if short:
            taken -= self.bench.lent_bytes(spec)
        room = _HELD_BYTES if self.memory_limit_bytes is None else self.memory_limit_bytes - taken
        held = room if self.held_limit_bytes is None else min(room, self.held_limit_bytes - taken)
        if room < 0:
            return None
        try:
            cost = self.bench.time(
                spec, self.share, max(0, held), short, 0.0 if once else self.long, self.close
            )
        except Exception:  # made-up inputs that the operation rejects
            return None
        return replace(guess, seconds=cost.seconds, scratch_bytes=cost.scratch_bytes, source="measured")


def _sized(spec: OpSpec, like: OpCost) -> OpCost:
    """A cost of a call's own size, which is counted as that of ``like``."""
    return replace(like, flops=flops(spec) if like.flops else 0, bytes=spec.touched_bytes())


@contextmanager
def _undisturbed(cuda: bool) -> Iterator[None]:
    """Below autograd, out of every mode, with the random state as before, and the meter installed once for
    all.
    """
    counted = available()
    if counted:
        counting_allocator().install()
    try:
        devices = list(range(torch.cuda.device_count())) if cuda else []
        with aside(), same_torch_random(devices), torch.no_grad(), private.below_autograd():
            yield
    finally:
        if counted:
            counting_allocator().uninstall()


@dataclass(frozen=True, slots=True)
class ExecutorOverheads:
    """Seconds that Python adds to an operation.

    Attributes:
        record_seconds: under a dispatch mode that records operations, beyond the operation itself.
        replay_seconds: of calling a tiny operation again from its recorded arguments, the operation included.
    """

    record_seconds: float
    replay_seconds: float


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.rows: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        reads = [
            private.storage_key(leaf)
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, torch.Tensor)
        ]
        writes = [private.storage_key(leaf) for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        self.rows.append((func, args, kwargs, reads, writes))
        return out


@lru_cache(maxsize=8)
def executor_overheads(device: str = "cpu") -> ExecutorOverheads:
    """What recording and replaying cost per operation here, measured once per process and device (20 ms)."""
    runs = 300
    with aside(), torch.no_grad():
        left, right = torch.ones(4, device=device), torch.ones(4, device=device)
        func = torch.ops.aten.add.Tensor

        def median() -> float:
            times = []
            for _ in range(runs):
                begin = time.perf_counter()
                torch.add(left, right)
                times.append(time.perf_counter() - begin)
            return statistics.median(times)

        median()
        plain = median()
        with _Recorder():
            recorded = median()
        tape: list[tuple[OpOverload, tuple[Any, ...], dict[str, Any]]] = [(func, (0, 1), {})] * runs
        values, times = {0: left, 1: right}, []
        for step, reads, kwargs in tape:
            begin = time.perf_counter()
            values[2] = step(*[values[at] for at in reads], **kwargs)
            times.append(time.perf_counter() - begin)
    return ExecutorOverheads(max(0.0, recorded - plain), statistics.median(times))
