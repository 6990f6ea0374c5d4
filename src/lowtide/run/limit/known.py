"""All kinds of steps of a model, and their plans.

In: a kind's key, or the graph of a step that was looked at. Out: the `Kind`, with a plan where one can be
made. Warnings of what was found are given here, once each.
"""

from __future__ import annotations

import threading

import torch

from lowtide.errors import BudgetError
from lowtide.graph import StepGraph
from lowtide.run.limit.arguments import refuse_sharded
from lowtide.run.limit.key import StepKey
from lowtide.run.limit.kinds import MOST_KINDS, Kind, Replan, plan_for_larger, same_but_gradients
from lowtide.run.limit.optimizer_need import own_share
from lowtide.run.limit.planning import Planner
from lowtide.run.look.look import Look
from lowtide.run.messages import OWN_OFF, Once, own_checkpointing, warn
from lowtide.run.record.verify import Verify


class Known:
    """The kinds of steps of one model.

    Args:
        planner: makes their plans.
        verify: as of `limit_memory`.

    Attributes:
        kinds: by key, the latest last.
        latest: the planned kind of the latest step, or ``None``.
        lock: held while a kind or its plan changes.
        tell: warns of something once.
    """

    def __init__(self, planner: Planner, verify: Verify) -> None:
        self.planner = planner
        self.model = planner.model
        self.verify: Verify = verify
        self.kinds: dict[StepKey, Kind] = {}
        self.latest: Kind | None = None
        self.lock = threading.RLock()
        self.tell = Once()

    def kind_for(self, key: StepKey) -> Kind:
        """The kind of steps with this key; its plan is made again if an earlier step asked for that.

        Raises:
            BudgetError: no plan fits.
        """
        with self.lock:
            kind = self.kinds.get(key)
            if kind is None:
                larger = plan_for_larger(self.kinds.values(), key)
                if larger is not None:
                    kind = larger
                else:
                    refuse_sharded(self.model)
                    without = same_but_gradients(self.kinds, key) if key.gradients else None
                    kind = Kind(key)
                    if without is not None:
                        self._plan_with_gradients(kind, without)
                    self.kinds[key] = kind
                    if len(self.kinds) > MOST_KINDS:
                        self.kinds.pop(next(iter(self.kinds)))
            self.planner.share_findings(kind)
            if kind.replan is not None and not kind.wants_look:
                self._solve_again(kind)
            self.latest = kind if kind.plan is not None else self.latest
            return kind

    def _plan_with_gradients(self, kind: Kind, without: Kind) -> None:
        """Plan for steps that add to gradients, without the margin if no plan leaves it."""
        try:
            self.planner.plan_with_gradients(kind, without)
        except BudgetError as error:
            if not without.margin_bytes:
                raise
            without.margin_bytes = 0
            self.planner.plan_with_gradients(kind, without)
            self.tell("stays", f"lowtide plans as if no step had taken more than predicted: {error}")

    def _solve_again(self, kind: Kind) -> None:
        """Make the plan again; where none leaves the margin, the present one stays."""
        try:
            self.planner.solve_again(kind)
        except BudgetError as error:
            if kind.replan is Replan.BUDGET_CHANGED or not kind.margin_bytes:
                raise
            kind.keep_plan()
            self.tell("stays", f"lowtide goes on with the plan that it has, since no other fits: {error}")

    def set_budget(self, budget: str | int) -> None:
        """Plan for another budget before the next step."""
        with self.lock:
            self.planner.budget = budget
            for kind in self.kinds.values():
                kind.replan = Replan.BUDGET_CHANGED

    def set_optimizer(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Plan with this optimizer's state, in place of the one counted so far, before the next step."""
        with self.lock:
            more = self.planner.count(optimizer)
            for kind in self.kinds.values():
                kind.add_resident(more)
                kind.replan = Replan.BUDGET_CHANGED

    # ---- looks -----------------------------------------------------------------------------------

    def is_to_verify(self, kind: Kind) -> bool:
        """Whether a look runs each operation twice; not where that was done at another size."""
        if self.verify == "never" or kind.looks or kind.must_verify or self.planner.kept:
            return self.verify != "never"
        return not any(
            other.verified is not None and other.key.differs_in_size(kind.key)
            for other in self.kinds.values()
        )

    def looked(self, kind: Kind, look: Look, graph: StepGraph) -> bool:
        """A step of a kind was looked at: plan for the longest one seen.

        Returns:
            Whether the look is of use. One that trusted another size's verification and found another program
            is to be repeated.

        Raises:
            BudgetError: no plan fits.
        """
        self._tell_of(look)
        program = graph.fingerprint(sizes=False)
        if not look.verified and self.verify != "never":
            kind.must_verify = all(other.verified != program for other in self.kinds.values())
            if kind.must_verify:
                return False
        kind.verified = program
        kind.looks += 1
        kind.backwards = max(kind.backwards, look.watch.backwards)
        kind.varies = kind.varies or look.tracer.asks
        if kind.graph is None or len(graph.operations) > len(kind.graph.operations):
            self._plan(kind, graph, look.tracer.checkpoints)
        else:
            kind.look_again = False
        self.latest = kind
        return True

    def _plan(self, kind: Kind, graph: StepGraph, checkpoints: int) -> None:
        """Plan for a kind from a step of it that was looked at.

        Args:
            kind: gets the plan.
            graph: the step.
            checkpoints: how many calls of ``torch.utils.checkpoint`` it made.

        Raises:
            BudgetError: no plan fits.
        """
        try:
            self.planner.plan(kind, graph, checkpoints)
        except BudgetError as error:
            made = [p for p in self.model.parameters() if p.requires_grad and not hasattr(p, "gradient_slab")]
            if made and not kind.key.gradients:
                error.add(
                    "Where gradients add up over several steps, those after the first take up to "
                    f"{sum(own_share(p).nbytes for p in made):,} bytes more."
                )
            if checkpoints:
                error.remedies = (OWN_OFF, *error.remedies)
            raise

    def _tell_of(self, look: Look) -> None:
        """Warn of a model that checkpoints by itself, and of operations that do not reproduce: every plan
        keeps their results from now on.
        """
        kept = look.recorder.findings.kept
        for name, reason in kept.items():
            if name not in self.planner.kept:
                warn(f"lowtide keeps the results of {name}: {reason}")
        self.planner.kept.update(kept)
        if look.tracer.checkpoints:
            self.tell("checkpoints", own_checkpointing(self.model))
