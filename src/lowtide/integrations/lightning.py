"""Lightning's ``Trainer`` within a memory budget."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

if "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules:  # its older name
    from pytorch_lightning import Callback  # pyright: ignore[reportMissingImports]
else:
    from lightning.pytorch import Callback  # pyright: ignore[reportMissingImports]

from lowtide.errors import PlanError
from lowtide.integrations.peaks import PEAK, PLANS, Peaks
from lowtide.limits import limit_memory
from lowtide.run.limit.checks import check_given
from lowtide.run.limit.handle import Handle
from lowtide.run.messages import warn


class LimitMemory(Callback):  # pyright: ignore[reportGeneralTypeIssues]
    """A callback that holds training to a budget. The budget counts the optimizer's state and step.

    With automatic optimization the limit is on ``training_step``: on all modules that it calls, and on the
    loss. With manual optimization ``training_step`` also runs backward. The limit is then on ``module``.
    Without ``module``, the limit is on the only submodule that has all trained parameters, or else on the
    forward of the LightningModule. ``memory_peak_mib``, ``memory_predicted_mib`` and ``memory_budget_mib``
    are logged. The callback removes the limit when training ends. If the ``Trainer`` saves checkpoints,
    lowtide keeps plans beside them, in ``_lowtide_plans``. A run that is resumed from a checkpoint
    (``fit(ckpt_path=...)``) uses these plans from its first step on.

    Args:
        budget: the budget of `lowtide.limit_memory`; ``None`` if ``policy=`` needs none.
        module: name of a submodule that has the limit in place of ``training_step``, such as ``"net"``;
            ``""`` is the LightningModule itself.
        options: other arguments of `lowtide.limit_memory`. With ``plans=None`` lowtide keeps no plans.

    Attributes:
        handle: the handle of the limit; ``None`` before training.

    Raises:
        PlanError: there is no module of that name.
        BudgetError: the budget is malformed; or, in the first step of ``fit()``, no plan fits.

    Example:
        ``trainer = Trainer(callbacks=[LimitMemory("6GiB")])``
    """

    def __init__(self, budget: str | int | None = None, module: str | None = None, **options: Any) -> None:
        check_given(budget, options.get("policy"), "LimitMemory")
        self.budget, self.module, self.options = budget, module, options
        self.handle: Handle | None = None
        self._peaks: Peaks | None = None
        self._before: Any = None  # what was in the place of the module's training_step

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """The optimizers are there now, with their state when training is resumed."""
        optimizers = list(trainer.optimizers)
        if len(optimizers) > 1 and "optimizer" not in self.options:
            warn(
                f"this module has {len(optimizers)} optimizers, and a limit counts one: the budget does "
                "not count their state. LimitMemory(..., optimizer=None) turns this warning off"
            )
        only = optimizers[0] if len(optimizers) == 1 else None
        options = {"optimizer": only, "plans": _plans_beside(trainer), **self.options}
        if self.module is None and pl_module.automatic_optimization:
            self._before = pl_module.__dict__.get("training_step")
            limited = TrainingStep(pl_module)
            self.handle = limit_memory(limited, self.budget, **options)
            pl_module.training_step = limited.in_place
        else:
            self.handle = limit_memory(_what_is_called(pl_module, self.module), self.budget, **options)
        self._peaks = Peaks(self.handle)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """Log the peaks."""
        if self._peaks is not None:
            self._peaks.note()
            for name, value in self._peaks.take().items():
                pl_module.log(name, value, reduce_fx="max", prog_bar=name == PEAK)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """The module is as it was."""
        if self.handle is None:
            return
        self.handle.remove()
        if isinstance(self.handle.model, TrainingStep):
            pl_module.__dict__.pop("training_step", None)
            if self._before is not None:
                pl_module.__dict__["training_step"] = self._before

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Training ends here, too."""
        self.on_train_end(trainer, pl_module)


def _plans_beside(trainer: Any) -> Path | None:
    """The folder for plans, beside the checkpoint that a run is resumed from, else beside those that it
    saves; ``None`` where there is no such folder on this machine.
    """
    resumed, saved = trainer.ckpt_path, getattr(trainer.checkpoint_callback, "dirpath", None)
    folder = str(Path(resumed).parent) if resumed and "://" not in str(resumed) else saved
    return None if not folder or "://" in str(folder) else Path(folder) / PLANS


class TrainingStep(torch.nn.Module):
    """The ``training_step`` of a module as the forward of another, which a limit can be put on.

    Of a module that `torch.compile` returned Lightning has compiled the ``training_step``: then `in_place`
    compiles this forward with the same, around the limit, so that the compiled engine holds it.

    Args:
        module: a LightningModule.

    Attributes:
        in_place: what stands in for the module's ``training_step``, with its signature.
    """

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module
        compiler = getattr(module, "_compiler_ctx", None)
        own: Callable[..., Any] = module.training_step
        called: Callable[..., Any] = self
        if compiler is not None:
            own = compiler["original_training_step"]
            called = compiler["dynamo_ctx"](self)
        self._own = own

        @functools.wraps(own)
        def in_place(*args: Any, **kwargs: Any) -> Any:
            return called(*args, **kwargs)

        self.in_place = in_place

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._own(*args, **kwargs)


def _what_is_called(module: torch.nn.Module, name: str | None) -> torch.nn.Module:
    """What a ``training_step`` calls."""
    if name is not None:
        try:
            return module.get_submodule(name)
        except AttributeError:
            names = ", ".join(child for child, _ in module.named_children())
            raise PlanError(
                f"LimitMemory(module={name!r}): this module has no such submodule; it has {names}"
            ) from None
    trained = {id(parameter) for parameter in module.parameters() if parameter.requires_grad}
    whole = [
        child for child in module.children() if trained <= {id(parameter) for parameter in child.parameters()}
    ]
    return whole[0] if len(whole) == 1 else module
