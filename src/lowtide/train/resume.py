"""Going on with a run: which one, with what options, and what does not go together."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from lowtide.train import checkpoint
from lowtide.train.checkpoint import CheckpointError
from lowtide.train.options import OptionError

RUNS = Path("runs")
"""Where ``make train`` puts its runs, each in a folder of its own."""

_OWN = {
    "checkpoint_dir",
    "resume",
    "stop_after",
    "compare",
    "json",
    "report",
    "tensorboard",
}
_LAYOUT = {
    "tp",
    "cp",
    "cp_exchange",
    "dp",
    "pp",
    "sequence_parallel",
    "shard_parameters",
    "dp_replicate",
    "schedule",
}
"""A checkpoint is loaded into any layout, so the command says which."""

_TOGETHER = ({"budget", "raise_budget", "policy", "host_budget", "tiles"}, {"compile", "compile_backend"})
"""Where the command says one, it says all."""


def newest_run(runs: Path = RUNS) -> Path:
    """The folder in ``runs`` with the newest checkpoint.

    Raises:
        CheckpointError: there is none.
    """
    folders = [folder for folder in runs.iterdir() if checkpoint.steps(folder)] if runs.is_dir() else []
    if not folders:
        raise CheckpointError(
            f"--resume: there is nothing to resume, no folder in {str(runs)!r} holds a checkpoint: leave out "
            "--resume to start a run, or name its folder with --checkpoint-dir"
        )
    return max(folders, key=lambda folder: (_written(folder), folder.name))


def _written(folder: Path) -> float:
    return checkpoint.manifest(folder, checkpoint.steps(folder)[-1]).stat().st_mtime


def named_folder(run: Path | None, resume: bool, checkpoint_dir: Path | None) -> Path | None:
    """The folder for checkpoints, which may be named behind ``--resume``, too.

    Raises:
        OptionError: a run is named that is not to be resumed, or two are.
    """
    if run is None:
        return checkpoint_dir
    if not resume:
        raise OptionError(
            f"{run}: this names a run, but not what to do with it: write --resume {run} to continue it, "
            f"--checkpoint-dir {run} to start one there, --data {run} to train on what is there"
        )
    if checkpoint_dir is not None and checkpoint_dir.resolve() != run.resolve():
        raise OptionError(
            f"--resume {run} --checkpoint-dir {checkpoint_dir}: a run continues in its own folder: "
            "leave out --checkpoint-dir"
        )
    return run


def options_to_resume(asked: dict[str, Any], given: Collection[str]) -> dict[str, Any]:
    """Options for going on with a run: what the command does not say is as the run was started.

    Args:
        asked: the command's options by name, defaults included; without a ``checkpoint_dir`` the newest run
            is taken.
        given: the names that the command says something about.

    Raises:
        CheckpointError: there is no run.
    """
    folder = asked["checkpoint_dir"] or newest_run()
    if not checkpoint.steps(folder):
        why = "no checkpoint is there" if folder.is_dir() else "there is no such folder"
        raise CheckpointError(
            f"--resume {folder}: {why}: give the folder of a run that wrote some, or leave out --resume "
            "to start anew"
        )
    options = {**asked, "checkpoint_dir": folder}
    kept = set(given) | _OWN | _LAYOUT
    for names in _TOGETHER:
        kept |= names if names & kept else set()
    begun = started_with(folder)
    for name, value in begun.items():
        if name in options and name not in kept:
            options[name] = value
    if begun.get("batch") and begun.get("grad_accum"):
        options |= _micro_batches(options, begun["batch"] * begun["grad_accum"], set(given))
    step = (checkpoint.steps(folder) or [0])[-1]
    if options["json"] is None and (folder / "results.json").exists():
        options["json"] = folder / f"results-from-{step}.json"
    page = (folder / "report.html").exists() and options["compare"] is not False
    if options["report"] is None and page:
        options["report"] = folder / f"report-from-{step}.html"
    return options


def _micro_batches(options: dict[str, Any], sequences: int, given: set[str]) -> dict[str, int]:
    """The sequences of a step as micro-batches: as many as the command says, or of the size that it says, or
    as a pipeline needs. Empty where the options are right as they are, or nothing else divides.
    """
    if (one := {"batch", "grad_accum"} & given) and len(one) == 1:
        (name,) = one
        (other,) = {"batch", "grad_accum"} - one
        fits = options[name] > 0 and sequences % options[name] == 0
        return {other: sequences // options[name]} if fits else {}
    if one or options.get("pp", 1) == 1:
        return {}
    from lowtide.train.arrangements import fills_pipeline  # takes seconds

    counts = range(options["grad_accum"], sequences + 1, options["grad_accum"])
    fits = (
        count
        for count in counts
        if sequences % (count * options.get("dp", 1)) == 0
        and fills_pipeline(options["schedule"], options["pp"], count)
    )
    count = next(fits, options["grad_accum"])
    return {"batch": sequences // count, "grad_accum": count}


def started_with(folder: Path) -> dict[str, Any]:
    """The options of a run, from its newest checkpoint that can be read; empty where checkpoints do not
    tell.
    """
    for step in reversed(checkpoint.steps(folder)):
        try:
            return dict(
                json.loads(checkpoint.manifest(folder, step).read_text(encoding="utf-8"))["run"].get(
                    "options", {}
                )
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue
    return {}


def check_same(folder: Path, run: dict[str, Any], now: dict[str, Any], done: int, last: int) -> None:
    """Refuse to go on with a run as another one; a run may get more steps than it was started with.

    Args:
        folder: of the run.
        run: what its checkpoint says that the losses depend on.
        now: what is asked for.
        done: steps that it has done.
        last: the step at which to stop now.

    Raises:
        OptionError: something differs, with all that does; or no step is left.
    """
    differs = [name for name, value in run.items() if name in now and now[name] != value]
    begun, asked = (each.get("batch", 0) * each.get("grad_accum", 0) for each in (run, now))
    if begun == asked:  # a step is of the same sequences, in other micro-batches
        differs = [name for name in differs if name not in ("batch", "grad_accum")]
    if "steps" in differs and now["steps"] > run["steps"]:
        differs.remove("steps")
    words = {
        "data": "it was trained on other text, or with another tokenizer (--data, --tokenizer)",
        "model": "it trains a model of another shape (--model and changes to it)",
    }
    told = [
        words.get(name) or f"it has --{name.replace('_', '-')} {run[name]}, not {now[name]}"
        for name in differs
    ]
    if told:
        raise OptionError(
            f"--resume: the run in {folder} differs from the options: {'; '.join(told)}. Leave these "
            "options out or pass those of the run, or start anew in another folder"
        )
    if done >= last:
        raise OptionError(
            f"--resume: the run in {folder} is at step {done} already, of {last}: pass --steps {2 * done}, "
            "say, to go on beyond"
        )
