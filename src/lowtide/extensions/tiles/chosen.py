"""Tiles that a limit chooses: ``limit_memory(model, budget, tiles="auto")``.

In: a call of a kind that is larger than all before. Out: which modules run in how many pieces, so that a plan
within the budget exists. Before the call's step begins it is traced on fake tensors, and the smallest peak of
any plan is looked at. If that is above the budget and lies in a module that treats each token alone, this
module is tiled, and the step is traced again. The limit then profiles and plans the tiled step as any other.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lowtide import budget as budgets
from lowtide.errors import BudgetError, PlanError, TraceError
from lowtide.extension import Extension
from lowtide.extensions.tiles.loss import (
    ChunkedLoss,
    chunked_loss,
    chunked_loss_of,
    has_output_layer,
    output_layer,
)
from lowtide.extensions.tiles.tile import Tiling, tile, tiled_forward
from lowtide.graph import StepGraph, no_collection
from lowtide.interception import suspended
from lowtide.meter.resident import model_device
from lowtide.plan import make
from lowtide.plan.data import Plan
from lowtide.plan.simulate import plain
from lowtide.plan.simulate.holders import pieces_at_peak
from lowtide.progress import working
from lowtide.remedies import LOSS
from lowtide.run.limit.entry import Entry, Facts, Kind
from lowtide.run.limit.key import Inputs, Members, StepKey
from lowtide.run.messages import warn
from lowtide.run.transforms import unused_bytes
from lowtide.trace.costs.specs import OpCost, Signature
from lowtide.trace.costs.timing import measure_costs
from lowtide.trace.fake import Specs, trace_fake
from lowtide.trace.results import loss_to_plan_for
from lowtide.trace.untouched import same_random
from lowtide.words import by_members, format_bytes

LOSS_TILES = "the loss"
"""The name of a chunked loss among the tiles."""

_SPARES = 0.02
"""Share of the smallest peak that tiles of a module have to spare."""

_LEFT = 0.25
"""Share of what else is live that a tiled module is to take at the peak where the budget is not in bytes."""

_MOST_PIECES = 32
_PROBED_TOKENS = 8

_TIMED_BYTES = 1 << 30
"""The largest operation that is run for its time."""


@dataclass(frozen=True)
class TilesRow:
    """What tiles cost.

    Attributes:
        tiles: pieces by module, alike modules as one (``h.#.mlp``); empty without tiles.
        smallest_bytes: the smallest peak of any plan.
        plain_seconds: of the step without a plan; 0 where it is not known.
    """

    tiles: dict[str, int]
    smallest_bytes: int
    plain_seconds: float


class Tiles(Extension):
    """Chooses tiles for the modules that a limit's smallest peak lies in.

    Attributes:
        rows: what was looked at for the largest step so far, without tiles first.
    """

    name = "tiles"

    def __init__(self) -> None:
        self.rows: list[TilesRow] = []
        self._looked_at: list[tuple[StepKey, int]] = []
        self._costs: dict[Signature, OpCost] = {}

    def copied(self) -> Tiles:
        """Tiles of its own: a copied module runs in as many pieces, until its limit chooses others."""
        return Tiles()

    def keeps(self) -> None:
        """Plans of an earlier process are of modules in pieces, which are whole again here."""
        return

    def close(self) -> None:
        """Take off the tiles that were chosen."""
        for tiling in self._chosen().values():
            tiling.remove()

    def admit(self, plan: Plan, problem: Any, limit_bytes: int) -> Plan:
        """The plan, which says what is tiled."""
        return replace(plan, notes=(*plan.notes, *self.lines())) if self.rows else plan

    def opens(self, limiter: Any, inputs: Inputs) -> None:
        """A limited call is about to begin: tile for it, if it is larger than those before."""
        maker, key = limiter.maker, inputs.key
        if maker.budget is None or any(
            version == maker.version and key.fits_in(other) for other, version in self._looked_at
        ):
            return
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            raise PlanError(
                'limit_memory(tiles="auto") chooses for one process, and this one has ranks beside it: give '
                "each rank the same tiles with lowtide.tile(module, pieces=8), and leave tiles= out"
            )
        before = self._pieces()
        try:
            with working("choosing tiles", "chose tiles", maker.progress) as work:
                found = _Search(limiter, inputs, self._costs, work.say)
                with no_collection():
                    self.rows = found.run(self._chosen())
        except TraceError as error:
            warn(f'tiles="auto" chooses no tiles for this step: {error}')
        self._looked_at.append((key, maker.version))
        if self._pieces() != before:
            limiter.book.known.clear()  # plans of other programs

    def _chosen(self) -> dict[str, Tiling | ChunkedLoss]:
        """The tiles of the model that were chosen, by alike modules."""
        found = dict[str, Tiling | ChunkedLoss]()
        for name, module in self.model.named_modules():
            tiled = tiled_forward(module)
            if tiled is not None and tiled.tiling.chosen:
                found[by_members(name)[0]] = tiled.tiling
        if (loss := chunked_loss_of(self.model)) is not None and loss.chosen:
            found[LOSS_TILES] = loss
        return found

    def _pieces(self) -> dict[str, int]:
        return {name: tiling.pieces for name, tiling in self._chosen().items()}

    def lines(self) -> list[str]:
        """What is tiled, and what that spares and costs, a line a row."""
        first, last = self.rows[0], self.rows[-1]
        if not last.tiles:
            return []
        lines = [f"tiles: {_in_words(last.tiles)}"]
        for row in self.rows:
            more = ""
            if row.tiles and first.plain_seconds:
                share = row.plain_seconds / first.plain_seconds - 1
                more = f", {100 * share:+.1f} % of a plain step's time"
            what = _in_words(row.tiles) if row.tiles else "without tiles"
            lines.append(f"  {what}: smallest budget {format_bytes(row.smallest_bytes)}{more}")
        return lines


def _in_words(tiles: dict[str, int]) -> str:
    return ", ".join(f"{name.replace('#', '*')} in {pieces} pieces" for name, pieces in tiles.items())


class _Search:
    """Looks for tiles for one call.

    Args:
        limiter: of the model.
        inputs: of the call.
        costs: seconds by operation, so far.
        say: told what takes long.
    """

    def __init__(
        self, limiter: Any, inputs: Inputs, costs: dict[Signature, OpCost], say: Callable[[str], None]
    ) -> None:
        self._limiter, self._inputs, self._costs, self._say = limiter, inputs, costs, say
        self._model: nn.Module = limiter.model
        self._head = output_layer(self._model)
        self._forms: dict[str, tuple[torch.Size, torch.dtype]] = {}
        self._tokenwise: dict[str, bool] = {}

    def run(self, tilings: dict[str, Tiling | ChunkedLoss]) -> list[TilesRow]:
        """Tile modules until a plan fits, or nothing spares more.

        Args:
            tilings: those that were chosen before, by alike modules; the search adds to them.

        Returns:
            What was looked at: without tiles, and after each change that stays.
        """
        if (loss := tilings.pop(LOSS_TILES, None)) is not None:
            loss.remove()  # in one piece it would still keep no logits
        for tiling in tilings.values():
            tiling.pieces = 1
        graph, least, holds = self._look()
        limit = self._limit(graph, least)
        rows, done = [TilesRow({}, least, graph.plain_seconds)], set[str]()
        while limit is None or budgets.with_slack(least) > limit:
            kind = self._candidate(holds, done)
            if kind is None:
                break
            tiling = tilings.get(kind)
            if tiling is None:
                is_loss = kind == LOSS_TILES
                tiling = chunked_loss(self._model, 1) if is_loss else tile(self._alike(kind), 1)
                tiling.chosen, tilings[kind] = True, tiling
            before = tiling.pieces
            tiling.pieces = self._pieces(holds[kind], least, limit, before)
            try:
                graph, now, holds_now = self._look()
            except TraceError:  # refused by `tile` where it is called
                done.add(kind)
                tiling.pieces = before
                continue
            if now > (1 - _SPARES) * least:
                done.add(kind)
                tiling.pieces = before
                continue
            least, holds = now, holds_now
            pieces = {name: one.pieces for name, one in tilings.items() if one.pieces > 1}
            rows.append(TilesRow(pieces, least, graph.plain_seconds))
            if limit is None or tiling.pieces >= _MOST_PIECES:
                done.add(kind)
        for kind, tiling in list(tilings.items()):
            if tiling.pieces == 1:
                tiling.remove()
                del tilings[kind]
        return rows

    # ---- a look ------------------------------------------------------------------------------------

    def _look(self) -> tuple[StepGraph, int, dict[str, int]]:
        """The step as it is tiled now, the smallest peak of any plan, and what modules of one kind hold
        there.
        """
        maker, inputs, model = self._limiter.maker, self._inputs, self._model
        self._say("tracing a step on fake tensors")
        with suspended(), self._noting(), self._limiter.inside():
            traced = trace_fake(
                self._step, inputs.args, inputs.kwargs, [model], model_device(model).type, self._priced
            )
        unused = unused_bytes(model, traced, Members(model).resident_bytes())
        entry = Entry(inputs.key, Kind(), graph=traced, facts=Facts(unused_bytes=unused))
        graph = maker.transform(entry)
        try:
            make(graph, 1, maker.policy, progress=False)
        except BudgetError as error:
            assert error.smallest_bytes is not None
            peak = error.peak
            return graph, error.smallest_bytes, {} if peak is None else self._held(*peak)
        raise AssertionError("no plan takes one byte")

    def _step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return loss_to_plan_for(self._limiter.own_step(*args, **kwargs), self._limiter.loss_fn)

    def _priced(self, specs: Specs) -> dict[Signature, OpCost]:
        new = {key: spec for key, spec in specs.items() if key not in self._costs}
        self._costs.update(measure_costs(new, memory_limit_bytes=_TIMED_BYTES))
        return {key: self._costs[key] for key in specs if key in self._costs}

    @contextmanager
    def _noting(self) -> Iterator[None]:
        """Note what modules are called with, where that is one tensor."""
        hooks = list[Any]()
        for name, module in self._model.named_modules():

            def note(_: nn.Module, args: Sequence[Any], kwargs: dict[str, Any], name: str = name) -> None:
                if len(args) == 1 and not kwargs and isinstance(args[0], torch.Tensor):
                    self._forms.setdefault(name, (args[0].shape, args[0].dtype))

            if name and not isinstance(module, torch.jit.ScriptModule):
                hooks.append(module.register_forward_pre_hook(note, with_kwargs=True))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _held(self, simulator: Any, simulation: Any) -> dict[str, int]:
        """Bytes at the peak by kind of module, those inside it included. What makes logits is of the loss."""
        inside = set[nn.Module]() if self._head is None else set(self._head.modules())
        logits = {name for name, module in self._model.named_modules() if module in inside}
        held = defaultdict[str, int](int)
        for piece in pieces_at_peak(simulator, simulation):
            if piece.name == LOSS or piece.module in logits:
                held[LOSS_TILES] += piece.bytes
                continue
            name = piece.module
            while name:
                held[by_members(name)[0]] += piece.bytes
                name = name.rpartition(".")[0]
        return held

    def _limit(self, graph: StepGraph, least: int) -> int | None:
        """The budget in bytes; ``None`` where it is the smallest that works."""
        maker = self._limiter.maker
        if maker.asked.word == "min":
            return None
        peak = maker.greatest_plain = max(maker.greatest_plain, plain(graph).peak_bytes)
        return budgets.resolve(maker.budget, peak, least, graph.device, resident_bytes=graph.resident_bytes)

    # ---- candidates ----------------------------------------------------------------------------------

    def _candidate(self, holds: dict[str, int], done: set[str]) -> str | None:
        """The kind of module that holds most and treats each token alone; of those inside one another the
        outermost.
        """
        found = [kind for kind in holds if kind not in done and self._is_tokenwise(kind)]
        outer = [kind for kind in found if not any(kind.startswith(f"{other}.") for other in found)]
        return max(outer, key=lambda kind: holds[kind], default=None)

    def _alike(self, kind: str) -> list[nn.Module]:
        return [module for name, module in self._model.named_modules() if by_members(name)[0] == kind]

    def _is_tokenwise(self, kind: str) -> bool:
        """Whether modules of a kind treat each token alone, by a call of the first with random numbers."""
        if kind == LOSS_TILES:
            loss = chunked_loss_of(self._model)
            return loss.chosen if loss is not None else has_output_layer(self._model)
        if kind not in self._tokenwise:
            form = next((form for name, form in self._forms.items() if by_members(name)[0] == kind), None)
            first = self._alike(kind)[0]
            makes_logits = self._head is not None and self._head in set(first.modules())
            self._tokenwise[kind] = (
                form is not None and not makes_logits and treats_tokens_alone(first, *form)
            )
        return self._tokenwise[kind]

    def _pieces(self, held: int, least: int, limit: int | None, before: int) -> int:
        """In how many pieces a kind is to run, of which ``held`` bytes are live at the peak."""
        others = max(1, least - held)
        room = _LEFT * others if limit is None else max(_LEFT * others, limit - others)
        wanted = 2 ** math.ceil(math.log2(max(2.0, held / room)))
        return min(_MOST_PIECES, before * wanted)


def treats_tokens_alone(module: nn.Module, shape: Sequence[int], dtype: torch.dtype) -> bool:
    """Whether a module's output for one token depends on that token alone, as far as a call with a few random
    tokens shows. Buffers and random states stay as they are.

    Args:
        module: the module.
        shape: of the tensor that it is called with, (..., tokens, features).
        dtype: of that tensor.
    """
    if tiled_forward(module) is not None:
        return True  # its first call checks that
    if len(shape) < 2 or not dtype.is_floating_point:
        return False
    few = [*(1 for _ in shape[:-2]), _PROBED_TOKENS, shape[-1]]
    device = next((one.device for one in module.parameters()), torch.device("cpu"))
    buffers = {one: one.detach().clone() for one in module.buffers()}
    cards = [] if device.index is None else [device.index]
    with same_random(cards), suspended(), torch.no_grad():
        tiling = tile(module, 2)
        try:
            tokens = torch.randn(few, dtype=dtype, device=device)
            output = module(tokens)
        except Exception:  # whatever a module raises that is called with other than it expects
            return False
        finally:
            tiling.remove()
            for one, value in buffers.items():
                one.copy_(value)
    return isinstance(output, torch.Tensor) and output.shape[:-1] == tokens.shape[:-1]
