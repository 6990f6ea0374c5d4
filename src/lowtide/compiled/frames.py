"""Python's frames: room for those of a long piece of work, in one piece.

From 3.11 on Python keeps frames in chunks of 16 KiB, and returns a chunk to the system as soon as its first
frame ends (seen in 3.11 to 3.14). A loop whose calls begin right at the end of a chunk so maps and unmaps
memory with every one of them: half a million page faults while Inductor compiled GPT of 12 layers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_SLOTS = 150_000
"""Of 8 bytes: such a frame needs a chunk of 2 MiB, and leaves 0.8 MiB of it to those that it calls. Only what
is written to takes memory.
"""


def with_room_for_frames(function: Callable[P, T]) -> Callable[P, T]:
    """A function whose calls share one chunk of frames, instead of 16 KiB after 16 KiB."""

    def roomy(*args: P.args, **kwargs: P.kwargs) -> T:
        return function(*args, **kwargs)

    roomy.__code__ = roomy.__code__.replace(co_stacksize=_SLOTS)
    return functools.wraps(function)(roomy)
