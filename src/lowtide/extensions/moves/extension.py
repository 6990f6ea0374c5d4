"""Moves as an extension of a limit: lays out what steps under a plan store, and carries their moves out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from lowtide import accelerator
from lowtide.errors import PlanError
from lowtide.extension import Extension
from lowtide.extensions.moves.auto import Auto
from lowtide.extensions.moves.engine import TransferEngine, lay_out, reserve_tiers
from lowtide.extensions.moves.layout import without_slab
from lowtide.extensions.moves.simulate import sources_of
from lowtide.extensions.moves.store.stores import Stores
from lowtide.extensions.moves.store.tier import StoreError
from lowtide.meter.resident import model_device
from lowtide.plan import resolve
from lowtide.plan.data import Plan
from lowtide.plan.simulate.index import Sources, StepIndex
from lowtide.run.messages import warn
from lowtide.words import count_text


class Moves(Extension):
    """Moves the values of one model.

    Args:
        stores: as of `lowtide.limit_memory`; ``None`` opens tiers of its own.

    Attributes:
        stores: those that are used.
        own: whether no user gave them.

    Raises:
        PlanError: ``stores`` is something else.
    """

    name = "moves"

    def __init__(self, stores: Stores | None = None) -> None:
        if stores is not None and not isinstance(stores, Stores):
            raise PlanError(f"stores= takes lowtide.Stores(...), not {type(stores).__name__}")
        self.stores = Stores() if stores is None else stores
        self.own = stores is None
        self.groups = self.stores.groups

    def __reduce__(self) -> tuple[type[Moves], tuple[()]]:
        return Moves, ()  # another process has tiers of its own

    def attach(self, maker: Any) -> None:
        """A limit holds it from now on, whose policy says how much of main memory is taken."""
        super().attach(maker)
        most = getattr(maker.policy, "host_bytes", None)
        if most is not None:
            self.stores.host_bytes = most if self.own else max(most, self.stores.host_bytes or 0)

    def copied(self) -> Moves:
        """The same for a copy, with no tier open."""
        found = Moves(self.stores.fresh())
        found.own = True
        return found

    def close(self) -> None:
        """Close the tiers, unless they are the user's."""
        if self.own:
            self.stores.close()

    def prepare(self, plan: Plan, device: torch.device) -> None:
        """Lay out and reserve the memory of what every step under the plan stores. A step is measured from
        after that on, so the slab counts as resident.
        """
        if plan.moves:
            lay_out(plan, self.stores, device)

    @contextmanager
    def around(self, step: Any) -> Iterator[None]:
        """Carry out the plan's moves in a forward, all of a step's by one engine."""
        planned = getattr(step, "planned", None)
        if planned is None or not planned.plan.moves:
            yield
            return
        if step.mover is None:
            step.mover = TransferEngine(planned.plan, self.stores, step.compares, model_device(self.model))
        yield
        if step.first and not step.mover.told and (notes := step.mover.notes):
            step.mover.told = True
            warn(
                f"{count_text(len(notes), 'value')} did not fit their codecs and were kept without "
                f"them, on top of the predicted peak ({notes[0]})"
            )

    def sources(self, index: StepIndex, plan: Plan) -> Sources | None:
        """Where evicted values come back from under the plan."""
        return sources_of(index, plan) if plan.moves else None

    def admit(self, plan: Plan, problem: Any, limit_bytes: int) -> Plan:
        """The plan, without its slab where that leaves too little for what runs between two steps: a slab is
        held for good. Main memory is reserved now where the policy is `auto`: if the system has no room left,
        the step recomputes.
        """
        if problem.claim.peak_bytes > limit_bytes - plan.slab_bytes:
            plan = without_slab(plan)
        policy = problem.patience.policy
        device = model_device(self.model)
        here = accelerator.is_accelerator(device) and not problem.shares_plan
        if not plan.moves or not isinstance(policy, Auto) or not here:
            return plan
        try:
            reserve_tiers(plan, self.stores, device)
        except StoreError as error:
            self.maker.policy = self.maker.policy.without_moves(str(error))
            patience = replace(problem.patience, policy=policy.without_moves(str(error)))
            return replace(problem, patience=patience).plan_within(limit_bytes)
        return plan


def moves_for(policy: Any, stores: Any, device: torch.device) -> Moves:
    """What moves the values of a limited model. How fast tiers and codecs are is measured here where the
    policy goes by that: their buffers are in no plan, so it is done before a step runs.

    Args:
        policy: a policy or its name. One of the user's own may move values.
        stores: as of `lowtide.limit_memory`.
        device: of the model.
    """
    found = Moves(stores)
    if isinstance(policy, str):
        policy = resolve(policy)
    if (with_links := getattr(policy, "with_links", None)) is not None:
        with_links(str(device))
    return found
