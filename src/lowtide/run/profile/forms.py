"""What the C++ recorder takes over of a profiled step (`run/record/cpp/profile.h`).

A form is an operation with arguments of the same shapes, strides, types and numbers: its calls cost the same.
A pattern is one with arguments of the same types: its calls are written down alike. Python runs the first
call of each pattern. C++ runs the others: it measures and verifies the first ones of each form as Python
does, records them and writes them down, and what they read is still compared with what was written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch

from lowtide.graph import Storage
from lowtide.meter import counting_allocator, measurable
from lowtide.ops import SAYS_WHERE, WRITES_PART, Call, has_plain_storage
from lowtide.run.digest import digest_address
from lowtide.run.profile.costs import RUNS, MeasuredCost, UnderWay
from lowtide.run.profile.segments import SegmentedTape
from lowtide.run.record.cpp_recorder import add_plain, cpp_recorder
from lowtide.run.watch import weakly
from lowtide.trace.traced import TracedOperation, TracedStorage, TracedValue, calling_line
from lowtide.trace.tracer import Tracer

_ASKS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


@cache
def asks(func: Any) -> bool:
    """Whether an operation asks for values: what the program does next may depend on them."""
    return not _ASKS.isdisjoint(func.tags)


def may_be_meeting(call: Call) -> bool:
    """Whether a call in a backward may be autograd's engine's: it adds the gradients of two nodes."""
    return call.info.name == "aten.add.Tensor" and len(call.args) == 2 and not call.kwargs


@cache
def _cpp_profile() -> Any:
    """The C++ recorder, which knows the classes of a profiled step, or ``None``."""
    module = cpp_recorder()
    if module is not None:
        module.know_traced(  # all that it reads of Python's objects are slots of these (`cpp/profile.h`)
            tracer=Tracer,
            reference=TracedStorage,
            storage=Storage,
            version=TracedValue,
            operation=TracedOperation,
            cost=MeasuredCost,
            calling_line=calling_line,
            says_where=list(SAYS_WHERE),
            writes_part=list(WRITES_PART),
        )
    return module


class Forms:
    """The forms that C++ knows of one profiled step.

    Args:
        tape: of the step.
        tracer: writes the step down.
        under_way: its collectives.
        notes: functions of the profiler that C++ calls, by their names in ``profile.h``.

    Attributes:
        cpp: runs calls of these forms; ``None`` on other devices than the CPU, and without a compiler.
    """

    def __init__(
        self,
        tape: SegmentedTape,
        tracer: Tracer,
        under_way: UnderWay,
        notes: Mapping[str, Callable[..., object]],
    ) -> None:
        self.cpp: Any = None
        self._operations = set[Any]()
        self._verified = tape.verify
        module = _cpp_profile() if tracer.device.type == "cpu" else None
        if module is None or (tape.verify and not digest_address()):
            return
        self.cpp = module.ProfileRecorder(
            tape=tape,
            tracer=tracer,
            begun=under_way.begun,
            register_storage=tracer.register,
            end_storage=tracer.end_storage,
            value_of=tape.value_of,
            **notes,
            note_finding=weakly(tape.note_finding),
            digest=digest_address() if tape.verify else 0,
            meter=counting_allocator().register_addresses if measurable(tracer.device) else [],
            runs=RUNS,
        )

    def learn(
        self, call: Call, results: list[Any], cost: MeasuredCost, operation: TracedOperation, recorded: bool
    ) -> None:
        """Python has run a call: if it need not run others of its pattern, C++ does.

        Args:
            call, results: the call, and what it returned as a flat list.
            cost: of the calls of this form.
            operation: as it was written down.
            recorded: it has a node on the tape.
        """
        info = call.info
        if self.cpp is None or not info.replays_plainly or call.others:
            return
        if recorded:  # what is not of ATen may depend on more than its arguments: each call runs twice
            once = not self._verified or info.name.startswith("aten.")
            if info.uninitialized or asks(call.func) or not once:
                return
        if not all(has_plain_storage(result) for result in results if isinstance(result, torch.Tensor)):
            return
        if call.func not in self._operations:
            self._operations.add(call.func)
            add_plain(self.cpp.program, call.func)
        self.cpp.learn(operation, cost, operation.phase == "backward" and may_be_meeting(call))
