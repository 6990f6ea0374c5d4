"""A scope's recorder: it verifies what runs for the first time, and remembers that it reproduced.

What runs is known by a trail: a number for the place in the program, the operations so far, the shapes, types
and parameters that they read, and which of them were recorded. A trail that is new is verified: its operation
runs twice. One that is known is trusted. So every block of a model is verified in its first step, and again
when its shapes or its operations change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from lowtide import private
from lowtide.errors import ReplayError
from lowtide.ops import OpInfo, op_info
from lowtide.run.messages import warn
from lowtide.run.record.directors import Director
from lowtide.run.record.recorder import Recorder
from lowtide.run.record.tape import LiveValue, Node, Ref
from lowtide.run.record.verify import Verify

MOST_TRAILS = 1 << 17


@cache
def _known() -> dict[int, bool]:
    """For each trail whether its last operation reproduced: facts about code, which no model owns. Trails
    hold the addresses of parameters, so those of two models differ.
    """
    return {}


class ScopeRecorder(Recorder):
    """Records one scope.

    Args:
        director: decides what is recorded.
        verify: ``first`` verifies what was not verified before, ``always`` everything, ``never`` nothing.
        place: stands for where in the program the scope is.
    """

    def __init__(self, director: Director, verify: Verify, place: int) -> None:
        super().__init__(director, verify=verify != "never")
        self._verify: Verify = verify
        self._trail = place
        self._new: dict[int, bool] = {}
        self._reproduces: bool | None = None
        self._news: dict[str, str] = {}
        self._withdrawn = False
        if verify == "first":
            self.around_unpack = self._unpacks

    @contextmanager
    def recording(self) -> Iterator[None]:
        """As the recorder's; what reproduced is remembered when the scope ends well, and what did not is
        said.
        """
        with super().recording():
            yield
        for name, reason in self._news.items():
            warn(f"lowtide keeps the results of {name} in a checkpointing scope: {reason}")
        if self._withdrawn:
            return
        if len(_known()) > MOST_TRAILS:
            _known().clear()
        _known().update(self._new)

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Verify the operation or trust it, by its trail, and go on as the recorder does."""
        if self._verify == "never" or op_info(func).is_view or private.in_backward():
            return super().operation(func, args, kwargs)
        self._trail = hash((self._trail, id(func), *_looks_of(args)))
        self._reproduces = _known().get(self._trail)
        if self._verify == "first":
            self.verify = self.check = self._reproduces is None
        result = super().operation(func, args, kwargs)
        if not self._wanted:
            self._trail = ~self._trail  # what reads a kept value is verified without it
        return result

    def _prepare(self, func: Any, info: OpInfo, *rest: Any) -> tuple[Node, list[Ref]] | None:
        """As the recorder's; what did not reproduce before is kept."""
        return None if self._reproduces is False else super()._prepare(func, info, *rest)

    def _link(self, *node: Any) -> None:
        """As the recorder's: it has been verified."""
        if self.verify:
            self._new[self._trail] = True
        super()._link(*node)

    def _not_reproduced(self, name: str, reason: str) -> None:
        super()._not_reproduced(name, reason)
        self._new[self._trail] = False
        told = hash((self._trail, name))
        if told not in _known():
            _known()[told] = False
            self._news[name] = reason

    def _written_behind(self, value: LiveValue, tensor: torch.Tensor) -> LiveValue:
        """As the recorder's. Only a verified run finds such writes, so the next one has to be verified,
        too.
        """
        self._withdrawn = True
        return super()._written_behind(value, tensor)

    def _unpacks(self, unpack: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Backward asks for a saved tensor: where its replay is another than the forward's, nothing of this
        run is trusted any more.
        """
        try:
            return unpack()
        except ReplayError:
            for trail in self._new:
                _known().pop(trail, None)
            raise


def _looks_of(items: tuple[Any, ...] | list[Any]) -> list[Any]:
    """Shape, type and device of each tensor, and the address of each parameter."""
    looks: list[Any] = []
    for item in items:
        if isinstance(item, torch.Tensor):
            looks += (None if item.is_nested else item.shape, item.dtype, item.device)
            owner = item if item._base is None else item._base
            if type(owner) is torch.nn.Parameter:
                looks.append(private.storage_key(owner))
        elif isinstance(item, (list, tuple)):
            looks += _looks_of(item)
    return looks
