"""The Pareto curve of a training step, peak against time: lowtide, compiled and eager, and every rival.

python -m benchmarks budget_curve [--quick]

For each model the points of plain steps, `torch.utils.checkpoint` on every block and its selective form (each
eager and compiled), torch's own knob (`activation_memory_budget`) at 0.9 to 0.0, lowtide eager at four
budgets and lowtide compiled at twelve. Peaks are exact: the counting allocator sees what Inductor's code
allocates, but not scratch inside its kernels. Times are paired: each round runs the plain compiled step and
some of the others in an order drawn anew, and a row is scored by the median of its differences from the plain
compiled step of the same round. They go on until that median is known within 1 % of the step (95 %), 9 to 61
rounds, on one processor where PyTorch has one thread. The processor's own time stands beside.

A row is written when its peak is known, and after each round. What stands in the result file is not run
again, so a run that was stopped goes on where it was; a row that failed is tried again. Each row says which
code made it (`made_by`), when and on what (`measured`): rows of other code of lowtide, or of another PyTorch,
are measured anew. ``--quick`` runs one round of four engines on a tiny model of each kind, into a file of its
own, to see that all of it works. Scores, tables and pictures: `benchmarks.curve_report`.
"""

from __future__ import annotations

import gc
import json
import os
import random
import time
import warnings
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

import lowtide
from benchmarks.cases import of_the_curve
from benchmarks.common import RESULTS, Case, keep_pages, machine, quick, stay_on_one_processor
from benchmarks.curve_engines import PLAIN, QUICK, RIVALS, Engine, Variant, made_by, variant
from benchmarks.curve_report import front, scores, uncertainty, write_report

NAME = "budget_curve"
ROUNDS, LEAST_ROUNDS = 61, 9
AGREED = 0.01
"""Part of the plain step's time within which the median of the rounds is known, and they end."""

COMPILED_BUDGETS, EAGER_BUDGETS = 12, 4
TOGETHER = 6
"""Variants that are timed in turn with the plain compiled one: so many fit in memory, and few are lost."""


class Rows:
    """The result file: rows by model and engine, written whenever one changes.

    Args:
        name: of the file.
    """

    def __init__(self, name: str = NAME) -> None:
        self.path = RESULTS / f"{name}.json"
        before = json.loads(self.path.read_text())["rows"] if self.path.exists() else []
        self._rows: dict[tuple[str, str], dict[str, Any]] = {(r["model"], r["engine"]): r for r in before}

    def of(self, model: str) -> list[dict[str, Any]]:
        """A model's rows."""
        return [row for (name, _), row in self._rows.items() if name == model]

    def row(self, model: str, engine: Engine) -> dict[str, Any]:
        """A row, an empty one at first."""
        return self._rows.get((model, engine.key), {})

    def forget_old(self, model: str, engine: Engine) -> None:
        """Leave out a row that other code has made."""
        if self.row(model, engine).get("made_by") != made_by(engine):
            self._rows.pop((model, engine.key), None)

    def put(self, model: str, engine: Engine, **values: Any) -> None:
        """Change a row and write the file."""
        named = {"model": model, "engine": engine.key, "name": engine.name, "compiled": engine.compiled}
        named["made_by"] = made_by(engine)
        here = machine()
        named["measured"] = f"{here['date']}, {here['processor']}"
        self._rows[model, engine.key] = {
            **named,
            "setting": engine.setting,
            **self.row(model, engine),
            **values,
        }
        rows = list(self._rows.values())
        RESULTS.mkdir(exist_ok=True)
        found = {"machine": machine(), "scores": scores(rows), "rows": rows}
        beside = self.path.with_suffix(".new")  # a run stopped while it writes loses nothing either
        beside.write_text(json.dumps(found, indent=1) + "\n")
        beside.replace(self.path)


