"""Choose the cut of every call of a step of compiled graphs, within one budget.

The planner decides about one `StepGraph` of the whole step. What it would store in each call is a candidate
cut of that call's graph. The planner's simulator knows calls; a backend fuses them and has an order of its
own. So each candidate is priced (`lowtide.compiled.price`), and a linear program in whole numbers, which
knows what each takes at every moment of the step, picks one for each call: the least seconds within the
budget, and few different ones of a graph that is called often. Where the planner's own choice takes too much
or leaves much, it is asked again, for as many bytes less or more as it was off.

Under Inductor pricing lowers a graph, which takes longer than everything else that planning does. Most
choices of a step that is one graph are good: so they may be compiled as they are, and priced by what is
generated for them meanwhile: `Choice.search` yields such cuts, and `try_cuts` compiles them.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any, TypeVar

from lowtide import budget as budgets
from lowtide.budget import with_slack
from lowtide.compiled.capture import CapturedGraph
from lowtide.compiled.joint import Key
from lowtide.compiled.lower import CompilationEnded, Generated
from lowtide.compiled.price import CandidateCut, CandidateCuts
from lowtide.compiled.steps import Step, step_of
from lowtide.compiled.timeline import Moment, Timeline
from lowtide.errors import BudgetError
from lowtide.extensions.moves.mixed import mixed
from lowtide.extensions.moves.placements import missing_links
from lowtide.extensions.moves.simulate import simulate_plan
from lowtide.graph import StepGraph
from lowtide.plan import make, within_seconds
from lowtide.plan.bound import Bound, LinearProgram
from lowtide.plan.choose import NEAR, Correction, at_or_smallest
from lowtide.plan.data import ModuleRow, Offload, Plan, decision_of
from lowtide.plan.policies import make_plan
from lowtide.plan.simulate import Simulator
from lowtide.plan.simulate.holders import holders_at_peak, parts_of, place_of_peak
from lowtide.remedies import ACTIVATIONS, GRADIENTS, LOSS, OUTPUTS, RESIDENT
from lowtide.trace.costs.roofline import outside_modes

T = TypeVar("T")

ROUNDS = 6
"""Plans for one budget: each is lowered, which takes seconds."""

FIRST = 0.985
"""Share of the budget that is asked for first under Inductor, which mostly takes up to 1 % more than single
calls: so the first plan is good in most cases.
"""

DOUBT = 0.1
"""Share by which a plain peak from single calls may be off: a budget so near to it prices the plain cut."""

ABOVE_LEAST = (1.01, 1.03)
"""Peaks that the planner is asked for under Inductor, too, as factors of the smallest that it finds: a plan
with a higher peak by single calls may allocate less. The smallest budget became 0.5 % less for a T5 by the
first factor, 6 % less on blocks of width 32 by the second, and stayed as it was on other models.
"""

SURE = 1.001
"""Where the smallest plan's cuts take at most this times what it predicts, no others are tried."""

MOST_CUTS = 3
"""Candidate cuts of one graph that one step may run: each is compiled."""

WORTH = 1e-3
"""Share of a step that another candidate cut of a graph has to save to be compiled."""

MOST_NODES = 2000  # of branch and bound


Cuts = tuple[CandidateCut, ...]
"""A candidate for each call."""


@dataclass(frozen=True)
class Chosen:
    """How each call of a step is cut.

    Attributes:
        cuts: a candidate for each call.
        plain: those of `torch.compile` itself.
        plan: the same for the planner's graph of the whole step, with what the step really takes.
        graph: that graph.
    """

    cuts: Cuts
    plain: Cuts
    plan: Plan
    graph: StepGraph


@dataclass(frozen=True)
class Rejected:
    """What a search yields when it does not choose the cuts that it yielded last: it lowers others next."""


CutSearch = Generator[Cuts | Rejected, None, Chosen]
"""Yields cuts that are worth compiling before they are priced. When the search is resumed it lowers those
that nobody has priced meanwhile, and yields `Rejected` before it lowers others. It returns the cuts that it
chooses.
"""


