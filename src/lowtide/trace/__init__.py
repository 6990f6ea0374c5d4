"""Look: from a step to its `StepGraph`.

Comes in: a step, operation by operation, and what autograd saves. Goes out: the graph as plain data, with the
seconds and scratch bytes of its operations. `tracer` is what every trace is made of, `eager` records a step
that runs, `fake` one that cannot run here, `costs` times operations for that one.

``lowtide.trace(step, *args)`` is the verb; see `lowtide.run.look.step.trace`.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lowtide.graph import StepGraph


class _Room(ModuleType):
    """Lets ``lowtide.trace`` be the room and the verb: ``lowtide.trace(step, *args)``."""

    def __call__(self, *args: Any, **kwargs: Any) -> StepGraph:
        from lowtide.run.look.step import trace

        return trace(*args, **kwargs)


sys.modules[__name__].__class__ = _Room
