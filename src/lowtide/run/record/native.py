"""The compiled half of the recorder (`cpp/`), and what it is told of a plan's program.

It takes the operations that the program has next and that need no closer look: those that are not recorded
and overwrite nothing that the recorder knows, and those that are recorded, overwrite nothing and draw no
random numbers. Everything else, a step that departs from its plan included, goes to the recorder in Python,
operation by operation; both work on the same tables and the same tape. Without a compiler Python does it all.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from lowtide import interception, private
from lowtide.ops import OpInfo, op_info
from lowtide.plan.data import ProgramStep

_PASS, _RECORD, _CLOSER = 0, 1, 2


@cache
def compiled() -> Any:
    """The compiled module, or ``None`` where it cannot be compiled. It is compiled where operations are
    intercepted first (half a minute, once for each PyTorch and Python).
    """
    from lowtide.run.record import handles, replay, tape

    module = interception.compiled_recorder()
    if module is not None:
        module.know(tape.LiveValue, tape.Node, handles.unpack, replay.bring_back, handles.overwritten)
    return module


def compiled_program(steps: Sequence[ProgramStep]) -> Any:
    """What the compiled half has to know of a plan's program, or ``None`` where there is none."""
    module = compiled()
    if module is None:
        return None
    made = module.Program()
    for step in steps:
        func = operation_named(step.name)
        if not isinstance(func, private.OpOverload):
            made.add(step.name, "", _CLOSER, [], [], -1, step.stored, None)
            continue
        info = op_info(func)
        places = {argument.name: at for at, argument in enumerate(private.schema_of(func).arguments)}
        writes = [where if isinstance(where, int) else places[where] for where in info.written]
        statistics = list(info.running_statistics)
        training = -1 if info.training_position is None else info.training_position
        name, _, overload = func.name().partition(".")
        kind = _kind(step, info)
        made.add(name, overload, kind, writes, statistics, training, step.stored, func)
    return made


def _kind(step: ProgramStep, info: OpInfo) -> int:
    if step.moves or info.uninitialized:
        return _CLOSER
    if not step.replayed:
        return _PASS
    return _RECORD if info.replays_plainly else _CLOSER


def operation_named(name: str) -> private.OpOverload | private.OpOverloadPacket | None:
    """The overload of that name, or the packet of overloads, or ``None``: a compiled module's call has no
    name of an operation.
    """
    found: Any = torch.ops
    try:
        for part in name.split("."):
            found = getattr(found, part)
    except (AttributeError, RuntimeError):
        return None
    return found if isinstance(found, (private.OpOverload, private.OpOverloadPacket)) else None
