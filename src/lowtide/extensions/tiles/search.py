"""In how many pieces modules have to run so that a plan within a budget exists.

In: how a step is traced, and a budget. Out: the tiled model, and what was looked at. If the smallest peak of
any plan is above the budget and lies in a module that treats each token alone, this module is to run in
pieces. What that would spare is read off the step without a further trace (`in_pieces`). Then the modules are
tiled, and the step is traced once more. If that shows that the budget is not met, the search goes on from
there.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from lowtide import budget as budgets
from lowtide.errors import BudgetError, TraceError
from lowtide.extensions.tiles.loss import (
    ChunkedLoss,
    chunked_loss,
    chunked_loss_of,
    has_output_layer,
    output_layer,
)
from lowtide.extensions.tiles.sketch import in_pieces
from lowtide.extensions.tiles.tile import Tiling, tile, tiled_forward
from lowtide.graph import StepGraph
from lowtide.interception import suspended
from lowtide.ops import IS_COLLECTIVE
from lowtide.plan import make
from lowtide.plan.policies.build import Policy
from lowtide.plan.search import Search
from lowtide.plan.simulate import plain
from lowtide.plan.simulate.holders import pieces_at_peak
from lowtide.remedies import LOSS
from lowtide.trace.costs.specs import OpCost, Signature
from lowtide.trace.costs.timing import measure_costs
from lowtide.trace.fake import CostBySignature, Specs
from lowtide.trace.untouched import same_random
from lowtide.words import by_members, format_bytes, outward, percent_text

T = TypeVar("T")

_SPARES = 0.02
"""Share of the smallest peak that tiles of a module have to spare."""

_UNSEEN = 0.02
"""Share of a peak that a trace on fake tensors may miss: what kernels take for themselves, for one."""

_MOST_TIMED_BYTES, _TIMED_BYTES = 1 << 30, 1 << 24
"""The largest operation that is run for its time: ever, and where nobody says how much room there is."""

_MOST_PIECES = 32
_PROBED_TOKENS = 8


@dataclass(frozen=True)
class TilesRow:
    """What tiles cost.

    Attributes:
        tiles: pieces by kind of module (``h.#.mlp``), and of `LOSS`; empty without tiles.
        smallest_bytes: the smallest peak of any plan.
        plain_seconds: of the step without a plan; 0 where it is not known.
    """

    tiles: dict[str, int]
    smallest_bytes: int
    plain_seconds: float


def in_lines(rows: Sequence[TilesRow], pieces: Mapping[str, int]) -> list[str]:
    """What is tiled, and what that spares and costs; nothing where no module is tiled.

    Args:
        rows: what was looked at.
        pieces: by kind of module.
    """
    if not pieces:
        return []
    first, lines = rows[0], [f"tiles: {_in_words(pieces)}"]
    for row in rows:
        more = ""
        if row.tiles and first.plain_seconds:
            more = f", {percent_text(row.plain_seconds / first.plain_seconds - 1)} of a plain step's time"
        what = _in_words(row.tiles) if row.tiles else "without tiles"
        lines.append(f"  {what}: smallest budget {format_bytes(row.smallest_bytes)}{more}")
    return lines


def _in_words(tiles: Mapping[str, int]) -> str:
    named = {("the loss" if kind == LOSS else kind.replace("#", "*")): count for kind, count in tiles.items()}
    return ", ".join(f"{name} in {count} pieces" for name, count in named.items())


# ---- tiles of a model --------------------------------------------------------------------------------


def chosen_tiles(model: nn.Module) -> dict[str, Tiling | ChunkedLoss]:
    """The tiles of a model that were chosen for it, by kind of module, and of `LOSS`."""
    found = dict[str, Tiling | ChunkedLoss]()
    for name, module in model.named_modules():
        tiled = tiled_forward(module)
        if tiled is not None and tiled.tiling.chosen:
            found[by_members(name)[0]] = tiled.tiling
    if (loss := chunked_loss_of(model)) is not None and loss.chosen:
        found[LOSS] = loss
    return found


def pieces_of(model: nn.Module) -> dict[str, int]:
    """In how many pieces modules run that were chosen, by kind."""
    return {kind: tiling.pieces or 1 for kind, tiling in chosen_tiles(model).items()}


def set_tiles(model: nn.Module, pieces: Mapping[str, int]) -> None:
    """Run modules in so many pieces, and whole again those that were chosen before.

    Args:
        model: the model.
        pieces: by kind of module, and of `LOSS`.
    """
    there = chosen_tiles(model)
    for kind, tiling in there.items():
        if kind not in pieces:
            tiling.remove()
    for kind, count in pieces.items():
        if kind in there:
            there[kind].pieces = count
        else:
            made = chunked_loss(model, count) if kind == LOSS else tile(_alike(model, kind), count)
            made.chosen = True


def _alike(model: nn.Module, kind: str) -> list[nn.Module]:
    return [module for name, module in model.named_modules() if by_members(name)[0] == kind]


# ---- the search --------------------------------------------------------------------------------------


class Costs:
    """Says what operations cost, of each once, however often a step is traced.

    Args:
        ask: asked for those that are new. By default they are timed.

    Attributes:
        room_bytes: what an operation that is timed may take; ``None`` where that is not known.
    """

    def __init__(self, ask: Callable[[Specs], CostBySignature] | None = None) -> None:
        self._ask = ask or self._timed
        self.room_bytes: int | None = None
        self._known: dict[Signature, OpCost] = {}

    def __call__(self, specs: Specs) -> CostBySignature:
        self._known.update(self._ask({key: spec for key, spec in specs.items() if key not in self._known}))
        return {key: self._known[key] for key in specs if key in self._known}

    def _timed(self, specs: Specs) -> CostBySignature:
        room = _TIMED_BYTES if self.room_bytes is None else min(self.room_bytes, _MOST_TIMED_BYTES)
        return measure_costs(specs, memory_limit_bytes=max(0, room) // 2)  # the rest is for its scratch


class TilesSearch(Generic[T]):
    """Tiles a model for one step.

    Args:
        model: the model.
        traced: the step on fake tensors, of the model as it is tiled then.
        graph_of: the step to plan for, of what ``traced`` returned.
        policy: of the plan.
        limit: the budget in bytes, of that step and the smallest peak of any plan; ``None`` where the
            smallest budget is asked for.

    Attributes:
        rows: what was traced: the step without tiles, and with those that stay.
    """

    def __init__(
        self,
        model: nn.Module,
        traced: Callable[[], T],
        graph_of: Callable[[T], StepGraph],
        policy: str | Policy,
        limit: Callable[[StepGraph, int], int | None],
    ) -> None:
        self._model, self._traced, self._graph_of = model, traced, graph_of
        self._policy, self._limit_of = policy, limit
        self._forms: dict[str, tuple[torch.Size, torch.dtype]] = {}
        self._tokenwise: dict[str, bool] = {}
        self._exchange = set[str]()
        self._head = output_layer(model)
        inside = set[nn.Module]() if self._head is None else set(self._head.modules())
        self._makes_logits = {name for name, module in model.named_modules() if module in inside}
        self.rows = list[TilesRow]()

    def run(self) -> T:
        """Tile modules until a plan fits, or nothing spares more; returns the step's trace as it is then."""
        # a chunked loss keeps no logits in one piece, either
        whole, pieces = {kind: 1 for kind in chosen_tiles(self._model) if kind != LOSS}, dict[str, int]()
        try:
            found, graph, least = self._look(whole)
            limit = self._limit_of(graph, least)
            self.rows.append(TilesRow({}, least, graph.plain_seconds))
            if _fits(least, limit):
                return found
            limit = None if limit is None else int((1 - _UNSEEN) * limit)
            while not _fits(least, limit):
                more = self._decided(graph, limit, pieces)
                if not more:
                    break
                try:
                    last, graph, now = self._look({**whole, **pieces, **more})
                except TraceError:
                    if not self._without_refused():
                        raise
                    continue
                if now > (1 - _SPARES) * least and not _fits(now, limit):
                    break
                found, least, pieces = last, now, {**pieces, **more}
                self.rows.append(TilesRow(pieces, least, graph.plain_seconds))
                if limit is None:
                    break
        finally:
            set_tiles(self._model, pieces)
        return found

    def _look(self, tiles: Mapping[str, int]) -> tuple[T, StepGraph, int]:
        """The step with these tiles: as traced, as it is planned for, and the smallest peak of any plan."""
        set_tiles(self._model, tiles)
        with suspended(), self._noting():
            traced = self._traced()
        graph = self._graph_of(traced)
        exchanging = (op.module for op in graph.operations if op.reason == IS_COLLECTIVE)
        self._exchange |= {by_members(name)[0] for module in exchanging for name in outward(module)}
        try:
            make(graph, 1, self._policy, progress=False)
        except BudgetError as error:
            assert error.smallest_bytes is not None
            return traced, graph, error.smallest_bytes
        raise AssertionError("no plan takes one byte")

    def _without_refused(self) -> bool:
        """Whether `lowtide.tile` has refused a kind that was tried, which is no candidate from now on."""
        tilings = chosen_tiles(self._model).items()
        refused = [kind for kind, one in tilings if isinstance(one, Tiling) and one.refused]
        self._tokenwise |= dict.fromkeys(refused, False)
        return bool(refused)

    def _decided(self, graph: StepGraph, limit: int | None, before: Mapping[str, int]) -> dict[str, int]:
        """The kinds that are to run in more pieces, and in how many: as far as sketches show, a plan fits
        then, or nothing spares more. Plans that need no search will do to compare sketches.

        Args:
            graph: of the last look.
            limit: the budget in bytes; ``None`` for the smallest that works.
            before: pieces at that look.
        """
        times, done = dict[str, int](), set[str]()
        least, holds = self._lowest(graph)
        while not times or not _fits(least, limit):
            kind = self._candidate(holds, done)
            if kind is None:
                break
            tried = {**times, kind: 2 * times.get(kind, 1)}
            now, holds_now = self._lowest(in_pieces(graph, tried, self._makes_logits))
            if now > (1 - _SPARES) * least and not _fits(now, limit):
                done.add(kind)
                continue
            least, holds, times, done = now, holds_now, tried, set()
            done |= {one for one, count in times.items() if 2 * count * before.get(one, 1) > _MOST_PIECES}
        return {kind: count * before.get(kind, 1) for kind, count in times.items()}

    def _lowest(self, graph: StepGraph) -> tuple[int, dict[str, int]]:
        """The smallest peak of the plans that need no search, and what each kind of module has there, those
        inside it included. What makes logits is of the loss.
        """
        search = Search(graph)
        lowest = min(search.baselines, key=attrgetter("height")).simulation
        held = defaultdict[str, int](int)
        for piece in pieces_at_peak(search.sim, lowest):
            if piece.name == LOSS or piece.module in self._makes_logits:
                held[LOSS] += piece.bytes
            else:
                for name in outward(piece.module):
                    held[by_members(name)[0]] += piece.bytes
        return lowest.peak_bytes, held

    @contextmanager
    def _noting(self) -> Iterator[None]:
        """Note what modules are called with, where that is one tensor."""
        hooks = list[Any]()
        for name, module in self._model.named_modules():

            def note(_: nn.Module, args: Sequence[Any], kwargs: dict[str, Any], name: str = name) -> None:
                if len(args) == 1 and not kwargs and isinstance(args[0], torch.Tensor):
                    self._forms.setdefault(by_members(name)[0], (args[0].shape, args[0].dtype))

            if name and not isinstance(module, torch.jit.ScriptModule):
                hooks.append(module.register_forward_pre_hook(note, with_kwargs=True))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    # ---- candidates ----------------------------------------------------------------------------------

    def _candidate(self, holds: dict[str, int], done: set[str]) -> str | None:
        """The kind of module that holds most and treats each token alone; of those inside one another the
        outermost.
        """
        found = [kind for kind in holds if kind not in done and self._is_tokenwise(kind)]
        outer = [kind for kind in found if not any(kind.startswith(f"{other}.") for other in found)]
        return max(outer, key=lambda kind: holds[kind], default=None)

    def _is_tokenwise(self, kind: str) -> bool:
        """Whether modules of a kind treat each token alone, by a call of the first with random numbers. Those
        that a user has tiled stay as they are.
        """
        if kind == LOSS:
            loss = chunked_loss_of(self._model)
            return loss.chosen if loss is not None else has_output_layer(self._model)
        if kind not in self._tokenwise:
            self._tokenwise[kind] = self._is_candidate(kind)
        return self._tokenwise[kind]

    def _is_candidate(self, kind: str) -> bool:
        if kind in self._exchange:  # a rank that calls it alone would wait for the others
            return False
        module, form = _alike(self._model, kind)[0], self._forms.get(kind)
        if (tiled := tiled_forward(module)) is not None:
            return tiled.tiling.chosen
        makes_logits = self._head in set(module.modules())
        return form is not None and not makes_logits and treats_tokens_alone(module, *form)


def tiled_for(
    model: nn.Module, traced: Callable[[], StepGraph], policy: str | Policy, budget: str | int
) -> tuple[StepGraph, list[str]]:
    """A step with the tiles that a plan within a budget needs, and what these spare and cost, in lines.

    Args:
        model: the model.
        traced: the step on fake tensors, of the model as it is tiled then.
        policy, budget: of the plan.
    """

    def limit(graph: StepGraph, least: int) -> int | None:
        if budgets.asks_for(budget) == "min":
            return None
        return budgets.resolve(budget, plain(graph).peak_bytes, least, graph.device)

    search = TilesSearch(model, traced, lambda graph: graph, policy, limit)
    return search.run(), in_lines(search.rows, pieces_of(model))


def _fits(least: int, limit: int | None) -> bool:
    """Whether the smallest peak is within the budget; never, where the smallest budget is asked for."""
    return limit is not None and budgets.with_slack(least) <= limit


def treats_tokens_alone(module: nn.Module, shape: Sequence[int], dtype: torch.dtype) -> bool:
    """Whether a module's output for one token depends on that token alone, as far as a call with a few random
    tokens and random weights shows. The module's own may not be known yet; they stay as they are.

    Args:
        module: the module.
        shape: of the tensor that it is called with, (..., tokens, features).
        dtype: of that tensor.
    """
    if len(shape) < 2 or not dtype.is_floating_point:
        return False
    device = next((one.device for one in module.parameters()), torch.device("cpu"))

    def drawn(like: torch.Tensor) -> torch.Tensor:
        if not like.dtype.is_floating_point:
            return like.detach().clone()
        return torch.randn_like(like).div_(math.sqrt(max(1, like.shape[-1]) if like.ndim > 1 else 1.0))

    with same_random([] if device.index is None else [device.index]), suspended(), torch.no_grad():
        tensors = {
            name: drawn(one).requires_grad_(one.requires_grad) for name, one in module.named_parameters()
        }
        tensors |= {name: one.detach().clone() for name, one in module.named_buffers()}
        tokens = torch.randn(*(1 for _ in shape[:-2]), _PROBED_TOKENS, shape[-1], dtype=dtype, device=device)
        tiling = tile(module, 2)
        try:
            output = torch.func.functional_call(module, tensors, (tokens,))
        except Exception:  # whatever a module raises that is called with other than it expects
            return False
        finally:
            tiling.remove()
    return isinstance(output, torch.Tensor) and output.shape[:-1] == tokens.shape[:-1]
