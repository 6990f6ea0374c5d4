"""Tiles that a limit chooses: ``limit_memory(model, budget, tiles="auto")``.

In: a call of a kind that is larger than all before. Out: which modules run in how many pieces, so that a plan
within the budget exists (`lowtide.extensions.tiles.search`). Before the call's step begins it is traced on
fake tensors. The limit then profiles and plans the tiled step as any other.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import asdict, replace
from typing import Any

import torch

from lowtide import budget as budgets
from lowtide import private
from lowtide.errors import PlanError, TraceError
from lowtide.extension import Extension
from lowtide.extensions.tiles.loss import has_output_layer
from lowtide.extensions.tiles.search import (
    Costs,
    TilesRow,
    TilesSearch,
    in_lines,
    pieces_of,
    set_tiles,
)
from lowtide.graph import StepGraph, no_collection
from lowtide.meter.resident import model_device
from lowtide.plan.data import Plan
from lowtide.plan.simulate import plain
from lowtide.private import fsdp
from lowtide.progress import working
from lowtide.run.limit.entry import Entry, Facts, Kind
from lowtide.run.limit.key import Inputs, Members, StepKey
from lowtide.run.messages import warn
from lowtide.run.transforms import unused_bytes
from lowtide.trace.fake import trace_fake
from lowtide.trace.results import loss_of, loss_to_plan_for

_NO_LOSS = (
    'tiles="auto" sees what the model does, and this model returns no loss. Give limit_memory(loss_fn=), a '
    "function that computes the loss from what the model returns, so that the loss can run in pieces, too"
)

_NO_TRACE = (
    'limit_memory(tiles="auto") traces a step on fake tensors, and there are none of weights that '
    "fully_shard gathers, nor of what stages of a pipeline send: tile the same modules on each rank with "
    "lowtide.tile(module, pieces=8), and leave tiles= out"
)


class Tiles(Extension):
    """Chooses tiles for the modules that a limit's smallest peak lies in.

    Attributes:
        rows: what was looked at for the largest step so far, without tiles first.
    """

    name = "tiles"

    def __init__(self) -> None:
        self.rows: list[TilesRow] = []
        self._looked_at: list[tuple[StepKey, budgets.Asked]] = []
        self._costs = Costs()
        self._known: dict[str, int] | None = None

    def copied(self) -> Tiles:
        """Tiles of its own: a copied module runs in as many pieces, until its limit chooses others."""
        return Tiles()

    def key(self, model: torch.nn.Module) -> Hashable:
        """The tiles: with others a step is another program."""
        return tuple(sorted(self._pieces.items())) or None

    def keeps(self) -> Mapping[str, Any]:
        """The tiles, and what was looked at for them."""
        return {"pieces": self._pieces, "rows": [asdict(row) for row in self.rows]}

    def resumes(self, kept: Mapping[str, Any] | None) -> bool:
        """The same modules run in as many pieces as there."""
        if kept is not None:
            self._set(kept["pieces"])
            self.rows = [TilesRow(**row) for row in kept["rows"]]
        return True

    def close(self) -> None:
        """Take off the tiles that were chosen."""
        set_tiles(self.model, {})

    def admit(self, plan: Plan, problem: Any, limit_bytes: int) -> Plan:
        """The plan, which says what is tiled."""
        return replace(plan, notes=(*plan.notes, *in_lines(self.rows, self._pieces)))

    def opens(self, limiter: Any, inputs: Inputs) -> None:
        """A limited call is about to begin: tile for it, if it is larger than those before, and no plan of an
        earlier process serves it.
        """
        maker, form = self.maker, inputs.key._replace(extensions=0)
        if maker.budget is None or any(
            asked == maker.asked and form.fits_in(other) for other, asked in self._looked_at
        ):
            return
        if limiter.forwards is not None or (private.may_shard() and fsdp.process_groups(self.model)):
            raise PlanError(_NO_TRACE)
        self._looked_at.append((form, maker.asked))
        entry = limiter.book.find(inputs.key)
        if entry.planned is not None and entry.planned_for == maker.version:
            return

        fixed = maker.asked.fixed_bytes
        self._costs.room_bytes = None if fixed is None else fixed - inputs.resident_bytes()

        def traced() -> Entry:
            with limiter.inside():
                return self._traced(limiter, inputs)

        try:
            with working("choosing tiles", "chose tiles", maker.progress) as work:
                work.say("tracing a step on fake tensors")
                self.choose(traced)
        except TraceError as error:
            warn(f'tiles="auto" chooses no tiles for this step: {error}')
        inputs.forget_key()

    def choose(self, traced: Callable[[], Entry]) -> Entry:
        """Tile the model for a step; returns the step's trace.

        Args:
            traced: the step on fake tensors, of the model as it is tiled then.
        """
        before = self._pieces
        search = TilesSearch(self.model, traced, self.maker.transform, self.maker.policy, self._limit)
        try:
            with no_collection():
                return search.run()
        finally:
            self.rows = search.rows
            self._agree(before)

    @property
    def _pieces(self) -> dict[str, int]:
        """In how many pieces modules run that were chosen, by kind."""
        if self._known is None:  # of a copied model
            self._known = pieces_of(self.model)
        return self._known

    def _set(self, pieces: dict[str, int]) -> None:
        set_tiles(self.model, pieces)
        self._known = pieces

    def _agree(self, before: dict[str, int]) -> None:
        """Run in as many pieces as any rank that shares the model has chosen, and as earlier steps need."""
        chosen = [pieces_of(self.model)]
        for extension in self.maker.extensions:
            chosen = [one for each in chosen for one in extension.gather(each)]
        chosen.append(before)
        kinds = sorted({kind for pieces in chosen for kind in pieces})
        self._set({kind: max(pieces.get(kind, 1) for pieces in chosen) for kind in kinds})

    def _traced(self, limiter: Any, inputs: Inputs) -> Entry:
        def step(*args: Any, **kwargs: Any) -> torch.Tensor:
            result = limiter.own_step(*args, **kwargs)
            if limiter.loss_fn is None and loss_of(result) is None and has_output_layer(self.model):
                self.maker.warn_once(_NO_LOSS)
            return loss_to_plan_for(result, limiter.loss_fn)

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
