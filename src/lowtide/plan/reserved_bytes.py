"""What PyTorch's caching allocator reserves on CUDA for steps under a plan.

In: a step graph, the values that a plan stores, and a model of the allocator in the state in which the steps
begin (`lowtide.meter.reserved`). Out: the bytes that are reserved after each step. The blocks of a step are
asked for and given back in the order of its events, as the executor does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from lowtide.graph import Operation, StepGraph
from lowtide.plan.simulate.simulator import simulator_of
from lowtide.plan.simulate.walk import LiveCopies

if TYPE_CHECKING:
    from lowtide.meter.reserved import Block, CachingAllocator  # the meter imports PyTorch

BlockName = tuple[str, int]
"""What the block is: a ``storage``, a replayed ``copy`` of a value, or ``scratch``; and its number."""


def block_changes(
    graph: StepGraph, stored: Collection[int], batch_resident: bool = False
) -> Iterator[tuple[BlockName, int]]:
    """The blocks of one step in order: a name with the bytes that are asked for, or 0 as it is given back.

    What is not given back is live after the step: gradients, outputs, what user code keeps. The inputs are
    asked for first. What was there before, such as parameters, is left out.

    Args:
        graph: of the step.
        stored: ids of the values that the plan stores (`Plan.stored`).
        batch_resident: whether the inputs are resident before and after the step, and are left out, too.
    """
    simulator, seen = simulator_of(graph), list[LiveCopies]()
    simulation = simulator.simulate(stored, seen=seen)
    moments, ends = defaultdict[int, list[LiveCopies]](list), defaultdict[int, list[int]](list)
    for moment in seen:
        moments[moment.event].append(moment)
    until = dict(enumerate(simulator.natural_end)) | simulation.held_until
    emptied = set(graph.begin_empty)
    for storage in graph.storages:
        if batch_resident and storage.kind == "input":
            continue
        if storage.producer is not None or storage.kind == "input":
            ends[until[storage.id]].append(storage.id)
        if storage.kind == "input" and storage.bytes:
            yield ("storage", storage.id), storage.bytes
    copies = dict[int, int]()  # a value, and the one whose block its copy lies in
    for event, (kind, index) in enumerate(graph.events):
        if kind == "op":
            made = dict[BlockName, int]()
            for value in graph.operations[index].writes:
                storage = graph.storages[graph.values[value].storage]
                if storage.producer == index and not graph.values[value].version and storage.bytes:
                    made["storage", storage.id] = storage.bytes
            yield from _within(graph.operations[index], made)
        elif kind in ("fill", "empty") and event < until[index] and (kind == "fill") is (index in emptied):
            yield ("storage", index), graph.storages[index].bytes if kind == "fill" else 0
            emptied.symmetric_difference_update({index})
        for moment in moments[event]:
            begun, ended = moment.values - copies.keys(), copies.keys() - moment.values
            for value in sorted(begun):
                if simulator.previous[value] in ended:  # written in place, over the copy before
                    ended.discard(simulator.previous[value])
                    copies[value] = copies.pop(simulator.previous[value])
            for value in sorted(ended):
                yield ("copy", copies.pop(value)), 0
            begun -= copies.keys()
            copies |= {value: value for value in begun}
            operation = graph.operations[moment.operation] if moment.operation >= 0 else None
            yield from _within(operation, {("copy", v): simulator.value_bytes[v] for v in sorted(begun)})
        for storage in ends[event]:
            if storage not in emptied:
                yield ("storage", storage), 0


def _within(operation: Operation | None, made: dict[BlockName, int]) -> Iterator[tuple[BlockName, int]]:
    """The blocks that one operation allocates and frees, in order: a block's name with its bytes, or with 0
    where the block is freed. The blocks in ``made`` are the operation's results, and stay. Where the
    operation's blocks were not recorded, its scratch is asked for beside the results, in one block; scratch
    bytes beyond a multiple of 512 are a counter or a flag, in a second block.
    """
    blocks, left = operation.blocks if operation is not None else (), defaultdict[int, list[BlockName]](list)
    if blocks:
        for name, bytes in made.items():
            left[bytes].append(name)
    elif operation is not None:
        small = operation.scratch_bytes % 512
        blocks = tuple(size for size in (operation.scratch_bytes - small, small) if size)
    back = {-change for change in blocks if change < 0}
    names = list[BlockName]()
    for number, bytes in enumerate((change for change in blocks if change > 0), 1):
        is_result = number not in back and left[bytes]
        names.append(left[bytes].pop(0) if is_result else ("scratch", number))
    for name in made:
        if name not in names:  # copied to be written in place, or no block of its own
            yield name, made[name]
    asked = iter(names)
    for change in blocks:
        yield (next(asked), change) if change > 0 else (names[-change - 1], 0)
    for number, (what, _) in enumerate(names, 1):
        if what == "scratch" and number not in back:
            yield names[number - 1], 0


def allocator_before_step(graph: StepGraph, allocator: CachingAllocator) -> CachingAllocator:
    """The allocator with what is resident before the step: parameters, buffers and gradients, each in its
    block, and the rest, such as an optimizer's state, in blocks of the parameters' sizes.
    """
    sizes = [s.bytes for s in graph.storages if s.producer is None and s.kind != "input" and s.bytes]
    inputs = sum(s.bytes for s in graph.storages if s.kind == "input")
    parameters = [s.bytes for s in graph.storages if s.kind == "parameter" and s.bytes]
    rest = graph.resident_bytes - inputs - sum(sizes)
    while rest > 0:
        more = parameters if parameters and sum(parameters) <= rest else [rest]
        sizes, rest = sizes + more, rest - sum(more)
    for bytes in sizes:
        allocator.allocate(bytes)
    return allocator


def reserved_after(
    graph: StepGraph,
    stored: Collection[int],
    allocator: CachingAllocator,
    steps: int = 10,
    update_blocks: Collection[int] = (),
    batch_resident: bool = False,
) -> list[int]:
    """The bytes that are reserved after each of some steps under a plan.

    Args:
        graph: of the step.
        stored: ids of the values that the plan stores.
        allocator: as it stands before the steps; it goes through them.
        steps: how many.
        update_blocks: bytes of the blocks that the optimizer's update takes for itself after each step.
        batch_resident: whether the allocator has the batch already, and each step is given that one. Else a
            step asks for its own, as where a loader brings it.

    Raises:
        MemoryError: a step does not fit the allocator's capacity.

    Example:
        >>> import lowtide, torch
        >>> from lowtide.meter.reserved import CachingAllocator
        >>> model = torch.nn.Linear(1024, 1024)
        >>> graph = lowtide.trace(lambda: model(torch.ones(1024, 1024)).sum())
        >>> stored = {saved.value for saved in graph.saved}
        >>> reserved_after(graph, stored, CachingAllocator(), steps=2)
        [23068672, 23068672]
    """
    reserved: list[int] = []
    changes = list(block_changes(graph, stored, batch_resident))
    for _ in range(steps):
        blocks: dict[BlockName, Block] = {}
        for name, bytes in changes:
            if bytes:
                blocks[name] = allocator.allocate(bytes)
            elif name in blocks:
                allocator.free(blocks.pop(name))
        for block in [allocator.allocate(bytes) for bytes in update_blocks]:
            allocator.free(block)
        for block in blocks.values():
            allocator.free(block)
        reserved.append(allocator.reserved_bytes)
    return reserved


def reserved_either_way(
    graph: StepGraph, stored: Collection[int], workspaces: Collection[int] = (), steps: int = 10
) -> tuple[int, int]:
    """The most bytes that are reserved for steps under a plan: by PyTorch's defaults, and with expandable
    segments.

    Args:
        graph: of the step.
        stored: ids of the values that the plan stores.
        workspaces: bytes of blocks among the graph's resident ones that the device's libraries keep.
        steps: how many.
    """
    from lowtide.meter.reserved import CachingAllocator

    found: list[int] = []
    for expandable in (False, True):
        allocator = CachingAllocator(expandable_segments=expandable)
        for bytes in workspaces:
            allocator.allocate(bytes)
        step = replace(graph, resident_bytes=graph.resident_bytes - sum(workspaces))
        found.append(max(reserved_after(step, stored, allocator_before_step(step, allocator), steps)))
    return found[0], found[1]
