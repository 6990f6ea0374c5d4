"""Helpers of all folders and the benchmarks are importable, one thread a process, the marker of what takes
minutes, a text to train on, silence around transformers, and garbage that is collected without going through
what was imported.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is first imported

HERE = Path(__file__).parent
FOLDERS = [*HERE.iterdir(), *(HERE / "extensions").iterdir()]
sys.path[:0] = [*(str(folder) for folder in FOLDERS if folder.is_dir()), str(HERE.parent)]

LONGEST = [HERE / folder for folder in ("families", "parallel", "train")]


class Frozen:
    """What was imported will never be garbage: every measurement collects, and would go through a million
    objects, which took half of the time of the executor's tests.
    """

    def __init__(self) -> None:
        self.modules = 0

    def pytest_collection_finish(self) -> None:
        """What the files of the tests import."""
        self.freeze()

    def pytest_runtest_logfinish(self) -> None:
        """What a test was the first to import."""
        if len(sys.modules) != self.modules:
            self.freeze()

    def freeze(self) -> None:
        """Leave out of later collections what lives now."""
        gc.collect()
        gc.freeze()
        self.modules = len(sys.modules)


def pytest_configure(config: pytest.Config) -> None:
    """Make the markers known."""
    config.addinivalue_line("markers", "slow: takes minutes; runs with `-m slow` only")
    config.addinivalue_line("markers", "on_each_backend: starts ranks, over Gloo and over NCCL")
    config.pluginmanager.register(Frozen())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with the folders whose files take longest, so that no process waits for one of them at the end;
    leave slow tests out unless they are asked for."""
    items.sort(
        key=lambda item: next(
            (at for at, folder in enumerate(LONGEST) if folder in item.path.parents), len(LONGEST)
        )
    )
    from tests.open_faults import OPEN

    for item in items:
        if reason := OPEN.get(item.nodeid.partition("tests/")[2]):
            item.add_marker(pytest.mark.xfail(reason=reason, strict=True))
    if "slow" in config.getoption("markexpr"):
        return
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.skip(reason="takes minutes: run with -m slow"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Of each test that starts ranks make two: over Gloo, and over NCCL."""
    if metafunc.definition.get_closest_marker("on_each_backend"):
        from ranks import backends

        if "group_backend" not in metafunc.fixturenames:
            metafunc.fixturenames.insert(0, "group_backend")
        metafunc.parametrize("group_backend", backends(), indirect=True, scope="module")


@pytest.fixture(scope="module")
def group_backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Over what the ranks of a test talk."""
    from ranks import BACKEND

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(BACKEND, request.param)
        yield request.param


@pytest.fixture
def one_rank() -> Iterator[Callable[[], None]]:
    """Begins a process group of this process alone, once. The group ends after all of the test has: a
    `DistributedDataParallel` that outlives its group frees it under the interpreter's lock, and may then wait
    for ever for a thread of Gloo that waits for the lock.
    """
    import torch.distributed as dist

    def begin() -> None:
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    yield begin
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text to train on, of about 60 kB."""
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("".join(f"{i} squared is {i * i}.\n" for i in range(3000)))
    return file


@pytest.fixture(scope="module")
def quiet_transformers() -> Iterator[None]:
    """transformers' models on one thread, without what they say while they are built."""
    import torch
    from transformers.utils import logging

    before, threads = logging.get_verbosity(), torch.get_num_threads()
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    yield
    logging.set_verbosity(before)
    torch.set_num_threads(threads)
