"""From ``file.py:function`` or ``package.module:function`` to the function of a user.

A script is imported as any module is, so its ``__name__`` is not ``"__main__"``. Its folder is the first of
``sys.path``, as with ``python file.py``; of a module that is the current folder, as with ``python -m``.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from lowtide.errors import LowtideError, shorten

_PACKAGES = [importlib.util.find_spec(name) for name in ("lowtide", "typer", "click")]
_BELOW = (
    *(os.path.dirname(one.origin) + os.sep for one in _PACKAGES if one is not None and one.origin),
    inspect.getfile(contextmanager),
    inspect.getfile(importlib),
    "<frozen",
)
"""Where the code is that runs a user's: files, or folders."""


class ScriptError(LowtideError):
    """A script, or what its function returned, is not what a command needs."""


class ScriptFailed(Exception):
    """The code of a script raised.

    Args:
        error: what it raised.
        on_fakes: the step ran on fake tensors.

    Attributes:
        error: the same; its traceback begins with the user's code, and ends there where the step ran on fake
            tensors.
    """

    def __init__(self, error: BaseException, on_fakes: bool = False) -> None:
        super().__init__(f"{type(error).__name__}: {error}")
        entry = error.__traceback__
        while entry is not None and _is_below(entry):
            entry = entry.tb_next
        self.error, error.__traceback__ = error, entry
        while on_fakes and entry is not None:
            if entry.tb_next is not None and _is_below(entry.tb_next):
                entry.tb_next = None
            entry = entry.tb_next
        if error.__traceback__ is not None:
            shorten(error)


def _is_below(entry: TracebackType) -> bool:
    return entry.tb_frame.f_code.co_filename.startswith(_BELOW)


@dataclass(frozen=True)
class Target:
    """A function of a script.

    Attributes:
        place: a file, or a module's dotted name.
        function: the function's name.
        is_file: whether ``place`` is a file.

    Example:
        >>> Target.of("package.train:make_step")
        Target(place='package.train', function='make_step', is_file=False)
    """

    place: str
    function: str
    is_file: bool

    def __str__(self) -> str:
        return f"{self.place}:{self.function}"

    @classmethod
    def of(cls, text: str) -> Target:
        """The target that a command was given. Nothing is imported.

        Raises:
            ScriptError: there is no such file, or no function is named.
        """
        place, _, function = text.rpartition(":")
        if not place or not function.isidentifier():
            place, function = text.removesuffix(":"), ""
        path = Path(place)
        is_file = path.suffix == ".py" or len(path.parts) > 1 or path.is_file()
        if is_file and not (path.suffix == ".py" and path.is_file()):
            what = "it is not a Python file" if path.exists() else "there is no such file"
            near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.py")], n=1)
            did = f"did you mean {path.parent / near[0]}?" if near else "give a file that ends in .py"
            raise ScriptError(f"{place}: {what}; {did}")
        if not function:
            has = f"; it has {_in_words(functions_in(path))}" if is_file else ""
            raise ScriptError(f"{place}: name a function of it, as in {place}:make_step{has}")
        return cls(place, function, is_file)

    @contextmanager
    def running(self) -> Iterator[Callable[[], Any]]:
        """The function. Within the block ``sys.path`` and ``sys.argv`` are the script's.

        Raises:
            ScriptError: there is no such function, or it needs arguments.
            ScriptFailed: the script raised when it was imported.
        """
        path, argv = list(sys.path), sys.argv
        sys.path.insert(0, str(Path(self.place).resolve().parent) if self.is_file else os.getcwd())
        sys.argv = [self.place]
        try:
            yield self._function()
        finally:
            sys.path[:], sys.argv = path, argv

    def _function(self) -> Callable[[], Any]:
        with of_the_user(str(self.place)):
            module = self._module()
        found = getattr(module, self.function, None)
        if found is None:
            names = functions_in(Path(module.__file__)) if module.__file__ else []
            near = difflib.get_close_matches(self.function, names, n=1)
            did = f". Did you mean {near[0]}?" if near else ""
            raise ScriptError(
                f"{self.place} has no function {self.function!r}: it has {_in_words(names)}{did}"
            )
        if not callable(found):
            raise ScriptError(f"{self}: that is no function, but of type {type(found).__name__}")
        if needed := _needed(found):
            raise ScriptError(
                f"{self} needs arguments ({', '.join(needed)}): give a function that can be called without, "
                "such as one that calls it with them"
            )
        return found

    def _module(self) -> ModuleType:
        """The script, imported."""
        if not self.is_file:
            try:
                return importlib.import_module(self.place)
            except ModuleNotFoundError as error:
                if error.name is None or not f"{self.place}.".startswith(f"{error.name}."):
                    raise  # another module, which the script imports
                raise ScriptError(
                    f"{self}: there is no module {error.name!r} in this folder, or installed: give a file, "
                    "as in my_train.py:make_step, or a module's dotted name"
                ) from None
        path = Path(self.place).resolve()
        # what the script's stem names already, as inspect.py would, stays what it is
        name = path.stem if path.stem not in sys.modules else f"{path.stem} of {path.parent}"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None, "it ends in .py"
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module


@contextmanager
def of_the_user(what: str) -> Iterator[None]:
    """What runs in the block is a user's code. What it raises is a `ScriptFailed`, other than what lowtide
    raises on purpose.

    Args:
        what: runs, in words.

    Raises:
        ScriptError: the code has ended the process.
        ScriptFailed: it raised.
    """
    try:
        yield
    except LowtideError:
        raise
    except SystemExit as error:
        raise ScriptError(
            f"{what} called sys.exit({error.code!r}): a script is imported here, without arguments. Put what "
            "reads arguments, and what trains, under if __name__ == '__main__'"
        ) from None
    except Exception as error:
        raise ScriptFailed(error) from None


def functions_in(path: Path) -> list[str]:
    """The public functions of a Python file, in its order; read, not run.

    >>> functions_in(Path(__file__))
    ['of_the_user', 'functions_in']
    """
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return []
    found = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    return [name for name in found if not name.startswith("_")]


def _in_words(names: list[str]) -> str:
    more = f" and {len(names) - 9} more" if len(names) > 9 else ""
    return ", ".join(names[:9]) + more if names else "no functions"


def _needed(function: Callable[..., Any]) -> list[str]:
    """The parameters that a function cannot be called without."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # it has no signature that Python knows
        return []
    kinds = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    return [p.name for p in parameters if p.default is p.empty and p.kind not in kinds]
