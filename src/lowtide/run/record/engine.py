"""The executor in C++ (`cpp/`), which records the operations of limited steps, evicts, and brings back.

In: what C++ has to know of Python (`engine`), a plan's program in its form (`program_of`), what the
operations of a limit need (`forms`). C++ takes every operation that replays plainly. Everything else comes to
Python (`lowtide.run.record.recorder`), on the same tape.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from lowtide import interception, private
from lowtide.ops import op_info, operation_named
from lowtide.plan.data import ProgramStep
from lowtide.run.record import values
from lowtide.trace.modules import calling_line

NONE, STORED, EVICTED, EVICTED_FIRST = range(4)
"""What a plan says of a value, as ``Plan`` of ``cpp/tape.h``: nothing; it stays until backward; it goes when
autograd saves it; it goes first when memory is short."""


@cache
def engine() -> Any:
    """The compiled module.

    Raises:
        LowtideError: there is no C++ compiler.
    """
    module = interception.cpp_module()
    module.know(
        here=values.here,
        fingerprint=values.fingerprint_of,
        overwritten=values.raise_overwritten,
        unpack=values.unpack,
        facts=_facts,
        where=_where,
        current=interception.cpp_here,
    )
    return module


def _where() -> str:
    """Where user code is now: the module whose forward runs, and the line; in backward autograd's node."""
    if private.in_backward():
        node = private.node_key()
        return "backward" if node is None else f"backward ({node[0]})"
    line = calling_line({})
    frame: Any = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, torch.nn.Module) and not isinstance(owner, torch.nn.Sequential):
            return f"{type(owner).__name__} ({line})" if line else type(owner).__name__
        frame = frame.f_back
    return line


def _facts(name: str, overload: str) -> Any:
    """What C++ has to know of an operation (``Fact`` of ``cpp/recorder.h``)."""
    func = operation_named(f"{name.replace('::', '.')}.{overload or 'default'}")
    if not isinstance(func, private.OpOverload):
        return engine().Fact(name)
    info = op_info(func)
    places = {argument.name: at for at, argument in enumerate(private.schema_of(func).arguments)}
    return engine().Fact(
        info.name,
        plain=info.replays_plainly and not info.uninitialized,
        ignored=info.is_view or info.waits,
        uninitialized=info.uninitialized,
        reads_values=info.reads_values,
        of_aten=info.name.startswith("aten."),
        writes=[where if isinstance(where, int) else places[where] for where in info.written],
        statistics=info.running_statistics,
        training=-1 if info.training_position is None else info.training_position,
        dropout=-1 if info.dropout_position is None else info.dropout_position,
        loose=info.loose + info.loose_undropped,
    )


def program_of(steps: Sequence[ProgramStep]) -> Any:
    """A plan's program, as C++ follows it."""
    made = engine().Program()
    for step in steps:
        name, _, overload = step.name.rpartition(".")
        overload = "" if overload == "default" else overload
        made.add(name.replace(".", "::", 1), overload, step.replayed, bool(step.moves), step.stored)
    return made


def forms(device_type: str) -> Any:
    """What the operations of a limit need, by form: empty at first."""
    from lowtide.meter import counting_allocator, measurable

    measures = device_type == "cpu" and measurable(torch.device(device_type))
    return engine().Forms(meter=counting_allocator().register_addresses if measures else [])
