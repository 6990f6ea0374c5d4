"""The cached plans of a limited model: the one owner of its entries.

In: the key of a step that begins, or a step that was profiled. Out: the entry of such steps, with a plan
where one can be made. The state machine says what follows (`machine.py`); plans are made here when it asks.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

from lowtide import budget as budgets
from lowtide.errors import BudgetError
from lowtide.graph import StepGraph
from lowtide.run.limit import machine
from lowtide.run.limit.checks import refuse_several_devices
from lowtide.run.limit.entry import Entry, Planned
from lowtide.run.limit.entry_states import Action
from lowtide.run.limit.key import StepKey
from lowtide.run.limit.planning import PlanMaker
from lowtide.run.messages import AS_IF, LEAST, own_checkpointing, warn
from lowtide.run.profile.profiler import Profiler
from lowtide.run.record.special import Verify
from lowtide.run.transforms import unused_bytes

MOST_ENTRIES = 24  # are remembered


class Cache:
    """The cached plans of one model.

    Args:
        maker: makes the plans.
        verify: as of `limit_memory`.

    Attributes:
        known: the entries by key, the latest used last.
        latest: the plan of the latest step, or ``None``.
        lock: held while an entry changes its state. How often and how long steps ran under a plan is written
            down by the running step alone, without the lock.
    """

    def __init__(self, maker: PlanMaker, verify: Verify) -> None:
        self.maker = maker
        self.verify: Verify = verify
        self.known: dict[StepKey, Entry] = {}
        self.latest: Planned | None = None
        self.lock = threading.RLock()
        self._verified: deque[StepGraph] = deque(maxlen=MOST_ENTRIES)  # steps whose operations reproduce

    # ---- a step begins ---------------------------------------------------------------------------

    def find(self, key: StepKey) -> Entry:
        """The entry for steps with this key: the one that was made for them, else the one of the smallest
        steps whose plan serves these, too, else a new one. A new one begins from a sibling where there is
        one: an entry whose steps differ from these only in the gradients that exist before them. Where there
        are too many entries, the least recently used one goes.
        """
        with self.lock:
            found = self.known.get(key) or self._find_serving(key)
            if found is not None:
                self.known[found.key] = self.known.pop(found.key)  # now the latest used
                return found
            refuse_several_devices(self.maker.model)
            sibling = self._sibling(key)
            entry = self.known[key] = Entry(key)
            # before the entry's first evidence: where no plan fits the sibling's steps, none fits these
            if sibling is not None and sibling.refused_at != self.maker.version:
                machine.borrow(entry, sibling)
            if len(self.known) > MOST_ENTRIES:
                machine.on_removed(self.known.pop(next(iter(self.known))))
            return entry

    def _find_serving(self, key: StepKey) -> Entry | None:
        """The smallest entry whose plan serves steps with this key."""
        serving = (entry for entry in self.known.values() if entry.serves(key))
        return min(serving, key=lambda entry: entry.key.elements(), default=None)

    def _sibling(self, key: StepKey) -> Entry | None:
        """An entry whose step graph is known, of steps that differ from those with this key only in gradients
        that exist before.
        """
        alike = key.without_gradients()
        lend = (entry for entry in self.known.values() if entry.lends)
        others = (entry for entry in lend if entry.key.without_gradients() == alike)
        return next(others, None) if key.gradients else None

    def stop(self) -> None:
        """The limit is removed."""
        with self.lock:
            for entry in self.known.values():
                machine.on_removed(entry)

    def begin_step(
        self, entry: Entry, shared: bool = False, backward_unseen: bool = False, prepared: bool = False
    ) -> Action:
        """Begin the next step of an entry. Returns whether the step is profiled or runs under a plan; that is
        made here where there is none.

        Args:
            entry, shared, backward_unseen, prepared: as of `machine.on_called`.

        Raises:
            BudgetError: no plan fits.
        """
        with self.lock:
            for extension in self.maker.extensions:
                extension.begins(entry)
            asked = machine.on_called(entry, self.maker.version, shared, backward_unseen, prepared)
            action = self._plan(entry, asked)
            self.latest = entry.planned or self.latest
            self._warn_above(entry)  # of a profiled step whose budget was refused, so that no plan came then
            return action

    def _plan(self, entry: Entry, action: Action) -> Action:
        """Make plans as long as the state machine asks for one. Returns the action that it ends with.

        Raises:
            BudgetError: no plan fits.
        """
        maker, version = self.maker, self.maker.version
        smallest, refused = None, None
        while action in (Action.PLAN, Action.PLAN_SMALLEST):
            try:
                planned = maker.make(entry, maker.budget if smallest is None else smallest)
            except BudgetError as error:
                waits = maker.is_awaited and smallest is None and bool(error.smallest_bytes)
                action = machine.on_plan_refused(entry, version, waits)
                if action is Action.RAISE:
                    raise
                if action is Action.PLAN_SMALLEST:
                    smallest = error.smallest_bytes
                refused = error.with_traceback(None) if action is not Action.VARY else None
            else:
                action = machine.on_plan_made(entry, planned, version)
        if refused is not None and smallest is not None:
            warn(f"{LEAST} {refused}", each_time=True)
        elif refused is not None:
            maker.warn_once("stays", f"{AS_IF} {refused}")
        return Action.RUN if action in (Action.ACCEPT, Action.VARY) else action

    # ---- a step was profiled ---------------------------------------------------------------------

    def is_to_verify(self, entry: Entry) -> bool:
        """Whether operations of a profiled step run twice: not where that was done at another size."""
        if self.verify == "never" or entry.seen.profiles or self.maker.findings:
            return self.verify != "never"
        others = self.known.values()
        return not any(other.seen.profiles and other.key.differs_in_size(entry.key) for other in others)

    def plan_from(
        self,
        entry: Entry,
        profiler: Profiler,
        graph: StepGraph,
        users: bool,
        later_keys: Sequence[StepKey] = (),
        own_bytes: int = 0,
    ) -> int | None:
        """Plan from a profiled step.

        Args:
            entry: of the step.
            profiler: of the step.
            graph: the step, as the profile shows it.
            users: whether it was a step of the user's, whose peak is compared with the budget.
            later_keys: as of `Entry`.
            own_bytes: what was there before the step (`Inputs.resident_bytes`).

        Returns:
            What a step of the user's took; ``None`` where that is not known.

        Raises:
            BudgetError: no plan fits; on every rank that shares the model's layers.
        """
        maker, peak = self.maker, profiler.peak_bytes
        taken, unused = None, unused_bytes(maker.model, graph)
        machine.note_outside(entry, graph.resident_bytes + unused - own_bytes)
        if users and peak is not None:
            claim = maker.claim
            taken = own_bytes + entry.outside_bytes + claim.resident_bytes - claim.to_come_bytes + peak
            machine.note_peak(entry, taken)
        self._warn_of_operations(profiler)
        if profiler.verified:
            self._verified.append(graph)
        action = machine.on_profiled(
            entry,
            graph,
            verified=profiler.verified or self.verify == "never" or self._reproduces(graph),
            backwards=profiler.watch.backwards + profiler.early,
            makes_graph=profiler.watch.makes_graph,
            may_differ=profiler.may_differ,
            ran=profiler.ran,
            checkpoints=profiler.checkpoints,
            collectives_bytes=profiler.collectives.overlapping_bytes,
            unused_bytes=unused,
            forward_spans=profiler.forward_spans,
            later_keys=later_keys,
            nested=profiler.nested,
        )
        if action is Action.PLAN:
            self._plan_together(entry, graph, profiler)
        self.latest = entry.planned or self.latest
        self._warn_above(entry)
        return taken

    def _reproduces(self, graph: StepGraph) -> bool:
        """Whether a step of the same program was seen to reproduce."""
        program = graph.fingerprint(sizes=False)
        return any(program == one.fingerprint(sizes=False) for one in self._verified)

    def _plan_together(self, entry: Entry, graph: StepGraph, profiler: Profiler) -> None:
        """Plan for a step that was just profiled.

        Raises:
            BudgetError: no plan fits; on every rank that shares the model's layers.
        """
        refusal = None
        for extension in self.maker.extensions:
            graph = extension.transform(graph, entry, profiler)
        machine.set_graph(entry, graph)
        try:
            self._plan(entry, Action.PLAN)
        except BudgetError as error:
            refusal = error
        for extension in self.maker.extensions:
            refusal = extension.settle(entry, refusal)
        if refusal is not None:
            try:
                raise refusal
            finally:
                del refusal  # its traceback holds this frame, and all that the step's frames hold

    # ---- warnings --------------------------------------------------------------------------------

    def _warn_of_operations(self, profiler: Profiler) -> None:
        """Warn of a model that checkpoints by itself, and of operations that do not reproduce: every plan
        keeps their results from now on.
        """
        findings = profiler.tape.findings
        for name, reason in findings.items():
            if name not in self.maker.findings:
                warn(f"lowtide keeps the results of {name}: {reason}")
        self.maker.findings.update(findings)
        if profiler.checkpoints:
            self.maker.warn_once(own_checkpointing(self.maker.model))

    def _warn_above(self, entry: Entry) -> None:
        """Warn if a profiled step took more than the budget, once a plan says how much that is."""
        if entry.planned is None or not entry.seen.unwarned_bytes:
            return
        taken, limit = machine.pop_peak(entry), entry.planned.plan.budget_bytes
        if limit is not None and taken > limit:
            which = "the first step" if len(self.known) == entry.seen.profiles == 1 else "this step"
            smallest = budgets.asks_for(self.maker.budget) == "min"
            others = ", other kinds to their own smallest" if smallest else ""
            warn(
                f"{which}, from which lowtide plans, took {budgets.format_bytes(taken)}, and the budget is "
                f"{budgets.format_bytes(limit)}; later ones of its kind keep to it{others}",
                each_time=True,
            )
