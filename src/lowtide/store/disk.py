"""The disk tier: one preallocated file without a name, read and written past the page cache by two
threads.
"""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
from pathlib import Path

import torch

from lowtide.errors import PlanError
from lowtide.store.tier import BUFFER_BYTES, Fault, StoreError, Tier

PAGE = 4096
_IN_MEMORY = {"tmpfs", "ramfs", "devtmpfs"}


class Disk(Tier):
    """Bytes in a file.

    The file is unlinked as soon as it is open (or never gets a name, where the system can do that), so
    nothing is left however the process ends. Its blocks are reserved before the first step, so that a full
    disk is known then. Reads and writes go past the page cache where the file system allows, each through one
    buffer of constant size.

    Args:
        path: a folder on the disk to use; the system's folder for temporary files by default.
        fault: for tests.

    Raises:
        PlanError: the folder does not exist, cannot be written, or lies in main memory.
    """

    name = "disk"

    def __init__(self, path: str | os.PathLike[str] | None = None, fault: Fault | None = None) -> None:
        self.path = Path(path if path is not None else tempfile.gettempdir())
        kind = file_system(self.path)
        if kind in _IN_MEMORY:
            raise PlanError(
                f"{self.path} is a {kind}, which lies in main memory: give path= a folder on a disk"
            )
        self.direct, self._file = _open(self.path)
        super().__init__(PAGE, fault)
        self._in = mmap.mmap(-1, BUFFER_BYTES)
        self._out = mmap.mmap(-1, BUFFER_BYTES)

    def _grow(self, end: int) -> None:
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self._file, 0, end)
            else:
                os.ftruncate(self._file, end)
        except OSError as error:
            raise self._explain("reserve", error) from error

    def _write(self, data: torch.Tensor, start: int) -> None:
        view = memoryview(self._in)
        staged = torch.frombuffer(self._in, dtype=torch.uint8)
        for at in range(0, data.numel(), BUFFER_BYTES):
            part = data[at : at + BUFFER_BYTES]
            staged[: part.numel()].copy_(part)
            _settle(data.device)
            whole = -(-part.numel() // PAGE) * PAGE
            done = 0
            while done < whole:
                count = os.pwrite(self._file, view[done:whole], start + at + done)
                if count <= 0:
                    raise OSError(errno.EIO, "nothing was written")
                done += count if count % PAGE == 0 else count // PAGE * PAGE
                if count % PAGE and count < PAGE:
                    raise OSError(errno.EIO, f"only {count} bytes were written")

    def _read(self, start: int, out: torch.Tensor) -> None:
        view = memoryview(self._out)
        staged = torch.frombuffer(self._out, dtype=torch.uint8)
        for at in range(0, out.numel(), BUFFER_BYTES):
            part = out[at : at + BUFFER_BYTES]
            whole = -(-part.numel() // PAGE) * PAGE
            done = 0
            while done < whole:
                count = os.preadv(self._file, [view[done:whole]], start + at + done)
                if count < PAGE:
                    raise _Short(f"{at + done + count} of {out.numel()} bytes could be read")
                done += count // PAGE * PAGE
            part.copy_(staged[: part.numel()])
            _settle(out.device)

    def _drop(self) -> None:
        os.close(self._file)

    def _explain(self, what: str, error: BaseException) -> StoreError:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            try:
                free = (
                    f"{os.statvfs(self.path).f_bavail * os.statvfs(self.path).f_frsize:,} bytes are free "
                    "there"
                )
            except OSError:
                free = "it is full"
            return StoreError(
                f"there is no room for lowtide's file in {self.path} ({free}): free some, or give path= "
                "another folder"
            )
        if isinstance(error, _Short):
            return StoreError(
                f"lowtide's file in {self.path} was cut short while a step was under way ({error}): no "
                "gradient of this step was computed from it. Clear the gradients and run the step again"
            )
        return StoreError(
            f"lowtide could not {what} its file in {self.path} ({type(error).__name__}: {error}): no "
            "gradient of this step was computed from it. Clear the gradients and run the step again, or "
            "give path= a folder on another disk"
        )


def _settle(device: torch.device) -> None:
    """Wait for copies from or to a GPU that this thread has queued: the buffer is used again at once."""
    if device.type != "cpu":
        torch.get_device_module(device.type).current_stream(device).synchronize()


class _Short(Exception):
    """A read ended before its end."""


def _open(folder: Path) -> tuple[bool, int]:
    """Whether reads and writes go past the page cache, and a file that nobody else sees."""
    unnamed, direct = getattr(os, "O_TMPFILE", 0), getattr(os, "O_DIRECT", 0)
    for flags in (direct, 0):
        try:
            if unnamed:
                return bool(flags), os.open(folder, unnamed | os.O_RDWR | flags, 0o600)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.EACCES, errno.ENOTDIR, errno.EROFS):
                raise PlanError(
                    f"{folder} cannot hold lowtide's file ({error.strerror}): give path= a folder that can "
                    "be written"
                ) from None
    try:
        handle, name = tempfile.mkstemp(prefix="lowtide-", dir=folder)
    except OSError as error:
        raise PlanError(
            f"{folder} cannot hold lowtide's file ({error.strerror}): give path= a folder that can be written"
        ) from None
    os.unlink(name)
    return False, handle


def file_system(path: Path) -> str:
    """The type of the file system that ``path`` lies on, empty where the system does not tell."""
    try:
        mounts = Path("/proc/self/mounts").read_text().splitlines()
    except OSError:
        return ""
    place = str(path.resolve())
    best, kind = "", ""
    for line in mounts:
        words = line.split()
        point = words[1].encode().decode("unicode_escape")
        if (place == point or place.startswith(point.rstrip("/") + "/")) and len(point) >= len(best):
            best, kind = point, words[2]
    return kind
