"""A run's checkpoints: everything that the rest of the run depends on, of one process or of several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from lowtide.train import checkpoint, shards
from lowtide.train.data import Corpus
from lowtide.train.options import OptionError, TrainOptions
from lowtide.train.ranks import Ranks
from lowtide.train.resume import check_same


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


def going_on(options: TrainOptions, resumed: checkpoint.Checkpoint | shards.Manifest) -> str:
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
    for entries in loaded.state["optimizer"]["state"].values():
        # copies, one parameter's after the other: no allocator counts what `torch.load` made
        entries.update({key: item.clone() for key, item in entries.items() if isinstance(item, torch.Tensor)})
    optimizer.load_state_dict(loaded.state["optimizer"])
    torch.set_rng_state(loaded.state["random"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(loaded.state["random_cuda"], device)
    loaded.state.clear()
