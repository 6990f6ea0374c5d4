"""Fake tensors: shapes, types and devices without memory.

Seen in PyTorch 2.11 to 2.13.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

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
