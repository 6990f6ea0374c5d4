"""The corpus and its batches."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lowtide.train.data import STANDARD_LIBRARY_BYTES, Batches, DataError, load_corpus


def test_the_standard_library_is_there_and_always_the_same() -> None:
    first, second = load_corpus(), load_corpus()
    assert first.digest == second.digest
    assert 1e6 < first.train.size + first.validation.size <= STANDARD_LIBRARY_BYTES
    assert 0.02 < first.validation.size / first.train.size < 0.2
    assert b"import os" in first.train.tobytes()


def test_a_python_without_sources_names_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="pass --data"):
        load_corpus(standard_library=tmp_path)


def test_a_file_ends_with_its_validation_text(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("a" * 950 + "b" * 50)
    corpus = load_corpus(file)
    assert corpus.train.tobytes() == b"a" * 950
    assert corpus.validation.tobytes() == b"b" * 50


def test_a_folder_is_read_in_the_order_of_names_without_hidden_and_binary_files(tmp_path: Path) -> None:
    for name, text in (
        ("b/2.txt", "two "),
        ("a.md", "one "),
        ("b/10.txt", "ten "),
        (".git/config", "hidden "),
        ("b/.env", "hidden "),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text * 100)
    (tmp_path / "picture.png").write_bytes(bytes(range(256)))
    (tmp_path / "empty.txt").touch()
    corpus = load_corpus(tmp_path)
    assert (
        corpus.train.tobytes() + corpus.validation.tobytes()
    ).decode() == "one " * 100 + "ten " * 100 + "two " * 100


def test_of_many_files_every_twentieth_is_for_validation(tmp_path: Path) -> None:
    for i in range(40):
        (tmp_path / f"{i:02d}.txt").write_text(f"{i:02d}")
    corpus = load_corpus(tmp_path)
    assert corpus.validation.tobytes() == b"1939"
    assert corpus.train.size == 2 * 38


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (gzip.compress(b"text" * 1000), "is binary"),
        ("text".encode("utf-16"), "is binary"),
        (bytes(range(1, 32)), "is binary"),
    ],
    ids=["empty", "gzip", "utf-16", "control characters"],
)
def test_a_file_without_text_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "data").write_bytes(content)
    with pytest.raises(DataError, match=message):
        load_corpus(tmp_path / "data")


def test_a_missing_file_and_an_empty_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no file or folder"):
        load_corpus(tmp_path / "missing")
    with pytest.raises(DataError, match="holds no text file"):
        load_corpus(tmp_path)


def test_any_encoding_that_extends_ascii_is_text(tmp_path: Path) -> None:
    for encoding in ("utf-8", "latin-1"):
        (tmp_path / encoding).write_bytes(("déjà vu\t\r\n" * 50).encode(encoding))
        assert load_corpus(tmp_path / encoding).train.size > 0


@given(
    st.integers(2, 400), st.integers(1, 5), st.integers(1, 64), st.integers(0, 2**32), st.integers(0, 10**9)
)
def test_batches_are_windows_that_depend_on_seed_and_index_alone(
    size: int, batch: int, sequence: int, seed: int, index: int
) -> None:
    text = np.arange(size) % 251
    if size < sequence + 1:
        with pytest.raises(DataError, match=f"--seq {sequence} needs at least {sequence + 1}"):
            Batches(text, batch, sequence, seed)
        return
    tokens, targets = Batches(text, batch, sequence, seed).draw(index)
    assert tokens.shape == targets.shape == (batch, sequence)
    assert tokens.dtype == targets.dtype == torch.int64
    assert torch.equal((tokens + 1) % 251, targets)
    assert torch.equal(tokens, Batches(text, batch, sequence, seed).draw(index)[0])


def test_different_seeds_and_indices_draw_different_batches() -> None:
    text = np.random.default_rng(0).integers(0, 256, 100_000)
    draws = [Batches(text, 2, 16, seed).draw(index)[0] for seed in (0, 1) for index in (0, 1)]
    assert len({tuple(draw.flatten().tolist()) for draw in draws}) == 4


def test_validation_batches_span_the_text() -> None:
    batches = list(Batches(np.arange(1001), 2, 10, 0).spread(3))
    assert [tokens.shape for tokens, _ in batches] == [(2, 10)] * 3
    assert batches[0][0][0, 0] == 0
    assert batches[-1][1][-1, -1] == 1000
