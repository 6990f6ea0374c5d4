"""The training run: `train` reads top to bottom. Everything that it calls is small and stands below it or in
the files beside it.
"""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from lowtide import meter
from lowtide.budget import format_bytes
from lowtide.errors import LowtideError
from lowtide.models import ModelSpec
from lowtide.optim import HostOptimizer
from lowtide.progress import muted
from lowtide.report import Report
from lowtide.train import checkpoint, shards
from lowtide.train.alive import Alive, guarded
from lowtide.train.compare import Comparison
from lowtide.train.curves import Curves
from lowtide.train.data import Blocks, Corpus, batches, tokenize
from lowtide.train.memory import BYTES_PER_PARAMETER, RunMeter, free_bytes, training_bytes
from lowtide.train.options import OptionError, TrainOptions
from lowtide.train.part import Part, WholeModel
from lowtide.train.progress import Progress, Silent
from lowtide.train.ranks import Ranks, ranks_for
from lowtide.train.resume import check_same
from lowtide.train.schedule import make_schedule
from lowtide.train.signals import stop_signals
from lowtide.train.text import read_text
from lowtide.train.tokenizer import HuggingFaceTokenizer, find_tokenizer


class TrainError(LowtideError):
    """Training cannot go on."""


@dataclass
class TrainResult:
    """What a run did.

    Attributes:
        options: what was asked for.
        corpus: what it read, in words.
        parameters: of the model.
        first_step: where it began; above 0 after a resume.
        losses: training loss of every step that this run did.
        validation: (steps done, validation loss).
        gradient_norms: before clipping, of every step.
        step_seconds: wall time of every step.
        step_peak_bytes: most live bytes within every step, from its first forward to the end of its optimizer
            step, evaluation and checkpoint included; empty where they cannot be counted. The first step
            plans. Of this process.
        budget_bytes: of the latest plan; ``None`` without a budget.
        ranks: what every process did that is its own: its name, its peaks, what its plans were; empty for a
            process alone.
        plans: how many plans were made (one for each shape of step).
        comparison: the plain and the planned step side by side, unless turned off.
        report: all that is shown of them, where results or a report are written.
        stopped: whether the run was interrupted before its last step.
        seconds: of the whole run.
    """

    options: TrainOptions
    corpus: str
    parameters: int
    first_step: int
    losses: list[float] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(default_factory=list)
    gradient_norms: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    step_peak_bytes: list[int] = field(default_factory=list)
    budget_bytes: int | None = None
    plans: int = 0
    comparison: Comparison | None = None
    report: Report | None = None
    stopped: bool = False
    seconds: float = 0.0
    ranks: list[dict[str, Any]] = field(default_factory=list)

    @property
    def last_step(self) -> int:
        """Optimizer steps done, those before a resume included."""
        return self.first_step + len(self.losses)

    @property
    def worst_step(self) -> int | None:
        """The step with the most live memory, counted from 1; ``None`` where memory was not counted."""
        peaks = self.step_peak_bytes
        return self.first_step + peaks.index(max(peaks)) + 1 if peaks else None

    @property
    def steps_over_budget(self) -> list[int]:
        """The steps that took more than the budget, counted from 1: none when it was held."""
        if self.budget_bytes is None:
            return []
        return [
            step
            for step, peak in enumerate(self.step_peak_bytes, self.first_step + 1)
            if peak > self.budget_bytes
        ]

    @property
    def within_budget(self) -> bool | None:
        """Whether every step stayed within the budget, those of the comparison included; ``None`` without a
        budget or a meter.
        """
        compared = None if self.comparison is None else self.comparison.within_budget
        if self.budget_bytes is None or not self.step_peak_bytes:
            return compared
        return not self.steps_over_budget and compared is not False

    def to_json(self) -> dict[str, Any]:
        """Everything as plain values."""
        return {
            "lowtide": "train",
            "options": self.options.to_json(),
            "corpus": self.corpus,
            "parameters": self.parameters,
            "first_step": self.first_step,
            "last_step": self.last_step,
            "losses": self.losses,
            "validation": [{"step": step, "loss": loss} for step, loss in self.validation],
            "gradient_norms": self.gradient_norms,
            "step_seconds": self.step_seconds,
            "step_peak_bytes": self.step_peak_bytes,
            "budget_bytes": self.budget_bytes,
            "within_budget": self.within_budget,
            "worst_step": self.worst_step,
            "steps_over_budget": self.steps_over_budget,
            "plans": self.plans,
            "comparison": None if self.comparison is None else self.comparison.to_json(),
            "report": None if self.report is None else self.report.to_json(),
            "stopped": self.stopped,
            "ranks": self.ranks,
            "seconds": self.seconds,
            "machine": {
                "torch": torch.__version__,
                "python": platform.python_version(),
                "processor": platform.machine(),
                "threads": torch.get_num_threads(),
            },
        }


