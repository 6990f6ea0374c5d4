"""Plans with a slab: one block on the device that what was fetched or gathered comes back into, laid out from
the lifetimes that the simulator sees.

In: a plan. Out: the same plan with a slab, or without. ZeRO-R's M_D (arXiv 1910.02054, section 6.3) and
OneFlow's static memory reuse: the slab is allocated once and held for the whole step, so it is part of the
predicted peak.
"""

from __future__ import annotations

from dataclasses import replace

from lowtide.plan.data import Plan
from lowtide.plan.layout.offsets import find
from lowtide.plan.simulate.holders import refusal
from lowtide.plan.simulate.simulator import Simulator

ALIGN = 512
"""Places begin at multiples of this, as what PyTorch's allocators give does: kernels choose their way by
it.
"""

_SECONDS = 0.5
"""The most time that a layout is looked for where greedy orders do not meet the bound."""


def with_slab(sim: Simulator, plan: Plan, required: bool = False) -> Plan:
    """The same plan with a slab for the values that come back.

    Args:
        sim: of the step.
        plan: made for it, without a slab.
        required: whether a slab is wanted at any price. Else the plan goes without where one would take the
            step above its budget, or without a budget where it would cost anything.

    Raises:
        BudgetError: it is required, and takes the step above the budget.
    """
    if not plan.moves:
        return plan
    moved = {move.value: move for move in plan.moves}
    held = sim.simulate(plan.stored, sim.with_moves(plan.moves, plan.window_bytes, slab=True))
    sizes = [
        moved[value].encoded_bytes + ALIGN if arriving else moved[value].place_bytes
        for value, arriving in held.spans
    ]
    begins, ends = zip(*held.spans.values(), strict=True) if held.spans else ((), ())
    found = find(begins, ends, sizes, align=ALIGN, seconds=_SECONDS)
    places = dict(zip(held.spans, map(int, found.offsets), strict=True))
    peak = held.peak_bytes + found.height
    most = plan.budget_bytes if plan.budget_bytes is not None else plan.predicted_peak_bytes
    if peak > most and not required:
        return plan
    if plan.budget_bytes is not None and peak > plan.budget_bytes:
        raise refusal(sim, held.beside(found.height), plan.budget_bytes, plan.policy)
    moves = tuple(
        replace(move, place=places.get((move.value, False), -1), arrival=places.get((move.value, True), -1))
        for move in plan.moves
    )
    return replace(
        plan,
        moves=moves,
        predicted_peak_bytes=peak,
        loose_peak_bytes=plan.predicted_peak_bytes,
        slab_bytes=found.height,
        peak_module=held.peak_module,
        peak_operation=held.peak_operation.name if held.peak_operation else "",
    )


def without_slab(plan: Plan) -> Plan:
    """The same plan with every value in memory of its own."""
    if not plan.slab_bytes:
        return plan
    moves = tuple(replace(move, place=-1, arrival=-1) for move in plan.moves)
    return replace(
        plan, moves=moves, slab_bytes=0, predicted_peak_bytes=plan.loose_peak_bytes, loose_peak_bytes=0
    )
