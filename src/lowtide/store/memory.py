"""Main memory to the byte, page-locked where an accelerator is to copy from it, and a file's blocks."""

from __future__ import annotations

import mmap
import os
from typing import Any

import torch
from torch import Tensor

from lowtide.budget import format_bytes
from lowtide.meter import free_main_memory


def host_bytes(count: int, pin: bool = False) -> Tensor:
    """``count`` zeroed bytes of main memory, page-aligned, as a tensor; they go with the last tensor on them.

    PyTorch's own pinned allocator rounds up to a power of two; this does not.

    Args:
        count: bytes, at least 1.
        pin: page-lock them for CUDA, so that transfers run beside computing.

    Raises:
        MemoryError: there is no room, or CUDA refuses to page-lock them.

    >>> host_bytes(3)
    tensor([0, 0, 0], dtype=torch.uint8)
    """
    # Memory of this process alone, but for locked pages: after a fork (of data loaders, say) a write to a
    # private page would move it away from the one that the device copies from.
    kind = mmap.MAP_SHARED if pin else mmap.MAP_PRIVATE
    check_free(count)
    try:
        memory = _Mapping(-1, count, flags=kind | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError, OverflowError) as error:
        raise MemoryError(str(error)) from error
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


def check_free(count: int) -> None:
    """Check that so many bytes of main memory are free.

    Raises:
        MemoryError: they are not.
    """
    free = free_main_memory()
    if free is not None and count > free:
        raise MemoryError(f"{format_bytes(free)} of main memory are free")


def reserve(handle: int, size: int) -> None:
    """Make a file's blocks reach to ``size``, so that a full disk is known now.

    Raises:
        OSError: there is no room.
    """
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(handle, 0, size)
    else:
        os.ftruncate(handle, size)
