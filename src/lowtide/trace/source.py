"""Which line of the program calls an operation."""

from __future__ import annotations

import sys

_NOT_ASKED = ("torch.", "lowtide.", "contextlib.", "functools.")
_ASKED = ("lowtide.models.", "lowtide.parallel.")


def calling_line() -> str:
    """The innermost line that is neither PyTorch's nor lowtide's own: ``train.py:31``, or with the package
    that it is in, ``transformers/models/gpt2/modeling_gpt2.py:210``. Empty where there is none.
    """
    frame = sys._getframe(1)
    while frame is not None:
        name = f"{frame.f_globals.get('__name__', '')}."
        if not name.startswith(_NOT_ASKED) or name.startswith(_ASKED):
            file = frame.f_code.co_filename.replace("\\", "/")
            # of a package the path inside it, which is the same on every machine
            parts = file.split("/")[-max(1, name.count(".")) :]
            return f"{'/'.join(parts)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
