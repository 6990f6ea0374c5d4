"""A refusal in words: what a budget that no plan meets is told."""

from __future__ import annotations

from lowtide.budget import (
    ACTIVATIONS,
    BUFFERS,
    GRADIENTS,
    INPUTS,
    LOSS,
    PARAMETERS,
    STANDING,
    too_small,
)
from lowtide.errors import BudgetError
from lowtide.plan.data import module_in_words
from lowtide.plan.simulate.holders import holders_at_peak, loss_storages
from lowtide.plan.simulate.simulator import Simulation, Simulator

_KINDS = {"parameter": PARAMETERS, "buffer": BUFFERS, "gradient": GRADIENTS}


def refusal(sim: Simulator, least: Simulation, budget_bytes: int, policy: str = "") -> BudgetError:
    """The refusal of a budget by the plan that takes least.

    Args:
        sim: of the step.
        least: what the step takes under that plan.
        budget_bytes: what was asked for.
        policy: the policy that makes the plan, where another may need less.
    """
    detail = f"At its peak stands {at_peak(least)}."
    made = holders_at_peak(sim, least)
    parts = parts_of(sim, least)
    return too_small(budget_bytes, least.peak_bytes, parts, policy=policy, detail=detail, made=made)


def parts_of(sim: Simulator, simulation: Simulation) -> dict[str, int]:
    """What stands at a simulated peak, in bytes by name; they add up to the peak."""
    graph, peak = sim.graph, simulation.peak_event
    found: dict[str, int] = dict.fromkeys((PARAMETERS, BUFFERS, GRADIENTS, STANDING, INPUTS), 0)
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
    stood = sum(storage.bytes for storage in graph.storages if storage.kind in (*_KINDS, "input"))
    found[STANDING] = max(0, graph.resident_bytes - stood)
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


def at_peak(simulation: Simulation) -> str:
    """What runs at the peak, in words."""
    op = simulation.peak_operation
    if op is None:
        return "what stood before the step"
    how = "replayed " if simulation.peak_in_replay else ""
    return f"{how}operation {op.name} (number {op.index}, {op.phase}) in {module_in_words(op.module)}"
