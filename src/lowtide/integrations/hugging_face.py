"""The ``Trainer`` of transformers (and those of TRL, which are made of it), within a memory budget."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from lowtide.errors import expect
from lowtide.integrations.peaks import PLANS, Peaks
from lowtide.limits import limit_memory
from lowtide.run.limit.checks import check_given
from lowtide.run.limit.handle import Handle, handle_of
from lowtide.run.messages import warn


class LimitMemory(TrainerCallback):
    """A callback that holds training to a budget. The budget counts the optimizer's state and step.

    The callback sets the limit when training begins, because the ``Trainer`` makes its optimizer at this
    time. It removes the limit when training ends. If an error ends training, call
    ``callback.handle.remove()``. The logs have ``memory_peak_mib``, ``memory_predicted_mib`` and
    ``memory_budget_mib`` beside the loss. If the ``Trainer`` saves checkpoints, lowtide keeps plans beside
    them, in ``_lowtide_plans``. A resumed run uses these plans from its first step on.

    Args:
        budget: the budget of `lowtide.limit_memory`; ``None`` if ``policy=`` needs none.
        options: other arguments of `lowtide.limit_memory`, except ``optimizer``. With ``plans=None`` lowtide
            keeps no plans.

    Attributes:
        handle: the handle of the limit; ``None`` before training.

    Raises:
        BudgetError: the budget is malformed; or, in the first step of ``train()``, no plan fits.

    Example:
        ``trainer = Trainer(model, args, train_dataset=data, callbacks=[LimitMemory("6GiB")])``
    """

    def __init__(self, budget: str | int | None = None, **options: Any) -> None:
        check_given(budget, options.get("policy"), "LimitMemory")
        self.budget, self.options = budget, options
        self.handle: Handle | None = None
        self._peaks: Peaks | None = None

    def on_train_begin(
        self, args: Any, state: Any, control: Any, *, model: Any, optimizer: Any = None, **kwargs: Any
    ) -> None:
        """The optimizer is there now."""
        if handle_of(model) not in (None, self.handle):
            warn(
                "this model has a limit already, which LimitMemory replaces until training ends. If "
                "you set that limit, use only one of the two. A run that ended with an error leaves "
                "its limit, too"
            )
        options = {"plans": _plans_beside(args), **self.options}
        self.handle = limit_memory(model, self.budget, optimizer=optimizer, **options)
        self._peaks = Peaks(self.handle)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A step is over, the optimizer's included."""
        if self._peaks is not None:
            self._peaks.note()

    on_substep_end = on_step_end  # one that adds to gradients

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Put the peaks beside the loss, in the history of the trainer, too."""
        if logs is None or "loss" not in logs or self._peaks is None:
            return
        peaks = self._peaks.take()
        logs.update(peaks)
        if state.log_history:
            state.log_history[-1].update(peaks)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The model is as it was."""
        if self.handle is not None:
            self.handle.remove()


def _plans_beside(args: Any) -> Path | None:
    """The folder for plans, beside a run's checkpoints; ``None`` where it has none. The ``Trainer`` uploads
    nothing whose name begins so.
    """
    saves = getattr(args, "save_strategy", "no")
    folder = None if getattr(saves, "value", saves) == "no" else args.output_dir
    return Path(folder) / PLANS if folder else None


def limit(trainer: Any, budget: str | int | None = None, **options: Any) -> LimitMemory:
    """Put `LimitMemory` in front of a trainer's other callbacks, so that those that write logs elsewhere
    (TensorBoard and the like) write the peaks, too.

    Args:
        trainer: a ``transformers.Trainer``.
        budget, options: as of `LimitMemory`.

    Raises:
        PlanError: it is no trainer.
        BudgetError: as of `LimitMemory`.

    Example:
        ``limit(trainer, "6GiB")``, before ``trainer.train()``
    """
    callbacks = getattr(getattr(trainer, "callback_handler", None), "callbacks", None)
    expect(isinstance(callbacks, list), "limit(trainer=)", trainer, "a transformers.Trainer")
    callback = LimitMemory(budget, **options)
    trainer.callback_handler.callbacks.insert(0, callback)
    return callback
