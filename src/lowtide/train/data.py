"""Text as bytes: a corpus from a file, a folder or Python's own standard library, and the batches drawn from
it.

Nothing is downloaded. Batch number ``i`` depends on the seed and ``i`` alone, so a resumed run reads on
exactly where it stopped.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lowtide.errors import LowtideError

VOCABULARY = 256
STANDARD_LIBRARY_BYTES = 20_000_000
VALIDATION_SHARE = 20  # one file in twenty, or the last twentieth of a single file
_LEFT_OUT = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "lib2to3"}
_TEXT_CONTROLS = bytes([7, 8, 9, 10, 11, 12, 13, 27])
_CONTROLS = bytes(set(range(32)) - set(_TEXT_CONTROLS))


class DataError(LowtideError):
    """The training text is missing, empty, binary or too short."""


@dataclass(frozen=True, eq=False)
class Corpus:
    """Text to train on and text to validate on, as bytes.

    Attributes:
        name: what it is, for people.
        train, validation: the bytes.
        digest: of both; a resumed run checks it.
    """

    name: str
    train: np.ndarray
    validation: np.ndarray
    digest: str

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.train.size / 1e6:.1f} MB to train on, {self.validation.size / 1e6:.1f} MB "
            "to validate on"
        )


def load_corpus(path: Path | None = None, standard_library: Path | None = None) -> Corpus:
    """The corpus in a text file or folder, or Python's standard library without one.

    A folder is every text file below it, in the order of their names; hidden and binary files are passed
    over.

    Raises:
        DataError: there is no text there.
    """
    if path is None:
        folder = standard_library or Path(sysconfig.get_path("stdlib"))
        texts = list(_capped(_texts_below(folder, "*.py", _LEFT_OUT), STANDARD_LIBRARY_BYTES))
        if not texts:
            raise DataError(
                f"this Python has no source of its standard library under {str(folder)!r}: pass --data with "
                "a text file or folder"
            )
        return _split("Python's standard library", texts)
    try:
        if path.is_dir():
            texts = list(_texts_below(path, "*", set()))
            if not texts:
                raise DataError(
                    f"the folder {str(path)!r} holds no text file: pass --data with one that does"
                )
            return _split(str(path), texts)
        if not path.exists():
            raise DataError(f"there is no file or folder {str(path)!r}: check --data")
        text = path.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {str(path)!r}: {error.strerror or error}") from error
    if not text:
        raise DataError(f"the file {str(path)!r} is empty: pass --data with some text")
    if not _is_text(text):
        raise DataError(
            f"the file {str(path)!r} is binary, not text: pass --data with plain text (UTF-8, unpacked)"
        )
    return _split(str(path), [text])


class Batches:
    """Training batches, drawn at random places of a text.

    >>> batches = Batches(np.arange(100, dtype=np.uint8), batch=2, sequence=8, seed=0)
    >>> tokens, targets = batches.draw(5)
    >>> tokens.shape, bool((tokens[:, 1:] == targets[:, :-1]).all())
    (torch.Size([2, 8]), True)
    """

    def __init__(
        self, text: np.ndarray, batch: int, sequence: int, seed: int, what: str = "training"
    ) -> None:
        if text.size < sequence + 1:
            raise DataError(
                f"the {what} text has {text.size} bytes, and --seq {sequence} needs at least {sequence + 1}: "
                "pass more text or a smaller --seq"
            )
        self._text, self._batch, self._sequence, self._seed = text, batch, sequence, seed

    def draw(self, index: int) -> tuple[Tensor, Tensor]:
        """Batch number ``index``: tokens and, one place later, targets, both (batch, sequence)."""
        random = np.random.default_rng([self._seed, index])
        return self._windows(random.integers(0, self._text.size - self._sequence, size=self._batch))

    def spread(self, count: int) -> Iterator[tuple[Tensor, Tensor]]:
        """``count`` batches spread evenly over the text, the same ones every time."""
        starts = np.linspace(0, self._text.size - self._sequence - 1, num=count * self._batch).astype(
            np.int64
        )
        for first in range(0, len(starts), self._batch):
            yield self._windows(starts[first : first + self._batch])

    def _windows(self, starts: np.ndarray) -> tuple[Tensor, Tensor]:
        windows = self._text[starts[:, None] + np.arange(self._sequence + 1)].astype(np.int64)
        return torch.from_numpy(windows[:, :-1].copy()), torch.from_numpy(windows[:, 1:].copy())


def _texts_below(folder: Path, pattern: str, left_out: set[str]) -> Iterator[bytes]:
    """The content of every text file below a folder, in the order of their names."""
    for file in sorted(folder.rglob(pattern), key=lambda file: file.relative_to(folder).parts):
        parts = file.relative_to(folder).parts
        if left_out.intersection(parts) or any(part.startswith(".") for part in parts) or not file.is_file():
            continue
        text = file.read_bytes()
        if text and _is_text(text):
            yield text


def _capped(texts: Iterator[bytes], most: int) -> Iterator[bytes]:
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


def _split(name: str, texts: list[bytes]) -> Corpus:
    """Every twentieth file for validation; the last twentieth of the text where there are only a few
    files.
    """
    if len(texts) >= VALIDATION_SHARE:
        train = b"".join(text for i, text in enumerate(texts) if i % VALIDATION_SHARE != VALIDATION_SHARE - 1)
        validation = b"".join(texts[VALIDATION_SHARE - 1 :: VALIDATION_SHARE])
    else:
        text = b"".join(texts)
        cut = len(text) - max(1, len(text) // VALIDATION_SHARE)
        train, validation = text[:cut], text[cut:]
    digest = hashlib.sha256(train + b"\0" + validation).hexdigest()[:16]
    return Corpus(name, np.frombuffer(train, np.uint8), np.frombuffer(validation, np.uint8), digest)
