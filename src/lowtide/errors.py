"""The errors that lowtide raises: one family, each message names what was given, what is allowed and what to
do.
"""

from __future__ import annotations

import inspect
import os
import reprlib
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from numbers import Integral
from typing import Any, ClassVar, Protocol


class LowtideError(Exception):
    """Base of every error that lowtide raises on purpose."""


class Words(Protocol):
    """Puts a `BudgetError` without a message into words."""

    def short(self, error: BudgetError) -> str:
        """What the step takes that is above its budget, in a line."""
        ...

    def remedies(self, error: BudgetError) -> Sequence[str]:
        """What to do, any one of these."""
        ...

    def holders(self, error: BudgetError) -> tuple[str, ...]:
        """A line for each of those that hold most at the peak."""
        ...

    def at_peak(self, sim: Any, least: Any) -> tuple[dict[str, int], tuple[Any, ...], str]:
        """What is live at a peak, in bytes by name; who holds what the step made; and where the peak is."""
        ...


class BudgetError(LowtideError):
    """A budget is malformed, or no plan can meet it.

    If no plan can meet it, the error holds facts, and its text is made when it is read: the bytes that the
    step takes at least (``args[0]``), the remedies, and the largest holders at the peak. It is then a
    ``torch.OutOfMemoryError``, too, so that code which catches that error also catches this one, such as
    accelerate's search for a batch size.

    Args:
        message: the text of the error; ``None`` if the facts give it.
        remedies: remedies that come before those of the facts.
        peak: the simulator and the simulation of the smallest plan, in place of ``parts`` and ``made``.

    Attributes:
        message: as given.
        budget_bytes: the budget; ``None`` if its text is malformed.
        smallest_bytes: the smallest budget for which a plan is known; ``None`` if the text is malformed.
        parts: the live bytes at the peak of that plan by name ("parameters", "least activations"); empty if
            they are not known.
        plain_peak_bytes: the plain step's peak, if the budget is a share of it.
        policy: the policy that cannot meet the budget; empty for the default planner.
        subject: the part of the step for which the budget is too small; empty for forward and backward.
        remedies: remedies, of which any one is enough.
        holders: the three largest at the peak, by module and line, with the bytes that a remedy frees.
        made: the holders of the tensors that the step made, as `lowtide.remedies.Holder`.
        detail: where the peak is, and other notes.

    Example:
        >>> error = BudgetError(None, 3 << 30, "Its peak is at the loss.", budget_bytes=1 << 30)
        >>> print(error)
        the budget of 1 GiB is too small: at least 3 GiB are needed
        What to do, any one of these:
          - give a budget of 3GiB or more (3221225472 bytes), the smallest that works
        Its peak is at the loss.
    """

    words: ClassVar[Words]  # given by the package, which loads what knows them when they are needed

    def __new__(
        cls,
        message: str | None = None,
        smallest_bytes: int | None = None,
        *_: Any,
        budget_bytes: int | None = None,
        **__: Any,
    ) -> BudgetError:
        """A refusal is out of memory in PyTorch's words, too, where PyTorch is loaded."""
        torch = sys.modules.get("torch")
        refuses = smallest_bytes is not None and budget_bytes is not None
        kind: Any = _out_of_memory(torch.OutOfMemoryError) if torch and refuses else cls
        return super().__new__(kind)

    def __init__(
        self,
        message: str | None,
        smallest_bytes: int | None = None,
        detail: str = "",
        *,
        budget_bytes: int | None = None,
        parts: Mapping[str, int] | None = None,
        plain_peak_bytes: int | None = None,
        policy: str = "",
        subject: str = "",
        remedies: Sequence[str] = (),
        made: Sequence[Any] = (),
        peak: tuple[Any, Any] | None = None,
    ) -> None:
        super().__init__(*([] if message is None else [message]))
        self.message = message
        self.budget_bytes, self.smallest_bytes = budget_bytes, smallest_bytes
        self.plain_peak_bytes, self.policy, self.subject = plain_peak_bytes, policy, subject
        self._parts, self._made, self._detail = dict(parts or {}), tuple(made), detail
        self._first_remedies, self._peak = tuple(remedies), peak

    @property
    def parts(self) -> dict[str, int]:
        """The live bytes at the peak of the smallest plan, by name."""
        self._look_at_peak()
        return self._parts

    @property
    def made(self) -> tuple[Any, ...]:
        """The holders of the tensors that the step made."""
        self._look_at_peak()
        return self._made

    @property
    def detail(self) -> str:
        """What is live at the peak, and what else is worth knowing."""
        self._look_at_peak()
        return self._detail

    @property
    def peak(self) -> tuple[Any, Any] | None:
        """The simulator and the simulation of the smallest plan, until somebody has asked for a text."""
        return self._peak

    @property
    def remedies(self) -> tuple[str, ...]:
        """What to do, any one of them."""
        if self.message is not None or self.budget_bytes is None or self.smallest_bytes is None:
            return self._first_remedies
        return *self._first_remedies, *self.words.remedies(self)

    @property
    def holders(self) -> tuple[str, ...]:
        """A line for each of the three that hold most at the peak."""
        return self.words.holders(self)

    @property
    def args(self) -> tuple[str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """What the step takes at least, in words; of a refusal, with those of an error of PyTorch's."""
        return (self._short + (_RUNS_OUT if type(self) is not BudgetError else ""),)

    @property
    def _short(self) -> str:
        return self.words.short(self) if self.message is None else self.message

    def __repr__(self) -> str:
        return f"BudgetError({self._short!r})"

    def __str__(self) -> str:
        short, remedies, holders = self._short, self.remedies, self.holders
        if not remedies:
            return f"{short} {self.detail}".strip()
        lines = [
            short,
            "What to do, any one of these:",
            *(f"  - {remedy}" for remedy in remedies),
            *(["Largest at its peak, with the bytes that a remedy frees:"] if holders else []),
            *(f"  - {holder}" for holder in holders),
            self.detail,
        ]
        return "\n".join(line for line in lines if line)

    def __reduce__(self) -> tuple[Any, ...]:
        self._look_at_peak()
        made = partial(BudgetError, budget_bytes=self.budget_bytes)
        return made, (self.message, self.smallest_bytes), self.__dict__

    def _look_at_peak(self) -> None:
        """Take from the smallest plan's peak what is live there: once, when somebody asks."""
        if self._peak is not None:
            peak, self._peak = self._peak, None
            self._parts, self._made, where = self.words.at_peak(*peak)
            self._detail = f"{where} {self._detail}".strip()

    def stating(self, **facts: Any) -> BudgetError:
        """The same refusal with other facts: ``budget_bytes``, ``smallest_bytes``, ``parts``,
        ``plain_peak_bytes``.
        """
        if not facts.keys().isdisjoint(("parts", "made")):
            self._look_at_peak()
        own: dict[str, Any]
        own = {"budget_bytes": self.budget_bytes, "smallest_bytes": self.smallest_bytes}
        own |= {"plain_peak_bytes": self.plain_peak_bytes, "policy": self.policy, "subject": self.subject}
        own |= {"parts": self._parts, "detail": self._detail, "remedies": self._first_remedies}
        return BudgetError(self.message, **(own | {"made": self._made, "peak": self._peak} | facts))

    def add(self, more: str) -> None:
        """Another sentence of detail."""
        self._detail = f"{self.detail} {more}".strip()

    def add_first_remedy(self, remedy: str) -> None:
        """What to do before all else."""
        self._first_remedies = (remedy, *self._first_remedies)


_RUNS_OUT = ". A step within it runs out of memory."
"""The end of what a refusal says in ``args[0]``."""


@cache
def _out_of_memory(kind: type[BaseException]) -> type[BudgetError]:
    """`BudgetError`, as an error of PyTorch's, too."""
    return type("BudgetError", (BudgetError, kind), {"__module__": __name__, "__doc__": BudgetError.__doc__})


class TraceError(LowtideError):
    """A step could not be recorded."""


class MeterError(LowtideError):
    """Memory cannot be measured the way that was asked for."""


class PlanError(LowtideError):
    """A plan is inconsistent with its step graph, or a plan file is damaged."""


class ReplayError(LowtideError, RuntimeError):
    """A value evicted during the forward did not come back bitwise equal."""


_OWN = tuple(
    os.path.join(os.path.dirname(__file__), name)
    for name in ("run", "trace", "compiled", "extensions", "private", "interception.py")
)
"""What runs a user's code: frames of these say nothing about an error in that."""


_CALLS = ("__call__", "_run", "redispatch")
"""Functions of these that run an operation of PyTorch."""


def shorten(error: BaseException, called: object = None) -> None:
    """Leave only the first of our own frames in a traceback, where the error is a user's: it was raised on
    purpose, or by what we called. Any other of ours keeps its frames.

    Args:
        error: what was raised.
        called: the user's function that was called: other arguments than it takes are a user's error, too.
    """
    entries, entry = list[Any](), error.__traceback__
    while entry is not None:
        entries.append(entry)
        entry = entry.tb_next
    codes = [entry.tb_frame.f_code for entry in entries]
    own = [code.co_filename.startswith(_OWN) for code in codes]
    misfits = str(error).startswith(f"{getattr(called, '__qualname__', '')}() ")
    if not own[-1] or isinstance(error, LowtideError) or codes[-1].co_name in _CALLS or misfits:
        kept = [entry for at, entry in enumerate(entries) if not (own[at] and any(own[:at]))]
        for entry, after in zip(kept, [*kept[1:], None], strict=True):
            entry.tb_next = after


def expect(fits: bool, name: str, given: object, allowed: str, error: type[LowtideError] = PlanError) -> None:
    """Refuse an argument that does not fit.

    Args:
        fits: whether it does.
        name: of the argument, as in ``"limit_memory(model=)"``.
        given: what was given.
        allowed: what to give in its place.
        error: what is raised.

    Example:
        >>> expect(callable(3), "measure(step=)", 3, "a function that runs one step", MeterError)
        Traceback (most recent call last):
        lowtide.errors.MeterError: measure(step=) was given 3: give a function that runs one step
    """
    if not fits:
        shown = " ".join(reprlib.repr(given).split())  # of a module it has several lines
        raise error(f"{name} was given {shown}: give {allowed}")


def is_count(given: object, least: int = 0) -> bool:
    """Whether this is a whole number, and at least ``least``.

    >>> is_count(3), is_count(0, 1), is_count(3.0), is_count(True)
    (True, False, False, False)
    """
    return isinstance(given, Integral) and not isinstance(given, bool) and int(given) >= least


def takes(function: Callable[..., object], count: int) -> bool:
    """Whether a function can be called with so many arguments."""
    try:
        inspect.signature(function).bind(*range(count))
    except TypeError:
        return False
    except ValueError:  # its signature is not known
        return count == 1
    return True
