"""Steps of an eager limit that `torch.compile` is around: the compiled engine takes them, or says why not.

A trainer compiles the model that it is given (``torch_compile=True``, accelerate's plugin), or the user does.
Dynamo does not look into a limiter. So the limiter's call learns what compiles, and with what, and the
model's own forward is compiled within the budget with the same.
"""

from __future__ import annotations

from typing import Any

from lowtide.compiled.api import limit_compiled_forward
from lowtide.errors import PlanError
from lowtide.private import Compiling
from lowtide.run.limit.limiter import Limiter

_EAGERLY = (
    "torch.compile has no effect on this limited model, whose steps run eagerly under the limit: {}. "
    "To compile parts of the model, compile its submodules"
)
_NOTHING = (
    "PyTorch compiled no part of its forward (it compiles no recurrent layers, and nothing with "
    "TORCH_COMPILE_DISABLE; TORCH_LOGS=graph_breaks shows the reason)"
)


class Delegate:
    """Gives the steps that `torch.compile` is around to the compiled engine, or says why it does not.

    Args:
        limiter: of the model.
        asked: what was asked for of the limit that the engine does not know.

    Attributes:
        handle: the compiled engine's, once it holds the limit.
    """

    def __init__(self, limiter: Limiter, asked: list[str]) -> None:
        self.handle: Any = None
        self._limiter, self._asked, self._refused = limiter, asked, False

    def run(self, compiling: Compiling, args: Any, kwargs: Any) -> tuple[bool, Any]:
        """Whether the forward of a step has run, compiled, and what it returned; else it has to run eagerly.

        Args:
            compiling: what compiles the call.
            args, kwargs: of the forward.
        """
        if self._refused:
            return False, None
        try:
            if self.handle is None:
                self.handle = self._limit(compiling)
            result = self.handle.run(*args, **kwargs)
        except PlanError as why:
            self._refuse(str(why))
            return False, None
        if self.handle.compiles_nothing:
            self._refuse(_NOTHING)
        return True, result

    def _limit(self, compiling: Compiling) -> Any:
        if self._asked:
            raise PlanError(f"the compiled engine knows no {' and no '.join(self._asked)}")
        limiter, maker = self._limiter, self._limiter.maker
        assert maker.budget is not None, "the optimal policy has one"
        optimizer = next(
            (vars(one)["optimizer"] for one in limiter.extensions if one.name == "optimizer"), None
        )
        return limit_compiled_forward(
            limiter.model, limiter.forward, maker.budget, optimizer, compiling, maker.plan_seconds
        )

    def _refuse(self, why: str) -> None:
        self.handle, self._refused = None, True
        self._limiter.warn_once(_EAGERLY.format(why))
