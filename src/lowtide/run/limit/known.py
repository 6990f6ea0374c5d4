"""What is known of each kind of step of a model, and the plans made from it.

Comes in: a kind's key, or the graph of a step that was looked at. Goes out: the `Kind`, with a plan where one
can be made. What a user has to hear is said here, once.
"""

from __future__ import annotations

import threading

import torch

from lowtide.errors import BudgetError
from lowtide.graph import StepGraph
from lowtide.run.limit.arguments import refuse_sharded
from lowtide.run.limit.key import StepKey
from lowtide.run.limit.kinds import MOST_KINDS, Kind, plan_for_larger, same_but_gradients
from lowtide.run.limit.messages import OWN_OFF, own_checkpointing, warn
from lowtide.run.limit.optimizer_need import own_share
from lowtide.run.limit.planning import Planner
from lowtide.run.look.look import Look
from lowtide.run.record.verify import Verify

_BUDGET_CHANGED = "the budget was changed"


class Known:
    """The kinds of steps of one model.

    Args:
        planner: makes their plans.
        verify: as of `limit_memory`.

    Attributes:
        kinds: by key, the latest last.
        latest: the planned kind of the latest step, or ``None``.
        lock: held while a kind or its plan changes.
    """

    def __init__(self, planner: Planner, verify: Verify) -> None:
        self.planner = planner
        self.model = planner.model
        self.verify: Verify = verify
        self.kinds: dict[StepKey, Kind] = {}
        self.latest: Kind | None = None
        self.lock = threading.RLock()
        self._told: set[str] = set()

    def tell(self, what: str, text: str) -> None:
        """Warn of something once."""
        if what not in self._told:
            self._told.add(what)
            warn(text)

    def kind_for(self, key: StepKey) -> Kind:
        """What is known of steps with this key; what an earlier step taught is acted upon now.

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
                        self._plan_standing(kind, without)
                    self.kinds[key] = kind
                    if len(self.kinds) > MOST_KINDS:
                        self.kinds.pop(next(iter(self.kinds)))
            self.planner.confer(kind)
            if kind.solve_again and not kind.wants_look:
                self._solve_again(kind)
            self.latest = kind if kind.plan is not None else self.latest
            return kind

    def _plan_standing(self, kind: Kind, without: Kind) -> None:
        """Plan for steps that add to gradients, if need be without what one step took besides."""
        try:
            self.planner.plan_standing(kind, without)
        except BudgetError as error:
            if not without.margin_bytes:
                raise
            without.margin_bytes = 0
            self.planner.plan_standing(kind, without)
            self.tell("stays", f"lowtide plans as if no step had taken more than predicted: {error}")

    def _solve_again(self, kind: Kind) -> None:
        """Make the plan again; where none fits that leaves what one step took besides, the one that is there
        stays.
        """
        try:
            self.planner.solve_again(kind)
        except BudgetError as error:
            plan = kind.plan
            if plan is None or not kind.margin_bytes or kind.solve_again == _BUDGET_CHANGED:
                raise
            kind.stays_bytes = kind.margin_bytes + max(plan.predicted_peak_bytes, plan.budget_bytes or 0)
            kind.margin_bytes, kind.solve_again = 0, ""
            self.tell("stays", f"lowtide goes on with the plan that it has, since no other fits: {error}")

    def set_budget(self, budget: str | int) -> None:
        """Plan for another budget before the next step."""
        with self.lock:
            self.planner.budget = budget
            for kind in self.kinds.values():
                kind.solve_again = _BUDGET_CHANGED

    def set_optimizer(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Plan with this optimizer's state, in place of the one counted so far, before the next step."""
        with self.lock:
            more = self.planner.count(optimizer)
            for kind in self.kinds.values():
                kind.stands_on(more)
                kind.solve_again = _BUDGET_CHANGED

    # ---- looks -----------------------------------------------------------------------------------

    def is_to_verify(self, kind: Kind) -> bool:
        """Whether a look runs each operation twice: not those that were verified at another size."""
        if self.verify == "never" or kind.looks or kind.strange or self.planner.kept:
            return self.verify != "never"
        return not any(
            other.verified is not None and other.key.differs_in_size(kind.key)
            for other in self.kinds.values()
        )

    def looked(self, kind: Kind, look: Look, graph: StepGraph) -> bool:
        """A step of a kind was looked at: plan for the longest one seen.

        Returns:
            Whether anything could be made of it. A look that trusted another size's verification and met
            another program is to be repeated.

        Raises:
            BudgetError: no plan fits.
        """
        self._tell_of(look)
        program = graph.fingerprint(sizes=False)
        if not look.verified and self.verify != "never":
            kind.strange = all(other.verified != program for other in self.kinds.values())
            if kind.strange:
                return False
        kind.verified = program
        kind.looks += 1
        kind.backwards = max(kind.backwards, look.watch.backwards)
        kind.varies = kind.varies or look.tracer.asks
        if kind.graph is None or len(graph.operations) > len(kind.graph.operations):
            self._plan(kind, graph, look.tracer.checkpoints)
        else:
            kind.look_again = ""
        self.latest = kind
        return True

    def _plan(self, kind: Kind, graph: StepGraph, checkpoints: int) -> None:
        """Plan for a kind from a step of it that was looked at, ``checkpoints`` parts of which checkpoint by
        themselves.

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
        """Operations were found that do not reproduce: say so once, and keep what they write in every plan
        from now on. Say once, too, that the model checkpoints by itself.
        """
        for name, reason in look.kept.items():
            if name not in self.planner.kept:
                warn(f"lowtide keeps the results of {name}: {reason}")
        self.planner.kept.update(look.kept)
        if look.tracer.checkpoints:
            self.tell("checkpoints", own_checkpointing(self.model))
