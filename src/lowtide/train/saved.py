"""A run's checkpoints: everything that the rest of the run depends on, of one process or of several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from lowtide import accelerator
from lowtide.train import checkpoint, shards
from lowtide.train.data import Corpus
from lowtide.train.options import OptionError, TrainOptions
from lowtide.train.ranks import Ranks
from lowtide.train.resume import check_same

_RANDOM = "random_cuda"
"""Where the state of an accelerator's generator lies."""


def find_checkpoint(options: TrainOptions, corpus: Corpus, ranks: Ranks) -> checkpoint.Checkpoint | None:
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
    loaded = checkpoint.load(folder, ranks)
    now = options.trajectory(corpus.digest, corpus.vocabulary)
    check_same(folder, loaded.run, now, loaded.step, options.stop_after or options.steps)
    return loaded


def going_on(options: TrainOptions, resumed: checkpoint.Checkpoint) -> str:
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
    content: dict[str, Any] = {"pieces": shards.pieces(modules, optimizer, ranks)}
    if ranks.alone:
        content["random"] = torch.get_rng_state()
        if accelerator.is_accelerator(ranks.device):
            content[_RANDOM] = accelerator.random_state(ranks.device)
    checkpoint.save(options.checkpoint_dir, step, content if content["pieces"] else None, run, ranks)


def restore(
    loaded: checkpoint.Checkpoint,
    modules: Sequence[nn.Module],
    optimizer: torch.optim.Optimizer,
    ranks: Ranks,
) -> None:
    """Put back what `save` wrote."""
    contents = list(loaded.contents())
    shards.load([content["pieces"] for content in contents], modules, optimizer)
    if ranks.alone and "random" in contents[0]:
        torch.set_rng_state(contents[0]["random"].clone())
    if ranks.alone and _RANDOM in contents[0] and accelerator.is_accelerator(ranks.device):
        accelerator.set_random_state(ranks.device, contents[0][_RANDOM].clone())
