"""What is held of a profiled step: its tape, and what autograd holds in place of saved tensors.

In: a tensor that autograd saves, as the tape has kept or evicted it; operations that write; storages that
are resized. A saved tensor that user code overwrites past its version counter is kept from then on: a plain
step reads what was written.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from lowtide import private
from lowtide.interception import unseen
from lowtide.meter.resident import plain_parts
from lowtide.ops import enter
from lowtide.run.record.engine import NONE, engine
from lowtide.run.record.handles import unpack
from lowtide.run.record.tape import Tape
from lowtide.run.tensor_bytes import Geometry
from lowtide.trace.tracer import TracedStorage, Tracer


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
        return engine().aliased(tensor)

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


class Profiling(Protocol):
    """What a saved tensor asks of the profiler of its step."""

    @property
    def tracer(self) -> Tracer: ...

    def backward_asks(self, number: int) -> None:
        """Backward asks for the saved tensor of this number."""

    def unpacks(self, number: int) -> None:
        """The saved tensor of this number is about to come back."""

    def release(self, number: int) -> None:
        """Autograd has released the saved tensor of this number."""

    def close(self) -> None:
        """Give the profile up."""


class SavedTensor:
    """What autograd holds in place of a saved tensor of a profiled step, and deletes when it releases that.

    Args:
        profiler: profiles the step.
        number: of the saved tensor, in the tracer.
        packed: the saved tensor, as C++ holds it.
        shows: the tensor's geometry.
    """

    __slots__ = ("__weakref__", "number", "packed", "profiler", "shows")

    def __init__(self, profiler: Profiling, number: int, packed: Any, shows: Geometry) -> None:
        self.profiler, self.number, self.packed, self.shows = profiler, number, packed, shows

    def is_behind(self) -> bool:
        """Whether it is on the tape, and its version counter does not show that it was overwritten."""
        return engine().is_behind(self.packed)

    def lies_in(self, where: Geometry, nbytes: int) -> bool:
        """Whether a write at ``where``, in the tensor's storage of ``nbytes``, overwrites a part of it."""
        return not engine().is_handle(self.packed) or where.overlaps(self.shows, nbytes)

    def keep(self, storage: torch.UntypedStorage) -> None:
        """Keep the tensor, which lies in ``storage``."""
        if engine().is_handle(self.packed):
            engine().keep_shown(self.packed, words_in(storage))

    def unpack(self) -> torch.Tensor:
        """The tensor, on a storage object of its own."""
        self.profiler.backward_asks(self.number)
        try:
            with unseen():
                return self._unpack()
        except BaseException:  # backward ends here without a hook
            self.profiler.close()
            raise

    def _unpack(self) -> torch.Tensor:
        tracer = self.profiler.tracer
        self.profiler.unpacks(self.number)
        tensor = unpack(self.packed)
        if tracer.storage_of(tensor) is not None:  # the program's own, which lives on
            tracer.hands_out(self.number, None)
            return tensor
        lent = Geometry(tensor).over(private.borrowed_storage(tensor))
        owner = [tensor]  # holds the bytes for as long as the alias is there
        tracer.hands_out(self.number, lent.untyped_storage(), owner.clear)
        return lent

    def __del__(self) -> None:
        self.profiler.release(self.number)


def words_in(storage: torch.UntypedStorage) -> torch.Tensor:
    """A tensor of bytes over a storage."""
    empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return empty.set_(storage)  # type: ignore


class SavedTensors:
    """The saved tensors of a profiled step, by the storage that they lie in; autograd's graph holds them.

    Args:
        tracer: writes the step down.

    Attributes:
        written: saved tensors whose storage an operation has written to, that storage, and where. What is in
            it is looked at before anything else runs (`keep_overwritten`), and until then the storage stays.
    """

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._saved_in: dict[int, list[weakref.ref[SavedTensor]]] = {}  # by the number of their storage
        self.written: list[tuple[weakref.ref[SavedTensor], torch.UntypedStorage, Geometry]] = []

    def add(self, saved: SavedTensor) -> SavedTensor:
        """Know a tensor that was packed just now."""
        storage = self._tracer.values[self._tracer.saved[saved.number].value].storage
        self._saved_in.setdefault(storage, []).append(weakref.ref(saved))
        return saved

    def before_resize(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """User code is about to resize a storage: what was saved in it is kept from here on."""
        number = self._tracer.resizes(storage, nbytes)
        if number is not None:
            private.unshare(storage)
            with unseen():
                for reference in self._saved_in.get(number, ()):
                    if saved := reference():
                        saved.keep(storage)

    def note_overwritten(self, written: list[torch.Tensor]) -> None:
        """An operation has written to what may have been saved; version counters have not moved yet."""
        self.keep_overwritten()
        for tensor in written:
            number = self._tracer.number_of(tensor)
            if number in self._saved_in:
                where = (tensor.untyped_storage(), Geometry(tensor))
                self.written += [(one, *where) for one in self._saved_in[number]]

    def keep_overwritten(self) -> None:
        """Keep saved tensors that were overwritten while their version counters stood still (by now a counter
        has moved, if it does): the backward of a plain step reads what was written.
        """
        if not self.written:
            return
        suspects = self.written.copy()
        self.written.clear()
        for reference, storage, where in suspects:
            saved = reference()
            if saved is None or not saved.is_behind():
                continue
            with unseen():
                # chunks of one storage have counters of their own (recurrent layers write to the others)
                if saved.lies_in(where, storage.nbytes()):
                    self._tracer.note_behind(saved.number)
                    saved.keep(storage)
