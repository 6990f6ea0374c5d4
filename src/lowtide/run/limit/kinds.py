"""All kinds of steps of a model: which steps may share a plan, and what is known of each kind.

In: a kind's key, or the graph of a step that was looked at. Out: the `Kind`, with a plan where one can be
made. Warnings of what was found are given here, once each.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass

from lowtide.errors import BudgetError
from lowtide.graph import StepGraph
from lowtide.plan.background import BackgroundSearch
from lowtide.plan.data import in_one_line
from lowtide.progress import working
from lowtide.run.hidden_costs import checkpoint_bytes, overlapped_bytes, with_earlier_gradients
from lowtide.run.limit.arguments import refuse_replicas, refuse_sharded
from lowtide.run.limit.key import StepKey
from lowtide.run.limit.optimizer_need import own_share
from lowtide.run.limit.planned import Planned
from lowtide.run.limit.planning import Planner
from lowtide.run.messages import OF_GRAPH, OWN_OFF, own_checkpointing, warn
from lowtide.run.profile.profiler import Profiler
from lowtide.run.ranks import LEARNING_STEPS
from lowtide.run.record.verify import Verify
from lowtide.words import count_text

_LOOKS = 8  # at a kind whose steps differ from one to the next, before the plan for the longest stays
MOST_KINDS = 24  # are remembered


@dataclass
class Kind:
    """One kind of step.

    Attributes:
        graph: the longest step that was looked at, the optimizer aside, or ``None`` before.
        planned: the plan in force, or ``None``.
        refused: which budget and optimizer no plan was found for, by `Planner.changes`.
        wants_look: the next step is to be looked at.
        looks: how often a step of it was looked at.
        backwards: the most that ran through a step that was looked at.
        makes_graph: in that step a backward was run with ``create_graph=True``.
        varies: its steps may differ in their operations: the forward reads values, or a step was seen to.
        margin_bytes: by how much a step was seen to exceed its prediction.
        checkpoint_bytes: what the model's own checkpoints keep beside tensors (random states).
        untold_bytes: the most that steps of it took which were looked at and not yet held against a budget.
        unseen_backward: backward runs on a thread whose operations are not intercepted: the next look runs
            its own backward.
    """

    key: StepKey
    graph: StepGraph | None = None
    planned: Planned | None = None
    refused: int | None = None
    wants_look: bool = True
    looks: int = 0
    backwards: int = 1
    makes_graph: bool = False
    varies: bool = False
    margin_bytes: int = 0
    checkpoint_bytes: int = 0
    untold_bytes: int = 0
    unseen_backward: bool = False

    @property
    def may_look_again(self) -> bool:
        """Whether there were few looks so far; some models run other operations in every step."""
        return self.looks < _LOOKS


class Kinds:
    """The kinds of steps of one model.

    Args:
        planner: makes their plans.
        verify: as of `limit_memory`.

    Attributes:
        known: by key, the latest last.
        latest: what is planned for the kind of the latest step, or ``None``.
        lock: held while a kind or its plan changes.
    """

    def __init__(self, planner: Planner, verify: Verify) -> None:
        self.planner, self.tell = planner, planner.tell
        self.verify: Verify = verify
        self.known: dict[StepKey, Kind] = {}
        self.latest: Planned | None = None
        self.lock = threading.RLock()
        self._verified: set[str] = set()  # programs whose operations were seen to reproduce

    def kind_for(self, key: StepKey) -> Kind:
        """The kind of steps with this key; its plan is made again if it is out of date.

        Raises:
            BudgetError: no plan fits.
        """
        with self.lock:
            kind = self.known.get(key) or self._larger(key) or self._new(key)
            if self._is_out_of_date(kind) and not kind.wants_look:
                assert kind.graph is not None
                self._plan_again(kind, kind.graph, "planned again")
            elif kind.graph is not None and kind.planned is None and kind.refused != self.planner.changes:
                with suppress(BudgetError):  # the next look may be at a shorter step
                    self._plan(kind, kind.graph, "planned again")
            elif kind.planned is not None and (better := kind.planned.better()):
                old = kind.planned
                kind.planned = Planned(old.key, old.graph, better, old.wanted)
            self.latest = kind.planned or self.latest
            return kind

    def stop(self) -> None:
        """End the searches that go on."""
        with self.lock:
            for kind in self.known.values():
                if kind.planned is not None and kind.planned.search is not None:
                    kind.planned.search.stop()
                    kind.planned.search = None

    def _larger(self, key: StepKey) -> Kind | None:
        """The smallest planned kind that is at least as large in every dimension, and otherwise equal."""
        fitting = [k for k in self.known.values() if k.planned and not k.wants_look and k.planned.serves(key)]
        return min(fitting, key=lambda kind: kind.key.elements(), default=None)

    def _new(self, key: StepKey) -> Kind:
        """A new kind. If its steps differ from known ones only in gradients that exist before, it is planned
        for at once.

        Raises:
            BudgetError: no plan fits.
        """
        refuse_sharded(self.planner.model)
        refuse_replicas(self.planner.model)
        kind, alike = Kind(key), key.without_gradients()
        others = (k for k in self.known.values() if k.graph and k.key.without_gradients() == alike)
        if key.gradients and (other := next(others, None)):
            assert other.graph is not None
            kind.margin_bytes, kind.backwards = other.margin_bytes, other.backwards
            kind.makes_graph, kind.checkpoint_bytes = other.makes_graph, other.checkpoint_bytes
            graph = with_earlier_gradients(other.graph)
            with suppress(BudgetError) if other.planned is None else nullcontext():  # as in `kind_for`
                self._plan_again(kind, graph, "planned for steps that add to gradients")
        self.known[key] = kind
        if len(self.known) > MOST_KINDS:
            self.known.pop(next(iter(self.known)))
        return kind

    def _is_out_of_date(self, kind: Kind) -> bool:
        """Whether the plan was made for another budget, optimizer or margin.

        All ranks that share the plan exchange what the latest step showed: if one has to look or to plan
        again, all do.
        """
        planned, planner = kind.planned, self.planner
        is_old = planned is not None and planned.wanted != planner.wanted(kind.margin_bytes)
        if planner.agreement is None or (planned is not None and planned.steps > LEARNING_STEPS):
            return is_old
        mine = (kind.wants_look, is_old, planner.changes, kind.margin_bytes, planner.kept)
        look, old, changes, margins, kept = zip(*planner.agreement.share(mine), strict=True)
        kind.wants_look, is_old, planner.changes = any(look), any(old), max(changes)
        if kind.wants_look or is_old:
            kind.margin_bytes = max(margins)
        for found in kept:
            planner.kept.update(found)
        return is_old

    def _plan(self, kind: Kind, graph: StepGraph, past: str) -> None:
        """Plan for a kind from a step of it.

        Raises:
            BudgetError: no plan fits.
        """
        kind.graph, kind.refused = graph, self.planner.changes
        with working("planning", past, self.planner.progress) as work:
            work.say(f"planning {count_text(len(graph.operations), 'operation')}")
            with _no_collection():
                whole, plan = self.planner.plan(graph, kind.margin_bytes, kind.checkpoint_bytes)
            work.done(in_one_line(plan))
        kind.refused, kind.wants_look = None, False
        kind.planned = Planned(kind.key, whole, plan, self.planner.wanted(kind.margin_bytes))
        if self.planner.unfinished is not None:
            with suppress(OSError):  # where no process can be started the plan stays
                kind.planned.search = BackgroundSearch(*self.planner.unfinished)

    def _plan_again(self, kind: Kind, graph: StepGraph, past: str) -> None:
        """Plan without another look. Where no plan leaves the margin that steps were seen to need, the
        present one stays, or there is none.

        Raises:
            BudgetError: no plan fits.
        """
        planner, planned = self.planner, kind.planned
        try:
            self._plan(kind, graph, past)
        except BudgetError as error:
            changed = planned is not None and planned.wanted[0] != planner.changes
            if changed or not kind.margin_bytes:
                raise
            margin, kind.margin_bytes = kind.margin_bytes, 0
            if planned is None:
                self._plan(kind, graph, past)
            else:
                planned.accept(margin, planner.wanted(0))
            self.tell(
                "stays",
                f"lowtide plans as if no step had taken more than predicted: no plan leaves that. {error}",
            )

    # ---- looks -----------------------------------------------------------------------------------

    def is_to_verify(self, kind: Kind) -> bool:
        """Whether a look runs each operation twice; not where that was done at another size."""
        if self.verify == "never" or kind.looks or self.planner.kept:
            return self.verify != "never"
        return not any(other.looks and other.key.differs_in_size(kind.key) for other in self.known.values())

    def take_in(self, kind: Kind, look: Profiler, graph: StepGraph) -> None:
        """Take in a look at a step of a kind: plan for the longest step seen. A look that trusted another
        size's verification and found another program is of no use: it is to be repeated.

        Raises:
            BudgetError: no plan fits.
        """
        self._tell_of(look)
        kind.looks += 1
        program = graph.fingerprint(sizes=False)
        if look.verified:
            self._verified.add(program)
        elif self.verify != "never" and program not in self._verified:
            return
        kind.backwards = max(kind.backwards, look.watch.backwards)
        kind.varies |= look.tracer.asks
        if kind.graph is None or kind.planned is None or len(graph.operations) > len(kind.graph.operations):
            kind.makes_graph = look.watch.makes_graph
            self._plan_looked(kind, graph, look.tracer.checkpoints)
        kind.wants_look = False
        self.latest = kind.planned

    def _plan_looked(self, kind: Kind, graph: StepGraph, checkpoints: int) -> None:
        """Plan for a kind from a step of it that was looked at, with so many calls of
        ``torch.utils.checkpoint``.

        Raises:
            BudgetError: no plan fits; on every rank that shares the model's layers.
        """
        planner, refusal = self.planner, None
        graph, neighbours = planner.agreed(graph)
        kind.checkpoint_bytes = checkpoint_bytes(graph, checkpoints)
        kind.margin_bytes = max(kind.margin_bytes, overlapped_bytes(graph) + kind.checkpoint_bytes)
        try:
            self._plan(kind, graph, "planned")
        except BudgetError as error:
            refusal = error
            made = [
                p for p in planner.model.parameters() if p.requires_grad and not hasattr(p, "gradient_slab")
            ]
            if made and not kind.key.gradients:
                error.add(
                    "Where gradients add up over several steps, those after the first take up to "
                    f"{sum(own_share(p).nbytes for p in made):,} bytes more."
                )
            if kind.makes_graph:
                error.add(f"Its {OF_GRAPH}.")
            if checkpoints:
                error.remedies = (OWN_OFF, *error.remedies)
        if neighbours is not None:  # if one refused alone, the others would wait in a collective
            refusal = neighbours.refusal(refusal)
        if refusal is not None:
            try:
                raise refusal
            finally:
                del refusal  # its traceback holds this frame, and all that the step's frames hold

    def _tell_of(self, look: Profiler) -> None:
        """Warn of a model that checkpoints by itself, and of operations that do not reproduce: every plan
        keeps their results from now on.
        """
        kept = look.recorder.findings.kept
        for name, reason in kept.items():
            if name not in self.planner.kept:
                warn(f"lowtide keeps the results of {name}: {reason}")
        self.planner.kept.update(kept)
        if look.tracer.checkpoints:
            self.tell(own_checkpointing(self.planner.model))


@contextmanager
def _no_collection() -> Iterator[None]:
    """Without cyclic garbage collection: a plan is made of many small objects, and no tensor. To look through
    all that a process holds again and again takes as long as planning does.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
