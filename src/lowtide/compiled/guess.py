"""A first cut that nobody has looked at, and the look at it while Inductor compiles it.

What a cut takes is read off the text that Inductor generates. A planner that reads it before it cuts has the
graph lowered for that alone, which takes longer than everything else that it does. Most first cuts are good:
so where sizes are fixed the first is compiled as it is, and its peak is read off the text of the halves,
before any kernel of the last is compiled. Where that is above the budget, or far below, `Refused` ends the
compilation, and the graph is planned with looks at every cut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import fx

from lowtide import budget as budgets
from lowtide.compiled.correction import NEAR, at_or_smallest
from lowtide.compiled.cut import Halves, cut
from lowtide.compiled.generated import Ends, profile_generated
from lowtide.compiled.joint import Joint
from lowtide.compiled.liveness import Profile
from lowtide.compiled.planner import FIRST, Task, lent_to, predict_generated, told
from lowtide.compiled.scratch import Bench, Scratch
from lowtide.compiled.seconds import with_forecast
from lowtide.plan import make
from lowtide.plan.data import Plan
from lowtide.private import inductor, partitioning
from lowtide.trace.costs.roofline import outside_modes

DOUBT = 0.1
"""Share by which the plain peak may be off that follows from single calls. A budget so near to it is not
guessed for.
"""


class Refused(BaseException):
    """A guess was not good. It is no error of whoever compiles, so nobody there may catch it."""


@dataclass(frozen=True)
class Guess:
    """A cut, and what it was made for.

    Attributes:
        plan: what is stored and what runs again, by single calls.
        halves: forward and backward.
        limit_bytes: the budget; ``None`` where it is a share of what these very halves take, or more.
        plain_peak_bytes: what `torch.compile` alone takes, by single calls where only that is known; ``None``
            where these are its own halves.
        seconds: from what is read off the texts of the halves to their time.
        extra_seconds: by which they are likely to take longer than those of `torch.compile`.
        plain_seconds: time of those of `torch.compile`, where their texts are known.
    """

    plan: Plan
    halves: Halves
    limit_bytes: int | None
    plain_peak_bytes: int | None
    seconds: Callable[[Sequence[Profile]], float]
    extra_seconds: float = 0.0
    plain_seconds: float | None = None


def guess(
    joint: Joint, budget: str | int, standing_bytes: int, options: dict[str, Any] | None
) -> Guess | None:
    """A cut for a budget by what single calls take, or ``None`` where that says too little.

    Args:
        joint: the graph.
        budget: as of `lowtide.limit_memory`.
        standing_bytes: what stands beside what the graph allocates.
        options: Inductor's settings.
    """
    task = Task(joint, standing_bytes)
    nothing_again = make(task.step.graph, policy="keep_all", progress=False)
    about, plain, plain_seconds = nothing_again.predicted_peak_bytes, task.plain(), None
    unchanged = partial(Guess, nothing_again, plain, seconds=partial(task.seconds, plain))
    if isinstance(budget, str) and budget.strip().endswith("%"):
        if budgets.parse(budget, 100) >= 100:
            return unchanged(None, None)
        profiles = predict_generated(joint, options or {})(*plain)(joint.size)
        about = standing_bytes + max(one.peak_bytes for one in profiles)
        plain_seconds = task.seconds(plain, profiles)
    limit = budgets.resolve(budget, about, None, task.device, standing_bytes=standing_bytes)
    if plain_seconds is None and limit >= (1 + DOUBT) * about:
        return unchanged(limit, None)
    if plain_seconds is None and limit > (1 - DOUBT) * about:
        return None
    room = limit - budgets.slack_bytes(limit)
    plan = at_or_smallest(task.step.graph, int(FIRST * room))
    if plan.predicted_peak_bytes > room:
        return None
    halves = cut(joint, task.step.stored(plan.stored, 0))
    extra = task.seconds(halves) - task.seconds(plain)
    return Guess(plan, halves, limit, about, partial(task.seconds, halves), extra, plain_seconds)


class Trial:
    """Looks at a guess while Inductor compiles it.

    Args:
        budget: as of `lowtide.limit_memory`.

    Attributes:
        plan: the plan with what it really takes, once that is known.
    """

    def __init__(self, budget: str | int) -> None:
        self.budget = budget
        self.plan: Plan | None = None
        self._guess: Guess | None = None
        self._standing = 0
        self._lent: set[str] = set()
        self._bench = Bench()
        self._forward: Profile | None = None

    def cut(self, joint: Joint, standing_bytes: int, options: dict[str, Any] | None) -> Halves | None:
        """The halves to look at, or ``None`` where there is no guess."""
        self._guess = guess(joint, self.budget, standing_bytes, options)
        self._standing, self._lent = standing_bytes, lent_to(joint)
        return None if self._guess is None else self._guess.halves

    def compile(self, half: fx.GraphModule, inputs: Sequence[Any], **how: Any) -> Any:
        """Compile a half as Inductor does, and look at it.

        Raises:
            Refused: the guess is not good.
        """
        if self._guess is None:
            return inductor.compile_half(half, inputs, **how)
        texts: list[str] = []
        backward = bool(how.get("is_backward"))
        ends, strides = Ends.of(half), partitioning.laid_out(half, inputs)

        def look(text: str) -> None:
            texts.append(text)
            self._look(text, ends, strides, backward)

        with inductor.reading(look):
            compiled = inductor.compile_half(half, inputs, **how)
        if not texts:
            raise Refused
        return compiled

    def _look(self, text: str, ends: Ends, strides: dict[str, tuple[int, ...]], backward: bool) -> None:
        assert self._guess is not None
        lent = self._lent - (self._forward.copied.keys() if self._forward else set())
        with outside_modes():
            scratch = Scratch(self._bench).run()
            found = profile_generated(text, ends, lent, scratch, partitioning.hint, strides)
        if not backward:
            self._forward = found
        peak = self._standing + max(found.peak_bytes, self._forward.peak_bytes if self._forward else 0)
        limit, plain = self._guess.limit_bytes, self._guess.plain_peak_bytes
        if limit is not None:
            most = limit if plain is None else limit - budgets.slack_bytes(limit)
            if peak > most or (backward and plain is not None and peak < NEAR * limit):
                raise Refused
        if backward:
            limit = budgets.parse(self.budget, peak) if limit is None else limit
            assert self._forward is not None
            seconds = self._guess.seconds((self._forward, found))
            plain_seconds = self._guess.plain_seconds
            plain_seconds = seconds - self._guess.extra_seconds if plain_seconds is None else plain_seconds
            plan = with_forecast(self._guess.plan, seconds, plain_seconds)
            self.plan = told(plan, limit, peak, plain or peak)
            self._guess = None
