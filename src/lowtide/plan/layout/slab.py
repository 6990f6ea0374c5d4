"""Where backward's fetched and gathered values lie: static offsets in one slab on the device, from the
lifetimes that the simulator sees.

ZeRO-R's M_D (arXiv 1910.02054, section 6.3) and OneFlow's static memory reuse: the slab is allocated once and
held for the whole step, so it is part of the predicted peak. Where it would take the step above its budget
the plan goes without.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from lowtide.plan.data import Move, Plan
from lowtide.plan.layout import find
from lowtide.plan.simulate.simulator import Simulation

ALIGN = 512
"""Places begin at multiples of this, as what PyTorch's allocators give does: kernels choose their way by
it.
"""

_SECONDS = 0.5
"""The most time that a layout is looked for where greedy orders do not meet the bound."""


def lay_out(moved: Mapping[int, Move], simulation: Simulation) -> tuple[dict[tuple[int, bool], int], int]:
    """Offsets of everything that a simulation saw in the slab, by (moved value, whether it is the encoded
    form on its way in), and the bytes of the slab.

    Args:
        moved: the values that come back.
        simulation: says when each place is taken.
    """
    keys = list(simulation.spans)
    sizes = [
        moved[value].encoded_bytes + ALIGN if arriving else moved[value].place_bytes
        for value, arriving in keys
    ]
    spans = [simulation.spans[key] for key in keys]
    found = find(
        [first for first, _ in spans], [until for _, until in spans], sizes, align=ALIGN, seconds=_SECONDS
    )
    return dict(zip(keys, map(int, found.offsets), strict=True)), found.height


def without_slab(plan: Plan) -> Plan:
    """The same plan with every value in memory of its own."""
    if not plan.slab_bytes:
        return plan
    moves = tuple(replace(move, place=-1, arrival=-1) for move in plan.moves)
    return replace(
        plan, moves=moves, slab_bytes=0, predicted_peak_bytes=plan.loose_peak_bytes, loose_peak_bytes=0
    )
