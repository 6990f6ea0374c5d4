"""A rank that dies, fails or falls silent ends the run on all others within a minute, by name, and leaves the
last checkpoint whole.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import needs_gloo
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.pipelining import PipelineStage

from lowtide.errors import LowtideError
from lowtide.parallel import linear
from lowtide.train import alive, checkpoint
from lowtide.train.options import TrainOptions
from lowtide.train.part import WholeModel
from lowtide.train.ranks import Ranks
from lowtide.train.trainer import train

pytestmark = [needs_gloo, pytest.mark.skipif(sys.platform == "win32", reason="needs signals")]
MINUTE = 60.0
MICRO_BATCHES = 3


def options(text: Path, **changes: Any) -> TrainOptions:
    small = {
        "model": "gpt-nano",
        "data": text,
        "steps": 4,
        "batch": 6,
        "seq": 16,
        "warmup": 1,
        "eval_every": 0,
        "eval_batches": 1,
    }
    return TrainOptions(
        **{**small, "budget": None, "policy": "keep_all", "compare": False, "dp": 3, **changes}
    )


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def body(
    rank: int, size: int, port: int, asked: TrainOptions, harm: Callable[[int], None], folder: Path
) -> None:
    """One process of a run, as torchrun would start it."""
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_RANK=str(rank),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    gc.freeze()  # the parent's objects: collecting them would copy the pages that the processes share
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    torch.set_num_threads(1)
    # for the life of this process
    sys.stderr = open(folder / f"stderr{rank}", "w", buffering=1)  # noqa: SIM115
    harm(rank)
    try:
        train(asked)
        message, code = "", 0
    except LowtideError as error:
        message, code = f"{type(error).__name__}: {error}", 2
    except BaseException as error:
        message, code = f"unnamed {type(error).__name__}: {error}", 3
    (folder / f"message{rank}").write_text(message)
    sys.stderr.flush()
    os._exit(code)


def run(
    asked: TrainOptions, harm: Callable[[int], None], folder: Path, stays: int | None = None, size: int = 3
) -> tuple[dict[int, str], dict[int, int | None], float]:
    """What each of the ranks said at last, its exit code, and how long it all took; ``stays`` is one that is
    not waited for.
    """
    folder.mkdir(exist_ok=True)
    context = multiprocessing.get_context("fork")
    port = free_port()
    processes = [
        context.Process(target=body, args=(rank, size, port, asked, harm, folder)) for rank in range(size)
    ]
    began = time.monotonic()
    for process in processes:
        process.start()
    for rank, process in enumerate(processes):
        if rank != stays:
            process.join(max(0.0, began + MINUTE - time.monotonic()))
    seconds = time.monotonic() - began
    hanging = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for process in processes:
        if process.is_alive():
            process.kill()
            process.join()
    codes = {rank: process.exitcode for rank, process in enumerate(processes) if rank not in hanging}
    said = {}
    for rank in range(size):
        words = [
            file.read_text() for name in ("message", "stderr") if (file := folder / f"{name}{rank}").exists()
        ]
        said[rank] = "\n".join(words)
    return said, codes, seconds


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def in_a_step(rank: int) -> None:
    """Rank 1 dies in the forward of its second step."""
    step, count = WholeModel.step, iter(range(100))

    def dies(self: Any, *args: Any) -> Any:
        if rank == 1 and next(count) == 1:
            die()
        return step(self, *args)

    WholeModel.step = dies


def in_a_collective(rank: int) -> None:
    """Rank 1 is killed while it waits for the others in a collective."""
    total, count = Ranks.sum, iter(range(100))

    def waits(self: Any, *numbers: float) -> Any:
        if next(count) == 1:
            if rank == 1:
                threading.Timer(0.5, die).start()
            else:
                time.sleep(1.5)
        return total(self, *numbers)

    Ranks.sum = waits


def first_in_a_step(rank: int) -> None:
    """Rank 0, which holds the store, dies."""
    step, count = WholeModel.step, iter(range(100))

    def dies(self: Any, *args: Any) -> Any:
        if rank == 0 and next(count) == 1:
            die()
        return step(self, *args)

    WholeModel.step = dies


def in_a_checkpoint(rank: int) -> None:
    """Rank 0 (which writes for its data-parallel peers) dies with half of the second checkpoint's file
    written.
    """
    write, count = checkpoint.write, iter(range(100))

    def dies(folder: Path, fill: Any, name: str = "") -> Any:
        if next(count) == 2:  # a file and a manifest a checkpoint
            (folder / f"step-{os.getpid()}.tmp").write_bytes(b"half of it")
            die()
        return write(folder, fill, name)

    checkpoint.write = dies


def in_a_reduce_scatter(rank: int) -> None:
    """Rank 1 dies in the backward of its second step, where a column-parallel layer would send the input's
    gradient: the other waits for it.
    """
    step, scatter, begun = WholeModel.step, linear.reduce_scatter, []

    def counted(self: Any, *args: Any) -> Any:
        begun.append(True)
        return step(self, *args)

    def dies(x: Any, *args: Any) -> Any:
        if rank == 1 and len(begun) == 2 and not isinstance(x, FakeTensor):
            die()
        return scatter(x, *args)

    WholeModel.step, linear.reduce_scatter = counted, dies


def between_stages(rank: int) -> None:
    """Rank 1, the middle stage of three, dies in its second step with a micro-batch behind it and another
    before it.
    """
    forward, count = PipelineStage.forward_one_chunk, iter(range(100))

    def dies(*args: Any, **options: Any) -> Any:
        if rank == 1 and next(count) == MICRO_BATCHES + 1:
            die()
        return forward(*args, **options)

    PipelineStage.forward_one_chunk = dies  # type: ignore[method-assign]


def with_an_error(rank: int) -> None:
    """Rank 2 fails on its own."""
    step, count = WholeModel.step, iter(range(100))

    def fails(self: Any, *args: Any) -> Any:
        if rank == 2 and next(count) == 1:
            raise ValueError("something of its own")
        return step(self, *args)

    WholeModel.step = fails


@pytest.mark.parametrize(
    ("harm", "victim", "words"),
    [
        (in_a_step, 1, "rank 1 (process"),
        (in_a_collective, 1, "rank 1 (process"),
        (first_in_a_step, 0, "rank 0"),
        (with_an_error, 2, "rank 2 failed during step 2: ValueError: something of its own"),
    ],
    ids=lambda item: getattr(item, "__name__", None),
)
def test_the_others_end_and_name_it(text: Path, tmp_path: Path, harm: Any, victim: int, words: str) -> None:
    said, codes, seconds = run(options(text), harm, tmp_path / "run")
    assert len(codes) == 3 and seconds < MINUTE, f"ranks hang: {codes}, {said}"
    for rank in {0, 1, 2} - {victim}:
        assert words in said[rank], said
        assert codes[rank] in (1, 2)
    if harm in (in_a_step, in_a_collective):
        assert all("died during step 2" in said[rank] for rank in {0, 1, 2} - {victim}), said


@pytest.mark.parametrize(
    ("harm", "layout"),
    [
        (in_a_reduce_scatter, {"tp": 2, "sequence_parallel": True}),
        (between_stages, {"model": "gpt-tiny", "pp": 3, "grad_accum": MICRO_BATCHES}),
    ],
    ids=["tensor", "pipeline"],
)
def test_the_others_end_wherever_they_wait_for_it(
    text: Path, tmp_path: Path, harm: Any, layout: dict[str, Any]
) -> None:
    """In a layer's collective, and in what stages send each other."""
    size = layout.get("tp", layout.get("pp"))
    said, codes, seconds = run(options(text, dp=1, **layout), harm, tmp_path / "run", size=size)
    assert len(codes) == size and seconds < MINUTE, f"ranks hang: {codes}, {said}"
    for rank in set(range(size)) - {1}:
        assert "rank 1 (process" in said[rank] and "died during step 2" in said[rank], said
        assert codes[rank] in (1, 2)


