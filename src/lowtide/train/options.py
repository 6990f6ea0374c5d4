"""The checks of a training run: an option that cannot take effect raises and names the way out."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from lowtide.budget import check, parse
from lowtide.errors import BudgetError
from lowtide.plan import POLICIES, check_seconds
from lowtide.report import check_path
from lowtide.train.arrangements import (
    check_compile,
    check_compiled_run,
    check_context,
    check_pipeline,
    check_sharding,
)
from lowtide.train.errors import OptionError, require
from lowtide.train.schedule import SHAPES
from lowtide.train.settings import Settings

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_COMPARED = "it shows the planned and the plain step, and this run does not compare them"


@dataclass(frozen=True)
class TrainOptions(Settings):
    """A training run that can be done.

    Raises:
        OptionError: an option is out of range, or does not go with another.
    """

    def __post_init__(self) -> None:
        for name in (
            "steps",
            "batch",
            "seq",
            "grad_accum",
            "eval_batches",
            "tp",
            "cp",
            "dp",
            "pp",
            "dp_replicate",
        ):
            require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1 is needed")
        for name in ("warmup", "weight_decay", "clip", "eval_every", "checkpoint_every", "seed"):
            require(getattr(self, name) >= 0, name, getattr(self, name), "it cannot be negative")
        if self.budget is not None:
            check(self.budget)
        several = self.optimizer_host_fraction is not None and self.ranks > 1
        require(
            not several or self.optimizer_host_fraction != "auto",
            "optimizer-host-fraction",
            self.optimizer_host_fraction,
            "each rank would choose its own share: give a number from 0 to 1",
        )
        require(
            not several or not self.shard_parameters,
            "optimizer-host-fraction",
            self.optimizer_host_fraction,
            "the budget of --shard-parameters does not count it: leave that out, or this",
        )
        if self.optimizer_host_fraction not in (None, "auto"):
            share = self.optimizer_host_fraction
            require(
                isinstance(share, int | float) and 0 <= share <= 1,
                "optimizer-host-fraction",
                share,
                "choose auto, or 0 to 1",
            )
        require(self.lr > 0, "lr", self.lr, "a positive learning rate is needed")
        require(
            self.warmup <= self.steps,
            "warmup",
            self.warmup,
            f"it is longer than the run of --steps {self.steps}",
        )
        require(self.dtype in DTYPES, "dtype", self.dtype, f"choose {' or '.join(DTYPES)}")
        require(
            self.lr_schedule in SHAPES, "lr-schedule", self.lr_schedule, f"choose one of {', '.join(SHAPES)}"
        )
        check_policy(self.policy)
        check_seconds(self.plan_seconds, self.policy, "--plan-seconds")
        if self.checkpoint_dir is not None:
            fits = self.checkpoint_dir.is_dir() or not self.checkpoint_dir.exists()
            require(fits, "checkpoint-dir", self.checkpoint_dir, "that is a file, and a folder is needed")
        else:
            require(
                not self.checkpoint_every,
                "checkpoint-every",
                self.checkpoint_every,
                "it needs --checkpoint-dir",
            )
            require(not self.resume, "resume", "", "it needs --checkpoint-dir with the run's checkpoints")
        if self.stop_after is not None:
            require(
                0 < self.stop_after <= self.steps,
                "stop-after",
                self.stop_after,
                f"choose a step from 1 to --steps {self.steps}",
            )
        if self.report is not None:
            require(self.compares, "report", self.report, f"{_COMPARED}: {self._to_compare} or --report")
            check_path(self.report)
        if self.tensorboard is not None:
            fits = self.tensorboard.is_dir() or not self.tensorboard.exists()
            require(fits, "tensorboard", self.tensorboard, "that is a file, and a folder is needed")
            if importlib.util.find_spec("tensorboard") is None:
                raise OptionError("--tensorboard needs tensorboard: pip install 'lowtide[tensorboard]'")
        for name, file in (("json", self.json), ("report", self.report)):
            check_file(name, file)
        check_device(self.device)
        check_host_budget(self.host_budget, self.policy, self.device, compiled=self.compile)
        require(
            self.host_budget is None or self.pp == 1,
            "host-budget",
            self.host_budget,
            "a pipeline moves nothing: leave it out, or --pp",
        )
        require(
            self.tiles is None or (self.pp == 1 and not self.shard_parameters),
            "tiles",
            self.tiles,
            "stages of a pipeline and sharded parameters cannot be traced on fake tensors: leave it out",
        )
        check_tiles(self.tiles, self.budget, self.compile)
        check_compile(self.compile, self.compile_backend, self.policy, self.device, self.loss_chunks)
        if self.compile:
            check_compiled_run(self)
        self._check_layout()

    def _check_layout(self) -> None:
        """Refuse layouts that cannot be, before any process waits for another."""
        require(
            not (self.sequence_parallel and self.tp == 1),
            "sequence-parallel",
            "",
            "it splits the sequence among the --tp ranks: pass --tp 2 or more",
        )
        require(
            self.batch % self.dp == 0,
            "batch",
            self.batch,
            f"a microbatch is split among --dp {self.dp}, which must divide it",
        )
        if self.sequence_parallel:
            require(
                self.seq % self.tp == 0,
                "seq",
                self.seq,
                f"--sequence-parallel splits it among --tp {self.tp}, which must divide it",
            )
            pieces = 2 * self.tp * self.cp
            require(
                self.cp == 1 or self.seq % pieces == 0,
                "seq",
                self.seq,
                f"--cp {self.cp} and --sequence-parallel cut it into {pieces} pieces, which must divide it",
            )
        check_context(self)
        check_sharding(self)
        if self.pp == 1:
            require(
                self.schedule is None, "schedule", self.schedule, "it is a pipeline's: pass --pp 2 or more"
            )
            return
        check_pipeline(self)

    @property
    def _to_compare(self) -> str:
        """What to do where a run does not end with a comparison."""
        given = {
            "--no-compare": self.compare is False,
            "--pp": self.pp > 1,
        }
        if not any(given.values()):
            return "install a C++ compiler, to measure memory,"
        return f"leave out {' and '.join(name for name, is_given in given.items() if is_given)}"


def check_device(name: str, more: str = "") -> torch.device:
    """The device called ``name``. What else could be given is said in ``more``.

    Raises:
        OptionError: it is not there, or lowtide does not measure its memory.
    """
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise OptionError(
            f"--device {name}: there is no such device, choose cpu, cuda or cuda:N{more}"
        ) from error
    require(device.type in ("cpu", "cuda"), "device", name, f"choose cpu, cuda or cuda:N{more}")
    if device.type == "cuda":
        require(torch.cuda.is_available(), "device", name, "this PyTorch sees no CUDA device, choose cpu")
        count = torch.cuda.device_count()
        require(
            (device.index or 0) < count,
            "device",
            name,
            f"there are {count} CUDA devices, the last is cuda:{count - 1}",
        )
    return device


def check_file(name: str, file: Path | None) -> None:
    """Raise an `OptionError` unless ``file`` is absent or can be written."""
    if file is not None:
        require(
            not file.is_dir() and file.parent.is_dir() and os.access(file.parent, os.W_OK),
            name,
            file,
            "cannot write a file there",
        )


def check_policy(name: str | None) -> None:
    """Raise an `OptionError` unless there is a policy of that name."""
    names = list(POLICIES)
    require(
        name is None or name in names,
        "policy",
        name,
        f"choose {', '.join(names[:-1])} or {names[-1]}",
    )


def check_tiles(given: str | None, budget: str | None, compiled: bool) -> None:
    """Raise an `OptionError` unless tiles, if given, go with the step and its budget."""
    require(given in (None, "auto"), "tiles", given, "choose auto, or leave it out")
    require(given is None or budget is not None, "tiles", given, "it needs a budget: pass --budget min")
    require(given is None or not compiled, "tiles", given, "compiled code has no tiles: leave out --compile")


def check_host_budget(given: str | None, policy: str | None, device: str, compiled: bool = False) -> None:
    """Raise an `OptionError` unless a budget of main memory is well written, and the plan moves values there.

    Args:
        given: the budget, or ``None``.
        policy, device: as given.
        compiled: whether the step is.
    """
    if given is None:
        return
    try:
        parse(given)
    except BudgetError:
        raise OptionError(f"--host-budget {given}: give bytes, as 8GiB") from None
    moving = "for policies that choose what moves to main memory: pass --policy auto or mixed, or none"
    require(policy in (None, "auto", "mixed"), "host-budget", given, f"it is {moving}")
    on_cpu = "what leaves a GPU goes there, and the device is the CPU: leave it out, or pass --device"
    require(device.lower() != "cpu", "host-budget", given, on_cpu)
    require(not compiled, "host-budget", given, "a compiled step moves nothing: leave it out, or --compile")
