"""Tiles that a limit chooses: ``limit_memory(model, budget, tiles="auto")``.

In: a call of a kind that is larger than all before. Out: which modules run in how many pieces, so that a plan
within the budget exists (`lowtide.extensions.tiles.search`). Before the call's step begins it is traced on
fake tensors. The limit then profiles and plans the tiled step as any other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from lowtide import budget as budgets
from lowtide.errors import PlanError, TraceError
from lowtide.extension import Extension
from lowtide.extensions.tiles.search import (
    TilesRow,
    TilesSearch,
    chosen_tiles,
    in_lines,
    remembering,
    set_tiles,
)
from lowtide.graph import StepGraph, no_collection
from lowtide.interception import suspended
from lowtide.meter.resident import model_device
from lowtide.plan.data import Plan
from lowtide.plan.simulate import plain
from lowtide.progress import working
from lowtide.run.limit.entry import Entry, Facts, Kind
from lowtide.run.limit.key import Inputs, Members, StepKey
from lowtide.run.messages import warn
from lowtide.run.transforms import unused_bytes
from lowtide.trace.fake import trace_fake
from lowtide.trace.results import loss_to_plan_for


class Tiles(Extension):
    """Chooses tiles for the modules that a limit's smallest peak lies in.

    Attributes:
        rows: what was looked at for the largest step so far, without tiles first.
    """

    name = "tiles"

    def __init__(self) -> None:
        self.rows: list[TilesRow] = []
        self._looked_at: list[tuple[StepKey, int]] = []
        self._costs = remembering()

    def copied(self) -> Tiles:
        """Tiles of its own: a copied module runs in as many pieces, until its limit chooses others."""
        return Tiles()

    def keeps(self) -> None:
        """Plans of an earlier process are of modules in pieces, which are whole again here."""
        return

    def close(self) -> None:
        """Take off the tiles that were chosen."""
        set_tiles(self.model, {})

    def admit(self, plan: Plan, problem: Any, limit_bytes: int) -> Plan:
        """The plan, which says what is tiled."""
        return replace(plan, notes=(*plan.notes, *in_lines(self.rows)))

    def opens(self, limiter: Any, inputs: Inputs) -> None:
        """A limited call is about to begin: tile for it, if it is larger than those before."""
        maker, key = self.maker, inputs.key
        if maker.budget is None or any(
            version == maker.version and key.fits_in(other) for other, version in self._looked_at
        ):
            return
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            raise PlanError(
                'limit_memory(tiles="auto") chooses for one process, and this one has ranks beside it: give '
                "each rank the same tiles with lowtide.tile(module, pieces=8), and leave tiles= out"
            )
        before = {kind: tiling.pieces for kind, tiling in chosen_tiles(self.model).items()}

        def traced() -> Entry:
            with suspended(), limiter.inside():
                return self._traced(limiter, inputs)

        try:
            with working("choosing tiles", "chose tiles", maker.progress) as work:
                work.say("tracing a step on fake tensors")
                self.choose(traced)
        except TraceError as error:
            warn(f'tiles="auto" chooses no tiles for this step: {error}')
        self._looked_at.append((key, maker.version))
        if {kind: tiling.pieces for kind, tiling in chosen_tiles(self.model).items()} != before:
            limiter.book.known.clear()  # plans of other programs

    def choose(self, traced: Callable[[], Entry]) -> Entry:
        """Tile the model for a step; returns the step's trace.

        Args:
            traced: the step on fake tensors, of the model as it is tiled then.
        """
        search = TilesSearch(self.model, traced, self.maker.transform, self.maker.policy, self._limit)
        with no_collection():
            found = search.run()
        self.rows = search.rows
        return found

    def _traced(self, limiter: Any, inputs: Inputs) -> Entry:
        def step(*args: Any, **kwargs: Any) -> torch.Tensor:
            return loss_to_plan_for(limiter.own_step(*args, **kwargs), limiter.loss_fn)

        model = self.model
        graph = trace_fake(step, inputs.args, inputs.kwargs, [model], model_device(model).type, self._costs)
        unused = unused_bytes(model, graph, Members(model).resident_bytes())
        return Entry(inputs.key, Kind(), graph=graph, facts=Facts(unused_bytes=unused))

    def _limit(self, graph: StepGraph, least: int) -> int | None:
        """The budget in bytes; ``None`` where it is the smallest that works."""
        maker = self.maker
        if maker.asked.word == "min":
            return None
        peak = maker.greatest_plain = max(maker.greatest_plain, plain(graph).peak_bytes)
        return budgets.resolve(maker.budget, peak, least, graph.device, resident_bytes=graph.resident_bytes)
