"""Compile a first cut before its peak is known, and read the peak off what Inductor generates for it.

What a cut takes is read off the text that Inductor generates. A planner that reads it before it cuts has the
graph lowered for that alone, which takes longer than everything else that it does. Most first cuts are good:
so where sizes are fixed the first is compiled as it is, and its peak is read off the text of the halves,
before any kernel of the last is compiled. Where that is above the budget, or far below, `Refused` ends the
compilation, and the graph is planned with looks at every cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from lowtide import budget as budgets
from lowtide.compiled.correction import NEAR, at_or_smallest
from lowtide.compiled.cut import Halves, cut
from lowtide.compiled.generated import Scratch, profile_generated
from lowtide.compiled.joint import Joint
from lowtide.compiled.liveness import Profile
from lowtide.compiled.prediction import lent_to
from lowtide.compiled.timeline import FIRST, told
from lowtide.compiled.variants import Menu
from lowtide.graph import StepGraph
from lowtide.plan import make
from lowtide.plan.data import Plan
from lowtide.private import inductor, partitioning
from lowtide.trace.costs.roofline import outside_modes

DOUBT = 0.1
"""Share by which the plain peak may be off that follows from single calls. A budget so near to it is not
guessed for.
"""


class Refused(BaseException):
    """A guess was not good. No `Exception`: PyTorch's compiler would catch that."""


class Trial:
    """Cuts a graph by what single calls take, and checks the peak while Inductor compiles the halves.

    Args:
        budget: as of `lowtide.limit_memory`.

    Attributes:
        plan: the plan with what it really takes, once that is known.
    """

    def __init__(self, budget: str | int) -> None:
        self.budget = budget
        self.plan: Plan | None = None
        self._halves: Halves | None = None
        self._known: dict[str, int] = {}  # scratch
        self._forward: Profile | None = None

    @property
    def graph(self) -> StepGraph:
        """The graph that `plan` is of."""
        return self._menu.step.graph

    def cut(self, joint: Joint, standing_bytes: int, options: dict[str, Any] | None) -> Halves | None:
        """The halves to look at, by what single calls take, or ``None`` where that says too little.

        Args:
            joint: the graph.
            standing_bytes: what stands beside what the graph allocates.
            options: Inductor's settings.
        """
        self._standing, self._lent = standing_bytes, lent_to(joint)
        self._menu = menu = Menu(joint, options, standing_bytes, self.budget)
        self._guess = make(menu.step.graph, policy="keep_all", progress=False)
        self._limit: int | None = None  # a share of what these very halves take, or more
        self._plain_peak: int | None = None  # these are the halves of `torch.compile`
        self._plain_seconds: float | None = None
        self._extra_seconds = 0.0  # likely
        about, plain = self._guess.predicted_peak_bytes, menu.plain()
        share = isinstance(self.budget, str) and self.budget.strip().endswith("%")
        if share and budgets.parse(self.budget, 100) >= 100:
            self._halves = plain
            return plain
        if share:
            looked = menu.variant(None)
            about = standing_bytes + max(looked.forward_bytes, looked.backward_bytes())
            self._plain_seconds = looked.seconds
        limit = budgets.resolve(self.budget, about, None, menu.device, standing_bytes=standing_bytes)
        self._limit = limit
        if not share and limit >= (1 + DOUBT) * about:
            self._halves = plain
            return plain
        room, self._plain_peak = limit - budgets.slack_bytes(limit), about
        self._guess = at_or_smallest(menu.step.graph, int(FIRST * room))
        doubtful = not share and limit > (1 - DOUBT) * about
        if not doubtful and self._guess.predicted_peak_bytes <= room:
            self._halves = cut(joint, menu.step.stored(self._guess.stored, 0))
            self._extra_seconds = menu.likely_seconds(self._halves) - menu.likely_seconds(plain)
        return self._halves

    def compile(self, half: fx.GraphModule, inputs: Sequence[Any], **how: Any) -> Any:
        """Compile a half as Inductor does, and look at it.

        Raises:
            Refused: the guess is not good.
        """
        if self._halves is None:
            return inductor.compile_half(half, inputs, **how)
        texts: list[str] = []
        backward = bool(how.get("is_backward"))
        as_given, strides = partitioning.twin(half), partitioning.laid_out(half, inputs)

        def look(text: str) -> None:
            texts.append(text)
            self._look(text, as_given, strides, backward)

        with inductor.reading(look):
            compiled = inductor.compile_half(half, inputs, **how)
        if not texts:
            raise Refused
        return compiled

    def _look(
        self, text: str, half: fx.GraphModule, strides: dict[str, tuple[int, ...]], backward: bool
    ) -> None:
        assert self._halves is not None
        lent = self._lent - (self._forward.copied.keys() if self._forward else set())
        with outside_modes():
            scratch = Scratch(self._known).run()
            found = profile_generated(text, half, lent, scratch, partitioning.hint, strides)
        if not backward:
            self._forward = found
        peak = self._standing + max(found.peak_bytes, self._forward.peak_bytes if self._forward else 0)
        limit, plain = self._limit, self._plain_peak
        if limit is not None:
            most = limit if plain is None else limit - budgets.slack_bytes(limit)
            if peak > most or (backward and plain is not None and peak < NEAR * limit):
                raise Refused
        if backward:
            assert self._forward is not None
            limit = budgets.parse(self.budget, peak) if limit is None else limit
            seconds = self._menu.seconds(self._halves, (self._forward, found))
            plain_seconds = self._plain_seconds
            plain_seconds = seconds - self._extra_seconds if plain_seconds is None else plain_seconds
            self.plan = told(self._guess, limit, peak, plain or peak, seconds, plain_seconds)
            self._halves = None
