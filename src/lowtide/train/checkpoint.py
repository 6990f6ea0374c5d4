"""Checkpoints that survive a kill at any moment, and that load without executing anything from the file.

A checkpoint is two files: one with the tensors (``step-00000100-DIGEST.pt``), and ``step-00000100.json``,
which names it, with its SHA-256 and what the run was. Each is written under a temporary name, flushed to the
disk and renamed, the JSON last: a checkpoint exists when its JSON does, and nothing older is deleted before.
Loading takes the newest whose digest is right, and says when it passed one over.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pickle
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import torch

from lowtide.errors import LowtideError
from lowtide.run.limit.messages import LowtideWarning

KEPT = 2
Read = TypeVar("Read")
_NAME = re.compile(r"step-(\d{8})\.json")
_FORMAT = 1


class CheckpointError(LowtideError):
    """A checkpoint cannot be written, or there is none that can be resumed."""


@dataclass(frozen=True)
class Checkpoint:
    """What `load` found.

    Attributes:
        step: optimizer steps done.
        run: what `save` was told about the run.
        state: what `save` was given: nested dictionaries of tensors and plain values.
    """

    step: int
    run: dict[str, Any]
    state: dict[str, Any]


def save(folder: Path, step: int, state: dict[str, Any], run: dict[str, Any]) -> Path:
    """Write a checkpoint and delete all but the newest `KEPT`; returns the tensors' file.

    Raises:
        CheckpointError: the folder or the disk does not take it. What was there stays valid.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(folder)
        digest, temporary = write(folder, lambda file: torch.save(state, file))
        data = folder / f"step-{step:08d}-{digest[:12]}.pt"
        rename(temporary, data)
        finish(
            folder, step, {"format": _FORMAT, "step": step, "file": data.name, "sha256": digest, "run": run}
        )
    except (OSError, RuntimeError) as error:  # torch.save turns a full disk into a RuntimeError
        raise CheckpointError(
            f"cannot write a checkpoint to {str(folder)!r}: {getattr(error, 'strerror', None) or error}"
        ) from error
    return data


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


class Damaged(Exception):
    """A checkpoint's content is not what was written."""


def load(folder: Path) -> Checkpoint:
    """The newest undamaged checkpoint in a folder, on the CPU; a damaged one is passed over with a warning.

    Raises:
        CheckpointError: there is none.
    """
    return newest(folder, lambda step: _read(folder, step))


def newest(folder: Path, read: Callable[[int], Read], warns: bool = True) -> Read:
    """What ``read`` makes of the newest checkpoint in a folder for which it does not raise `Damaged`; each
    that it passes over is ``warns`` of.

    Raises:
        CheckpointError: there is none.
    """
    found = steps(folder)
    if not found:
        raise CheckpointError(
            f"no checkpoint in {str(folder)!r}: check --checkpoint-dir, or leave out --resume to start anew"
        )
    damage: list[str] = []
    for step in reversed(found):
        try:
            checkpoint = read(step)
        except Damaged as error:
            damage.append(str(error))
            continue
        for text in damage if warns else ():
            warnings.warn(f"{text}; resuming from step {step} instead", LowtideWarning, stacklevel=3)
        return checkpoint
    raise CheckpointError(
        f"every checkpoint in {str(folder)!r} is damaged ({'; '.join(damage)}): start anew in another "
        "--checkpoint-dir"
    )


def manifest(folder: Path, step: int) -> Path:
    """The JSON file of a checkpoint."""
    return folder / f"step-{step:08d}.json"


def _read(folder: Path, step: int) -> Checkpoint:
    name = manifest(folder, step).name
    try:
        about = json.loads(manifest(folder, step).read_text(encoding="utf-8"))
        version = about["format"]
        if version != _FORMAT:
            raise CheckpointError(
                f"checkpoint {name} has format {version!r}; a run of one process reads format {_FORMAT}"
            )
        run, digest, data = about["run"], about["sha256"], folder / Path(about["file"]).name
        with data.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != digest:
                raise Damaged(f"checkpoint {name} is damaged: {data.name} is not what was written")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Damaged(f"checkpoint {name} is damaged ({type(error).__name__}: {error})") from error
    try:
        return Checkpoint(step, run, torch.load(data, map_location="cpu", weights_only=True))
    except (pickle.UnpicklingError, RuntimeError) as error:
        raise Damaged(f"checkpoint {name} holds something else than tensors and plain values") from error


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
            named.update(about["files"] if "files" in about else [about["file"]])
    for file in (*folder.glob("step-*.tmp"), *folder.glob("step-*.pt")):
        if file.name not in named:
            file.unlink(missing_ok=True)
