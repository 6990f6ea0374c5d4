"""Steps of a limited model that `torch.compile` is around: the compiled engine holds their limit.

A trainer compiles the model that it is given (``torch_compile=True``, accelerate's plugin), or the user does.
Dynamo does not look into a limiter. So the limiter's call learns there what compiles, and with what, and the
model's own forward is compiled within the budget with the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lowtide.errors import PlanError
from lowtide.private import Compiling

Engine = Callable[[Any, Compiling], Any]
"""From a limiter, and from what compiles, to a handle with ``run``.

Raises:
    PlanError: the engine cannot hold this limit; says why.
"""

_EAGERLY = (
    "torch.compile around this limited model is left out, and its steps run eagerly under the limit: {}. To "
    "compile parts of it, compile its submodules, which stay so"
)
_NOTHING = (
    "PyTorch compiled nothing of its forward (it compiles none of the recurrent layers, and nothing under "
    "TORCH_COMPILE_DISABLE; TORCH_LOGS=graph_breaks says why)"
)


class Refused(Exception):
    """The compiled engine does not take this step."""


class Delegate:
    """Gives steps to the compiled engine, or says why it does not.

    Args:
        engine: makes the handle; ``None`` takes no step.
        tell: warns of something once.

    Attributes:
        handle: the compiled engine's, once it holds the limit.
    """

    def __init__(self, engine: Engine | None, tell: Callable[[str], None]) -> None:
        self.engine = engine
        self.handle: Any = None
        self._tell = tell
        self._refused = engine is None

    def run(self, limiter: Any, compiling: Compiling, args: Any, kwargs: Any) -> Any:
        """The forward of a step, compiled.

        Raises:
            Refused: it has to run eagerly.
        """
        if self._refused or self.engine is None:
            raise Refused
        try:
            if self.handle is None:
                self.handle = self.engine(limiter, compiling)
            result = self.handle.run(*args, **kwargs)
        except PlanError as why:
            self._refuse(str(why))
            raise Refused from None
        if self.handle.compiles_nothing:
            self._refuse(_NOTHING)
        return result

    def _refuse(self, why: str) -> None:
        self.handle, self._refused = None, True
        self._tell(_EAGERLY.format(why))
