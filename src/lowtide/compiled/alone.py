"""A graph that is a whole step: it is planned for, cut and compiled as soon as it is captured.

What is compiled, PyTorch keeps on disk; its plan is kept beside it. A warm process takes compiled code from
there, and no partitioner is asked: what was planned is found under a digest of the code itself and of what
its plan follows from. Where the code is found and its plan is not, it is compiled anew.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, field, replace
from itertools import chain
from typing import Any

import torch
from torch import fx

from lowtide.compiled.capture import FREES_AT_ONCE, Cutter, compile_graph
from lowtide.compiled.choose_cuts import (
    Choice,
    Chosen,
    Cuts,
    CutSearch,
    at_once,
    choice_alone,
    search_within,
)
from lowtide.compiled.cut import Halves, cut
from lowtide.compiled.dynamic import Numbers, plan_range
from lowtide.compiled.joint import Joint
from lowtide.compiled.lower import CutRefused, Generated, Size
from lowtide.compiled.price import CandidateCut
from lowtide.compiled.shelf import digest, open_shelf, plans_in
from lowtide.errors import BudgetError, PlanError
from lowtide.graph import StepGraph
from lowtide.meter import resident_bytes
from lowtide.meter.cuda import workspace_bytes
from lowtide.meter.resident import model_device
from lowtide.plan.data import Offload, Plan
from lowtide.private import inductor, partitioning
from lowtide.progress import current


@dataclass
class PlansMade:
    """The plans that were made so far, for the handle to read; compiled code does not hold them.

    Attributes:
        planned: a plan for each graph.
        graphs: the step graphs that they were made for, by `Plan.graph`.
        held: program -> the open sizes up to which its largest plan holds.
    """

    planned: list[Plan] = field(default_factory=list)
    graphs: dict[str, StepGraph] = field(default_factory=dict)
    held: dict[str, Numbers] = field(default_factory=dict)

    def add(self, chosen: Chosen) -> None:
        """Take down a plan."""
        self.planned.append(chosen.plan)
        self.graphs[chosen.plan.graph] = chosen.graph


class Partitioner(Cutter):
    """Cuts each joint graph within a budget.

    Another budget, version or machine compiles anew: `uuid` says so to Inductor's cache.

    Args:
        budget: as of `lowtide.limit_memory`.
        standing: bytes that stand beside a graph, where that is more than its own inputs.
        options: Inductor's settings; ``None`` where graphs run call by call.
        report: takes down what was planned, in this process alone.
        tiers: where saved values may wait.
        wishes: a digest of the regions that the user has marked in the graph.
        after_bytes: the most live bytes when backward has ended; 0 for what the graph returns.
    """

    def __init__(
        self,
        budget: str | int,
        standing: Callable[[], int] | None = None,
        options: dict[str, Any] | None = None,
        report: PlansMade | None = None,
        tiers: tuple[Offload, ...] = (),
        wishes: str = "",
        after_bytes: int = 0,
    ) -> None:
        super().__init__(options)
        self.after_bytes = after_bytes
        self.budget, self.tiers, self.wishes = budget, tiers, wishes
        self._standing = standing
        self._report = PlansMade() if report is None else report
        self._compiled_first: _CompiledFirst | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_standing": None, "_report": PlansMade(), "_compiled_first": None}

    def compile(self, module: Any, inputs: Any) -> Any:
        """Compile a graph that is a whole step. Where compiled code comes from the disk, so does its plan.

        Where sizes are fixed the first cut is compiled before it is priced; a bad one is priced in time.

        Args:
            module: Dynamo's graph.
            inputs: its (fake) inputs.
        """
        options, hits, before = self.options, inductor.cache_hits(), len(self._report.planned)
        shelf = open_shelf(options)
        fixed = not self.tiers and not any(partitioning.free_sizes_of(inputs))
        compiled, texts = None, list[str]()
        ahead = options is not None and fixed and inductor.writes_python()
        compile = functools.partial(compile_graph, module, inputs, options, self, at_once=ahead)
        with inductor.reading(texts.append):
            if ahead:
                compiled = self._compile_first(compile, texts)
            if compiled is None:
                texts.clear()
                compiled = compile()
        if options is None or shelf is None or not texts:
            return compiled
        key = self.uuid() + texts[0]  # the forward says what it saves
        if made := self._report.planned[before:]:
            shelf.keep(key, [plan.to_json() for plan in made])
        elif inductor.cache_hits() > hits:
            known = plans_in(shelf.find(key))
            if not known:  # the plan of what was found is lost
                anew = {**options, **inductor.UNCACHED}
                return compile_graph(module, inputs, anew, self, at_once=ahead)
            self._report.planned += known
        return compiled

    def _compile_first(self, compile: Callable[..., Any], texts: list[str]) -> Any:
        """What is compiled by the first cut that proves good; nothing where no text was generated to see that
        by.
        """
        self._compiled_first = first = _CompiledFirst()
        try:
            while True:
                try:
                    compiled = compile(inner=first.compile)
                except CutRefused:
                    texts.clear()
                    continue
                if first.candidate is not None:
                    return None
                if first.chosen is not None:
                    self._report.add(first.chosen)
                return compiled
        finally:
            self._compiled_first = None

    def halves(self, joint: Joint) -> Halves:
        """Forward and backward within the budget."""
        fixed = not any(partitioning.free_sizes(joint.module))
        if self.tiers and not fixed:
            raise PlanError(
                "tiers are for graphs of fixed sizes, and this one leaves some open: leave out mark_dynamic "
                "(and what makes sizes follow from data), or tiers"
            )
        beside = 0 if self._standing is None else self._standing()
        inputs = {joint.key_of[node] for node in joint.primals if node in joint.key_of}
        if self._standing is not None:  # parameters stand there already
            static = [joint.primals[at] for at in joint.static]
            inputs -= {joint.key_of[node] for node in static if node in joint.key_of}

        def standing_at(size_of: Size) -> int:
            return beside + sum(joint.bytes_of(key, size_of) for key in inputs)

        def choice(budget: str | int, at: Joint) -> Choice:
            standing = standing_at(at.size)
            return choice_alone(at, budget, standing, self.options, self.tiers, self.after_bytes)

        if self._compiled_first is not None and fixed:

            def search(budget: str | int) -> CutSearch:
                return choice(budget, joint).search()

            return self._compiled_first.begin(joint, search, self.budget, self._report.planned)

        def plan_at(size_of: Size) -> Chosen:
            at = joint if size_of is joint.size else replace(joint, size=size_of)
            before = self._report.planned
            return at_once(search_within(lambda budget: choice(budget, at).search(), self.budget, before))

        chosen = plan_range(joint, self.budget, plan_at, standing_at, self._report.held)
        self._report.add(chosen)
        return chosen.cuts[0].halves

    def uuid(self) -> str:
        """What the cut follows from, beside the graph."""
        standing = None if self._standing is None else self._standing()
        tiers = [astuple(tier) for tier in self.tiers]
        return digest(self.budget, self.options, standing, tiers, self.after_bytes, self.wishes)


class _CompiledFirst:
    """Compiles cuts of a graph that is a whole step before they are priced. Each is priced by the text that
    Inductor generates meanwhile, and its compilation ends where it is not good.

    Attributes:
        candidate: the cut that waits for its price.
        chosen: the cut that is compiled in the end, with what it takes, once that is known.
    """

    candidate: CandidateCut | None = None
    chosen: Chosen | None = None
    _search: Iterator[Cuts | None] | None = None
    _program = ""
    _tries = 0

    def begin(
        self,
        joint: Joint,
        search: Callable[[str | int], CutSearch],
        budget: str | int,
        before: Sequence[Plan],
    ) -> Halves:
        """The halves to compile.

        Args:
            joint: the graph; at each compilation it is traced anew, and is the same.
            search: searches within a budget.
            budget: as of `lowtide.compile`.
            before: the plans for other graphs within it.

        Raises:
            BudgetError: no plan is found that fits.
        """
        if self._search is None:
            self._program = joint.program
            self._search = self._note(search_within(search, budget, before))
        if joint.program != self._program:
            raise PlanError(
                "a graph was traced in two ways while it was compiled: something that it depends on changed "
                "meanwhile. Run the step again"
            )
        self.candidate = None
        self._tries += 1
        cuts = next(filter(None, self._search), None)
        again = f", try {self._tries}" if self._tries > 1 else ""
        current().say(f"compiling within the budget{again}")
        if cuts is None:
            assert self.chosen is not None
            cuts = self.chosen.cuts
        else:
            self.candidate = cuts[0]
        stored = cuts[0].stored
        if stored is None:
            return partitioning.min_cut(joint.module, joint.forward_outputs, joint.static)
        return cut(joint, stored)

    def _note(self, search: CutSearch) -> Iterator[Cuts | None]:
        self.chosen = yield from search

    def compile(self, half: fx.GraphModule, inputs: Sequence[Any], **how: Any) -> Any:
        """What Inductor makes of a half.

        Raises:
            CutRefused: the cut is not good; before the kernels are compiled that the backward's text names.
        """
        if self.candidate is None:
            return inductor.compile_half(half, inputs, **how)
        code = self.candidate.code
        assert isinstance(code, Generated)
        return code.compile(half, inputs, self._check, **how)

    def _check(self) -> None:
        """The candidate is priced.

        Raises:
            CutRefused: it is not chosen.
        """
        assert self._search is not None
        following = next(self._search, None)
        if following is not None:
            self._search = chain([following], self._search)
        if self.chosen is None or self.chosen.cuts[0] is not self.candidate:
            raise CutRefused
        self.candidate = None


# ---- without compiling a kernel -------------------------------------------------------------------


class _Enough(Exception):
    """The graph is planned; nobody runs it."""


def forecast(model: torch.nn.Module, budget: str | int, *args: Any, backend: str = "inductor") -> Plan:
    """Trace a step, plan it and predict what the backend would allocate; then stop.

    No value of a parameter or an input is read: uninitialised tensors may be given.

    Args:
        model: whose call returns the loss.
        budget: as of `lowtide.compile`.
        args: of the call.
        backend: ``inductor`` or ``aot_eager``.

    Raises:
        BudgetError: no plan fits.
        PlanError: the model does not compile as one graph, or no gradient is asked for.
    """
    report = PlansMade()
    # what a cache hands out nobody plans
    options = {**FREES_AT_ONCE, **inductor.UNCACHED} if backend == "inductor" else None
    place = model_device(model)
    standing = resident_bytes(model) + workspace_bytes(place)
    partitioner = Partitioner(budget, lambda: standing, options, report)

    def planning(module: Any, inputs: Any) -> Any:
        return compile_graph(module, inputs, options, partitioner, _stop)

    compiled = torch.compile(model, backend=planning, fullgraph=True)
    try:
        compiled(*args)
    except inductor.BackendCompilerFailed as error:
        inner = error.inner_exception
        if isinstance(inner, BudgetError):
            raise inner from None
        if not isinstance(inner, _Enough):
            raise
    except inductor.Unsupported as error:
        said = str(error).strip().splitlines()[0]
        raise PlanError(
            f"{type(model).__name__} does not compile as one graph ({said}): plan it without compiling, or "
            "run it under lowtide.compile, which takes graph breaks"
        ) from error
    if not report.planned:
        raise PlanError(f"{type(model).__name__} asks for no gradient: there is nothing to plan")
    return report.planned[0]


def _stop(*args: Any, **kwargs: Any) -> Any:
    raise _Enough