@dataclass(frozen=True)
class Asked:
    """What a user asks of plans.

    Attributes:
        budget: as of `lowtide.limit_memory`.
        tiers: where saved values may wait.
        plan_seconds: as of `lowtide.compile`.
    """

    budget: str | int
    tiers: tuple[Offload, ...] = ()
    plan_seconds: float | None = None

    @property
    def facts(self) -> list[Any]:
        """What plans follow from beside the budget, in JSON's words."""
        return [[astuple(tier) for tier in self.tiers], self.plan_seconds]

    def policy(self, device: str) -> Any:
        """Of the planner, for steps on a device."""
        policy: Any = "optimal"
        if decisions := tuple(map(decision_of, self.tiers)):
            with outside_modes():  # AOTAutograd calls us among fake tensors
                links = missing_links(decisions, None, (), device)
            policy = mixed(*decisions, links=links, slab=False)
        return within_seconds(policy, self.plan_seconds, device)


def choice_of(timeline: Timeline, candidates: Sequence[CandidateCuts], asked: Asked) -> Choice:
    """How to cut every call of a step.

    Args:
        timeline: the step.
        candidates: those of each call's graph.
        asked: of the plan.
    """
    step = step_of([one.joint for one in candidates], [one.costs for one in candidates], timeline)
    return Choice(timeline, candidates, step, asked.budget, asked.policy(timeline.device))


