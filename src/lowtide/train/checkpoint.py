"""A run's checkpoints on disk, of one process or of several. They survive the end of the process at any
moment, and execute nothing when they are read.

A checkpoint is a file from each rank that holds something of its own (``step-00000100-00000-DIGEST.pt``), and
``step-00000100.json``, which names them, with their SHA-256 and what the run was. Each is written under a
temporary name, flushed to the disk and renamed, the JSON last and from one rank, when every file is down: a
checkpoint exists when its JSON does, and nothing older is deleted before. A rank that dies on the way leaves
files that no JSON names. Loading takes the newest whose digests are right, and says when it passed one over.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pickle
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from lowtide.errors import LowtideError
from lowtide.run.messages import LowtideWarning
from lowtide.train.ranks import Ranks

KEPT = 2
_NAME = re.compile(r"step-(\d{8})\.json")
_FORMAT = 3


class CheckpointError(LowtideError):
    """A checkpoint cannot be written, or there is none that can be resumed."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint in a folder.

    Attributes:
        folder: where it lies.
        step: optimizer steps done.
        run: what `save` was told about the run.
        files: its files, with their SHA-256.
    """

    folder: Path
    step: int
    run: dict[str, Any]
    files: dict[str, str]

    def contents(self) -> Iterator[Any]:
        """What each rank that wrote a file gave, on the CPU; read from the disk where it is used.

        Raises:
            CheckpointError: it is something else than tensors and plain values.
        """
        for file in self.files:
            try:
                yield torch.load(self.folder / file, map_location="cpu", weights_only=True, mmap=True)
            except (pickle.UnpicklingError, RuntimeError, OSError) as error:
                raise CheckpointError(f"{file} holds something else than tensors and plain values") from error


def make_folder(folder: Path, ranks: Ranks) -> None:
    """Make the folder of a run before its first step. A collective: every rank calls it.

    Raises:
        CheckpointError: a rank could not, or cannot write to it; on every rank.
    """
    problem = ""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            problem = "it may not be written to"
    except OSError as error:
        problem = str(error.strerror or error)
    _raise_any(folder, ranks.gather(problem))


def save(folder: Path, step: int, content: Any, run: dict[str, Any], ranks: Ranks | None = None) -> None:
    """Write a checkpoint, and delete all but the newest `KEPT`. A collective: every rank calls it.

    Args:
        folder: of the run.
        step: optimizer steps done.
        content: what this rank writes: tensors and plain values in containers; ``None`` for nothing.
        run: what the checkpoint is to say about the run.
        ranks: of the run; one process without them.

    Raises:
        CheckpointError: a rank could not write; on every rank. What was there stays valid.
    """
    ranks = ranks or Ranks()
    mine: tuple[str, str] | str | None = None
    if content is not None:
        name = f"step-{step:08d}-{ranks.rank:05d}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            digest, temporary = write(
                folder, lambda file: torch.save(content, file), f"{name}-{os.getpid()}.tmp"
            )
            mine = f"{name}-{digest[:12]}.pt", digest
            rename(temporary, folder / mine[0])
        except (OSError, RuntimeError) as error:  # torch.save turns a full disk into a RuntimeError
            mine = str(getattr(error, "strerror", None) or error)
    found = ranks.gather(mine)
    _raise_any(folder, found)
    problem = ""
    if ranks.rank == 0:
        files = dict(item for item in found if item is not None)
        try:
            finish(folder, step, {"format": _FORMAT, "step": step, "files": files, "run": run})
        except (OSError, RuntimeError) as error:
            problem = str(getattr(error, "strerror", None) or error)
    _raise_any(folder, ranks.gather(problem))


def _raise_any(folder: Path, found: Sequence[Any]) -> None:
    for rank, item in enumerate(found):
        if isinstance(item, str) and item:
            who = f"rank {rank} " if len(found) > 1 else ""
            raise CheckpointError(f"{who}cannot write a checkpoint to {str(folder)!r}: {item}")


def finish(folder: Path, step: int, about: dict[str, Any]) -> None:
    """Write the manifest, with which a checkpoint exists, and delete all but the newest `KEPT`."""
    _, temporary = write(folder, lambda file: file.write(json.dumps(about, indent=1).encode()))
    rename(temporary, manifest(folder, step))
    found = steps(folder)
    earlier = [old for old in found if old < step]
    # later ones were damaged, or load had taken them
    for old in earlier[: -(KEPT - 1)] + [later for later in found if later > step]:
        manifest(folder, old).unlink(missing_ok=True)
    _remove_leftovers(folder)


def steps(folder: Path) -> list[int]:
    """The steps of which the folder holds a checkpoint, oldest first."""
    if not folder.is_dir():
        return []
    return sorted(int(match[1]) for file in folder.iterdir() if (match := _NAME.fullmatch(file.name)))


def load(folder: Path, ranks: Ranks | None = None) -> Checkpoint:
    """The newest undamaged checkpoint in a folder; a damaged one is passed over with a warning. A collective:
    every rank checks some of the files.

    Raises:
        CheckpointError: there is none.
    """
    ranks = ranks or Ranks()
    found = steps(folder)
    if not found:
        raise CheckpointError(
            f"no checkpoint in {str(folder)!r}: check --checkpoint-dir, or leave out --resume to start anew"
        )
    damage: list[str] = []
    for step in reversed(found):
        checkpoint = _read(folder, step, ranks)
        problems = [
            text for text in ranks.gather("" if isinstance(checkpoint, Checkpoint) else checkpoint) if text
        ]
        if isinstance(checkpoint, Checkpoint) and not problems:
            for text in damage if ranks.rank == 0 else ():
                warnings.warn(f"{text}; resuming from step {step} instead", LowtideWarning, stacklevel=2)
            return checkpoint
        damage.append(problems[0])
    raise CheckpointError(
        f"every checkpoint in {str(folder)!r} is damaged ({'; '.join(damage)}): start anew in another "
        "--checkpoint-dir"
    )


def manifest(folder: Path, step: int) -> Path:
    """The JSON file of a checkpoint."""
    return folder / f"step-{step:08d}.json"


def _read(folder: Path, step: int, ranks: Ranks) -> Checkpoint | str:
    """A checkpoint whose files, those that this rank checks, are as they were written; or what is wrong."""
    name = manifest(folder, step).name
    try:
        about = json.loads(manifest(folder, step).read_text(encoding="utf-8"))
        if about["format"] != _FORMAT:
            return f"checkpoint {name} has format {about['format']!r}, and this lowtide reads {_FORMAT}"
        files = {Path(file).name: str(digest) for file, digest in about["files"].items()}
        for file, digest in list(files.items())[ranks.rank :: ranks.size]:
            with (folder / file).open("rb") as opened:
                if hashlib.file_digest(opened, "sha256").hexdigest() != digest:
                    return f"checkpoint {name} is damaged: {file} is not what was written"
        return Checkpoint(folder, int(about["step"]), dict(about["run"]), files)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"checkpoint {name} is damaged ({type(error).__name__}: {error})"


class _Hashing:
    """A file for writing that keeps a digest of what went through."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.sha256 = hashlib.sha256()

    def write(self, data: bytes) -> int:
        self.sha256.update(data)
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()


def write(folder: Path, fill: Callable[[Any], object], name: str = "") -> tuple[str, Path]:
    """Write a temporary file down to the disk; returns the SHA-256 of its content, and its name."""
    temporary = folder / (name or f"step-{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            hashing = _Hashing(file)
            fill(hashing)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return hashing.sha256.hexdigest(), temporary


def rename(temporary: Path, path: Path) -> None:
    """Give a finished file its name, durably."""
    os.replace(temporary, path)
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Make a rename durable; where the system cannot open folders (Windows) the rename alone has to do."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _remove_leftovers(folder: Path) -> None:
    """Delete what killed runs left behind: temporary files, and tensors that no JSON names."""
    named = set()
    for step in steps(folder):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            about = json.loads(manifest(folder, step).read_text(encoding="utf-8"))
            named.update(about["files"])
    for file in (*folder.glob("step-*.tmp"), *folder.glob("step-*.pt")):
        if file.name not in named:
            file.unlink(missing_ok=True)