def train(options: TrainOptions, progress: Progress | None = None) -> TrainResult:
    """Train a language model under a memory budget, and measure what the budget did.

    Args:
        options: what to do.
        progress: told about every step; silent without one.

    Raises:
        LowtideError: the options do not go together, the data or a checkpoint is no good, the budget cannot
            be met, or the loss diverged.
    """
    with ranks_for(options) as ranks:
        silent = options.silent_seconds
        store = ranks.store
        alive = Alive(store, ranks.rank, ranks.size, silent_seconds=silent) if store is not None else None
        with guarded(alive):
            return _train(
                options, ranks, progress if progress is not None and ranks.rank == 0 else Silent(), alive
            )


def _train(options: TrainOptions, ranks: Ranks, progress: Progress, alive: Alive | None) -> TrainResult:
    began = time.perf_counter()
    device = ranks.device
    text = read_text(None if options.data is None else str(options.data), options.text_column)
    fixed = options.spec(0).vocabulary if options.spec(0).config is None else None
    tokenizer = find_tokenizer(
        options.tokenizer,
        options.model,
        fixed,
        text.train,
        options.checkpoint_dir if options.resume else None,
    )
    corpus = tokenize(text, tokenizer)
    spec = options.spec(corpus.vocabulary)
    # weights are a quarter of what training holds, and each process makes all of its share of the layers
    # before others take some over
    sharded = min(options.dp, BYTES_PER_PARAMETER // 4) if options.shard_parameters else 1
    check_room(spec, device, options.tp * options.pp * sharded, options.optimizer_host_fraction)
    loader = batches(Blocks(corpus.train, options.seq), options.batch, options.seed)
    validation = Blocks(corpus.validation, options.seq, "validation")
    resumed = find_checkpoint(options, corpus, ranks)
    if isinstance(tokenizer, HuggingFaceTokenizer) and options.checkpoint_dir is not None and ranks.rank == 0:
        tokenizer.save(options.checkpoint_dir)

    def doing(what: str) -> None:
        if alive is not None:
            alive.doing(what)

    with RunMeter(device) as memory, stop_signals() as stop:
        torch.manual_seed(options.seed)
        part = _part(spec, options, ranks)
        optimizer = make_optimizer(part.modules, options)
        part.limit(optimizer)
        result = TrainResult(options, str(corpus), part.parameters, first_step=0)
        if resumed is not None:
            restore(options, resumed, part.modules, optimizer, device)
            # the loaded state is the checkpoint's own tensors
            memory.adopt(meter.resident_tensors(optimizer=optimizer))
            result.first_step = resumed.step
            loader.load_state_dict(resumed.run["loader"])
        order = iter(loader)
        schedule = make_schedule(
            optimizer, options.lr, result.first_step, options.steps, options.warmup, options.lr_schedule
        )
        curves = Curves(options.tensorboard if ranks.rank == 0 else None, result.first_step)
        progress.start(
            result.first_step,
            options.steps,
            f"{options.model}, {result.parameters / 1e6:.1f} M parameters, {corpus}",
        )
        if resumed is not None:
            progress.note(_going_on(options, resumed))

        for step in range(result.first_step, options.stop_after or options.steps):
            done = step + 1
            last = done == options.steps
            doing(f"step {done}")
            with memory.block() as peak:
                step_began = time.perf_counter()
                ranks.seed(options.seed, step)
                drawn = [next(order) for _ in range(options.grad_accum)]
                # the bar of the training is there from the first step on
                with muted() if result.losses else nullcontext():
                    loss = part.step(drawn, optimizer)
                if part.note:
                    progress.note(part.note)
                    part.note = ""
                norm = part.clip(options.clip or math.inf)
                loss, asked = ranks.sum(loss / ranks.size, float(bool(stop)))
                if not math.isfinite(loss) or not math.isfinite(norm):
                    raise TrainError(
                        f"the loss became {loss} (gradient norm {norm}) at step {done}: lower --lr or raise "
                        "--warmup"
                    )
                rate = float(schedule.get_last_lr()[0])
                optimizer.step()
                schedule.step()
                optimizer.zero_grad(set_to_none=True)
                seconds = time.perf_counter() - step_began

                if last or due(done, options.eval_every):
                    doing(f"the evaluation after step {done}")
                    (mean,) = ranks.sum(
                        part.evaluate(list(validation.spread(options.eval_batches, options.batch)))
                        / ranks.size
                    )
                    result.validation.append((done, mean))
                stopping = bool(asked) if not ranks.alone else bool(stop)
                if options.checkpoint_dir and (
                    last or stopping or done == options.stop_after or due(done, options.checkpoint_every)
                ):
                    doing(f"the checkpoint after step {done}")
                    save(options, corpus, done, part.modules, optimizer, loader.state_dict(), ranks)
            result.losses.append(loss)
            result.gradient_norms.append(norm)
            result.step_seconds.append(seconds)
            if peak.bytes is not None:
                result.step_peak_bytes.append(peak.bytes)
            speed = options.batch * options.seq * options.grad_accum / seconds
            progress.step(done, loss, speed, peak.bytes)
            curves.add(
                done,
                loss=loss,
                learning_rate=rate,
                gradient_norm=norm,
                tokens_per_second=speed,
                memory__peak_mib=None if peak.bytes is None else peak.bytes / 2**20,
            )
            if result.validation and result.validation[-1][0] == done:
                mean = result.validation[-1][1]
                progress.evaluated(done, mean, corpus.bytes_per_token)
                curves.add(done, validation_loss=mean)
            if stopping:
                result.stopped = not last
                break
        progress.finish()
        curves.close()

        if options.compares and not result.stopped:
            doing("the comparison")
            progress.comparing()
            result.comparison = part.compare(drawn[0], optimizer)
            if ranks.rank == 0 and (options.json is not None or options.report is not None):
                doing("the report")
                result.report = part.report(result.comparison, curve=options.report is not None)
        result.plans, result.budget_bytes = part.plans, part.about().get("budget_bytes")
        part.release()
    result.seconds = time.perf_counter() - began
    if not ranks.alone:
        doing("the end")
        mine = {
            "name": ranks.name,
            "first_step": result.first_step,
            "step_peak_bytes": result.step_peak_bytes,
        }
        mine |= {"plans": result.plans, **part.about()}
        mine["comparison"] = None if result.comparison is None else result.comparison.to_json()
        result.ranks = ranks.gather(mine)
    return result


def make_optimizer(modules: Sequence[nn.Module], options: TrainOptions) -> torch.optim.Optimizer:
    """AdamW with weight decay on matrices only (not on biases and norms), fused: fastest, and without
    temporaries of its own.

    Where options say so, a share of its state lies on the host; the numbers stay the same.
    """
    parameters = {
        id(parameter): parameter
        for module in modules
        for parameter in module.parameters()
        if parameter.requires_grad
    }
    matrices = [parameter for parameter in parameters.values() if parameter.ndim >= 2]
    others = [parameter for parameter in parameters.values() if parameter.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": options.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if options.optimizer_host_fraction is None:
        return torch.optim.AdamW(groups, lr=options.lr, betas=(0.9, 0.95), fused=True)
    share = options.optimizer_host_fraction
    return HostOptimizer(torch.optim.AdamW, groups, host_fraction=share, lr=options.lr, betas=(0.9, 0.95))


def check_room(
    spec: ModelSpec,
    device: torch.device,
    shared_by: int = 1,
    host_fraction: float | Literal["auto"] | None = None,
) -> None:
    """Refuse a model whose weights, gradients and optimizer state on the device alone do not fit, before
    anything is allocated.

    Raises:
        OptionError: they do not.
    """
    needed, free = training_bytes(spec) // shared_by, free_bytes(device)
    moved = 1.0 if host_fraction == "auto" else host_fraction or 0.0
    needed -= int(needed * moved / 2)  # AdamW's moments are half of it
    if free is not None and needed > free:
        raise OptionError(
            f"--model {spec.name}: parameters, gradients and optimizer state take {format_bytes(needed)}, "
            f"and {format_bytes(free)} are free: "
            "choose a smaller model (lowtide plan plans this one without allocating it)"
        )


def due(done: int, every: int) -> bool:
    """Whether something that happens every ``every`` steps (0 is never) happens after ``done``."""
    return every > 0 and done % every == 0


def find_checkpoint(
    options: TrainOptions, corpus: Corpus, ranks: Ranks
) -> checkpoint.Checkpoint | shards.Manifest | None:
    """The checkpoint to go on from, checked against the options; ``None`` for a fresh start.

    Raises:
        OptionError: the folder holds another run, or this one and ``--resume`` was not given.
        CheckpointError: there is nothing to resume.
    """
    folder = options.checkpoint_dir
    if folder is None:
        return None
    if not options.resume:
        if found := checkpoint.steps(folder):
            raise OptionError(
                f"--checkpoint-dir {folder} holds a run at step {found[-1]}: pass --resume to go on with it, "
                "or another folder"
            )
        return None
    shared = not ranks.alone or shards.format_of(folder) == shards.FORMAT
    loaded = shards.newest(folder, ranks) if shared else checkpoint.load(folder)
    now = options.trajectory(corpus.digest, corpus.vocabulary)
    check_same(folder, loaded.run, now, loaded.step, options.stop_after or options.steps)
    if "loader" not in loaded.run:
        raise OptionError(
            f"--resume: the run in {folder} was begun by an older lowtide, which drew its batches in another "
            "order: start anew in another folder"
        )
    return loaded


def _going_on(options: TrainOptions, resumed: checkpoint.Checkpoint | shards.Manifest) -> str:
    """Which run is gone on with, and from where to where."""
    text = f"going on with the run in {options.checkpoint_dir} after step {resumed.step} of {options.steps}"
    before = resumed.run.get("steps", options.steps)
    return (
        text
        if before == options.steps
        else f"{text} ({before} so far): the learning rate follows the new length from here on"
    )


def save(
    options: TrainOptions,
    corpus: Corpus,
    step: int,
    modules: Sequence[nn.Module],
    optimizer: torch.optim.Optimizer,
    loader: dict[str, Any],
    ranks: Ranks,
) -> None:
    """Write a checkpoint of everything that the rest of the run depends on, ``loader`` being the state of the
    data's order. The learning rate depends on the step alone; with several processes so do random numbers.
    """
    assert options.checkpoint_dir is not None
    run = {**options.trajectory(corpus.digest, corpus.vocabulary), "options": options.to_json()}
    run["loader"] = loader
    if not ranks.alone:
        shards.save(options.checkpoint_dir, step, modules, optimizer, run, ranks)
        return
    (model,) = modules
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "random": torch.get_rng_state(),
        "random_cuda": torch.cuda.get_rng_state(ranks.device) if ranks.device.type == "cuda" else None,
    }
    checkpoint.save(options.checkpoint_dir, step, state, run)


def restore(
    options: TrainOptions,
    loaded: checkpoint.Checkpoint | shards.Manifest,
    modules: Sequence[nn.Module],
    optimizer: torch.optim.Optimizer,
    device: torch.device,
) -> None:
    """Put back what `save` wrote."""
    if isinstance(loaded, shards.Manifest):
        assert options.checkpoint_dir is not None
        shards.load(options.checkpoint_dir, loaded, modules, optimizer)
        return
    (model,) = modules
    model.load_state_dict(loaded.state["model"])
    optimizer.load_state_dict(loaded.state["optimizer"])
    torch.set_rng_state(loaded.state["random"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(loaded.state["random_cuda"], device)
    loaded.state.clear()


def _part(spec: ModelSpec, options: TrainOptions, ranks: Ranks) -> Part:
    """This process's part of the model, with the weights that one process alone would have."""
    if options.shard_parameters:
        from lowtide.train.sharded import ShardedModel

        return ShardedModel(spec, options, ranks)
    if options.pp > 1:
        from lowtide.train.stages import Stages

        return Stages(spec, options, ranks)
    return WholeModel(spec, options, ranks)