class Choice:
    """The cuts of a step within one budget.

    Args:
        timeline: the step.
        candidates: those of each call's graph.
        step: the same step for the planner.
        budget: as of `lowtide.limit_memory`.
        policy: of the planner.

    Attributes:
        tried: candidates for every call -> the plan that asked for them.
    """

    def __init__(
        self,
        timeline: Timeline,
        candidates: Sequence[CandidateCuts],
        step: Step,
        budget: str | int,
        policy: Any = "optimal",
    ) -> None:
        self.timeline, self.candidates, self.step = timeline, candidates, step
        self.budget, self.policy = budget, policy
        self.fused = any(one.options is not None for one in candidates)
        self._share = budgets.is_share(budget)
        self.tried: dict[Cuts, Plan] = {}

    # ---- what cuts take --------------------------------------------------------------------------

    def peaks(self, cuts: Sequence[CandidateCut]) -> list[int]:
        """The most live bytes at each moment when each call is cut so."""
        calls, found = self.timeline.calls, []
        for moment in self.timeline.moments:
            lent = moment.lent_beside((calls[n], cuts[n].saved_bytes) for n in moment.waiting)
            takes = (self._bytes(moment, number, cuts[number], lent) for number in moment.calls)
            found.append(moment.bytes + sum(takes))
        return found

    def peak(self, cuts: Sequence[CandidateCut]) -> int:
        """The most live bytes at any moment when each call is cut so."""
        return max(self.peaks(cuts))

    def _bytes(self, moment: Moment, number: int, cut: CandidateCut, lent: frozenset[Key] | None) -> int:
        """What a call takes at a moment: while it runs, or while its backward is to come.

        Args:
            moment: at which.
            number: the call's.
            cut: its cut.
            lent: of a backward, the inputs that others still hold when it has ended; ``None`` for the graph's
                inputs.
        """
        call = self.timeline.calls[number]
        if number != moment.call:
            return moment.held_bytes(call, cut.saved_bytes) + cut.copied_bytes
        if moment.kind == "forward":
            return cut.forward_bytes
        return cut.backward_bytes(lent)

    @functools.cached_property
    def _plain(self) -> Cuts:
        return tuple(one.plain for one in self.candidates)

    @functools.cached_property
    def _keeps_all(self) -> Plan:
        return make(self.step.graph, policy="keep_all", progress=False)

    # ---- choosing --------------------------------------------------------------------------------

    def choose(self) -> Chosen:
        """The best cuts that are found, each priced.

        Raises:
            BudgetError: none are found that fit.
        """
        return at_once(self.search())

    def search(self) -> CutSearch:
        """The search of `choose`, step by step: it yields cuts that are to be priced, or `Rejected`.

        Raises:
            BudgetError: none are found that fit.
        """
        for one in dict.fromkeys(one for one in self.candidates if self.candidates.count(one) > 1):
            one.price_extremes()  # layers that share a graph are cut in few ways, so these are mixed
        if self._share and budgets.parse(self.budget, 100) >= 100:
            yield self._plain
        exact = not self.fused or self._share
        plain_peak = self.peak(self._plain) if exact else self._keeps_all.predicted_peak_bytes
        smallest = (yield from self._least()) if budgets.asks_for(self.budget) == "min" else None
        limit = self._limit_bytes(plain_peak, smallest)
        if not exact and limit <= max(moment.bytes for moment in self.timeline.moments):
            raise self._forecast_refusal(limit, plain_peak)
        if not exact and limit > (1 - DOUBT) * plain_peak:
            yield self._plain if limit >= plain_peak else Rejected()
            plain_peak = self.peak(self._plain)
        if plain_peak <= limit:
            return self._result(self._plain, self._keeps_all, limit, plain_peak)
        room = limit - budgets.slack_bytes(limit)
        best = self._best(room) if self.tried else None
        if best is None or self.peak(best) < NEAR * limit:
            best = (yield from self._near(room, limit)) or best
        if best is None:
            smallest = with_slack(self._smallest()) + 1
            best = self._best(room)
            if best is None:
                raise self._refusal(limit, smallest, plain_peak)
        plan = self.tried.get(best)
        if plan is None:
            asked = next(iter(self.tried.values()))
            bound = Bound(asked.bound_extra_seconds, asked.bound_peak_bytes)
            values = {value for (n, key), value in self.step.value_of.items() if key in best[n].saved_bytes}
            plan = make_plan(self.step.graph, stored=values, policy="optimal", bound=bound)
        return self._result(best, plan, limit, plain_peak)

    def _near(self, room: int, limit: int) -> Generator[Cuts | Rejected, None, Cuts | None]:
        """The best cuts within ``room`` bytes that a few plans ask for; nothing where none of these fit."""
        best, correction = None, Correction(room)
        target: int | None = int(FIRST * room) if self.fused else room
        for _ in range(ROUNDS):
            plan = at_or_smallest(self.step.graph, target, self.policy)
            cuts = self._meant(plan)
            yield cuts
            took = self.peak(cuts)
            best = self._best(room) or best
            if best is not None and self.peak(best) >= NEAR * limit:
                break
            yield Rejected()
            target = correction.next_target(target, plan.predicted_peak_bytes, took)
            if target is None:
                break
        return best

    def _limit_bytes(self, plain_peak: int, smallest: int | None) -> int:
        device, resident = self.timeline.device, self.timeline.resident_bytes
        least = self._smallest if smallest is None else lambda: smallest
        return budgets.resolve(self.budget, plain_peak, least, device, resident_bytes=resident)

    def _forecast_refusal(self, limit: int, plain_peak: int) -> BudgetError:
        """Of a budget that no cut can hold, as what no call takes is above it: Inductor, which takes many
        times as long as the planner, is not asked.
        """
        plan = at_or_smallest(self.step.graph, 1, self.policy)
        smallest = with_slack(plan.predicted_peak_bytes / FIRST) + 1
        error = self._refusal(limit, smallest, plain_peak, plan)
        error.add(
            "This smallest budget is computed from single calls, without Inductor: a smaller budget may work."
        )
        return error

    def _refusal(
        self, limit: int, smallest: int, plain_peak: int, forecast: Plan | None = None
    ) -> BudgetError:
        resident, zeros = self.timeline.resident_bytes, 0
        if self.timeline.zeros and forecast is None:
            least = self._best(None)
            assert least is not None
            zeros = self.candidates[0].zeros_bytes(least[0], self.timeline.zeros)
        plan = forecast or min(self.tried.values(), key=lambda one: one.predicted_peak_bytes)
        sim = Simulator(self.step.graph)
        simulation = simulate_plan(sim, plan)
        found, shares = parts_of(sim, simulation), {RESIDENT: resident, OUTPUTS: zeros}
        for name in (GRADIENTS, LOSS):  # a backend may take less than single calls
            shares[name] = max(0, min(found.get(name, 0), smallest - sum(shares.values())))
        shares[ACTIVATIONS] = smallest - sum(shares.values())
        return BudgetError(
            None,
            smallest,
            f"Its peak is at {place_of_peak(simulation)}.",
            budget_bytes=limit,
            parts={name: count for name, count in shares.items() if count},
            plain_peak_bytes=plain_peak,
            made=holders_at_peak(sim, simulation),
        )

    def _meant(self, plan: Plan) -> Cuts:
        """What a plan of the step means for each call."""
        meant = tuple(one.of(plan, self.step, n) for n, one in enumerate(self.candidates))
        self.tried.setdefault(meant, plan)
        return meant

    def _smallest(self) -> int:
        """The smallest peak that is found."""
        return at_once(self._least())

    def _least(self) -> Generator[Cuts | Rejected, None, int]:
        """As `_smallest`, step by step."""
        for one in dict.fromkeys(self.candidates) if len(self.candidates) > 1 else ():
            one.price_extremes()
        plan = at_or_smallest(self.step.graph, 1, self.policy)
        cuts = self._meant(plan)
        yield cuts
        if self.fused and self.peak(cuts) > SURE * plan.predicted_peak_bytes:
            yield Rejected()
            for more in ABOVE_LEAST:
                target = int(more * plan.predicted_peak_bytes)
                self.peak(self._meant(at_or_smallest(self.step.graph, target, self.policy)))
        self.peak(cuts)
        found = self._best(None)
        assert found is not None
        return self.peak(found)

    def _result(self, cuts: Cuts, plan: Plan, limit: int, plain_peak: int) -> Chosen:
        seconds = plain_seconds = sum(one.seconds for one in cuts)
        if all(one.code.priced for one in self._plain):
            plain_seconds = sum(one.seconds for one in self._plain)
        elif cuts != self._plain:
            both = zip(self.candidates, cuts, self._plain, strict=True)
            plain_seconds -= sum(one.likely_seconds(a) - one.likely_seconds(b) for one, a, b in both)
        plan = with_prices(plan, limit, self.peak(cuts), plain_peak, seconds, plain_seconds)
        return Chosen(cuts, self._plain, plan, self.step.graph)

    def _best(self, room: int | None) -> Cuts | None:
        """A candidate for each call, of those that are priced: the least seconds within ``room`` bytes at
        every moment, or with ``None`` the smallest peak; nothing where none fits.
        """
        moments, program = self.timeline.moments, LinearProgram()
        known = {id(one): one.priced for one in self.candidates}
        if not all(known.values()):
            return None
        step_seconds = sum(min(cut.seconds for cut in known[id(one)]) for one in self.candidates) or 1.0
        unit = max(*(moment.bytes for moment in moments), 1)
        # where there is no limit the peak comes before the seconds
        weight, most = (1e3, math.inf) if room is None else (0.0, room / unit)
        peak = program.column(weight, most)
        used: dict[int, dict[int, int]] = {}  # graph -> candidate -> whether any call is cut so
        columns: list[list[tuple[CandidateCut, int]]] = []  # of each call
        for one in self.candidates:
            cuts = known[id(one)]
            if id(one) not in used:
                used[id(one)] = {id(cut): program.column(WORTH) for cut in cuts}
                program.row([(column, 1.0) for column in used[id(one)].values()], MOST_CUTS)
            least = min(cut.seconds for cut in cuts)
            columns.append([(cut, program.column((cut.seconds - least) / step_seconds)) for cut in cuts])
            program.row([(column, -1.0) for _, column in columns[-1]], -1.0)
            for cut, column in columns[-1]:
                program.row([(column, 1.0), (used[id(one)][id(cut)], -1.0)], 0.0)
        for moment in moments:
            takes = [
                (column, self._bytes(moment, number, cut, moment.lent) / unit)
                for number in moment.calls
                for cut, column in columns[number]
            ]
            program.row([(peak, -1.0), *takes], -moment.bytes / unit)
        whole = [column for column in range(len(program.cost)) if column != peak]
        _, _, point = program.solve(whole, nodes=MOST_NODES, gap=1e-3)
        if point is None:
            return None
        found = tuple(
            max((point[column], n, cut) for n, (cut, column) in enumerate(each))[2] for each in columns
        )
        return found if room is None or self.peak(found) <= room else None

    def again(self, before: Chosen) -> Chosen | None:
        """The cuts that were chosen before, priced anew since other bytes are resident; ``None`` where they
        are above the budget.
        """
        limit, peak = before.plan.budget_bytes, self.peak(before.cuts)
        if limit is None or peak > limit:
            return None
        plain = before.plan.plain_peak_bytes + peak - before.plan.predicted_peak_bytes
        if all(one.code.priced for one in before.plain):  # else a forecast, as before
            plain = self.peak(before.plain)
        return replace(before, plan=replace(before.plan, predicted_peak_bytes=peak, plain_peak_bytes=plain))


