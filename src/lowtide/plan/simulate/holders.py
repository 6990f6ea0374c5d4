"""Who holds the memory at a simulated peak: what the step made, by what it is, its module and its line."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

from lowtide.graph import GAP_OP, Operation, StepGraph
from lowtide.plan.data import Plan, module_in_words
from lowtide.plan.data.text import ranges
from lowtide.plan.simulate.index import Sources
from lowtide.plan.simulate.origins import Origins
from lowtide.plan.simulate.simulator import Simulation, Simulator
from lowtide.plan.simulate.walk import LiveCopies
from lowtide.remedies import (
    ACTIVATIONS,
    BUFFERS,
    GRADIENTS,
    INPUTS,
    LOSS,
    OF_PARAMETERS,
    PARAMETERS,
    RESIDENT,
    SCORES,
    STATE,
    Holder,
    largest,
)
from lowtide.words import by_members, outward

OF_THE_LOSS = re.compile(r"(log_softmax|nll_loss|cross_entropy|logsumexp)")
"""Operations of a token loss: what they read and write are logits."""

_KINDS = {"parameter": PARAMETERS, "buffer": BUFFERS, "gradient": GRADIENTS}

_OF_ONE_TOKEN = re.compile(
    r"aten\.(add|sub|mul|div|pow|neg|rsqrt|sqrt|exp|sigmoid|tanh|silu|gelu|relu|leaky_relu|hardtanh|clamp|"
    r"mean|native_layer_norm|_fused_rms_norm|native_dropout|bernoulli|empty_like|_to_copy|clone|copy|mm|"
    r"addmm)_?\."
)
"""Operations that treat each token alone, products with a weight among them."""

_PRODUCTS = ("aten.mm.", "aten.addmm.")

TILES = 8
"""Pieces of the tokens in which a module runs where that is proposed."""

MADE, RECOMPUTED, PASSING = "activations", "recomputed activations", "gradients of activations"
FETCHED, SCRATCH = "activations that came back", "scratch of an operation"
HELD = "activations that an autograd.Function keeps on its own"
"""Name of what is no saved tensor and lives until backward has read it, such as ``ctx.x = x``."""

SAVE = "ctx.save_for_backward(x) in place of ctx.x = x"


class _Piece(NamedTuple):
    """One block of memory: its kind, its bytes, the module and line that made it, its shape and dtype."""

    name: str
    bytes: int
    module: str
    source: str
    form: str


def holders_at_peak(sim: Simulator, simulation: Simulation) -> list[Holder]:
    """What the step made and its inputs, as far as live at a simulated peak, the largest first. What else was
    resident before the step is not in it, nor are the gradients that the step leaves.

    Args:
        sim: of the step.
        simulation: the step under that plan.
    """
    groups: dict[tuple[str, str, str], list[_Piece]] = {}
    tileable = _tileable(sim.graph)
    loss = next((op for op in sim.graph.operations if _is_loss(op)), None)
    for piece in pieces_at_peak(sim, simulation):
        if piece.name == LOSS and loss is not None:
            piece = piece._replace(module=loss.module, source=loss.source)
        kind, _ = by_members(piece.module)
        key = (piece.name, kind, piece.source)
        if piece.name in (LOSS, SCORES):
            key = (LOSS, "", "") if piece.name == LOSS else (SCORES, kind, "")
        groups.setdefault(key, []).append(piece)
    found = [_together(name, pieces, tileable.get(kind)) for (name, kind, _), pieces in groups.items()]
    return sorted(found, key=lambda holder: -holder.bytes)


def _tileable(graph: StepGraph) -> dict[str, str]:
    """For each kind of module that `lowtide.tile` may run in pieces, the outermost such that it lies in: one
    whose forward treats each token alone, and has two products with weights or more.
    """
    weights = {value.id for value in graph.values if graph.storages[value.storage].kind == "parameter"}
    products, others = Counter[str](), set[str]()
    for op in graph.operations:
        if op.phase == "backward" or not op.module:
            continue
        fits = _OF_ONE_TOKEN.match(op.name) is not None
        is_product = op.name.startswith(_PRODUCTS)
        kind = by_members(op.module)[0]
        for outer in outward(kind):
            products[outer] += is_product
            if not fits or (is_product and weights.isdisjoint(op.reads)):
                others.add(outer)
    fit = {kind for kind, count in products.items() if count > 1 and kind not in others}
    found = {kind: [outer for outer in outward(kind) if outer in fit] for kind in products}
    return {kind: outer[-1] for kind, outer in found.items() if outer}


def _together(name: str, pieces: list[_Piece], tiled: str | None) -> Holder:
    most = max(pieces, key=lambda piece: piece.bytes)
    module, _ = by_members(most.module)
    for numbers in zip(*(by_members(piece.module)[1] for piece in pieces), strict=True):
        module = module.replace("#", ranges(sorted(set(numbers))), 1)
    count, remedy = sum(piece.bytes for piece in pieces), ("", 0)
    if name == HELD:  # one at a time comes back
        remedy = SAVE, count - most.bytes
    elif tiled is not None and name not in (LOSS, SCORES, OF_PARAMETERS):
        of = repr(tiled.replace("#", "*"))
        words = f'tiles of {of} (tiles="auto" in limit_memory, --tiles auto, or lowtide.tile)'
        remedy = words, count - count // TILES
    return Holder(name, count, module, most.source, most.form, remedy)


def _is_loss(op: Operation) -> bool:
    return OF_THE_LOSS.search(op.name) is not None


def loss_storages(sim: Simulator) -> set[int]:
    """Storages that the operations of a token loss read or write."""
    operations = filter(_is_loss, sim.graph.operations)
    return {sim.storage_of[value] for op in operations for value in (*op.reads, *op.writes)}


def pieces_at_peak(sim: Simulator, simulation: Simulation) -> Iterator[_Piece]:
    graph, peak = sim.graph, simulation.peak_event
    loss, origins = loss_storages(sim), Origins(graph)
    held_by_functions = _held_by_functions(sim)
    parameters = {storage.bytes for storage in graph.storages if storage.kind == "parameter"}
    for storage in graph.storages:
        until = max(sim.natural_end[storage.id], simulation.held_until.get(storage.id, -1))
        if storage.kind == "input" and until > peak:
            yield _Piece(INPUTS, storage.bytes, "", "", "")
        if storage.producer is None or not sim.op_event[storage.producer] <= peak < until:
            continue
        op = graph.operations[storage.producer]
        if op.phase == "backward" and until >= sim.end:
            continue  # a gradient that the step leaves
        passing = OF_PARAMETERS if storage.bytes in parameters else PASSING
        made = HELD if storage.id in held_by_functions else MADE
        name = LOSS if storage.id in loss else passing if op.phase == "backward" else made
        yield _piece(sim, name, op, storage.id, origins)
    held = _copies(sim, simulation)
    for value in held.values if held is not None else ():
        moved = value in simulation.sources.moved
        if simulation.sources.slab and moved:
            continue  # it lies in the slab
        op, storage = graph.operations[graph.values[value].producer or 0], sim.storage_of[value]
        name = LOSS if storage in loss else FETCHED if moved else RECOMPUTED
        yield _piece(sim, name, op, storage, origins)
    scratch = int(simulation.top_bytes[peak] - simulation.live_bytes[peak]) if peak >= 0 else 0
    op = simulation.peak_operation
    if op is not None and scratch > 0 and not simulation.peak_in_replay:
        yield _Piece(SCRATCH, scratch, op.module, op.source, op.name)


def _held_by_functions(sim: Simulator) -> set[int]:
    """Storages of the forward that backward reads, and that no saved tensor brings there."""
    graph = sim.graph
    backward = [op for op in graph.operations if op.phase == "backward"]
    read = {sim.storage_of[value] for op in backward for value in op.reads}
    saved = {sim.storage_of[one.value] for one in graph.saved}
    begin = sim.op_event[backward[0].index] if backward else sim.end
    return {
        storage.id
        for storage in graph.storages
        if storage.producer is not None
        and storage.id in read - saved
        and sim.op_event[storage.producer] < begin < sim.free_event[storage.id]
    }


def _copies(sim: Simulator, simulation: Simulation) -> LiveCopies | None:
    """What replays hold at the peak."""
    seen: list[LiveCopies] = []
    sim.simulate(simulation.stored, simulation.sources, seen=seen)
    peak = simulation.peak_event
    within = [held for held in seen if held.event == peak and held.operation >= 0]
    if simulation.peak_in_replay and within:
        return max(within, key=lambda held: held.bytes + held.scratch_bytes)
    before = [held for held in seen if held.event <= peak and held.operation < 0]
    return before[-1] if before else None


def _piece(sim: Simulator, name: str, op: Operation, storage: int, origins: Origins) -> _Piece:
    """A gradient of an activation is of the module and the line that made that, where these are known."""
    size = sim.graph.storages[storage].bytes
    value = next((v for v in op.writes if sim.storage_of[v] == storage), None)
    form = ""
    if value is not None:
        made = sim.graph.values[value]
        bits = re.search(r"\d+", made.dtype)
        whole = math.prod(made.shape) * (int(bits.group()) if bits else 8) >= 8 * size
        form = f"{'x'.join(map(str, made.shape))} {made.dtype}" if made.shape and whole else ""
    module, source = op.module, op.source
    if value is not None and name == PASSING:
        own, source = origins.maker(value)
        module = module if own is None else own
    if value is not None and name != LOSS and origins.scores.issuperset(origins.of(value) or (value,)):
        name = SCORES
    return _Piece(name, size, module, source, form)


def parts_of(sim: Simulator, simulation: Simulation) -> dict[str, int]:
    """What is live at a simulated peak, in bytes by name; they add up to the peak."""
    graph, peak = sim.graph, simulation.peak_event
    found: dict[str, int] = dict.fromkeys((PARAMETERS, BUFFERS, GRADIENTS, RESIDENT, INPUTS), 0)
    for storage in graph.storages:
        if storage.kind in _KINDS:
            found[_KINDS[storage.kind]] += storage.bytes
        elif storage.kind == "input":
            found[INPUTS] += storage.bytes if sim.natural_end[storage.id] >= peak else 0
        elif (
            storage.kind == "backward"
            and sim.op_event[storage.producer or 0] <= peak
            and sim.free_event[storage.id] == sim.end
        ):
            found[GRADIENTS] += storage.bytes  # backward lets go of all but these
    resident = sum(storage.bytes for storage in graph.storages if storage.kind in (*_KINDS, "input"))
    found[RESIDENT] = max(0, graph.resident_bytes - resident)
    loss = sum(graph.storages[storage].bytes for storage in _loss_storages(sim, simulation))
    rest = max(0, simulation.peak_bytes - sum(found.values()))
    found[LOSS] = min(loss, rest)
    found[ACTIVATIONS] = rest - found[LOSS]
    return {name: count for name, count in found.items() if count}


def _loss_storages(sim: Simulator, simulation: Simulation) -> set[int]:
    """What the operations of a token loss read and write, of what their own step has at the peak."""
    graph, peak = sim.graph, simulation.peak_event
    return {
        storage
        for storage in loss_storages(sim)
        if (producer := graph.storages[storage].producer) is not None
        and sim.op_event[producer] <= peak
        and max(sim.natural_end[storage], simulation.held_until.get(storage, -1)) >= peak
    }


def planned_holders(
    graph: StepGraph,
    plan: Plan,
    optimizer_bytes: int = 0,
    sources_of: Callable[[Simulator, Plan], Sources] | None = None,
) -> tuple[Holder, ...]:
    """What holds most at the peak of a step under a plan.

    Args:
        graph: the step.
        plan: made for it.
        optimizer_bytes: what of the graph's resident bytes is the optimizer's state.
        sources_of: where evicted values come back from, for a plan that moves some.
    """
    sim = Simulator(graph)
    simulation = sim.simulate(plan.stored, sources_of(sim, plan) if sources_of is not None else None)
    parts = parts_of(sim, simulation)
    state = min(optimizer_bytes, parts.get(RESIDENT, 0))
    rest = parts.pop(RESIDENT, 0) - state  # never touched, or of a graph without parameters
    parts |= {STATE: state, PARAMETERS: parts.get(PARAMETERS, 0) + rest}
    return largest(holders_at_peak(sim, simulation), parts)


def place_of_peak(simulation: Simulation) -> str:
    """Where the peak is, in words: which operation runs then."""
    op = simulation.peak_operation
    if op is None:
        return "its beginning, before any operation"
    if op.name == GAP_OP:
        return f"an operation outside the compiled graphs (number {op.index}, {op.phase})"
    how = "replayed " if simulation.peak_in_replay else ""
    return f"{how}operation {op.name} (number {op.index}, {op.phase}) in {module_in_words(op.module)}"
