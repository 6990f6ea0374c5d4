"""`apply`: run a step under a plan."""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from lowtide.errors import PlanError, expect
from lowtide.plan.data import Plan
from lowtide.run.messages import warn
from lowtide.run.mover import Mover
from lowtide.run.record.recorder import Recorder
from lowtide.run.record.special import Verify, check_verify
from lowtide.run.record.tape import Tape

if TYPE_CHECKING:
    from lowtide.extensions.moves.store.stores import Stores


class apply:
    """Run the step in the block under ``plan``.

    Enter the object again for the next step. With ``verify="first"`` only the first step is verified.

    Args:
        plan: a plan of the step that runs in the block. With another step the gradients are right, but the
            peak differs: a warning says this if the operations differ, but not if only sizes differ.
        verify: ``first`` runs each recorded operation of the first step twice and compares the results,
            ``always`` also compares the digest of every replayed tensor in every step, ``never`` compares
            nothing.
        stores: groups, codecs of your own and open tiers for a plan that moves values; by default the tiers
            that the plan names.

    Attributes:
        findings: the operations of the latest step that did not reproduce, with the reason. Their results
            were kept.
        departed: how many operations of the latest step differ from the plan, counted from the first one.

    Raises:
        PlanError: ``plan`` is no plan, or carries no program.

    Example:
        >>> import torch, lowtide
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 1))
        >>> x = torch.randn(4, 8)
        >>> plan = lowtide.plan(lowtide.trace(lambda: model(x).sum()), policy="full")
        >>> with lowtide.apply(plan):
        ...     model(x).sum().backward()
    """

    def __init__(self, plan: Plan, *, verify: Verify = "first", stores: Stores | None = None) -> None:
        check_verify(verify)
        if not isinstance(plan, Plan):
            raise PlanError(
                f"apply takes a Plan, not {type(plan).__name__}: make one with "
                "lowtide.plan(lowtide.trace(step, *args))"
            )
        if not plan.program:
            raise PlanError(
                "this plan has no program to follow: make it with lowtide.plan or lowtide.policies.make_plan"
            )
        self.plan = plan
        self.stores = _stores_of(plan, stores)
        self.verify: Verify = verify
        self.findings: dict[str, str] = {}
        self.departed = 0
        self._verified = self._warned = False
        self._stack: ExitStack | None = None
        self._recorder: Recorder | None = None

    def __enter__(self) -> Self:
        if self._stack is not None:
            raise PlanError("this apply(plan) is already active: nest another one")
        verify = self.verify != "never" and not self._verified
        recorder = self._recorder = Recorder(
            tape=Tape(verify),
            check=self.verify == "always",
            mover=self._mover(verify),
        )
        recorder.follow(self.plan.program)
        self._stack = ExitStack()
        self._stack.enter_context(recorder.recording())
        self.findings = recorder.tape.findings
        return self

    def _mover(self, verify: bool) -> Mover | None:
        """What moves values in the next step, where the plan does."""
        if not self.plan.moves:
            return None
        from lowtide.extensions.moves.engine import TransferEngine  # loads tiers and codecs

        return TransferEngine(self.plan, self.stores, verify)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._stack is not None and self._recorder is not None
        core = self._recorder.core
        self.departed = core.extra
        stack, self._stack, self._recorder = self._stack, None, None
        stack.__exit__(kind, error, trace)
        self._verified = self._verified or kind is None
        if kind is None and self.departed and not self._warned:
            self._warned = True
            warn(
                f"from operation {core.at + 1} on, the step runs other operations than the applied "
                "plan: its gradients are right, but its peak may be above the plan's. Make a plan from "
                "a trace of this step"
            )


def _stores_of(plan: Plan, stores: Any) -> Any:
    """What holds the values that a plan moves.

    Raises:
        PlanError: ``stores`` is something else.
    """
    if stores is None and not plan.moves:
        return None
    from lowtide.extensions.moves.store.stores import Stores  # loads tiers and codecs

    known = stores is None or isinstance(stores, Stores)
    expect(known, "apply(stores=)", stores, "lowtide.Stores(...), or None")
    return Stores() if stores is None else stores
