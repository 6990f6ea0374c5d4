"""Notice a limit that never engages: the model's parts are called one by one, and its own forward never."""

from __future__ import annotations

from collections.abc import Callable

import torch


class _Runs:
    """Notes that a part of the model ran. In a copy of the model it notes nothing: the copy has a limit of
    its own.
    """

    def __init__(self, name: str = "", ran: dict[str, None] | None = None) -> None:
        self.name, self.ran = name, ran if ran is not None else {}

    def __call__(self, *_: object) -> None:
        self.ran[self.name] = None

    def __reduce__(self) -> tuple[type[_Runs], tuple[()]]:
        return _Runs, ()


class Engagement:
    """Watches a limited model until its forward runs for the first time.

    Args:
        model: the limited model.
        warn: tells whoever runs the step.
    """

    def __init__(self, model: torch.nn.Module, warn: Callable[[str], None]) -> None:
        self._kind = type(model).__name__
        self._warn = warn
        self._ran: dict[str, None] = {}
        self._with_gradients: set[int] = set()
        self._hooks = [
            part.register_forward_pre_hook(_Runs(name, self._ran))
            for name, part in model.named_modules()
            if part is not model and not isinstance(part, torch.jit.ScriptModule)
        ]
        trained = [
            p
            for p in model.parameters()
            if not torch.nn.parameter.is_lazy(p) and p.is_leaf and p.requires_grad
        ]
        self._hooks += [p.register_post_accumulate_grad_hook(self._has_gradient) for p in trained]

    def _has_gradient(self, parameter: torch.Tensor) -> None:
        if not self._ran and id(parameter) not in self._with_gradients:
            self._with_gradients.add(id(parameter))  # a penalty on weights, before the first step, perhaps
            return
        called = [name for name in self._ran if not any(name.startswith(f"{other}.") for other in self._ran)]
        more = f" and {len(called) - 4} more" if len(called) > 4 else ""
        who = f"{', '.join(called[:4])}{more} did" if called else "a method of its own did, perhaps"
        self.end()
        self._warn(
            f"the limit on this {self._kind} has not engaged: its parameters got gradients, but its own "
            f"forward never ran ({who}). Put the limit on what is called, or call the model itself"
        )

    def end(self) -> None:
        """The limit engages, or it has been said that it does not."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
