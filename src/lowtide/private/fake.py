"""Fake tensors: shapes, types and devices without memory.

Seen in PyTorch 2.11 to 2.13.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import DynamicOutputShapeException as DynamicOutputShapeException
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.optim.optimizer import _foreach_supported_types

from lowtide.private.dispatch import mode_stack


def fake_mode() -> FakeTensorMode:
    """A fake tensor mode that takes real tensors as constants, and whose tensors refuse to give an address.

    By default a fake tensor's ``data_ptr()`` is 0 and code that writes there ends the process.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    mode._allow_unsafe_data_ptr_access = False
    return mode


without_fake_mode = unset_fake_temporarily
"""A context: operations in the block see no fake tensor mode, whatever is active outside."""


@contextmanager
def without_fake_log() -> Iterator[None]:
    """In the block PyTorch logs no traceback of an operation that fails on fake tensors; it raises all the
    same.
    """
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


@contextmanager
def real_for_transformers(has_values: Callable[[torch.Tensor], bool]) -> Iterator[None]:
    """In the block transformers takes a fake tensor for a real one where ``has_values`` says so.

    It asks before it looks at the values of masks and positions, and makes square masks without them.
    Seen in transformers 5.23.
    """
    asked: Any = sys.modules.get("transformers.utils.import_utils")
    is_fake_tensor = getattr(asked, "is_fake_tensor", None)
    if is_fake_tensor is None:
        yield
        return

    def has_none(item: Any) -> bool:
        # Dynamo, which may trace this, sees PyTorch's and transformers' functions alone
        return is_fake_tensor(item) and (torch.compiler.is_compiling() or not has_values(item))

    asked.is_fake_tensor = has_none
    try:
        yield
    finally:
        asked.is_fake_tensor = is_fake_tensor


def is_fake_mode_active() -> bool:
    """Whether operations of this thread make fake tensors."""
    return any(isinstance(mode, FakeTensorMode) for mode in mode_stack())


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no content to look at."""
    return isinstance(tensor, FakeTensor)


def has_foreach(parameter: torch.Tensor) -> bool:
    """Whether PyTorch's optimizers may update a parameter of this type together with others (``foreach``);
    that its device allows it, too, they ask for themselves.
    """
    return type(parameter) in _foreach_supported_types


@contextmanager
def foreach_takes_fakes() -> Iterator[None]:
    """In the block PyTorch's optimizers choose ``foreach`` for fake tensors as they do for parameters."""
    _foreach_supported_types.append(FakeTensor)
    try:
        yield
    finally:
        _foreach_supported_types.remove(FakeTensor)
