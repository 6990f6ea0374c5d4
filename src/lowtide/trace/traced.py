"""What a `Tracer` notes while a step runs: its storages as long as they live, its operations and values, and
which line of user code calls an operation.
"""

from __future__ import annotations

import sys
import weakref
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Literal

import torch

CostFigures = tuple[float, int, tuple[int, ...]]
"""What an operation takes: seconds, scratch bytes, blocks, as `lowtide.graph.Operation` has them."""

_NOT_ASKED = ("torch.", "lowtide.", "contextlib.", "functools.")
_ASKED = ("lowtide.models.", "lowtide.parallel.")


class TracedStorage(weakref.ref[torch.UntypedStorage]):
    """A storage of the step, while it lives.

    Attributes:
        key: as of `lowtide.private.storage_key`.
        number: its id in the graph.
        value: the id of its newest value.
        phase: in which phase an operation of the step made it, or empty: it was resident before the step.
        resized: user code resizes it.
        gathered: sharded weights are gathered into it.
    """

    __slots__ = ("gathered", "key", "number", "phase", "resized", "value")
    gathered: bool
    key: int
    number: int
    value: int
    phase: str
    resized: bool


@dataclass(slots=True)
class TracedOperation:
    """As `lowtide.graph.Operation`, of which it has name, reads, writes, phase, module, random, reason,
    source and region; the rest is known at the end.
    """

    name: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    phase: Literal["forward", "backward"]
    module: str
    random: bool
    reason: str
    source: str
    region: int | None


@dataclass(slots=True)
class TracedValue:
    """As `lowtide.graph.Value`, of which it has storage, version, producer, shape and dtype; the rest is
    known at the end.
    """

    storage: int
    version: int
    producer: int | None
    shape: tuple[int, ...]
    dtype: torch.dtype


def calling_line(files: dict[CodeType, str]) -> str:
    """The innermost line that is neither PyTorch's nor lowtide's own: ``train.py:31``, or with the package
    that it is in, ``transformers/models/gpt2/modeling_gpt2.py:210``. Empty where there is none.

    Args:
        files: of code that was met before, the file as it is written here, or empty where the code is not a
            user's.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        file = files.get(code)
        if file is None:
            file = files[code] = _file_of(frame)
        if file:
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def _file_of(frame: FrameType) -> str:
    """The file of a frame's code, from its package on, which is the same on every machine; empty where the
    code is not a user's.
    """
    name = f"{frame.f_globals.get('__name__', '')}."
    if name.startswith(_NOT_ASKED) and not name.startswith(_ASKED):
        return ""
    file = frame.f_code.co_filename.replace("\\", "/")
    return "/".join(file.split("/")[-max(1, name.count(".")) :])
