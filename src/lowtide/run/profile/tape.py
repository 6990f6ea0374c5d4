"""The tape of a profiled step: what its forward ran, and what the step's own storages hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lowtide import private
from lowtide.meter.resident import plain_parts
from lowtide.ops import enter
from lowtide.run.record.engine import NONE, engine
from lowtide.run.record.tape import Tape
from lowtide.trace.traced import TracedStorage
from lowtide.trace.tracer import Tracer


class ProfiledTape(Tape):
    """Records the forwards of a profiled step. Copies that it keeps lie in storages of their own, so that the
    step's storages end where user code lets go of them.

    Args:
        tracer: knows the step's storages.
        verify: as of `Profiler`; and compare what is read with what was written.
    """

    def __init__(self, tracer: Tracer, verify: bool) -> None:
        super().__init__(verify)
        self.core.natural = True
        self._tracer = tracer
        self._sparse: dict[int, Any] = {}  # storages of the step's own sparse tensors

    def register(self, core: Any, tensor: torch.Tensor, extent: int, plan: int = NONE) -> Any:
        """The value of ``tensor``; the step's tracer knows its storage from now on."""
        self._tracer.register(tensor)
        return super().register(core, tensor, extent, plan)

    def apart(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor over a storage of its own that shares the bytes."""
        return engine().shared(tensor)

    def is_constant(self, sparse: torch.Tensor) -> bool:
        """Whether a sparse tensor was there before the step."""
        return super().is_constant(sparse) and not any(
            private.storage_key(part) in self._sparse or self._is_made(part) for part in plain_parts(sparse)
        )

    def _is_made(self, tensor: torch.Tensor) -> bool:
        """Whether the step made the tensor's storage."""
        storage = self._tracer.storage_of(tensor)
        return storage is not None and bool(storage.phase)

    def note_sparse(self, parts: Sequence[torch.Tensor]) -> None:
        """The step made a sparse tensor of these parts."""
        for part in parts:
            enter(self._sparse, part.untyped_storage(), None)

    def note_gathered(self, storage: TracedStorage) -> None:
        """A sharded weight was gathered into a storage: no replay brings it back."""
        self.core.forget(storage.key)
        self.core.gather(storage.key)
