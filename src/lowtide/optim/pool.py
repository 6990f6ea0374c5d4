"""Where the optimizer's host part lies: main memory, or files mapped into it, within ``host_limit=``."""

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
from lowtide.extensions.moves.store.disk import IN_MEMORY, file_system
from lowtide.extensions.moves.store.host import check_free, host_bytes, reserve
from lowtide.optim.errors import OptimError

WHAT = "the optimizer's host part"

Spec = tuple[int, torch.dtype]
"""Elements and their type."""


class Pool(ABC):
    """Hands out zeroed memory, all that is asked for at once or nothing.

    Args:
        limit_bytes: the most that may be handed out at any time; ``None`` is what the machine has.

    Attributes:
        name: ``memory`` or ``disk``.
        remedy: what to do where it is full.
        used_bytes: handed out, and not given back.
    """

    name = ""
    remedy = "lower host_fraction"

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
                f"{WHAT} needs {format_bytes(need)} more and host_limit= leaves "
                f"{format_bytes(max(0, left))}: raise it, or {self.remedy}"
            )
        made = iter(self._zeros([spec for spec in specs if spec[0]], need) if need else ())
        self.used_bytes += need
        return [next(made) if count else torch.zeros(0, dtype=dtype) for count, dtype in specs]

    def give_back(self, tensors: Sequence[Tensor]) -> None:
        """Say that tensors of `zeros` are not used any more; their memory goes with the last reference."""
        self.used_bytes -= sum(tensor.nbytes for tensor in tensors)

    def prefetch(self, tensors: Sequence[Tensor]) -> None:  # noqa: B027
        """These stretches will be read soon."""

    @abstractmethod
    def _zeros(self, specs: Sequence[Spec], need: int) -> list[Tensor]: ...


class MemoryPool(Pool):
    """Main memory, in its exact size.

    Args:
        limit_bytes: as of `Pool`.
        pin: page-lock it for this device, so that transfers run beside computing.
    """

    name = "memory"
    remedy = "lower host_fraction, or use host='disk'"

    def __init__(self, limit_bytes: int | None = None, pin: torch.device | None = None) -> None:
        super().__init__(limit_bytes)
        self.pin = pin

    def _zeros(self, specs: Sequence[Spec], need: int) -> list[Tensor]:
        try:
            check_free(need)
            if self.pin is None:  # PyTorch's own, which the meter counts
                return [torch.zeros(count, dtype=dtype) for count, dtype in specs]
            return [host_bytes(count * dtype.itemsize, self.pin).view(dtype) for count, dtype in specs]
        except (RuntimeError, MemoryError) as error:
            raise OptimError(
                f"the host has no room for {need:,} bytes more of {WHAT} ({error}): {self.remedy}"
            ) from error


class FilePool(Pool):
    """Files mapped into memory.

    Args:
        limit_bytes: as of `Pool`.
        folder: on the disk to use; ``None`` is the system's folder for temporary files.

    Raises:
        OptimError: there is no such folder, or it lies in main memory.
    """

    name = "disk"

    def __init__(self, limit_bytes: int | None = None, folder: str | os.PathLike[str] | None = None) -> None:
        super().__init__(limit_bytes)
        self.folder = Path(folder if folder is not None else tempfile.gettempdir())
        if not self.folder.is_dir():
            raise OptimError(f"host_folder={str(self.folder)!r} is not a folder: make it, or name another")
        if (kind := file_system(self.folder)) in IN_MEMORY:
            raise OptimError(
                f"host_folder={str(self.folder)!r} is a {kind}, which lies in main memory: name a folder on "
                "a disk, or take host='memory'"
            )
        self._maps: list[tuple[int, int, weakref.ReferenceType[mmap.mmap]]] = []

    def _zeros(self, specs: Sequence[Spec], need: int) -> list[Tensor]:
        page = mmap.PAGESIZE
        sizes = [-(-count * dtype.itemsize // page) * page for count, dtype in specs]
        try:
            with tempfile.TemporaryFile(dir=self.folder) as file:
                reserve(file.fileno(), sum(sizes))
                mapped = mmap.mmap(file.fileno(), sum(sizes))
        except OSError as error:
            raise OptimError(
                f"no room for {format_bytes(need)} of {WHAT} in {self.folder} ({error.strerror}): free "
                f"some, name another disk with host_folder=, or {self.remedy}"
            ) from error
        starts = [sum(sizes[:k]) for k in range(len(sizes))]
        made = [
            torch.frombuffer(mapped, dtype=dtype, count=count, offset=start)
            for (count, dtype), start in zip(specs, starts, strict=True)
        ]
        self._maps = [entry for entry in self._maps if entry[2]() is not None]
        self._maps.append((made[0].data_ptr(), sum(sizes), weakref.ref(mapped)))
        return made

    def prefetch(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            address = tensor.data_ptr()
            for start, size, reference in self._maps:
                mapped = reference()
                if mapped is not None and start <= address < start + size:
                    begin = (address - start) // mmap.PAGESIZE * mmap.PAGESIZE
                    mapped.madvise(
                        mmap.MADV_WILLNEED, begin, min(size - begin, tensor.nbytes + mmap.PAGESIZE)
                    )
