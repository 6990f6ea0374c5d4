"""Real tensors among the fake ones of a trace: which calls are carried out for real, and of what nobody knows
any longer what is in it.
"""

from __future__ import annotations

import math
import weakref
from typing import Any

import torch

from lowtide import private
from lowtide.ops import OpInfo, has_plain_storage
from lowtide.private import FakeTensor
from lowtide.trace.fake import is_small_constant

_FEW = 1 << 16
_INTEGERS = {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}


def stays_real(
    info: OpInfo, inputs: list[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    """Whether a call on real constants only (or one that makes integers from nothing) is carried out for real
    in a fake trace.

    So are small tensors of ones, and what is made of such: models make them as masks and windows, and ask
    what is in them.
    """
    if inputs:
        return all(
            not isinstance(t, FakeTensor) and (is_small_constant(t) or _is_small_and_plain(t)) for t in inputs
        )
    if info.name == "aten.ones.default":
        return math.prod(args[0]) <= _FEW
    dtype = kwargs.get("dtype")
    if dtype is not None:
        return dtype in _INTEGERS
    return bool(args) and all(isinstance(item, int) for item in args)


def _is_small_and_plain(tensor: torch.Tensor) -> bool:
    """Whether the tensor holds few numbers, and no gradient is asked for them."""
    return tensor.numel() <= _FEW and not tensor.requires_grad


class Unknown:
    """Real tensors that numbers of fake ones were written into, in place: they hold what stood there before,
    which no step has there.

    What is asked of them is asked of fakes, and what is made of them is fake.
    """

    def __init__(self) -> None:
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is one."""
        return (
            bool(self._storages)
            and has_plain_storage(tensor)
            and private.storage_key(tensor) in self._storages
        )

    def seen(self, inputs: list[torch.Tensor], written: list[torch.Tensor]) -> None:
        """A call has written to some of its ``inputs``."""
        if not any(isinstance(tensor, FakeTensor) or self.has(tensor) for tensor in inputs):
            return
        for tensor in written:
            if not isinstance(tensor, FakeTensor) and has_plain_storage(tensor) and not self.has(tensor):
                key, storage = private.storage_key(tensor), tensor.untyped_storage()
                self._storages[key] = weakref.ref(storage, lambda _, key=key: self._storages.pop(key, None))
