"""Host memory within a budget: main memory, page-locked where an accelerator is to copy from it, or files."""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from lowtide.budget import format_bytes
from lowtide.meter import free_main_memory

Spec = tuple[int, torch.dtype]
"""Elements and their type."""


def host_bytes(count: int, pin: bool = False) -> Tensor:
    """``count`` zeroed bytes of main memory, page-aligned, as a tensor; they go with the last tensor on them.

    PyTorch's own pinned allocator rounds up to a power of two; this does not.

    Args:
        count: bytes, at least 1.
        pin: page-lock them for CUDA, so that transfers run beside computing.

    Raises:
        OSError: there is no room.
        MemoryError: CUDA refuses to page-lock them.

    >>> host_bytes(3)
    tensor([0, 0, 0], dtype=torch.uint8)
    """
    # Memory of this process alone, but for locked pages: after a fork (of data loaders, say) a write to a
    # private page would move it away from the one that the device copies from.
    kind = mmap.MAP_SHARED if pin else mmap.MAP_PRIVATE
    memory = _Mapping(-1, count, flags=kind | mmap.MAP_ANONYMOUS)
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    if pin:
        memory.lock(tensor.data_ptr(), count)
    return tensor


class _Mapping(mmap.mmap):
    """A mapping that is unlocked in its finalizer: weak references are told only after it is unmapped."""

    _runtime: Any = None
    _address = 0

    def lock(self, address: int, count: int) -> None:
        runtime: Any = torch.cuda.cudart()
        code = int(runtime.cudaHostRegister(address, count, 0))
        if code:
            raise MemoryError(
                f"CUDA refuses to page-lock {count:,} bytes (error {code}): the limit on locked memory "
                "(ulimit -l) may be too low"
            )
        self._runtime, self._address = runtime, address

    def __del__(self) -> None:
        if self._runtime is not None:
            self._runtime.cudaHostUnregister(self._address)


class Pool(ABC):
    """Hands out zeroed memory, all that is asked for at once or nothing.

    Args:
        what: whose memory it is, for messages.
        remedy: what to do where there is no room.
        error: raised there.
        limit_bytes: the most that may be handed out at any time; ``None`` is what the machine has.

    Attributes:
        used_bytes: handed out, and not given back.
    """

    name = ""

    def __init__(
        self, what: str, remedy: str, error: type[Exception], limit_bytes: int | None = None
    ) -> None:
        self.what, self.remedy, self.error = what, remedy, error
        self.limit_bytes = limit_bytes
        self.used_bytes = 0

    def zeros(self, specs: Sequence[Spec]) -> list[Tensor]:
        """A zeroed flat tensor for each of ``specs``.

        Raises:
            the pool's error: there is not enough; nothing is taken then.
        """
        need = sum(count * dtype.itemsize for count, dtype in specs)
        left = None if self.limit_bytes is None else self.limit_bytes - self.used_bytes
        if left is not None and need > left:
            raise self.error(
                f"{self.what} needs {format_bytes(need)} more and host_limit= leaves "
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
        kind: ``tensors`` are PyTorch's, which the meter counts; ``mapped`` memory lies beside them, and
            ``pinned``
            memory is page-locked, too, so that transfers run beside computing.
    """

    name = "memory"

    def __init__(
        self,
        what: str,
        remedy: str,
        error: type[Exception],
        limit_bytes: int | None = None,
        kind: Literal["tensors", "mapped", "pinned"] = "tensors",
    ) -> None:
        super().__init__(what, remedy, error, limit_bytes)
        self.kind = kind

    def _zeros(self, specs: Sequence[Spec], need: int) -> list[Tensor]:
        free = free_main_memory()
        try:
            if free is not None and need > free:
                raise MemoryError(f"{format_bytes(free)} of main memory are free")
            if self.kind == "tensors":
                return [torch.zeros(count, dtype=dtype) for count, dtype in specs]
            pin = self.kind == "pinned"
            return [host_bytes(count * dtype.itemsize, pin).view(dtype) for count, dtype in specs]
        except (RuntimeError, OSError, MemoryError, ValueError, OverflowError) as error:
            raise self.error(
                f"the host has no room for {need:,} bytes more of {self.what} ({error}): {self.remedy}"
            ) from error


class FilePool(Pool):
    """Files mapped into memory.

    Args:
        folder: on the disk to use; ``None`` is the system's folder for temporary files.

    Raises:
        the pool's error: there is no such folder.
    """

    name = "disk"

    def __init__(
        self,
        what: str,
        remedy: str,
        error: type[Exception],
        limit_bytes: int | None = None,
        folder: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__(what, remedy, error, limit_bytes)
        self.folder = Path(folder if folder is not None else tempfile.gettempdir())
        if not self.folder.is_dir():
            raise error(f"host_folder={str(self.folder)!r} is not a folder: make it, or name another")
        self._maps: list[tuple[int, int, weakref.ReferenceType[mmap.mmap]]] = []

    def _zeros(self, specs: Sequence[Spec], need: int) -> list[Tensor]:
        page = mmap.PAGESIZE
        sizes = [-(-count * dtype.itemsize // page) * page for count, dtype in specs]
        try:
            with tempfile.TemporaryFile(dir=self.folder) as file:
                reserve(file.fileno(), sum(sizes))
                mapped = mmap.mmap(file.fileno(), sum(sizes))
        except OSError as error:
            raise self.error(
                f"no room for {format_bytes(need)} of {self.what} in {self.folder} ({error.strerror}): free "
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


def reserve(handle: int, size: int) -> None:
    """Make a file's blocks reach to ``size``, so that a full disk is known now.

    Raises:
        OSError: there is no room.
    """
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(handle, 0, size)
    else:
        os.ftruncate(handle, size)
