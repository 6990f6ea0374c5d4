"""Look: from a step to its `StepGraph`.

``lowtide.trace(step, *args)`` runs one step and returns its graph; see `lowtide.run.step.trace`.
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
        from lowtide.run.step import trace

        return trace(*args, **kwargs)


sys.modules[__name__].__class__ = _Room
