"""Checkpoints: what was written comes back, or what was written before; whatever happens, and whatever lies
in the files.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from lowtide.run.messages import LowtideWarning
from lowtide.train import checkpoint
from lowtide.train.checkpoint import CheckpointError


def state_of(step: int) -> dict[str, Any]:
    return {
        "model": {"weight": torch.full((64,), float(step))},
        "step": torch.tensor(step),
        "note": "text",
        "nothing": None,
    }


def save(folder: Path, step: int) -> None:
    checkpoint.save(folder, step, state_of(step), {"seed": 1})


def check(loaded: checkpoint.Checkpoint) -> int:
    (state,) = loaded.contents()
    assert state["model"]["weight"].eq(loaded.step).all()
    assert state["step"] == loaded.step
    assert loaded.run == {"seed": 1}
    return loaded.step


def files(folder: Path, suffix: str) -> list[Path]:
    return sorted(folder.glob(f"*{suffix}"))


def test_the_newest_comes_back_and_two_are_kept(tmp_path: Path) -> None:
    for step in (5, 10, 15):
        save(tmp_path / "run", step)
    assert check(checkpoint.load(tmp_path / "run")) == 15
    assert checkpoint.steps(tmp_path / "run") == [10, 15]
    assert len(list((tmp_path / "run").iterdir())) == 4


def test_nothing_to_load_names_the_way_out(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(CheckpointError, match="leave out --resume"):
            checkpoint.load(folder)


@pytest.mark.parametrize("suffix", [".pt", ".json"])
@pytest.mark.parametrize("damage", ["truncated", "changed", "missing", "empty"])
def test_a_damaged_checkpoint_is_passed_over_with_a_warning(tmp_path: Path, suffix: str, damage: str) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    newest = files(tmp_path, suffix)[-1]
    content = bytearray(newest.read_bytes())
    if damage == "missing":
        newest.unlink()
    elif damage == "changed":
        content[len(content) // 2] ^= 1
        newest.write_bytes(bytes(content).replace(b'"sha', b'"shb'))
    else:
        newest.write_bytes(content[: len(content) // 2] if damage == "truncated" else b"")
    if (suffix, damage) == (".json", "missing"):
        assert check(checkpoint.load(tmp_path)) == 1  # without its JSON it was never there
    else:
        with pytest.warns(LowtideWarning, match="resuming from step 1 instead"):
            assert check(checkpoint.load(tmp_path)) == 1
    save(tmp_path, 2)
    assert check(checkpoint.load(tmp_path)) == 2


def test_with_nothing_undamaged_left_it_says_so(tmp_path: Path) -> None:
    save(tmp_path, 1)
    files(tmp_path, ".pt")[0].write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"every checkpoint .* is damaged"):
        checkpoint.load(tmp_path)


def test_going_on_from_an_older_one_voids_what_came_after(tmp_path: Path) -> None:
    save(tmp_path, 10)
    save(tmp_path, 20)
    files(tmp_path, ".pt")[-1].write_bytes(b"")
    save(tmp_path, 15)
    assert checkpoint.steps(tmp_path) == [10, 15]
    assert check(checkpoint.load(tmp_path)) == 15


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("echo executed > executed",)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("how", ["torch", "pickle"])
def test_code_in_a_file_is_not_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    monkeypatch.chdir(tmp_path)
    save(tmp_path, 1)
    data, manifest = files(tmp_path, ".pt")[0], files(tmp_path, ".json")[0]
    if how == "torch":
        torch.save({"model": Evil()}, data)
    else:
        data.write_bytes(pickle.dumps({"model": Evil()}))
    about = json.loads(manifest.read_text())
    digest = hashlib.sha256(data.read_bytes()).hexdigest()
    manifest.write_text(json.dumps({**about, "files": {data.name: digest}}))
    with pytest.raises(CheckpointError):
        list(checkpoint.load(tmp_path).contents())
    assert not (tmp_path / "executed").exists()


def test_a_json_cannot_point_out_of_its_folder(tmp_path: Path) -> None:
    save(tmp_path / "other", 1)
    save(tmp_path / "run", 1)
    other = files(tmp_path / "other", ".pt")[0]
    other.rename(other.with_name("elsewhere.pt"))
    manifest = files(tmp_path / "run", ".json")[0]
    about = json.loads(manifest.read_text())
    (digest,) = about["files"].values()
    manifest.write_text(json.dumps({**about, "files": {"../other/elsewhere.pt": digest}}))
    with pytest.raises(CheckpointError):
        checkpoint.load(tmp_path / "run")


class Died(BaseException):
    """Stands for the process's end: nothing may catch it and tidy up."""


@pytest.mark.parametrize("call", range(12))
def test_dying_at_any_call_leaves_a_whole_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    """Every system call that changes the folder is the last one, in turn."""
    save(tmp_path, 1)
    save(tmp_path, 2)
    count = 0

    def mortal(function: Any) -> Any:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count > call:
                raise Died
            return function(*args, **kwargs)

        return wrapper

    with monkeypatch.context() as patch:
        for place, name in ((os, "replace"), (os, "fsync"), (Path, "unlink")):
            patch.setattr(place, name, mortal(getattr(place, name)))
        try:
            save(tmp_path, 3)
            finished = True
        except Died:
            finished = False
    assert check(checkpoint.load(tmp_path)) in ((3,) if finished else (2, 3))
    save(tmp_path, 4)
    assert check(checkpoint.load(tmp_path)) == 4
    assert len(list(tmp_path.iterdir())) == 4


def test_a_folder_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="cannot write a checkpoint"):
        save(tmp_path / "file", 1)


def test_a_full_disk_leaves_the_last_one_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1)

    def full(self: Any, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint._Hashing, "write", full)
        with pytest.raises(CheckpointError, match="No space left on device"):
            save(tmp_path, 2)
    assert check(checkpoint.load(tmp_path)) == 1
    assert not files(tmp_path, ".tmp")


def save_until_killed(folder: Path, last: int, writer: int) -> None:
    """Checkpoint after checkpoint, each told of when it is finished."""
    step = last
    while True:
        step += 1
        state = {"weight": torch.full((300_000,), float(step)), "step": torch.tensor(step)}
        checkpoint.save(folder, step, state, {"step": step})
        os.write(writer, step.to_bytes(8, "big"))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills forked processes")
@pytest.mark.filterwarnings("error::lowtide.LowtideWarning")
def test_kill_9_at_random_moments_never_loses_a_finished_checkpoint(tmp_path: Path) -> None:
    moments = random.Random(0)
    last, killed_writing = 0, 0
    for _ in range(40):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                save_until_killed(tmp_path, last, writer)
            finally:
                os._exit(1)
        os.close(writer)
        told = os.read(reader, 8)
        time.sleep(moments.uniform(0, 0.03))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        while more := os.read(reader, 8):
            told = more
        os.close(reader)
        killed_writing += any(tmp_path.glob("*.tmp"))
        found = checkpoint.load(tmp_path)
        assert found.step - int.from_bytes(told, "big") in (0, 1)
        (state,) = found.contents()
        assert found.run == {"step": found.step} and state["step"] == found.step
        assert state["weight"].eq(found.step).all()
        last = found.step
    assert last >= 40
    assert killed_writing >= 3  # else the kills missed the writes, and the test proves nothing
