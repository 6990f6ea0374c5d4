"""The disk tier: a preallocated file without a name, read and written past the page cache by two threads."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Event, Tensor

from lowtide.accelerator import Streams
from lowtide.errors import PlanError
from lowtide.extensions.moves.store.host import host_bytes, reserve
from lowtide.extensions.moves.store.lanes import StreamLane
from lowtide.extensions.moves.store.tier import StoreError, Tier

BUFFER_BYTES = 4 << 20
"""Size of the buffer that each thread moves bytes through: it does not grow with the model (ZeRO-R's C_B)."""

PAGE = 4096
IN_MEMORY = {"tmpfs", "ramfs", "devtmpfs"}


class Disk(Tier):
    """Bytes in a file.

    Nothing of the file is left however the process ends. Its blocks are reserved before the first step, so
    that a full disk is known then. Reads and writes go past the page cache where the file system allows,
    each through a buffer of constant size; on a GPU that is page-locked, and each direction has a stream.

    Args:
        path: a folder on the disk to use; the system's folder for temporary files by default.
        device: whose bytes are kept.

    Attributes:
        direct: whether reads and writes go past the page cache.

    Raises:
        PlanError: the folder does not exist, cannot be written, or lies in main memory.
    """

    name = "disk"

    def __init__(
        self, path: str | os.PathLike[str] | None = None, device: torch.device | str = "cpu"
    ) -> None:
        self.path = Path(path if path is not None else tempfile.gettempdir())
        kind = file_system(self.path)
        if kind in IN_MEMORY:
            raise PlanError(
                f"{self.path} is a {kind}, which lies in main memory: give path= a folder on a disk"
            )
        try:
            self._file = tempfile.TemporaryFile(dir=self.path, buffering=0)  # noqa: SIM115
        except OSError as error:
            raise PlanError(
                f"{self.path} cannot hold lowtide's file ({error.strerror}): give path= a folder that can be "
                "written"
            ) from None
        self.direct = _past_the_cache(self._file.fileno())
        super().__init__(PAGE, device)
        self._out, self._in = _Staging(self.streams), _Staging(self.streams)

    def _grow(self, end: int) -> None:
        try:
            reserve(self._file.fileno(), end)
        except OSError as error:
            raise self._explain("reserve", error) from error

    def _write(self, data: Tensor, start: int, ready: Event | None) -> None:
        for at, part, buffer in self._out.pieces(data):
            self._out.copy(buffer[: part.numel()], part, part, ready)
            self._pages(os.pwrite, buffer, part.numel(), start + at)

    def _read(self, out: Tensor, start: int, ready: Event | None) -> None:
        for at, part, buffer in self._in.pieces(out):
            self._pages(
                lambda file, view, place: os.preadv(file, [view], place), buffer, part.numel(), start + at
            )
            self._in.copy(part, buffer[: part.numel()], part, ready)

    def _pages(
        self, move: Callable[[int, memoryview, int], int], buffer: Tensor, count: int, start: int
    ) -> None:
        """Move whole pages around ``count`` bytes, as many at a time as the system does."""
        end, done = -(-count // PAGE) * PAGE, 0
        while done < end:
            moved = move(self._file.fileno(), buffer[done:end].numpy().data, start + done)
            if moved < PAGE:
                raise OSError(errno.EIO, f"it was cut short: {done + moved} of {count} bytes")
            done += moved // PAGE * PAGE

    def _drop(self) -> None:
        self._file.close()

    def _explain(self, what: str, error: BaseException) -> StoreError:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return StoreError(
                f"there is no room for lowtide's file in {self.path} ({shutil.disk_usage(self.path).free:,} "
                "bytes are free there): free some, or give path= another folder"
            )
        return StoreError(
            f"lowtide could not {what} its file in {self.path} ({type(error).__name__}: {error}): no "
            "gradient of this step was computed from it. Clear the gradients and run the step again, or "
            "give path= a folder on another disk"
        )


class _Staging:
    """A thread's buffer between the device and the file, and its way to the device."""

    def __init__(self, streams: Streams | None) -> None:
        self._lane = StreamLane(streams) if streams is not None else None
        self._pin = streams.device if streams is not None else None
        self._buffer: Tensor | None = None

    def pieces(self, data: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Where each piece of ``data`` begins, the piece, and the buffer."""
        if self._buffer is None:
            self._buffer = host_bytes(BUFFER_BYTES, self._pin)
        for at in range(0, data.numel(), BUFFER_BYTES):
            yield at, data[at : at + BUFFER_BYTES], self._buffer

    def copy(self, target: Tensor, source: Tensor, held: Tensor, ready: Event | None) -> None:
        """Copy after ``ready``, now: the buffer is used again at once."""
        if self._lane is None or ready is None:
            target.copy_(source)
        else:
            self._lane.copy([(target, source)], held, [ready]).wait()


def _past_the_cache(file: int) -> bool:
    """Have a file read and written past the page cache, where its file system can do that."""
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | os.O_DIRECT)
    except (AttributeError, OSError):
        return False
    return True


def file_system(path: Path) -> str:
    """The type of the file system that ``path`` lies on, empty where the system does not say."""
    try:
        mounts = Path("/proc/self/mounts").read_text().splitlines()
    except OSError:
        return ""
    kinds = {
        Path(point.encode().decode("unicode_escape")): kind for _, point, kind, *_ in map(str.split, mounts)
    }
    place = path.resolve()
    return next((kinds[folder] for folder in (place, *place.parents) if folder in kinds), "")
