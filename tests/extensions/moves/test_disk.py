"""The disk tier: its file leaves nothing behind, and what is wrong with it is said."""

from __future__ import annotations

import errno
import os
import signal
import time
from pathlib import Path

import pytest
import torch

from lowtide.errors import PlanError
from lowtide.extensions.moves.store.disk import Disk
from lowtide.extensions.moves.store.tier import StoreError


def noise(count: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def test_a_truncated_file_is_said(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    slot = disk.take(100_000)
    disk.write(noise(100_000, 0), slot).wait()
    os.ftruncate(disk._file.fileno(), 50_000)
    with pytest.raises(StoreError, match=r"cut short.*of 100000 bytes"):
        disk.read(slot, torch.empty(100_000, dtype=torch.uint8)).wait()
    disk.close()


def test_a_full_disk_is_said_before_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    disk = Disk(tmp_path)
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StoreError, match=r"no room.*bytes are free there.*path="):
        disk.expect([0], [1000])
    with pytest.raises(StoreError, match="no room"):
        disk.take(1000)
    assert disk.arena.taken_bytes == 0
    disk.close()


def test_folders_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"cannot hold lowtide's file.*give path=") as refused:
        Disk(tmp_path / "missing")
    assert refused.value.__cause__ is None, "the message says all that the system's error says"
    if Path("/dev/shm").is_dir():
        with pytest.raises(PlanError, match="lies in main memory"):
            Disk("/dev/shm")


def test_kill_leaves_no_file(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            tier, source = Disk(str(tmp_path)), torch.ones(1 << 20, dtype=torch.uint8)
            slot = tier.take(1 << 20)
            tier.write(source, slot).wait()
            os.write(writer, b"x")
            while True:
                tier.write(source, slot)
        finally:
            os._exit(1)
    os.read(reader, 1)
    time.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    os.close(reader)
    os.close(writer)
    assert list(tmp_path.iterdir()) == []
