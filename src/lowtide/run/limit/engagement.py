"""Wait for the first step of a limited model, and warn where its limit never engages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lowtide.run.messages import warn


class _RanHook:
    """A hook that notes that a part of the model ran. A copy notes nothing: a copied model has a limit of its
    own.
    """

    def __init__(self, name: str = "", ran: dict[str, None] | None = None) -> None:
        self.name, self.ran = name, ran if ran is not None else {}

    def __call__(self, *_: object) -> None:
        self.ran[self.name] = None

    def __reduce__(self) -> tuple[type[_RanHook], tuple[()]]:
        return _RanHook, ()


class Engagement:
    """Waits for a limited model's first forward, and warns if its parameters get gradients before, because
    its parts are called one by one, for instance.
    """

    waits = False  # for the first forward

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._hooks: list[Any] = []

    def begin(self) -> None:
        """Wait from now on."""
        self.waits = True
        self._ran: dict[str, None] = {}
        self._with_gradients: set[int] = set()
        self._hooks = [
            part.register_forward_pre_hook(_RanHook(name, self._ran))
            for name, part in self._model.named_modules()
            if part is not self._model and not isinstance(part, torch.jit.ScriptModule)
        ]
        self._hooks += [
            p.register_post_accumulate_grad_hook(self._has_gradient)
            for p in self._model.parameters()
            if not torch.nn.parameter.is_lazy(p) and p.is_leaf and p.requires_grad
        ]

    def end(self) -> None:
        """Wait no longer: the limit has engaged, or is gone."""
        self.waits = False
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not wait within the block, which is no step of the user's."""
        waited = self.waits
        self.end()
        try:
            yield
        finally:
            if waited:
                self.begin()

    def _has_gradient(self, parameter: torch.Tensor) -> None:
        if not self._ran and id(parameter) not in self._with_gradients:
            self._with_gradients.add(id(parameter))  # a penalty on weights, before the first step, perhaps
            return
        called = [name for name in self._ran if not any(name.startswith(f"{other}.") for other in self._ran)]
        more = f" and {len(called) - 4} more" if len(called) > 4 else ""
        who = f"{', '.join(called[:4])}{more} did" if called else "a method of its own did, perhaps"
        self.end()
        warn(
            f"the limit on this {type(self._model).__name__} has not engaged: its parameters got gradients, "
            f"but its own forward never ran ({who}). Put the limit on what is called, or call the model "
            "itself"
        )
