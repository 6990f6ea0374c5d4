"""Chance: a step that is only looked at leaves random state as it was, and shows the most that chance may let run."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from lowtide import private
from lowtide.ops import OpInfo

BY_CHANCE = "chance decides how much of it runs: this is the most that was found"
"""A note of a graph whose model left more out when its single random numbers were others."""


@contextmanager
def same_random(devices: Sequence[int] = ()) -> Iterator[None]:
    """Afterwards the random states of PyTorch, of NumPy and of Python are what they were: models draw masks and layers to leave out from all.

    Args:
        devices: the GPUs whose generators are put back, too.

    Example:
        >>> import random
        >>> random.seed(1)
        >>> with same_random():
        ...     drawn = random.random()
        >>> drawn == random.random()
        True
    """
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=list(devices)):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def draws_one(info: OpInfo, args: Sequence[Any]) -> bool:
    """Whether the call draws a single number, as models do to decide whether a layer runs."""
    return info.name in ("aten.rand.default", "aten.rand.generator") and tuple(args[0]) in ((), (1,))


def extreme(drawn: torch.Tensor, least: bool) -> torch.Tensor:
    """What was drawn from [0, 1), with the least or the greatest number that there is in it."""
    with private.without_fake_mode():
        return drawn.fill_(0.0 if least else 1 - torch.finfo(drawn.dtype).eps / 2)
