"""The plans of a limited model: a `PlanBook` of entries, one for each key of a step.

In: the key of a step that begins; a step that was written down; a step that has ended. Out: the step's
entry, and how the step runs (`How`). Plans are made between steps, before a key's next forward at the latest.
Whatever a plan says, the governor holds the budget while a step is recorded
(``run/record/cpp/governor.h``), so nothing is learnt from one that took more. A step that runs as it is
(`How.PASS`) is not held: where one took more, its kind is recorded from then on.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

from lowtide.errors import BudgetError
from lowtide.graph import StepGraph
from lowtide.run.limit.checks import refuse_several_devices
from lowtide.run.limit.entry import Entry, Facts, How, Kind, Planned, State
from lowtide.run.limit.key import StepKey
from lowtide.run.limit.planning import PlanMaker
from lowtide.run.messages import LEAST, own_checkpointing, warn
from lowtide.run.profile.profiler import Profiler
from lowtide.run.record.special import Verify
from lowtide.run.transforms import checkpoint_bytes

MOST_ENTRIES = 24  # are remembered
_MOST_PLANS = 4  # of steps that are alike but for sizes and what they run
_ROOMY = 0.9  # a step that takes no more of the budget runs as it is
_LISTENED_AFTER = (1, 3, 7)
"""After so many steps of a kind that no plan foresaw, and that were not written down, the next one is."""


class PlanBook:
    """The plans of one model, by the key of a step.

    Args:
        maker: makes the plans.
        verify: as of `limit_memory`.

    Attributes:
        known: the entries by key, the latest used last.
        verified: programs whose operations reproduce.
        latest: the plan of the latest step, or ``None``.
        lock: held while an entry changes.
    """

    def __init__(self, maker: PlanMaker, verify: Verify) -> None:
        self.maker = maker
        self.verify: Verify = verify
        self.known: dict[StepKey, Entry] = {}
        self.latest: Planned | None = None
        self.lock = threading.RLock()
        self._kinds: dict[Any, Kind] = {}
        self.verified: deque[str] = deque(maxlen=MOST_ENTRIES)

    # ---- a step begins ---------------------------------------------------------------------------

    def find(self, key: StepKey) -> Entry:
        """The entry for steps with this key: the one that was made for them, else the one of the smallest
        steps whose plan serves these, too, else a new one. A new one begins from a sibling where there is
        one: an entry whose steps differ from these only in the gradients that exist before them. Where there
        are too many entries, the least recently used one goes.
        """
        with self.lock:
            found = self.known.get(key) or (self._find_serving(key) if self.known else None)
            if found is None and sum(one.recalls(self, key) for one in self.maker.extensions):
                found = self.known.get(key) or self._find_serving(key)
            if found is not None:
                self.known[found.key] = self.known.pop(found.key)  # now the latest used
                return found
            refuse_several_devices(self.maker.model)
            entry = self.known[key] = Entry(key, self._kinds.setdefault(key[1:], Kind()))
            sibling = self._sibling(key) if key.gradients else None
            if sibling is not None and sibling.state is not State.REFUSED:
                entry.graph, entry.borrowed, entry.facts = sibling.graph, True, sibling.facts
                entry.forward_spans, entry.later_keys = sibling.forward_spans, sibling.later_keys
                # it is planned for without being listened to
                entry.kind = self._kinds[key[1:]] = sibling.kind
            if len(self.known) > MOST_ENTRIES:
                del self.known[next(iter(self.known))]
            return entry

    def put(self, entry: Entry) -> None:
        """Have an entry that an earlier process has kept. One that has no plan is planned for now.

        Raises:
            BudgetError: no plan fits.
        """
        if entry.planned is None:
            self._plan(entry)
        entry.kind = self._kinds.setdefault(entry.key[1:], entry.kind)
        self.known.setdefault(entry.key, entry)

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
        return next(others, None)

    def begin(
        self, entry: Entry, co_limited: bool = False, backward_unseen: bool = False, prepared: bool = False
    ) -> How:
        """How the next step of an entry runs. A plan is made here where there is none, or an outdated one.

        Args:
            entry: of the step.
            co_limited: other limited models take part in it. It is not written down, since what they do would
                be, too: a step of the model alone is, aside.
            backward_unseen: its backward runs where no operation is intercepted.
            prepared: no step of the user's begins: a plan is made ahead, from one of lowtide's own.

        Raises:
            BudgetError: no plan fits.
        """
        with self.lock:
            for extension in self.maker.extensions:
                extension.begins(entry)
            entry.facts.backward_unseen |= backward_unseen
            how = self._how(entry, entry.facts.backward_unseen or prepared, co_limited)
            entry.is_asked = False
            self.latest = entry.planned or self.latest
            return how

    def _how(self, entry: Entry, unseen: bool, co_limited: bool) -> How:
        if entry.graph is not None and entry.planned_for != self.maker.version:
            self._plan(entry)
        listens = entry.is_listened or (
            entry.state is State.NEW and (unseen or self.maker.asked.given is None)
        )
        aside = unseen or co_limited
        if listens and not (aside and entry.state is State.PLANNED):
            return How.ASIDE if aside else How.LISTEN
        if entry.state is not State.PLANNED:
            return How.GOVERN
        assert entry.planned is not None
        plan, limit = entry.planned.plan, self.maker.budget_bytes
        roomy = limit is None or plan.predicted_peak_bytes <= _ROOMY * limit
        is_first = entry.planned.is_kept and not entry.planned.history.steps
        may_exceed = entry.kind.recorded or entry.facts.may_differ or co_limited or is_first
        return How.PASS if plan.changes_nothing and roomy and not may_exceed else How.FOLLOW

    def _plan(self, entry: Entry) -> None:
        """Make a plan from the graph of an entry.

        Raises:
            BudgetError: no plan fits.
        """
        maker = self.maker
        if entry.planned_for != maker.version:
            entry.planned, entry.kind.recorded = None, entry.facts.makes_graph  # that was for another budget
        entry.planned_for = maker.version
        try:
            planned = self._made(entry, maker.budget)
        except BudgetError as error:
            if not maker.is_awaited or not error.smallest_bytes:
                entry.state = State.PLANNED if entry.planned is not None else State.REFUSED
                raise
            planned = self._made(entry, error.smallest_bytes)
            maker.warn_once(f"{LEAST} {id(entry)} {maker.version}", f"{LEAST} {error.with_traceback(None)}")
        entry.kind.plans += 1
        entry.planned, entry.state, entry.planned_for = planned, State.PLANNED, maker.version

    def _made(self, entry: Entry, budget: str | int | None) -> Planned:
        graph, plan = self.maker.make(entry, budget)
        return Planned(entry.key, graph, plan, entry.forward_spans, entry.later_keys)

    # ---- a step was written down -----------------------------------------------------------------

    def is_to_verify(self, entry: Entry) -> bool:
        """Whether operations of a step that is written down run twice: not where that was done at another
        size.
        """
        if self.verify == "never" or entry.listened or self.maker.findings:
            return self.verify != "never"
        return entry.kind.plans == 0

    def see_graph(
        self,
        entry: Entry,
        profiler: Profiler,
        graph: StepGraph,
        own_bytes: int,
        unused: int,
        later_keys: Sequence[StepKey],
        governed_bytes: int | None = None,
    ) -> None:
        """Plan from a step that was written down.

        Args:
            entry: of the step.
            profiler: of the step.
            graph: the step.
            own_bytes: what was there before the step (`Inputs.resident_bytes`).
            unused: as of `unused_bytes`.
            later_keys: as of `Entry`.
            governed_bytes: what the step took under a governor, or ``None``.

        Raises:
            BudgetError: no plan fits; on every rank that shares the model's layers.
        """
        with self.lock:
            self._see_graph(entry, profiler, graph, own_bytes, unused, later_keys, governed_bytes)

    def _see_graph(
        self,
        entry: Entry,
        profiler: Profiler,
        graph: StepGraph,
        own_bytes: int,
        unused: int,
        later_keys: Sequence[StepKey],
        governed_bytes: int | None,
    ) -> None:
        maker, kind = self.maker, entry.kind
        entry.listened += 1
        kind.listens = False
        self._warn_of_operations(profiler)
        program = graph.fingerprint(sizes=False)
        if profiler.verified:
            self.verified.append(program)
        elif self.verify != "never" and program not in self.verified:
            kind.listens = True  # once more, with each operation run twice
        entry.facts = Facts(
            backwards=max(entry.facts.backwards, profiler.watch.backwards + profiler.early),
            checkpoints=profiler.checkpoints,
            makes_graph=profiler.watch.makes_graph,
            nested=entry.facts.nested or profiler.nested,
            hidden_bytes=profiler.collectives.overlapping_bytes
            + checkpoint_bytes(graph, profiler.checkpoints),
            unused_bytes=unused,
            outside_bytes=max(0, graph.resident_bytes + unused - own_bytes),
            backward_unseen=entry.facts.backward_unseen,
            may_differ=entry.facts.may_differ or profiler.may_differ,
        )
        entry.forward_spans, entry.later_keys = tuple(profiler.forward_spans), tuple(later_keys)
        entry.borrowed, refusal = False, None
        kind.recorded |= entry.facts.makes_graph
        for extension in maker.extensions:
            graph = extension.transform(graph, entry, profiler)
        entry.graph = graph
        try:
            self._plan(entry)
        except BudgetError as error:
            # the governor holds later steps as it has held this one; of what a backward saves, making a
            # graph, the governor evicts some, and a plan nothing
            limit = maker.budget_bytes
            least = error.smallest_bytes if entry.facts.makes_graph else limit
            to_come = maker.claim.to_come_bytes  # of the optimizer's state, beside which later steps run
            held = governed_bytes is not None and governed_bytes + to_come <= (least or 0)
            entry.is_held = held and limit is not None and maker.refusal(limit) is None
            refusal = None if entry.is_held else error
            kind.recorded = True  # a plan of an earlier step is no reason to let one run as it is
        for extension in maker.extensions:
            refusal = extension.settle(entry, refusal)
        self.latest = entry.planned or self.latest
        if refusal is not None:
            try:
                raise refusal
            finally:
                del refusal  # its traceback holds this frame, and all that the step's frames hold

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

    # ---- a step has ended ------------------------------------------------------------------------

    def see(
        self, entry: Entry, foreseen: bool, took_bytes: int | None, recorded: bool, again: bool = False
    ) -> None:
        """A step has ended.

        Args:
            entry: of the step.
            foreseen: it followed its plan to the end.
            took_bytes: its peak, resident bytes included; ``None`` where that is not known.
            recorded: its operations were recorded.
            again: it was told of before, and has taken more since.
        """
        with self.lock:
            limit = self.maker.budget_bytes
            above = limit is not None and took_bytes is not None and took_bytes > limit
            entry.kind.recorded |= above and not recorded
            entry.facts.may_differ |= not foreseen and entry.state is State.PLANNED
            kind, was_foreseen = entry.kind, foreseen and not (above and not recorded)
            if not was_foreseen and not again:
                kind.governed += 1
                kind.listens |= kind.governed in _LISTENED_AFTER and kind.plans < _MOST_PLANS
            needs = above or (limit is None and not was_foreseen)
            if needs and took_bytes is not None and self.maker.asked.word == "min":
                self.maker.raise_to(took_bytes)
