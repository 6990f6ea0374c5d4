"""The host tier: main memory, page-locked where the link wants it, or files on disk mapped into memory."""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from lowtide.budget import format_bytes
from lowtide.meter import free_main_memory
from lowtide.optim.errors import OptimError
from lowtide.store.pinned import host_bytes

Spec = tuple[int, torch.dtype]
"""Elements and their type."""

_PAGE = mmap.PAGESIZE


class Tier(ABC):
    """Hands out zeroed memory, all that is asked for at once or nothing.

    Args:
        limit_bytes: the most that may be handed out at any time; ``None`` is what the machine has.
    """

    name = ""

    def __init__(self, limit_bytes: int | None = None) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0

    def zeros(self, specs: Sequence[Spec]) -> list[Tensor]:
        """A zeroed flat tensor for each of ``specs``.

        Raises:
            OptimError: there is not enough; nothing is taken then.
        """
        need = sum(count * dtype.itemsize for count, dtype in specs)
        left = None if self.limit_bytes is None else self.limit_bytes - self.used_bytes
        if left is not None and need > left:
            raise OptimError(
                f"the optimizer's host part needs {format_bytes(need)} more and host_limit= leaves "
                f"{format_bytes(max(0, left))}: raise it, or lower host_fraction"
            )
        made = (
            self._zeros(specs, need) if need else [torch.zeros(count, dtype=dtype) for count, dtype in specs]
        )
        self.used_bytes += need
        return made

    def give_back(self, tensors: Sequence[Tensor]) -> None:
        """Say that tensors of `zeros` are not used any more; their memory goes with the last reference."""
        self.used_bytes -= sum(tensor.nbytes for tensor in tensors)

    def prefetch(self, tensors: Sequence[Tensor]) -> None:  # noqa: B027
        """These stretches will be read soon."""

    @abstractmethod
    def _zeros(self, specs: Sequence[Spec], need: int) -> list[Tensor]: ...


class MemoryTier(Tier):
    """Main memory.

    Args:
        pin: page-lock it, so that transfers run beside computing. It is registered in its exact size:
            PyTorch's own pinned allocator rounds up to a power of two.
        limit_bytes: as for every tier.
    """

    name = "memory"

    def __init__(self, pin: bool = False, limit_bytes: int | None = None) -> None:
        super().__init__(limit_bytes)
        self._pin = pin

    def _zeros(self, specs: Sequence[Spec], need: int) -> list[Tensor]:
        free = free_main_memory()
        if free is not None and need > free:
            raise OptimError(
                f"the optimizer's host part needs {format_bytes(need)} of main memory and "
                f"{format_bytes(free)} are free: lower host_fraction, or put it on disk with host='disk'"
            )
        try:
            if not self._pin:
                return [torch.zeros(count, dtype=dtype) for count, dtype in specs]
            return [
                host_bytes(count * dtype.itemsize, pin=True).view(dtype)
                if count
                else torch.zeros(0, dtype=dtype)
                for count, dtype in specs
            ]
        except (RuntimeError, OSError, MemoryError) as error:
            raise OptimError(
                f"no main memory for the optimizer's host part of {format_bytes(need)} ({error}): lower "
                "host_fraction, or use host='disk'"
            ) from error


class DiskTier(Tier):
    """Files mapped into memory. Each has lost its name before it is used, so nothing is left behind however
    the process ends.

    Args:
        folder: on the disk to use; ``None`` is the system's folder for temporary files.
        limit_bytes: as for every tier.
    """

    name = "disk"

    def __init__(self, folder: str | os.PathLike[str] | None = None, limit_bytes: int | None = None) -> None:
        super().__init__(limit_bytes)
        self.folder = Path(folder if folder is not None else tempfile.gettempdir())
        if not self.folder.is_dir():
            raise OptimError(f"host_folder={str(self.folder)!r} is not a folder: make it, or name another")
        self._maps: list[tuple[int, int, weakref.ReferenceType[mmap.mmap]]] = []

    def _zeros(self, specs: Sequence[Spec], need: int) -> list[Tensor]:
        sizes = [-(-count * dtype.itemsize // _PAGE) * _PAGE for count, dtype in specs]
        handle, name = tempfile.mkstemp(prefix="lowtide-optim-", dir=self.folder)
        try:
            os.unlink(name)
            os.posix_fallocate(handle, 0, sum(sizes))
            mapped = mmap.mmap(handle, sum(sizes))
        except OSError as error:
            raise OptimError(
                f"no room for the optimizer's host part of {format_bytes(need)} in {self.folder} "
                f"({error.strerror}): free some, name another disk with host_folder=, or lower host_fraction"
            ) from error
        finally:
            os.close(handle)
        made, place = [], 0
        for (count, dtype), size in zip(specs, sizes, strict=True):
            made.append(
                torch.frombuffer(mapped, dtype=dtype, count=count, offset=place)
                if count
                else torch.zeros(0, dtype=dtype)
            )
            place += size
        start = next(tensor.data_ptr() for tensor in made if tensor.numel())
        self._maps = [entry for entry in self._maps if entry[2]() is not None]
        self._maps.append((start, sum(sizes), weakref.ref(mapped)))
        return made

    def prefetch(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            address = tensor.data_ptr()
            for start, size, reference in self._maps:
                mapped = reference()
                if mapped is not None and start <= address < start + size:
                    begin = (address - start) // _PAGE * _PAGE
                    mapped.madvise(mmap.MADV_WILLNEED, begin, min(size - begin, tensor.nbytes + _PAGE))