def test_a_checkpoint_that_is_not_finished_does_not_count(text: Path, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    asked = options(text, checkpoint_dir=folder, checkpoint_every=1)
    said, codes, seconds = run(asked, in_a_checkpoint, tmp_path / "run")
    assert len(codes) == 3 and seconds < MINUTE, said
    for rank in (1, 2):
        assert "rank 0 (process" in said[rank] or "rank 0 or torchrun" in said[rank], said
    assert checkpoint.steps(folder) == [1]
    from dataclasses import replace

    said, codes, _ = run(replace(asked, resume=True), lambda rank: None, tmp_path / "again")
    assert list(codes.values()) == [0, 0, 0], said
    assert checkpoint.steps(folder) == [3, 4] and not list(folder.glob("*.tmp"))


# ---- torchrun itself -----------------------------------------------------------------------------

SCRIPT = """
import os, signal, sys
from lowtide import cli
from lowtide.train.part import WholeModel
step, count = WholeModel.step, iter(range(100))
def dies(self, *args):
    if os.environ["RANK"] == "1" and next(count) == 1 and os.environ.get("DIE"):
        os.kill(os.getpid(), signal.SIGKILL)
    return step(self, *args)
WholeModel.step = dies
cli.main()
"""


def torchrun(folder: Path, text: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    script = folder / "script.py"
    script.write_text(SCRIPT)
    line = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-port",
        str(free_port()),
        str(script),
        "train",
    ]
    line += [
        "--model",
        "gpt-nano",
        "--batch",
        "4",
        "--seq",
        "32",
        "--steps",
        "3",
        "--tp",
        "2",
        "--sequence-parallel",
        "--policy",
        "keep_all",
        "--no-compare",
    ]
    line += ["--json", str(folder / "results.json"), "--data", str(text)]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(line, capture_output=True, text=True, timeout=120, check=False, env=environment)


@pytest.mark.slow
def test_torchrun(text: Path, tmp_path: Path) -> None:
    done = torchrun(tmp_path, text)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "results.json").read_text())
    assert len(found["losses"]) == 3 and [rank["name"] for rank in found["ranks"]] == [
        "rank 0 (tensor 0)",
        "rank 1 (tensor 1)",
    ]
    assert done.stdout.count("validation loss") >= 1
    alone = train(options(text, batch=4, seq=32, steps=3, dp=1, warmup=3))
    assert found["losses"] == pytest.approx(alone.losses, rel=2e-5)


