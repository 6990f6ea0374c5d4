"""What `lowtide suggest` prints runs: every row's command, on a smaller model and text."""

from __future__ import annotations

import dataclasses
import math
import shlex
from pathlib import Path
from typing import Any

import torch.distributed.fsdp  # once, before processes are made
import typer
from ranks import on_each_backend, on_ranks

from lowtide.cli import app
from lowtide.estimate.devices import device
from lowtide.estimate.suggest import suggest
from lowtide.train.options import TrainOptions
from lowtide.train.trainer import train

pytestmark = on_each_backend
FSDP = torch.distributed.fsdp


def asked(command: str, text: Path) -> TrainOptions:
    """The options of a printed command, the model, its batch and its text made small."""
    flags = shlex.split(command.partition(" train ")[2])
    cli: Any = typer.main.get_command(app)
    given = cli.commands["train"].make_context("train", flags).params
    given = {name: given[name] for name in TrainOptions.__dataclass_fields__ if given.get(name) is not None}
    small = dict(
        device=torch.get_default_device().type, model="gpt-nano", seq=32, batch=2, grad_accum=2, data=text
    )
    run = dict(steps=1, warmup=0, eval_every=0, eval_batches=1, compare=False, json=None, raise_budget=True)
    return TrainOptions(**{**given, **small, **run})


def losses(text: Path, commands: list[str]) -> list[float]:
    return [train(asked(command, text)).losses[0] for command in commands]


def test_every_row_runs_with_the_flags_that_it_prints(text: Path) -> None:
    rows: dict[str, str] = {}
    for row in suggest("gpt2", devices=2, device=device("v100"), runs_with="lowtide", count=50).best:
        options = asked(row.command, text)
        rows[str(dataclasses.replace(options, loss_chunks=None))] = row.command
    layouts = {options.layout for options in (asked(command, text) for command in rows.values())}
    assert {"--dp 2 --shard-parameters", "--dp 2", "--pp 2", "--tp 2 --sequence-parallel"} <= layouts
    for found in on_ranks(2, losses, text, list(rows.values())):
        assert all(math.isclose(loss, found[0], rel_tol=2e-2) for loss in found), found