def with_prices(
    plan: Plan, limit: int, peak: int, plain_peak: int, seconds: float, plain_seconds: float
) -> Plan:
    """The plan with what its cuts take, and those of `torch.compile`, in place of what the planner predicted.

    Its distance from the bound stays the planner's. What each module adds is scaled to the extra time.
    """
    extra = seconds - plain_seconds
    alone = sum(row.extra_seconds for row in plan.modules)
    if alone:
        modules = [replace(row, extra_seconds=row.extra_seconds * extra / alone) for row in plan.modules]
    else:  # nothing runs again, and still the cut is another one
        modules = [*plan.modules, *([ModuleRow("", 0, 0, 0, extra)] if extra else [])]
    return replace(
        plan,
        budget_bytes=limit,
        modules=tuple(modules),
        predicted_peak_bytes=peak,
        plain_peak_bytes=plain_peak,
        bound_peak_bytes=min(plan.bound_peak_bytes, peak),
        plain_seconds=plain_seconds,
        predicted_extra_seconds=extra,
        bound_extra_seconds=extra - plan.gap_seconds,
    )


def search_within(
    search: Callable[[str | int], CutSearch], budget: str | int, largest_bytes: int
) -> CutSearch:
    """A search within a budget. Where that is a share and too small for this step, its bytes are those of the
    largest step so far: a last, small batch has room for what larger ones may take.

    Args:
        search: searches within a budget.
        budget: as of `lowtide.limit_memory`.
        largest_bytes: as of `fallback_bytes`.

    Raises:
        BudgetError: no plan is found that fits.
    """
    try:
        return (yield from search(budget))
    except BudgetError as error:
        if error.smallest_bytes is None or error.smallest_bytes > largest_bytes:
            raise
        return (yield from search(largest_bytes))


