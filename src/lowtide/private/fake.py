"""Fake tensors: shapes, types and devices without memory.

Seen in PyTorch 2.11 to 2.13.
"""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch._subclasses.fake_tensor import unset_fake_temporarily

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


def is_fake_mode_active() -> bool:
    """Whether operations of this thread make fake tensors."""
    return any(isinstance(mode, FakeTensorMode) for mode in mode_stack())


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no content to look at."""
    return isinstance(tensor, FakeTensor)
