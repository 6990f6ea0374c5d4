"""Tokens that no rank has: an error on every device, as for a model of one process, where each rank alone
would take them for another's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowtide.interception import without_modes
from lowtide.parallel.errors import ParallelError
from lowtide.private import assert_on_device, is_fake


def check_tokens(tokens: Tensor, size: int, what: str, ignore_index: int | None = None) -> None:
    """Refuse tokens outside a vocabulary: at once on the CPU, by a device-side assertion (no synchronisation)
    elsewhere.

    Args:
        tokens: whole numbers of any shape.
        size: of the vocabulary.
        what: they are, for the message.
        ignore_index: a number that is let pass.

    Raises:
        ParallelError: on the CPU, where looking is free. Elsewhere PyTorch's error for a failed assertion
            comes with a later operation.

    >>> import torch
    >>> check_tokens(torch.tensor([0, 9]), 10, "token")
    """
    if torch.compiler.is_compiling():
        outside = (tokens < 0) | (tokens >= size)
        if ignore_index is not None:
            outside = outside & (tokens != ignore_index)
        assert_on_device(~outside.any(), f"a {what} is not of the vocabulary of {size}")
        return
    if is_fake(tokens) or tokens.device.type == "meta" or not tokens.numel():
        return
    with without_modes():  # a look at the caller's mistake is no part of the step
        bad = (tokens < 0) | (tokens >= size)
        if ignore_index is not None:
            bad &= tokens != ignore_index
        ignored = "" if ignore_index is None else f"; targets that do not count are {ignore_index}"
        if not _looks_freely(tokens):
            assert_on_device(~bad.any(), f"a {what} is not of the vocabulary of {size}{ignored}")
        elif bad.any():
            raise ParallelError(f"{what} {int(tokens[bad][0])} is not of the vocabulary of {size}{ignored}")


def _looks_freely(tokens: Tensor) -> bool:
    return tokens.device.type == "cpu"