def fallback_bytes(budget: str | int, before: Iterable[Plan]) -> int:
    """The bytes of the largest step so far, where a budget is a share; else 0.

    Args:
        budget: as of `lowtide.limit_memory`.
        before: plans for other steps within it.
    """
    return max((one.budget_bytes or 0 for one in before), default=0) if budgets.is_share(budget) else 0


def at_once(search: Generator[Any, None, T]) -> T:
    """What a search by steps finds, where nothing is compiled between them."""
    while True:
        try:
            next(search)
        except StopIteration as found:
            return found.value


def try_cuts(graphs: Sequence[CapturedGraph], search: CutSearch) -> Chosen:
    """What a search finds in the end. The cuts that it yields are compiled, and priced by the text that
    Inductor generates meanwhile; so nothing is lowered twice. The graph with the most calls comes last: where
    the cuts are rejected, the kernels of its backward are not compiled.

    Args:
        graphs: of each call.
        search: finds how to cut them.

    Raises:
        BudgetError: no plan is found that fits.
    """
    ahead: list[Cuts | Rejected | Chosen | Exception] = []  # what came of the search during a compilation

    def resume() -> Cuts | Rejected | Chosen:
        try:
            return next(search)
        except StopIteration as ended:
            return ended.value

    def check(cuts: Cuts, this: CandidateCut) -> None:
        if not all(one.code.priced for one in cuts):
            return
        try:
            ahead.append(resume())
        except Exception as error:
            ahead.append(error)  # not through PyTorch's compiler, which would wrap it
        if not (isinstance(ahead[0], Chosen) and this in ahead[0].cuts):
            raise CompilationEnded

    while True:
        came = ahead.pop() if ahead else resume()
        if isinstance(came, Exception):
            raise came
        if isinstance(came, Chosen):
            return came
        if isinstance(came, Rejected):
            continue
        both = sorted(zip(graphs, came, strict=True), key=lambda one: len(one[0].joint.calls))
        with contextlib.suppress(CompilationEnded):
            for graph, one in both:
                if isinstance(one.code, Generated) and not one.code.priced and graph.has_readable_text:
                    inner = functools.partial(one.code.compile, then=functools.partial(check, came, one))
                    graph.run_as(one.way, inner)
