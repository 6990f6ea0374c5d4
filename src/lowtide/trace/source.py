"""Which line of the program calls an operation."""

from __future__ import annotations

import sys
from types import CodeType, FrameType

_NOT_ASKED = ("torch.", "lowtide.", "contextlib.", "functools.")
_ASKED = ("lowtide.models.", "lowtide.parallel.")


def calling_line(files: dict[CodeType, str]) -> str:
    """The innermost line that is neither PyTorch's nor lowtide's own: ``train.py:31``, or with the package
    that it is in, ``transformers/models/gpt2/modeling_gpt2.py:210``. Empty where there is none.

    Args:
        files: of code that was met before, the file as it is written here, or empty where the code is not the
            program's.
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
    code is not the program's.
    """
    name = f"{frame.f_globals.get('__name__', '')}."
    if name.startswith(_NOT_ASKED) and not name.startswith(_ASKED):
        return ""
    file = frame.f_code.co_filename.replace("\\", "/")
    return "/".join(file.split("/")[-max(1, name.count(".")) :])
