"""C++ is compiled once for each PyTorch and Python, by one process, into a folder of one's own."""

from __future__ import annotations

import multiprocessing
import os
from functools import partial
from pathlib import Path
from typing import Literal

import pytest
import torch

from lowtide import native
from lowtide.errors import LowtideError
from lowtide.interception import cpp_module
from lowtide.meter import available
from lowtide.native import BuildError, cache_dir, cache_folder

PACKAGE = Path(native.__file__).parent
ALLOCATOR = PACKAGE / "meter" / "counting_allocator.cpp"
USES: dict[str, Literal["", "c10", "torch"]] = {
    "meter/counting_allocator.cpp": "c10",
    "extensions/moves/packing.cpp": "",
    "run/tensor_bytes.cpp": "",
    "run/record/cpp/recorder.cpp": "torch",
}
"""All C++ that lowtide compiles itself, and what of PyTorch's own each file needs."""

BY_INDUCTOR = {"compiled/vector_costs.cpp"}

needs_allocator = pytest.mark.skipif(not available(), reason="no C++ compiler here")


def test_all_files_are_known() -> None:
    assert {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.cpp")} == USES.keys() | BY_INDUCTOR


@pytest.mark.parametrize("name", USES)
def test_where_there_is_a_compiler_each_file_compiles(name: str) -> None:
    """Lowtide goes on in Python without a word, and tests of what is compiled are skipped."""
    source, uses = PACKAGE / name, USES[name]
    try:
        native.compiler()
        native._options(source, uses)
    except BuildError as without:
        pytest.skip(str(without))
    native.build(source, uses)  # raises what the compiler says
    if uses == "torch":
        assert cpp_module() is not None, "it compiles, and Python cannot load it"


def test_whether_a_file_is_to_be_compiled_is_known_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert not native.takes_long(ALLOCATOR, "c10"), "it is not compiled at all"
    monkeypatch.delenv("CXX")
    source = PACKAGE / "run" / "tensor_bytes.cpp"
    try:
        native.compiler()
    except BuildError as without:
        pytest.skip(str(without))
    assert native.takes_long(source)
    native.build(source)
    assert not native.takes_long(source)


def test_a_source_that_is_missing_is_no_missing_compiler() -> None:
    """A file was renamed, and what it compiled to ran in Python from then on, without a word."""
    with pytest.raises(AssertionError, match="is missing"):
        native.load(PACKAGE / "run" / "renamed.cpp")


@needs_allocator
def test_two_processes_may_compile_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path / "cache"))
    with multiprocessing.get_context("fork").Pool(2) as pool:
        one, other = pool.map(partial(native.build, uses="c10"), [ALLOCATOR] * 2, chunksize=1)
    assert one == other and list((tmp_path / "cache").glob("*.so")) == [one]


def test_a_cache_folder_that_others_can_write_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "open"
    place.mkdir()
    place.chmod(0o777)
    mine = tmp_path / f"lowtide-{os.getuid()}"
    monkeypatch.setenv("LOWTIDE_CACHE", str(place))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert cache_dir() == mine
    mine.chmod(0o777)
    with pytest.raises(BuildError, match="LOWTIDE_CACHE"):
        cache_dir()


def test_the_cache_folders_earlier_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOWTIDE_CACHE_DIR", "anywhere")
    with pytest.raises(LowtideError, match="is not read any more: name the folder in LOWTIDE_CACHE"):
        cache_folder()


def test_environments_that_link_to_one_pytorch_share_what_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch").symlink_to(Path(torch.__file__).parent)
    source = Path("recorder.cpp")
    here = native._options(source, "torch")
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "torch" / "__init__.py"))
    assert native._options(source, "torch") == here
