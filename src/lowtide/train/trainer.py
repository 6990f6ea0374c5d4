"""The training run: `train` reads top to bottom. Everything that it calls is small and stands below it or in
the files beside it: `part` for forward and backward under the budget, `saved` for checkpoints, `result` for
what a run found.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import nn

from lowtide.errors import LowtideError
from lowtide.models import ModelSpec
from lowtide.optim import HostOptimizer
from lowtide.progress import mute
from lowtide.train import checkpoint
from lowtide.train.alive import Alive, guarded
from lowtide.train.curves import Curves
from lowtide.train.data import Blocks, batches, tokenize
from lowtide.train.memory import BYTES_PER_PARAMETER, RunMeter, check_room
from lowtide.train.options import TrainOptions
from lowtide.train.part import Part, WholeModel
from lowtide.train.progress import Progress
from lowtide.train.ranks import Ranks, ranks_for
from lowtide.train.result import TrainResult
from lowtide.train.saved import find_checkpoint, going_on, restore, save
from lowtide.train.schedule import make_schedule
from lowtide.train.signals import stop_signals
from lowtide.train.text import read_text
from lowtide.train.tokenizer import HuggingFaceTokenizer, find_tokenizer


class TrainError(LowtideError):
    """Training cannot go on."""


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
        alive = None if ranks.store is None else Alive(ranks.store, ranks.rank, ranks.size)
        with guarded(alive):
            return _train(
                options, ranks, progress if progress is not None and ranks.rank == 0 else Progress(), alive
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
    sharded = (
        min(options.dp * options.cp // options.dp_replicate, BYTES_PER_PARAMETER // 4)
        if options.shard_parameters
        else 1
    )
    check_room(spec, device, options.tp * options.pp * sharded, options.optimizer_host_fraction)
    loader = batches(Blocks(corpus.train, options.seq), options.batch, options.seed)
    validation = Blocks(corpus.validation, options.seq, "validation")
    resumed = find_checkpoint(options, corpus, ranks)
    if options.checkpoint_dir is not None:
        checkpoint.make_folder(options.checkpoint_dir, ranks)
        if isinstance(tokenizer, HuggingFaceTokenizer) and ranks.rank == 0:
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
            restore(resumed, part.modules, optimizer, ranks)
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
            progress.note(going_on(options, resumed))

        for step in range(result.first_step, options.stop_after or options.steps):
            done = step + 1
            last = done == options.steps
            doing(f"step {done}")
            with memory.block() as peak:
                step_began = time.perf_counter()
                ranks.seed(options.seed, step)
                drawn = [next(order) for _ in range(options.grad_accum)]
                # the bar of the training is there from the first step on
                with mute() if result.losses else nullcontext():
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
            if ranks.rank == 0 and options.report is not None:
                doing("the report")
                result.report = part.report(result.comparison)
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


def due(done: int, every: int) -> bool:
    """Whether something that happens every ``every`` steps (0 is never) happens after ``done``."""
    return every > 0 and done % every == 0


def _part(spec: ModelSpec, options: TrainOptions, ranks: Ranks) -> Part:
    """This process's part of the model, with the weights that one process alone would have."""
    if options.pp > 1:
        from lowtide.train.stages import Stages

        return Stages(spec, options, ranks)
    if options.compile:
        from lowtide.train.compiled import CompiledModel

        return CompiledModel(spec, options, ranks)
    return WholeModel(spec, options, ranks)
