"""Learn from one step under a plan what its dispatches come to, so that the steps after it need not ask
again.

Between the kernels of a real step the interpreter finds the processor's caches full of other things, and a
dispatch that goes through Python takes 60 microseconds where it takes 10 in a loop. But a plan's steps
dispatch the same operations in the same order. So one of them is listened to. Its `Script` says where,
between one module's beginning or end and another's, nothing is recorded: there the later steps run outside
the recorder (`lowtide.run.quiet`). For the dispatches that are left it says what there is to do. Where a step
departs from its script, the recorder asks again from there on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from lowtide import private
from lowtide.ops import OpInfo, has_plain_storage, tensors_of
from lowtide.plan.data import Plan
from lowtide.run.tape import Node, Standing

ASK = 0
"""The recorder has to look at it."""
PASS = 1
"""It is not recorded and writes nothing that was there before."""
WRITE = 2
"""It is not recorded and writes to tensors that were there before."""

_WORTHWHILE = 4
"""Leaving the recorder and coming back takes about as long as so many dispatches less one."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """How an operation is recorded that overwrites nothing and moves nothing: what a look at its results and
    the plan would find again.

    Attributes:
        info: facts about it.
        device: where it runs.
        outputs: positions, in the flat list of its results, of those that are given up.
        single: its result is one tensor.
        claimed: whether layers that ask are told to save what it writes.
    """

    info: OpInfo
    device: torch.device
    outputs: tuple[int, ...]
    single: bool
    claimed: bool

    @classmethod
    def of(cls, node: Node, info: OpInfo, result: Any) -> Recipe | None:
        """The recipe by which ``node`` was recorded, or ``None`` where it takes a closer look every time."""
        closer = (
            info.written or info.running_statistics or info.collective or info.loose or info.uninitialized
        )
        if (
            closer
            or node.written
            or any(
                isinstance(part, (list, Standing))
                for item in node.args
                for part in (item if isinstance(item, list) else [item] if isinstance(item, Standing) else ())
            )
        ):
            return None
        outputs = tuple(position for position, _ in node.outputs)
        return cls(info, node.device, outputs, isinstance(result, torch.Tensor), node.claimed)


Entry = tuple[Any, "int | Recipe", int]
"""An operation, what is left to do for it, and by how many operations the plan's program goes on."""

Mark = tuple[torch.nn.Module, bool, bool, int]
"""A module, whether it ends (or begins), whether the recorder is on from there, and how far the program went
on while it was off.
"""


@dataclass(frozen=True)
class Script:
    """What the dispatches of a step come to.

    Attributes:
        plan: the plan that the step ran under.
        entries: dispatch by dispatch, where the recorder is on.
        marks: where it goes off and on, and the other beginnings and ends of the same modules.
    """

    plan: Plan
    entries: tuple[Entry, ...]
    marks: tuple[Mark, ...]


class Listener:
    """Hears what a recorder makes of every dispatch of one step.

    Args:
        plan: what the step runs under.

    Attributes:
        stay: something in the step looks for the recorder (a scope, a limited model inside), so no script may
            leave it.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.stay = False
        # dispatches between marks, and whether each can do without the recorder
        self._stretches: list[list[tuple[Entry, bool]]] = [[]]
        self._asked: set[int] = set()  # stretches in which a layer asked the recorder for something
        self._marks: list[tuple[torch.nn.Module, bool]] = []

    def heard(
        self, func: Any, kind: int | Recipe, advance: int, untouched: bool, tensors: list[torch.Tensor]
    ) -> None:
        """A dispatch is over.

        Args:
            func: the operation.
            kind: what there was to do.
            advance: by how many operations the program went on.
            untouched: nothing that it wrote to is known to the recorder.
            tensors: its arguments and results.
        """
        if not all(has_plain_storage(t) and not (t.is_complex() or t.is_neg()) for t in tensors):
            kind = ASK  # conjugation and negation want `private.call`, other layouts a closer look
        self._stretches[-1].append(((func, kind, advance), kind in (PASS, WRITE) and untouched))

    def asked(self) -> None:
        """A layer asked the recorder what to save, and went by the answer."""
        self._asked.add(len(self._stretches) - 1)

    @contextmanager
    def listening(self, model: torch.nn.Module) -> Iterator[None]:
        """Note where in the step the submodules of ``model`` begin and end."""

        def around(module: torch.nn.Module) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
            return lambda forward: Staged(forward, lambda ends: self._mark(module, ends))

        with wrapped([m for m in model.modules() if m is not model], around):
            yield

    def _mark(self, module: torch.nn.Module, ends: bool) -> None:
        self._marks.append((module, ends))
        self._stretches.append([])

    def script(self) -> Script:
        """What was heard."""
        on = [
            at in self._asked or not all(quiet for _, quiet in stretch)
            for at, stretch in enumerate(self._stretches)
        ]
        on[0] = True
        if self.stay:
            on = [True] * len(on)
        first = 0
        while first < len(on):
            last = first
            while last < len(on) and on[last] == on[first]:
                last += 1
            if not on[first] and sum(map(len, self._stretches[first:last])) < _WORTHWHILE:
                on[first:last] = [True] * (last - first)
            first = last
        turning = {module for at, (module, _) in enumerate(self._marks) if on[at] != on[at + 1]}
        entries: list[Entry] = []
        marks: list[Mark] = []
        off = 0
        for at, stretch in enumerate(self._stretches):
            if at and self._marks[at - 1][0] in turning:
                back = on[at] and not on[at - 1]
                marks.append((*self._marks[at - 1], on[at], off if back else 0))
                off = 0 if back else off
            if on[at]:
                entries += [entry for entry, _ in stretch]
            else:
                off += sum(advance for (_, _, advance), _ in stretch)
        return Script(self.plan, tuple(entries), tuple(marks))


class Staged:
    """A module's forward that says when it begins and when it ends, on the thread that asked for it.

    Args:
        forward: the module's own.
        crosses: is told ``False`` at the beginning and ``True`` at the end.
    """

    __slots__ = ("__wrapped__", "crosses", "thread")

    def __init__(self, forward: Callable[..., Any], crosses: Callable[[bool], None]) -> None:
        self.__wrapped__ = forward
        self.crosses = crosses
        self.thread = threading.get_ident()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != self.thread:
            return self.__wrapped__(*args, **kwargs)
        self.crosses(False)
        result = self.__wrapped__(*args, **kwargs)
        self.crosses(True)
        return result


@contextmanager
def wrapped(
    modules: list[torch.nn.Module],
    around: Callable[[torch.nn.Module], Callable[[Callable[..., Any]], Callable[..., Any]]],
) -> Iterator[bool]:
    """For the length of the block, the modules' forwards are wrapped; says whether all could be (another
    thread's step may run in them).
    """
    free = [m for m in modules if "forward" not in m.__dict__ and not private.is_compiled(m)]
    for module in free:
        module.__dict__["forward"] = around(module)(module.forward)
    try:
        yield len(free) == len(modules)
    finally:
        for module in free:
            module.__dict__.pop("forward", None)


def tensors_around(args: Any, kwargs: Any, result: Any) -> list[torch.Tensor]:
    """The tensors of a call and of what it returned."""
    return [*tensors_of(args), *tensors_of(kwargs), *tensors_of(result)]
