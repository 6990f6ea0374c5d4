"""Plans that the next process uses: `KeptPlans`, an extension of a limit.

In: a folder. What the limit plans is written there, a file for each rank. When a step comes whose key has no
entry, and an earlier process has kept one, the entry is put into the book with its plan. What the profile of
that process showed comes with it, so a step for which the plan is not right (another budget, another
optimizer) is planned for without being profiled.

A kept plan is followed as any other: each operation is compared with the plan's program, and the governor
holds the budget. So a file that is not right for a model costs time, and no bits.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lowtide.errors import BudgetError, PlanError, expect
from lowtide.extension import Extension
from lowtide.extensions.kept.file import (
    Common,
    KeptKey,
    NotUsed,
    key_of,
    maker_of,
    read,
    read_step,
    step_text,
    write,
)
from lowtide.graph import StepGraph
from lowtide.meter.resident import model_device
from lowtide.progress import took
from lowtide.run.limit.book import PlanBook
from lowtide.run.limit.entry import Entry, Planned, State
from lowtide.run.limit.key import Inputs, Members, StepKey
from lowtide.run.messages import warn
from lowtide.run.profile.profiler import Profiler
from lowtide.words import count_text

_SETTLED = 2
"""After so many steps under a plan it is known what their operations need."""


class KeptPlans(Extension):
    """Keeps the plans of a limit in a folder, and uses those that are there.

    Args:
        folder: of the plans. It is made where there is none.
    """

    name = "plans"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._made_by: dict[str, str] | None = None  # before the first step
        self._steps: dict[KeptKey, str] = {}  # of the file, as long as no such step has come
        self._keys: dict[StepKey, KeptKey] = {}
        self._programs: dict[StepKey, str] = {}  # as `PlanBook.verified` has them
        self._written: dict[StepKey, tuple[Planned | None, bool, str | None]] = {}
        self._book: PlanBook | None = None
        self._is_due = self._fails = False

    def copied(self) -> KeptPlans:
        """The same folder."""
        return KeptPlans(self.folder)

    @property
    def path(self) -> Path:
        """The file of this rank."""
        rank, ranks = 0, 1
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
        return self.folder / f"{type(self.model).__name__}-rank{rank}of{ranks}.jsonl"

    # ---- what an earlier process has kept --------------------------------------------------------

    def recalls(self, book: PlanBook, key: StepKey) -> bool:
        """Put the kept steps that differ from this one in sizes alone into the book."""
        begin = time.perf_counter()
        self._book = book
        self._open()
        others = [found for one in self.maker.extensions if (found := one.key(self.model)) is not None]
        kept = self._keys[key] = key_of(key, Members(self.model), others)
        alike = [one for one in self._steps if one.others == kept.others]
        count = sum(self._recall(book, key, one) for one in alike)
        if count:
            plans = f"of {count_text(count, 'kind')} of steps, from {self.path}"
            took("read plans of an earlier run", time.perf_counter() - begin, plans, self.maker.progress)
        return count > 0

    def opens(self, limiter: Any, inputs: Inputs) -> None:
        """Read the file before the first step, whose key may depend on it."""
        if self._made_by is None:
            self._open()
            inputs.forget_key()

    def _open(self) -> None:
        """Read the file once, and use it where all ranks can use theirs."""
        if self._made_by is not None:
            return
        self._made_by = maker_of(self.model, model_device(self.model))
        common, steps, why = None, list[str](), ""
        try:
            common, steps = read(self.path, self._made_by)
        except FileNotFoundError:
            pass
        except NotUsed as error:
            why = str(error)
        states = {} if common is None else common.extensions
        agreed = [one.resumes(states.get(one.name)) for one in self.maker.extensions]  # each is asked
        if common is not None and not all(agreed):
            why = "another rank has none that it can use"
        if why:
            warn(f"the plans in {self.path} are not used: {why}. Steps are profiled and planned for anew")
        if common is not None and all(agreed):
            self._steps = dict(zip(common.keys, steps, strict=True))
            self._take_over(common)

    def _take_over(self, common: Common) -> None:
        """What holds for all steps."""
        maker = self.maker
        maker.findings.update(common.findings)
        maker.forms.know(common.forms)
        maker.greatest_plain = max(maker.greatest_plain, common.plain_bytes)
        if common.budget == maker.budget and common.budget_bytes is not None and maker.asked.word != "auto":
            maker.raise_to(common.budget_bytes)

    def _recall(self, book: PlanBook, key: StepKey, kept: KeptKey) -> bool:
        """Put one kept step into the book. One that has no plan for this limit is planned for where the step
        that comes needs it.
        """
        maker, text = self.maker, self._steps.pop(kept)
        at = key._replace(shapes=kept.shapes)
        try:
            entry, program, plan = read_step(text, at, maker.policy, maker.budget)
            planned = None if plan is None or maker.asked.word == "auto" else self._planned(entry, plan)
            if planned is None and maker.shares_plan:
                return False  # others would have to plan with this rank: all profile such a step
            if planned is None and not key.fits_in(at):
                self._steps[kept] = text  # until such a step comes
                return False
            entry.kind.listens |= book.verify != "never" and not program
            if planned is not None:
                entry.planned, entry.state, entry.planned_for = planned, State.PLANNED, maker.version
                entry.kind.plans = 1
            book.put(entry)
        except NotUsed as error:
            warn(f"of the plans in {self.path} one is not used: {error}")
            return False
        except BudgetError:  # it is profiled, which says what does fit
            return False
        if entry.planned is not None and not entry.planned.is_kept:
            entry.planned = replace(entry.planned, is_kept=True)
        if program:
            book.verified.append(program)
        self._keys[at], self._programs[at] = kept, program
        if planned is not None:
            self._written[at] = planned, entry.kind.listens, text
        return True

    def _planned(self, entry: Entry, plan: Any) -> Planned | None:
        """The plan in force, where it is for the step as this limit has it, with what extensions claim."""
        graph = self.maker.transform(entry)
        if graph.fingerprint() != plan.graph:
            return None
        return Planned(entry.key, graph, plan, entry.forward_spans, entry.later_keys, is_kept=True)

    # ---- what the next process finds -------------------------------------------------------------

    def transform(self, graph: StepGraph, entry: Entry, profiler: Profiler) -> StepGraph:
        """Note which program the step runs."""
        self._programs[entry.key] = graph.fingerprint(sizes=False)
        return graph

    def settle(self, entry: Entry, refusal: BudgetError | None) -> BudgetError | None:
        """Write a new plan down."""
        if entry.planned is not None:
            self._write()
        return refusal

    def begins(self, entry: Entry) -> None:
        """Write a plan down that was made without a profile, and what steps under a new one have shown."""
        planned = entry.planned
        if planned is None or entry.key not in self._keys:
            return
        written = self._written.get(entry.key)
        is_new = written is None or written[0] is not planned
        if is_new or self._is_due or (planned.history.steps == _SETTLED and not planned.is_kept):
            self._write()

    def close(self) -> None:
        """Write what was not written yet."""
        self._write()

    def _write(self) -> None:
        book, maker = self._book, self.maker
        if book is None or self._fails:
            return
        assert self._made_by is not None
        states = {one.name: one.keeps() for one in maker.extensions}
        self._is_due = None in states.values()
        if self._is_due:
            return
        steps = dict(self._steps)
        for key, entry in book.known.items():
            if key in self._keys and (text := self._text(entry)):
                steps[self._keys[key]] = text
        common = Common(
            maker.budget,
            maker.budget_bytes,
            maker.greatest_plain,
            maker.findings,
            maker.forms.known(),
            states,
            list(steps),
        )
        try:
            write(self.path, self._made_by, common, steps.values())
        except OSError as error:
            self._fails = True
            warn(f"plans are not kept: {self.path} cannot be written ({error.strerror or error})")

    def _verified_program(self, entry: Entry, book: PlanBook) -> str:
        """The program of a step, or of the sibling whose profile it has; empty where it was not verified."""
        profiled = (other.key for other in book.known.values() if other.graph is entry.graph)
        programs = (self._programs.get(key, "") for key in profiled)
        return next((program for program in programs if program in book.verified), "")

    def _text(self, entry: Entry) -> str | None:
        """A step as it is in the file: without its plan where that is for an earlier budget."""
        if entry.planned is None or entry.graph is None:
            return None
        planned = entry.planned if entry.planned_for == self.maker.version else None
        written, listens = self._written.get(entry.key), entry.kind.listens
        if written is not None and written[:2] == (planned, listens):
            return written[2]
        assert self._book is not None
        plan, program = None if planned is None else planned.plan, self._verified_program(entry, self._book)
        text = step_text(entry, plan, program, self.maker.policy, self.maker.budget)
        self._written[entry.key] = planned, listens, text
        return text


def kept_in(folder: Any) -> KeptPlans:
    """What keeps plans in a folder.

    Raises:
        PlanError: it is no folder.
    """
    expect(isinstance(folder, str | Path), "limit_memory(plans=)", folder, 'a folder, "plans"')
    path = Path(folder).expanduser()
    if path.exists() and not path.is_dir():
        raise PlanError(f"limit_memory(plans=) takes a folder, and {path} is a file")
    return KeptPlans(path)
