"""What autograd holds in place of a saved tensor of a profiled step."""

from __future__ import annotations

from typing import Any

import torch

from lowtide import private
from lowtide.interception import unseen
from lowtide.run.digest import Geometry
from lowtide.run.record.handles import Evicted, Kept


class SavedTensor:
    """Autograd holds this in place of a saved tensor, and deletes it when it releases the saved tensor."""

    __slots__ = ("__weakref__", "number", "packed", "profiler")

    def __init__(self, profiler: Any, number: int, packed: Kept | Evicted) -> None:
        self.profiler, self.number, self.packed = profiler, number, packed

    def is_behind(self) -> bool:
        """Whether the tensor is evicted, and its version counter does not show that it was overwritten."""
        return (
            isinstance(self.packed, Evicted) and private.version(self.packed.witness) == self.packed.version
        )

    def lies_in(self, where: Geometry, nbytes: int) -> bool:
        """Whether a write at ``where``, in the tensor's storage of ``nbytes``, overwrites a part of it."""
        return not isinstance(self.packed, Evicted) or where.overlaps(self.packed.ref, nbytes)

    def keep(self, storage: torch.UntypedStorage) -> None:
        """Keep the tensor, which lies in ``storage``."""
        if isinstance(self.packed, Evicted):
            self.packed = self.packed.as_kept(storage)

    def unpack(self) -> torch.Tensor:
        """The tensor, on a storage object of its own."""
        self.profiler.watch.backward_begins()
        self.profiler.keep_overwritten()
        try:
            with unseen():
                return self._unpack()
        except BaseException:  # backward ends here without a hook
            self.profiler.close()
            raise

    def _unpack(self) -> torch.Tensor:
        tracer = self.profiler.tracer
        tracer.unpacks(self.number)
        self.profiler.under_way.operation_begins()
        tensor = self.packed.unpack()
        if isinstance(self.packed, Kept):
            tracer.hands_out(self.number, None)
            return tensor
        alone = self.packed.ref.over(private.borrowed_storage(tensor))
        owner = [tensor]  # holds the bytes for as long as the alias is there
        tracer.hands_out(self.number, alone.untyped_storage(), owner.clear)
        return alone

    def __del__(self) -> None:
        self.profiler.release(self.number)
