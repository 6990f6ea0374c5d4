"""A model's parts by name: its tensors, by their storages, and the modules whose forwards are under way; and
which line of user code calls an operation.

In: a model. Out: names for what a `Tracer` writes down (`lowtide.trace.tracer`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import CodeType, FrameType
from typing import Any

import torch

from lowtide import private
from lowtide.graph import StorageKind
from lowtide.meter.resident import gradient_of
from lowtide.trace.results import plain_leaves

_NOT_ASKED = ("torch.", "lowtide.", "contextlib.", "functools.")
_ASKED = ("lowtide.models.", "lowtide.parallel.")
_COMMAND = "lowtide.steps."
_NOBODY = "nobody"  # calls what runs a user's model in a command: no line of the user's is further out


def tensor_names(model: torch.nn.Module) -> dict[int, tuple[StorageKind, str]]:
    """The kind and the qualified name of a model's parameters, of their gradients and of its buffers, by the
    keys of their storages (`lowtide.private.storage_key`). Of what shares a storage the first one's.

    >>> list(tensor_names(torch.nn.Linear(2, 2)).values())
    [('parameter', 'weight'), ('parameter', 'bias')]
    """
    found: dict[int, tuple[StorageKind, str]] = {}

    def note(tensor: torch.Tensor, kind: StorageKind, name: str) -> None:
        for leaf in plain_leaves(tensor):
            found.setdefault(private.storage_key(leaf), (kind, name))

    for name, parameter in model.named_parameters():
        note(parameter, "parameter", name)
        # the slab is resident without gradients, too
        for tensor in (gradient_of(parameter), getattr(parameter, "gradient_slab", None)):
            if isinstance(tensor, torch.Tensor):
                note(tensor, "gradient", name)
    for name, buffer in model.named_buffers():
        note(buffer, "buffer", name)
    return found


@contextmanager
def following_modules(model: torch.nn.Module, under_way: list[str]) -> Iterator[None]:
    """In the block, the names of the modules whose forwards are under way are in ``under_way``, outermost
    first. A module that is not the model's has the name of the one around it.
    """
    names = {id(module): name for name, module in model.named_modules()}

    def begins(module: torch.nn.Module, _: Any) -> None:
        if torch.compiler.is_compiling():
            return
        here = under_way[-1] if under_way else ""
        under_way.append(names.get(id(module), here))

    def ends(*_: object) -> None:
        if not torch.compiler.is_compiling() and under_way:
            under_way.pop()

    with ExitStack() as stack:
        for module in _open_modules(model):
            stack.callback(module.register_forward_pre_hook(begins, prepend=True).remove)
            stack.callback(module.register_forward_hook(ends, prepend=True, always_call=True).remove)
        yield


def _open_modules(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The modules whose own code runs: none that are compiled, and nothing inside these."""
    if isinstance(model, torch.jit.ScriptModule) or private.is_compiled(model):
        return
    yield model
    for child in model.children():
        yield from _open_modules(child)


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
            return f"{file}:{frame.f_lineno}" if file is not _NOBODY else ""
        frame = frame.f_back
    return ""


def _file_of(frame: FrameType) -> str:
    """The file of a frame's code, from its package on, which is the same on every machine; empty where the
    code is not a user's.
    """
    name = f"{frame.f_globals.get('__name__', '')}."
    if name.startswith(_COMMAND):
        return _NOBODY
    if name.startswith(_NOT_ASKED) and not name.startswith(_ASKED):
        return ""
    file = frame.f_code.co_filename.replace("\\", "/")
    return "/".join(file.split("/")[-max(1, name.count(".")) :])
