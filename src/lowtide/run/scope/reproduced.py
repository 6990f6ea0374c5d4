"""A scope's recorder: it verifies what runs for the first time, and remembers what reproduced.

Each operation has a fingerprint: a hash of the place in the program, the operations so far, the shapes, types
and parameters that they read, and which of them were recorded. An operation with a new fingerprint runs
twice, to be verified; one with a known fingerprint is trusted. So every block of a model is verified in its
first step, and again when its shapes or its operations change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from lowtide import private
from lowtide.errors import ReplayError
from lowtide.ops import Call, op_info
from lowtide.run.messages import warn
from lowtide.run.record.directors import Director
from lowtide.run.record.recorder import Recorder
from lowtide.run.record.tape import LiveValue, Node
from lowtide.run.record.verify import Verify

MOST_FINGERPRINTS = 1 << 17


@cache
def _known() -> dict[int, bool]:
    """Whether an operation reproduced, by its fingerprint. No model owns these facts about code; fingerprints
    hold addresses of parameters, so those of two models differ.
    """
    return {}


class ScopeRecorder(Recorder):
    """Records one scope.

    Args:
        director: decides what is recorded.
        verify: ``first`` verifies what was not verified before, ``always`` everything, ``never`` nothing.
        place: a number for the scope's place in the program.
    """

    def __init__(self, director: Director, verify: Verify, place: int) -> None:
        super().__init__(director, verify=verify != "never")
        self._verify: Verify = verify
        self._fingerprint = place
        self._new: dict[int, bool] = {}
        self._reproduces: bool | None = None
        self._news: dict[str, str] = {}
        self._withdrawn = False
        if verify == "first":
            self.around_unpack = self._unpacks

    @contextmanager
    def recording(self) -> Iterator[None]:
        """As the recorder's. At the end it remembers what reproduced, unless the scope failed, and warns of
        what did not.
        """
        with super().recording():
            yield
        for name, reason in self._news.items():
            warn(f"lowtide keeps the results of {name} in a checkpointing scope: {reason}")
        if self._withdrawn:
            return
        if len(_known()) > MOST_FINGERPRINTS:
            _known().clear()
        _known().update(self._new)

    def will_evict(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` comes back for whoever saves it, as all that the scope wrote does."""
        return private.storage_key(tensor) in self.tables.given

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Verify the operation or trust it, by its fingerprint, and go on as the recorder does."""
        if self._verify == "never" or op_info(func).is_view or private.in_backward():
            return super().operation(func, args, kwargs)
        self._fingerprint = hash((self._fingerprint, id(func), *_form_of(args)))
        self._reproduces = _known().get(self._fingerprint)
        if self._verify == "first":
            self.verify = self.check = self._reproduces is None
        result = super().operation(func, args, kwargs)
        if not self._wanted:
            # operations that read a kept value are verified apart from those that read a recorded one
            self._fingerprint = ~self._fingerprint
        return result

    def _prepare(self, call: Call) -> Node | None:
        """As the recorder's, but an operation that did not reproduce before is not recorded."""
        return None if self._reproduces is False else super()._prepare(call)

    def _link(self, *node: Any) -> None:
        """As the recorder's; the operation has been verified by now."""
        if self.verify:
            self._new[self._fingerprint] = True
        super()._link(*node)

    def _not_reproduced(self, name: str, reason: str) -> None:
        super()._not_reproduced(name, reason)
        self._new[self._fingerprint] = False
        told = hash((self._fingerprint, name))
        if told not in _known():
            _known()[told] = False
            self._news[name] = reason

    def _written_behind(self, value: LiveValue, tensor: torch.Tensor) -> LiveValue:
        """As the recorder's. Only a verified run finds such writes, so the next run is verified, too."""
        self._withdrawn = True
        return super()._written_behind(value, tensor)

    def _unpacks(self, unpack: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Bring a saved tensor back; if its replay differs from the forward, trust nothing of this run any
        more.
        """
        try:
            return unpack()
        except ReplayError:
            for fingerprint in self._new:
                _known().pop(fingerprint, None)
            raise


def _form_of(items: tuple[Any, ...] | list[Any]) -> list[Any]:
    """Shape, type and device of each tensor, and the address of each parameter."""
    form: list[Any] = []
    for item in items:
        if isinstance(item, torch.Tensor):
            form += (None if item.is_nested else item.shape, item.dtype, item.device)
            owner = private.base_of(item)
            if type(owner) is torch.nn.Parameter:
                form.append(private.storage_key(owner))
        elif isinstance(item, (list, tuple)):
            form += _form_of(item)
    return form
