"""Random state: a step that is only looked at leaves it as it was."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch


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
