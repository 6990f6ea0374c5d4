"""The C++ recorder (`cpp/`), and a plan's program in its form.

It handles the program's next operation if that is plain: one that is not recorded and overwrites nothing that
the recorder knows, or one that is recorded, overwrites nothing and draws no random numbers. Everything else,
and a step that departs from its plan, goes to the recorder in Python, operation by operation. Both write on
the same tape. Without a compiler Python does it all, but for steps whose operations vary: C++ alone evicts on
demand (`cpp/on_demand.h`), and without it such steps run under the longest one's plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from functools import cache
from typing import Any

from lowtide import interception, private
from lowtide.ops import OpInfo, op_info, operation_named
from lowtide.plan.data import ProgramStep


class Handler(IntEnum):
    """Who handles an operation of a program, and how: as in `cpp/recorder.h`."""

    PASS = 0
    RECORD = 1
    PYTHON = 2


@cache
def cpp_recorder() -> Any:
    """The C++ recorder, or ``None`` where it cannot be compiled. Compiling takes half a minute, once for
    each version of PyTorch and Python.
    """
    from lowtide.run.record import directors, handles, replay, tape, values

    module = interception.cpp_module()
    if module is not None:
        module.know(  # all that it reads of Python's objects are slots of these classes (`cpp/tape.h`)
            value=values.LiveValue,
            node=values.Node,
            tape=tape.Tape,
            director=directors.PlanDirector,
            here=values.LiveValue.here,
            unpack=handles.unpack,
            bring_back=replay.bring_back_in_python,
            run_node=replay.run_node,
            drop_inputs=values.Node.drop_inputs,
            overwritten=handles.raise_overwritten,
        )
    return module


def cpp_program(steps: Sequence[ProgramStep]) -> Any:
    """A plan's program for the C++ recorder, or ``None`` where there is none."""
    module = cpp_recorder()
    if module is None:
        return None
    made = module.Program()
    for step in steps:
        func = operation_named(step.name)
        if isinstance(func, private.OpOverload):
            _add(made, func, _handler(step, op_info(func)), step.stored)
        else:
            made.add(step.name, "", Handler.PYTHON, [], [], -1, step.stored, None)
    return made


class AnyProgram:
    """What the C++ recorder knows of the operations of steps that no plan is for: it records each one that
    is plain, from the second time on.

    Attributes:
        compiled: as `cpp_program`.
    """

    def __init__(self) -> None:
        module = cpp_recorder()
        self.compiled: Any = None if module is None else module.Program(any=True)
        self._known = set[Any]()

    def learn(self, func: Any) -> None:
        """An operation has come that the C++ recorder did not take."""
        if self.compiled is None or func in self._known or not isinstance(func, private.OpOverload):
            return
        self._known.add(func)
        info = op_info(func)
        if info.replays_plainly and not info.uninitialized:
            add_plain(self.compiled, func)


def add_plain(program: Any, func: Any) -> None:
    """Have a program of any operations know one that replays plainly."""
    _add(program, func, Handler.RECORD, ())


def _add(made: Any, func: Any, handler: Handler, stored: Sequence[bool]) -> None:
    info = op_info(func)
    places = {argument.name: at for at, argument in enumerate(private.schema_of(func).arguments)}
    writes = [where if isinstance(where, int) else places[where] for where in info.written]
    training = -1 if info.training_position is None else info.training_position
    name, _, overload = func.name().partition(".")
    made.add(name, overload, handler, writes, list(info.running_statistics), training, stored, func)


def _handler(step: ProgramStep, info: OpInfo) -> Handler:
    if step.moves or info.uninitialized:
        return Handler.PYTHON
    if not step.replayed:
        return Handler.PASS
    return Handler.RECORD if info.replays_plainly else Handler.PYTHON
