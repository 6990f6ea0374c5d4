"""Lightning's ``Trainer`` within a memory budget."""

from __future__ import annotations

import sys
from typing import Any

import torch

if "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules:  # its older name
    from pytorch_lightning import Callback  # pyright: ignore[reportMissingImports]
else:
    from lightning.pytorch import Callback  # pyright: ignore[reportMissingImports]

from lowtide.errors import PlanError
from lowtide.integrations.peaks import Peaks
from lowtide.run.limit.limit import Handle, limit_memory
from lowtide.run.limit.messages import warn


class LimitMemory(Callback):  # pyright: ignore[reportGeneralTypeIssues]
    """Training stays within a budget, the optimizer's state and step included.

    A ``training_step`` rarely calls the module itself, but what stands in it (``self.net(x)``), so that is
    what has to be limited: ``module``, or the only part that has all trained parameters. ``memory_peak_mib``,
    ``memory_predicted_mib`` and ``memory_budget_mib`` are logged. The limit is taken off when training ends.

    Args:
        budget: as of `lowtide.limit_memory`.
        module: name of what ``training_step`` calls, as in ``"net"``; ``""`` is the LightningModule itself.
        options: other arguments of `lowtide.limit_memory`.

    Attributes:
        handle: of the limited module, once training has begun.

    Raises:
        PlanError: there is no module of that name.
        BudgetError: in the first step of ``fit()``, when no plan fits.

    Example:
        ``trainer = Trainer(callbacks=[LimitMemory("6GiB")])``
    """

    def __init__(self, budget: str | int, module: str | None = None, **options: Any) -> None:
        self.budget, self.module, self.options = budget, module, options
        self.handle: Handle | None = None
        self._peaks: Peaks | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """The optimizers are there now, with their state when training is resumed."""
        optimizers = list(trainer.optimizers)
        if len(optimizers) > 1 and "optimizer" not in self.options:
            warn(
                f"this module has {len(optimizers)} optimizers, and a limit counts one: the budget is held "
                "without their state. Give LimitMemory(..., optimizer=None) if that is as it should be"
            )
        only = optimizers[0] if len(optimizers) == 1 else None
        self.handle = limit_memory(
            _called(pl_module, self.module), self.budget, **{"optimizer": only, **self.options}
        )
        self._peaks = Peaks(self.handle)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """Log the peaks."""
        if self._peaks is not None:
            self._peaks.note()
            pl_module.log_dict(self._peaks.take(), reduce_fx="max")

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """The module is as it was."""
        if self.handle is not None:
            self.handle.remove()


def _called(module: torch.nn.Module, name: str | None) -> torch.nn.Module:
    """What a ``training_step`` calls."""
    if name is not None:
        try:
            return module.get_submodule(name)
        except AttributeError:
            names = ", ".join(child for child, _ in module.named_children())
            raise PlanError(
                f"LimitMemory(module={name!r}): this module has no such part, but {names}"
            ) from None
    trained = {id(parameter) for parameter in module.parameters() if parameter.requires_grad}
    whole = [
        child for child in module.children() if trained <= {id(parameter) for parameter in child.parameters()}
    ]
    return whole[0] if len(whole) == 1 else module
