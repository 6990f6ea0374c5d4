"""Text to train on and text to validate on: a file, a folder, a data set of Hugging Face, or the source of
Python's standard library. Nothing is downloaded but what ``hf:`` asks for.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowtide.errors import LowtideError

HUGGING_FACE_PREFIX = "hf:"
STANDARD_LIBRARY_BYTES = 20_000_000
VALIDATION_SHARE = 20  # one document in twenty, or the last twentieth of a single file
TABLES = {".jsonl": "from_json", ".parquet": "from_parquet", ".csv": "from_csv", ".arrow": "from_file"}
"""Files with rows, and what of `datasets.Dataset` reads them."""

_LEFT_OUT = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "lib2to3"}
_TEXT_CONTROLS = bytes([7, 8, 9, 10, 11, 12, 13, 27])
_CONTROLS = bytes(set(range(32)) - set(_TEXT_CONTROLS))


class DataError(LowtideError):
    """The training text is missing, empty, binary or too short."""


@dataclass(frozen=True)
class Text:
    """Documents, as bytes in an encoding that extends ASCII.

    Attributes:
        name: what it is, for people.
        train, validation: the documents.
    """

    name: str
    train: list[bytes]
    validation: list[bytes]


def read_text(source: str | None = None, column: str | None = None) -> Text:
    """The documents of a source.

    Args:
        source: a text file; a folder, which is every text file below it in the order of names (hidden and
            binary ones are passed over); a ``.jsonl``, ``.parquet``, ``.csv`` or ``.arrow`` file, or a folder
            that ``datasets`` saved, of which every row is a document; ``hf:OWNER/NAME[:CONFIGURATION]``, a
            data set on the hub; ``None`` is the source of Python's standard library.
        column: which column of the rows holds the text. By default ``text``, or the only one of strings.

    Raises:
        DataError: there is no text there.
    """
    if source is None:
        _no_column(column, "Python's standard library")
        return _standard_library(Path(sysconfig.get_path("stdlib")))
    if source.startswith(HUGGING_FACE_PREFIX):
        return _from_hub(source, column)
    path = Path(source)
    try:
        if path.is_dir():
            if (path / "dataset_info.json").exists() or (path / "dataset_dict.json").exists():
                return _rows(source, _datasets(source).load_from_disk(source), column)
            _no_column(column, f"the folder {source!r}")
            documents = list(_texts_below(path, "*", set()))
            if not documents:
                raise DataError(f"the folder {source!r} holds no text file: pass --data with one that does")
            return _split(source, documents)
        if not path.exists():
            raise DataError(f"there is no file or folder {source!r}: check --data")
        if path.suffix in TABLES:
            return _from_table(path, column)
        _no_column(column, f"the file {source!r}")
        text = path.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {source!r}: {error.strerror or error}") from error
    if not text:
        raise DataError(f"the file {source!r} is empty: pass --data with some text")
    if not _is_text(text):
        raise DataError(
            f"the file {source!r} is binary, not text: pass --data with plain text (UTF-8, unpacked)"
        )
    return _split(source, [text])


def _standard_library(folder: Path) -> Text:
    documents = list(_cap(_texts_below(folder, "*.py", _LEFT_OUT), STANDARD_LIBRARY_BYTES))
    if not documents:
        raise DataError(
            f"this Python has no source of its standard library under {str(folder)!r}: pass --data with "
            "a text file or folder"
        )
    return _split("Python's standard library", documents)


def _datasets(source: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            f"--data {source} is read by Hugging Face's datasets: pip install 'lowtide[datasets]'"
        ) from error
    return datasets


def _from_hub(source: str, column: str | None) -> Text:
    """A data set on the hub, or in the cache of those that were there once."""
    name, _, configuration = source.removeprefix(HUGGING_FACE_PREFIX).partition(":")
    datasets = _datasets(source)
    try:
        found = datasets.load_dataset(name, configuration or None)
    except Exception as error:  # the hub's, the network's and the reader's, of many types
        raise DataError(
            f"--data {source}: cannot load this data set ({_first_line(error)}): check its name, its "
            "configuration (hf:OWNER/NAME:CONFIGURATION) and the network"
        ) from error
    return _rows(source, found, column)


def _from_table(path: Path, column: str | None) -> Text:
    datasets = _datasets(str(path))
    try:
        found = getattr(datasets.Dataset, TABLES[path.suffix])(str(path))
    except Exception as error:  # the readers' own, of several types
        raise DataError(f"cannot read the rows of {str(path)!r}: {_first_line(error)}") from error
    return _rows(str(path), found, column)


def _rows(source: str, found: Any, column: str | None) -> Text:
    """The text of a data set's rows; its own validation rows where it has some."""
    parts = found if isinstance(found, dict) else {"train": found}
    train = parts["train"] if "train" in parts else next(iter(parts.values()))
    column = _column(source, train, column)
    documents = _documents(train[column])
    if not documents:
        raise DataError(f"--data {source}: column {column!r} holds no text")
    if "validation" in parts:
        return Text(source, documents, _documents(parts["validation"][column]))
    return _split(source, documents)


def _column(source: str, rows: Any, asked: str | None) -> str:
    strings = [name for name, kind in rows.features.items() if getattr(kind, "dtype", "") in _STRINGS]
    if asked is None and "text" in strings:
        return "text"
    if asked is None and len(strings) == 1:
        return strings[0]
    if asked in strings:
        return str(asked)
    told = f"--data {source}: " + ("" if asked is None else f"no column {asked!r} of strings; ")
    raise DataError(f"{told}choose one with --text-column: {', '.join(strings) or 'there is none'}")


_STRINGS = ("string", "large_string")


def _no_column(column: str | None, where: str) -> None:
    if column is not None:
        raise DataError(f"--text-column {column}: {where} is plain text and has no columns: leave it out")


def _documents(texts: Iterator[str | None]) -> list[bytes]:
    return [text.encode() for text in texts if text]


def _texts_below(folder: Path, pattern: str, left_out: set[str]) -> Iterator[bytes]:
    """The content of every text file below a folder, in the order of their names."""
    for file in sorted(folder.rglob(pattern), key=lambda file: file.relative_to(folder).parts):
        parts = file.relative_to(folder).parts
        if left_out.intersection(parts) or any(part.startswith(".") for part in parts) or not file.is_file():
            continue
        text = file.read_bytes()
        if text and _is_text(text):
            yield text


def _cap(texts: Iterator[bytes], most: int) -> Iterator[bytes]:
    for text in texts:
        if most <= 0:
            return
        yield text[:most]
        most -= len(text)


def _is_text(data: bytes) -> bool:
    """Whether bytes look like text in an ASCII-compatible encoding: no zero byte, hardly a control
    character.
    """
    sample = data[:65536]
    return b"\0" not in data and len(sample) - len(sample.translate(None, _CONTROLS)) <= len(sample) // 100


def _split(name: str, documents: list[bytes]) -> Text:
    """Every twentieth document for validation; the last twentieth of the text where there are only a few."""
    if len(documents) >= VALIDATION_SHARE:
        train = [text for i, text in enumerate(documents) if i % VALIDATION_SHARE != VALIDATION_SHARE - 1]
        return Text(name, train, documents[VALIDATION_SHARE - 1 :: VALIDATION_SHARE])
    text = b"".join(documents)
    cut = len(text) - max(1, len(text) // VALIDATION_SHARE)
    return Text(name, [text[:cut]], [text[cut:]])


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__