@pytest.mark.slow
def test_torchrun_with_a_rank_that_dies(text: Path, tmp_path: Path) -> None:
    began = time.monotonic()
    done = torchrun(tmp_path, text, DIE="1")
    assert done.returncode != 0 and time.monotonic() - began < MINUTE
    assert "rank 1 (process" in done.stderr and "died during step 2" in done.stderr, done.stderr[-3000:]


class Store:
    """What two ranks of one process meet under."""

    def __init__(self, items: dict[str, str] | None = None) -> None:
        self.items = {} if items is None else items

    def clone(self) -> Store:
        return Store(self.items)

    def set(self, key: str, value: str) -> None:
        self.items[key] = value

    def get(self, key: str) -> str:
        return self.items[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.items for key in keys)


@pytest.mark.parametrize(("where", "ends"), [("elsewhere", True), (alive._machine(), False)])
def test_a_silent_rank_is_waited_for_where_its_process_is_seen(
    monkeypatch: pytest.MonkeyPatch, where: str, ends: bool
) -> None:
    """One that a debugger has stopped, say."""
    said, ended = list[str](), threading.Event()
    monkeypatch.setattr(alive, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(alive, "GRACE_SECONDS", 0.05)
    monkeypatch.setattr(alive, "SILENT_SECONDS", 0.2)
    about = {"beat": 1, "pid": os.getpid(), "machine": where, "host": "node7", "doing": "step 3"}
    store = Store({"lowtide/alive/0/1": json.dumps(about)})
    here = alive.Alive(store, 0, 2, end=lambda message: (said.append(message), ended.set()))
    try:
        assert ended.wait(MINUTE if ends else 0.6) is ends
    finally:
        here.close()
    place = f"rank 1 (process {os.getpid()} on node7)"
    assert [text.partition(" has been silent")[0] for text in said] == [
        f"{place} was last heard during step 3 and"
    ] * ends
