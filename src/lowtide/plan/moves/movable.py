"""Values that move: which may, what they take, and which codec fits which."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence

from lowtide.errors import PlanError
from lowtide.graph import StepGraph
from lowtide.plan.data import (
    Codec,
    Compress,
    Links,
    Move,
    Moved,
    Moving,
    ProgramStep,
    Shard,
    gather_bytes,
    stages,
)
from lowtide.plan.moves.supply import codec_named, encoded_bytes
from lowtide.plan.simulate.simulator import Simulation, Simulator

_ITEM_BYTES = {
    "float64": 8, "int64": 8, "complex64": 8, "complex128": 16, "float32": 4, "int32": 4, "float16": 2,
    "bfloat16": 2, "int16": 2,
    "bool": 1, "uint8": 1, "int8": 1,
}  # fmt: skip

_UNDER_WAY = ("c10d.", "c10d_functional.", "_dtensor.", "fsdp.", "symm_mem.")
"""Operations that may still be writing when they return, and that only the program can wait for."""


def dtypes_of(sim: Simulator) -> dict[int, str]:
    """Saved value -> name of the type that autograd saves it as."""
    found: dict[int, str] = {}
    for saved in sim.graph.saved:
        found.setdefault(saved.value, saved.dtype.removeprefix("torch."))
    return found


def movable(sim: Simulator, min_bytes: int = 1) -> list[int]:
    """The saved values that may move, in the order of the forward: made in the forward, by an operation that
    is over when it returns or can be waited for, not overwritten later, not below ``min_bytes``."""
    graph, found = sim.graph, []
    for value in sim.droppable:
        v = graph.values[value]
        if v.producer is None or not v.storable or v.must_store or sim.value_bytes[value] < max(1, min_bytes):
            continue
        op = graph.operations[v.producer]
        if (
            op.phase == "forward"
            and not op.name.startswith(_UNDER_WAY)
            and not any(graph.saved[t].forced for t in sim.saved_of[value])
        ):
            found.append(value)
    return sorted(found, key=lambda v: graph.values[v].producer or 0)


def refuse_moves(sim: Simulator, moves: Iterable[int]) -> None:
    """Check that values may move.

    Raises:
        PlanError: one may not.
    """
    for value in moves:
        if not 0 <= value < len(sim.graph.values):
            raise PlanError(f"there is no value {value} to move: this step has {len(sim.graph.values)}")
        v = sim.graph.values[value]
        if v.producer is None:
            raise PlanError(
                f"value {value} ({sim.describe(value)}) stood before the step: parameters, buffers and "
                "inputs never move"
            )
        if v.must_store or not v.storable or sim.graph.operations[v.producer].phase != "forward":
            raise PlanError(
                f"value {value} cannot move: {sim.describe(value)} is overwritten later in the step, or made "
                "in backward"
            )
        if sim.graph.operations[v.producer].name.startswith(_UNDER_WAY):
            raise PlanError(
                f"value {value} cannot move: {sim.graph.operations[v.producer].name} may still be writing it "
                "when it returns. Use a functional collective (torch.distributed._functional_collectives), "
                "which lowtide can wait for"
            )


def moved_of(
    sim: Simulator, moves: Mapping[int, Moving], links: Links | None = None, codecs: Sequence[Codec] = ()
) -> list[Moved]:
    """The moved values as the simulator wants them."""
    dtypes = dtypes_of(sim)
    found = []
    for value, decision in moves.items():
        bytes_ = sim.value_bytes[value]
        first, then = stages(decision)
        encoded, scratch, gather, encode, decode = bytes_, 0, 0, 0.0, 0.0
        dtype = dtypes.get(value, "uint8")
        item = _ITEM_BYTES.get(dtype, 1)
        if isinstance(first, Shard):
            encoded = -(-(bytes_ // item) // first.size) * item
            gather = gather_bytes(decision, encoded)
            # overlapped where the parts are on the device
            speed = (links or {}).get(first.group) if then is not None else None
            decode = bytes_ / speed.read_bytes_per_second + speed.latency_seconds if speed else 0.0
        elif isinstance(first, Compress):
            codec, elements = codec_named(first.codec, codecs), bytes_ // item
            encoded = min(bytes_, encoded_bytes(codec, elements, dtype))
            scratch = codec.scratch(elements, sim.graph.device)
            speed = (links or {}).get(first.codec)
            encode = bytes_ / speed.write_bytes_per_second if speed else 0.0
            decode = bytes_ / speed.read_bytes_per_second if speed else 0.0
        found.append(Moved(value, decision, bytes_, encoded, scratch, gather, encode, decode))
    return found


def not_replayable_from(
    graph: StepGraph, program: Sequence[ProgramStep], moves: Mapping[int, Moving], codecs: Sequence[Codec]
) -> set[int]:
    """Moved values that a replay would read although their codec keeps too little for that."""
    read = {
        u
        for op, step in zip((op for op in graph.operations if op.phase == "forward"), program, strict=True)
        if step.replayed
        for u in op.reads
    }
    found = set()
    for value, decision in moves.items():
        first, _ = stages(decision)
        if (
            value in read
            and isinstance(first, Compress)
            and not codec_named(first.codec, codecs).replayable_from
        ):
            found.add(value)
    return found


def move_rows(
    graph: StepGraph,
    moved: Sequence[Moved],
    simulation: Simulation,
    places: Mapping[tuple[int, bool], int],
) -> tuple[Move, ...]:
    """The plan's moves, in the order of the forward; ``places`` are offsets in its slab
    (`lowtide.plan.layout.slab.lay_out`).
    """
    traffic = simulation.traffic
    if traffic is None:
        return ()
    place = {value: k for k, value in enumerate(traffic.order)}
    by_value = {m.value: m for m in moved}
    rows = []
    for value, (born, gone) in traffic.lifetimes.items():
        m = by_value[value]
        inside = (places.get((value, False), -1), places.get((value, True), -1))
        form = (graph.values[value].shape, graph.values[value].dtype)
        rows.append(
            Move(
                value, m.decision, m.bytes, m.encoded_bytes, place.get(value, -1), born, gone, *inside, *form
            )
        )
    return tuple(rows)


def default_window(sim: Simulator, values: Sequence[int]) -> int:
    """A sixteenth of what moves, and at least the largest value."""
    sizes = [sim.value_bytes[v] for v in values]
    return max([*sizes, sum(sizes) // 16, 1])


def least_count(most: int, fits: Callable[[int], bool]) -> int | None:
    """The least count up to ``most`` that fits, where more fits sooner; ``None`` when ``most`` does not,
    either.
    """
    count = bisect_left(range(most + 1), True, key=fits)
    return count if count <= most else None


def lossless_codec(sim: Simulator, value: int, dtype: str) -> str:
    """The codec that loses nothing and is known to fit, or empty: masks of comparisons and dropout, ReLU's
    output.
    """
    op = sim.graph.operations[sim.producer[value]]
    if dtype == "bool":
        return "mask"
    name = op.name.split(".")[1] if "." in op.name else op.name
    if name in ("bernoulli", "bernoulli_") and dtype not in ("uint8",):
        return "mask"
    # a dropout mask that was scaled: two distinct numbers still
    if name in ("div_", "div") and len(op.reads) == 1:
        above = sim.producer[op.reads[0]]
        if above >= 0 and sim.graph.operations[above].name.split(".")[1] in ("bernoulli", "bernoulli_"):
            return "mask"
    if name in ("relu", "relu_", "threshold") and _only_relu_backward(sim, value):
        return "positive"
    return ""


def _only_relu_backward(sim: Simulator, value: int) -> bool:
    """Whether nothing but ReLU's own backward asks for the saved value."""
    graph = sim.graph
    readers = [op for op in graph.operations if op.phase == "backward" and value in op.reads]
    return (
        len(sim.saved_of[value]) == 1
        and len(readers) == 1
        and readers[0].name == "aten.threshold_backward.default"
        and readers[0].reads[-1] == value
    )


def fitting_codec(
    sim: Simulator, name: str, codecs: Sequence[Codec] = (), everywhere: bool = False
) -> Callable[[int], str]:
    """For each value the codec that stands for ``name`` there: its gentler form where backward is not linear
    in the value.

    Args:
        sim: of the step.
        name: of a codec.
        codecs: codecs of the user's own.
        everywhere: whether it is to be used for every value regardless.
    """
    from lowtide.plan.moves.linear import linear_values

    gentler = codec_named(name, codecs).gentler
    if not gentler or everywhere:
        return lambda value: name
    linear = linear_values(sim.graph)
    return lambda value: name if value in linear else gentler
