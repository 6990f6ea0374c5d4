"""Main memory in its exact size, page-locked where a GPU is to copy from it, and unlocked before it is
unmapped.
"""

from __future__ import annotations

import mmap
from typing import Any

import torch
from torch import Tensor


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
    # after a fork (of data loaders, say) a write to a private page moves it away from the GPU's copy: locked
    # pages are shared
    kind = mmap.MAP_SHARED if pin else mmap.MAP_PRIVATE
    memory = _Memory(-1, count, flags=kind | mmap.MAP_ANONYMOUS)
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    if pin:
        memory.lock(tensor.data_ptr(), count)
    return tensor


class _Memory(mmap.mmap):
    """A mapping that is unlocked in its finalizer: weak references to it are only told when it has been
    unmapped.
    """

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
