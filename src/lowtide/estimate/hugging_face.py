"""Hugging Face ``config.json`` files -> `Shape`. Only the keys that shape the model are read; transformers is
not needed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lowtide.errors import expect
from lowtide.estimate.architectures import READERS
from lowtide.estimate.errors import EstimateError
from lowtide.estimate.presets import Preset


def from_hugging_face(data: Mapping[str, Any], source: str = "the configuration") -> Preset:
    """The shape and usual settings in a Hugging Face configuration.

    Args:
        data: the contents of a ``config.json``.
        source: what messages call it.

    Raises:
        EstimateError: the ``model_type`` is not understood, or a size is missing or does not fit.

    Example:
        >>> config = {"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12,
        ...     "vocab_size": 50257, "n_positions": 1024}
        >>> from_hugging_face(config).shape.parameters()
        124439808
    """
    contents = isinstance(data, Mapping)
    expect(contents, "from_hugging_face(data=)", data, "the dictionary in a config.json", EstimateError)
    kind = data.get("model_type")
    if kind not in READERS:
        raise EstimateError(
            f"{source}: models of type {kind!r} are not understood; {', '.join(READERS)} are. Give the sizes "
            "as flags (--layers --hidden --heads ...) where the model is built like one of these"
        )
    return READERS[kind](data, source)


def read_hugging_face(path: str | os.PathLike[str]) -> Preset:
    """The same from a ``config.json`` or the folder that holds one."""
    place = as_path("read_hugging_face", path)
    return from_hugging_face(read_json(place / "config.json" if place.is_dir() else place), repr(str(place)))


def no_formula(path: Path) -> str:
    """Why the model in a ``config.json`` or its folder has no formula; nothing where it has one."""
    data = read_json(path / "config.json" if path.is_dir() else path)
    try:
        from_hugging_face(data, f"{data.get('model_type')!r}")
    except EstimateError as error:
        return str(error)
    return ""


def as_path(function: str, path: Any) -> Path:
    """The path of that name.

    Raises:
        EstimateError: it is none.
    """
    expect(isinstance(path, str | os.PathLike), f"{function}(path=)", path, "a file's path", EstimateError)
    return Path(path)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file, with errors that name it."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise EstimateError(f"cannot read {str(path)!r}: {error.strerror or error}") from error
    except ValueError as error:
        raise EstimateError(f"{str(path)!r} is no JSON: {error}") from error
    if not isinstance(data, dict):
        raise EstimateError(f"{str(path)!r} holds no JSON object")
    return data