def ours(rows: Sequence[dict[str, Any]]) -> list[Engine]:
    """lowtide's points for a model whose rivals are measured.

    Eager: the smallest budget, and equal parts of the way to the plain eager peak. Compiled: the smallest
    budget, the plain compiled peak, the peaks of the rivals' front, and the middles of the widest gaps
    between these until they are twelve. What was chosen once stays.
    """
    rivals = [row for row in rows if row["name"] != "lowtide" and row.get("seconds")]
    peaks = {row["engine"]: row["peak_bytes"] for row in rivals}
    if "eager plain" not in peaks or PLAIN.key not in peaks:
        return []
    least, most, eager = min(peaks.values()), peaks[PLAIN.key], peaks["eager plain"]
    parts = [least + (eager - least) * part // EAGER_BUDGETS for part in range(1, EAGER_BUDGETS)]
    between = sorted(row["peak_bytes"] for row in front(rivals) if least < row["peak_bytes"] < most)
    budgets = {most, least, *between[: COMPILED_BUDGETS - 3]}
    while len(budgets) < COMPILED_BUDGETS - 1:
        steps = sorted(budgets)
        low, high = max(pairwise(steps), key=lambda gap: gap[1] - gap[0])
        budgets.add((low + high) // 2)
    found = []
    for compiled, chosen in ((False, parts), (True, sorted(budgets))):
        before = [r["setting"] for r in rows if r["name"] == "lowtide" and r["compiled"] == compiled]
        found += [Engine("lowtide", compiled, setting) for setting in before or ("min", *map(str, chosen))]
    return found


def prepare(case: Case, engines: Sequence[Engine], rows: Rows, shared: Any) -> list[Variant]:
    """Build the variants and note their peaks; one that cannot be built is noted with its error."""
    original, batch = shared
    found = []
    for engine in engines:
        begin = time.perf_counter()
        try:
            made = variant(engine, case, original, batch)
        except Exception as error:  # a rival that fails on a model is a result
            said = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}"
            if "peak_bytes" not in rows.row(case.name, engine):
                rows.put(case.name, engine, error=said)
            print(f"{case.name:22} {engine.key:28} failed: {said}", flush=True)
            continue
        row = rows.row(case.name, engine)
        if "peak_bytes" not in row:
            above = made.peak_bytes - lowtide.meter.resident_bytes(original)
            rows.put(
                case.name,
                engine,
                error=None,
                peak_bytes=made.peak_bytes,
                above_parameters_bytes=above,
                prepare_seconds=made.prepare_seconds,
                **made.promised,
            )
            print(
                f"{case.name:22} {engine.key:28} {above / 1e6:8.1f} MB above the parameters, prepared in "
                f"{time.perf_counter() - begin:.0f} s",
                flush=True,
            )
        found.append(made)
    return found


def timed_enough(row: dict[str, Any], rounds: int) -> bool:
    """Whether a row has been timed often enough: so many rounds, or fewer that agree."""
    done = len(row.get("seconds", ()))
    return done >= rounds or (done >= LEAST_ROUNDS and uncertainty(row) <= AGREED)


def time_in_turn(case: Case, variants: Sequence[Variant], rows: Rows, rounds: int) -> None:
    """Rounds of all variants, the plain compiled one first among them, until all are timed often enough;
    written after each round.
    """
    draw, order = random.Random(0), list(range(len(variants)))
    for made in variants:
        made.step()
    while not all(timed_enough(rows.row(case.name, made.engine), rounds) for made in variants):
        draw.shuffle(order)
        wall, own = [0.0] * len(variants), [0.0] * len(variants)
        for which in order:
            begin, own_begin = time.perf_counter(), time.process_time()
            variants[which].step()
            wall[which], own[which] = time.perf_counter() - begin, time.process_time() - own_begin
        for at, made in enumerate(variants):
            row = rows.row(case.name, made.engine)
            if len(row.get("seconds", ())) < rounds:
                took = {
                    "seconds": wall[at],
                    "plain_seconds": wall[0],
                    "cpu_seconds": own[at],
                    "plain_cpu_seconds": own[0],
                }
                added = {name: [*row.get(name, ()), seconds] for name, seconds in took.items()}
                rows.put(case.name, made.engine, **added, load=os.getloadavg()[0])


def run(case: Case, rows: Rows, rounds: int, only: str, engines: Sequence[Engine] = ()) -> None:
    """All that is missing of a model: first the rivals, then lowtide at budgets that these suggest; or these
    engines.
    """
    torch._dynamo.config.recompile_limit = 1000  # all variants share one forward function
    torch._dynamo.config.accumulated_recompile_limit = 1000
    shared = (case.build(), case.batch())
    asked = (lambda: list(RIVALS), lambda: ours(rows.of(case.name)))
    for ask in (lambda: list(engines),) if engines else asked:
        wanted = [engine for engine in ask() if only in engine.key]
        for engine in wanted:
            rows.forget_old(case.name, engine)
        missing = [
            engine
            for engine in wanted
            if "peak_bytes" not in (row := rows.row(case.name, engine)) or not timed_enough(row, rounds)
        ]
        for at in range(0, len(missing), TOGETHER):
            group = [PLAIN, *(engine for engine in missing[at : at + TOGETHER] if engine != PLAIN)]
            variants = prepare(case, group, rows, shared)
            if rounds and len(variants) > 1 and variants[0].engine == PLAIN:
                time_in_turn(case, variants, rows, rounds)
            del variants
            torch._dynamo.reset()
            gc.collect()


def main(models: Sequence[str] = (), rounds: int | None = None, only: str = "") -> None:
    """Run what is missing and write benchmarks/results/budget_curve.json, its tables and its picture.

    Args:
        models: names of cases; all without one.
        rounds: of the times at most; 0 measures peaks alone.
        only: a part of the engines' names.
    """
    warnings.simplefilter("ignore")
    keep_pages()
    stay_on_one_processor()
    rows = Rows(f"{NAME}_quick" if quick() else NAME)
    for case in of_the_curve(quick()):
        if not models or case.name in models:
            most = (1 if quick() else ROUNDS) if rounds is None else rounds
            run(case, rows, most, only, QUICK if quick() else ())
    if not quick():
        write_report()


if __name__ == "__main__":
    main()
