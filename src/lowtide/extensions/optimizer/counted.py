"""An optimizer that counts against the budget: its state beside each step, and its own step between two.

In: an optimizer and the model that it trains. Out: what it claims (`lowtide.extension.Claim`), and the
refusal of a budget that its own step is above.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from lowtide.errors import BudgetError, PlanError
from lowtide.extension import Claim, Extension
from lowtide.extensions.optimizer.need import (
    OptimizerNeed,
    depends_on,
    missing_gradient_bytes,
    optimizer_need,
    smaller_update,
)
from lowtide.meter import resident_bytes
from lowtide.meter.resident import bytes_under, innermost, model_device, own_share, workspace_bytes
from lowtide.remedies import BUFFERS, GRADIENTS, PARAMETERS, REDUCED, STATE, UPDATE, WORKSPACES, Holder
from lowtide.run.messages import warn
from lowtide.words import format_bytes


class CountedOptimizer(Extension):
    """The optimizer that a budget counts.

    Args:
        optimizer: the optimizer, or what a trainer has wrapped around it.

    Attributes:
        optimizer: the optimizer itself.
        reduced_bytes: what gradients are copied into, between backward and the optimizer's step, while ranks
            add them up.
        moved_bytes: of its state, what ``host_fraction="auto"`` moved to the host.
    """

    name = "optimizer"
    not_copied = (
        "the copy of a limited model does not count an optimizer: remove() its limit and call "
        "limit_memory with the copy's optimizer"
    )

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = innermost(optimizer)
        self.reduced_bytes = self.moved_bytes = 0
        self._known: tuple[Any, OptimizerNeed] | None = None
        self._warned = False

    @property
    def need(self) -> OptimizerNeed:
        """What it takes, worked out again only where that may have changed: it takes as long as planning for
        a small model.
        """
        seen = depends_on(self.optimizer)
        if self._known is None or self._known[0] != seen:
            self._known = seen, optimizer_need(self.optimizer)
            if (unknown := self._known[1].unknown) and not self._warned:
                self._warned = True
                warn(
                    f"the temporaries of a step of {type(self.optimizer).__name__} cannot be computed "
                    f"({unknown}), so the budget counts the optimizer's state only: measure a step with "
                    "lowtide.measure(optimizer.step), and leave as many bytes of the budget free"
                )
        return self._known[1]

    def claim(self) -> Claim:
        """Its state, and the peak of its own step."""
        need = self.need
        return Claim(
            resident_bytes=need.state_bytes,
            to_come_bytes=need.to_come_bytes,
            moved_bytes=self.moved_bytes,
            step_bytes=need.step_bytes,
            peak_bytes=sum(self._parts().values()),
        )

    def refusal(self, limit_bytes: int) -> BudgetError | None:
        """The refusal of a budget that its own step is above: with what is live at that step's peak, and the
        option with which its update takes least.
        """
        parts = self._parts()
        least = sum(parts.values())
        if least <= limit_bytes:
            return None
        less = smaller_update(self.optimizer, self.need)
        words, freed = less
        return BudgetError(
            None,
            least,
            f"{words} takes {format_bytes(freed)} less for its update." if words else "",
            budget_bytes=limit_bytes,
            parts=parts,
            subject="optimizer.step()",
            made=[Holder(UPDATE, parts[UPDATE], known_remedy=less)] if parts[UPDATE] else (),
        )

    def _parts(self) -> dict[str, int]:
        """What is live at the peak of its own step, in bytes by name."""
        need, own = self.need, resident_bytes(self.model)
        own += missing_gradient_bytes(self.optimizer)
        parameters = sum(own_share(parameter).nbytes for parameter in self.model.parameters())
        buffers = min(own - parameters, bytes_under(self.model.buffers()))
        return {
            PARAMETERS: parameters,
            BUFFERS: buffers,
            GRADIENTS: own - parameters - buffers,
            STATE: need.state_bytes,
            WORKSPACES: workspace_bytes(model_device(self.model)),
            UPDATE: need.step_bytes,
            REDUCED: max(0, self.reduced_bytes - need.step_bytes),
        }

    def make_room(self, extra_seconds: Callable[[int], float], shares_plan: bool) -> None:
        """With ``host_fraction="auto"``, move state to the host while that takes less time than recomputing.

        Raises:
            PlanError: ranks share one plan, and each would choose for itself.
        """
        optimizer: Any = self.optimizer
        if getattr(optimizer, "host_fraction", None) != "auto":
            return
        if shares_plan:
            raise PlanError(
                'with host_fraction="auto" each rank chooses its own share, but these ranks use one '
                "plan: give the share as a number"
            )
        everything = optimizer.device_state_bytes(0.0)

        def seconds(share: float) -> float:
            return extra_seconds(everything - optimizer.device_state_bytes(share))

        share = optimizer.choose_host_fraction(seconds)
        self.moved_bytes = everything - optimizer.device_state_bytes(share)


def count_reduced(extensions: Iterable[Extension], reduced_bytes: int) -> None:
    """Count the buffers that gradients are copied into while ranks add them up, beside the optimizer's state:
    they exist after backward, when the optimizer's own step may be the peak.

    Args:
        extensions: of a limit that counts its optimizer; nothing is planned yet.
        reduced_bytes: the most bytes that these buffers have at once.
    """
    (counted,) = (one for one in extensions if isinstance(one, CountedOptimizer))
    counted.reduced_bytes = reduced_bytes


def check_optimizer(model: torch.nn.Module, optimizer: Any) -> None:
    """Check that this is ``None`` or an optimizer of the model's parameters.

    Raises:
        PlanError: it is neither.
    """
    if optimizer is None:
        return
    if not isinstance(optimizer, torch.optim.Optimizer):
        given = optimizer.__name__ + ", a class" if isinstance(optimizer, type) else type(optimizer).__name__
        raise PlanError(f"optimizer= takes a torch.optim.Optimizer of the model's parameters, not {given}")
    own = {id(parameter): parameter.requires_grad for parameter in model.parameters()}
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if any(own.values()) and not held & own.keys():  # a frozen model is not limited
        raise PlanError(
            f"optimizer= was given {type(optimizer).__name__} that holds none of this model's "
            "parameters: give the optimizer that trains the model, or leave optimizer= out and "
            "subtract its memory from the budget"
        )
