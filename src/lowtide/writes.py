"""Tell the tapes of steps whose forward is over before a storage that they start from is overwritten.

Between forward and backward, and in backward, any code may write to a tensor that a replay starts from: in
place, or through ``.data``, where no version counter moves. A dispatch key of our own is let in there. Only
operations that write have a kernel at it (``run/record/cpp/writes.h``), so all others cost nothing.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from lowtide import private

KEY = "TESTING_ONLY_GenericMode"
"""The key at which operations that write have a kernel, above autograd; nothing else uses it."""
PARSED = private.dispatch_key(KEY)


class _Kernel:
    """The compiled kernel of the process, which knows the tapes."""

    def __init__(self) -> None:
        self.module: Any = None

    def resizes(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Python is about to resize a storage."""
        if nbytes < storage.nbytes():
            self.module.before_change(private.storage_address(storage), True)


_kernel = cache(_Kernel)


def serve(module: Any) -> None:
    """This is the compiled kernel."""
    kernel = _kernel()
    if kernel.module is None:
        private.before_storage_resizes(kernel.resizes)
    kernel.module = module


def watch() -> None:
    """From here on writes of this thread are seen, and those of backwards that it begins."""
    private.include_key(PARSED, True)


def any_watched() -> bool:
    """Whether any tape may have to be told."""
    module = _kernel().module
    return module is not None and module.any_watched()


def drop_idle_key() -> None:
    """Take the key out of this thread where no tape has to be told."""
    if private.is_key_included(PARSED) and not any_watched():
        private.include_key(PARSED, False)
