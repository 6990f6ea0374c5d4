"""Text to train on: files, folders, rows of tables."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from trained import POEM

from lowtide.train import text as texts
from lowtide.train.data import Corpus, tokenize
from lowtide.train.text import STANDARD_LIBRARY_BYTES, DataError, read_text
from lowtide.train.tokenizer import (
    Bytes,
)


def load_corpus(path: Path | None = None) -> Corpus:
    return tokenize(read_text(None if path is None else str(path)), Bytes())


def test_the_standard_library_is_there_and_always_the_same() -> None:
    first, second = load_corpus(), load_corpus()
    assert first.digest == second.digest
    assert 1e6 < first.train.size + first.validation.size <= STANDARD_LIBRARY_BYTES
    assert 0.02 < first.validation.size / first.train.size < 0.2
    assert b"import os" in first.train.tobytes()


def test_a_python_without_sources_names_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="pass --data"):
        texts._standard_library(tmp_path)


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


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet", "saved"])
def test_rows_are_documents(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"text": [row.decode() for row in POEM], "other": ["x"] * len(POEM)})
    file = str(tmp_path / f"rows.{kind}")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    {"jsonl": rows.to_json, "csv": rows.to_csv, "parquet": rows.to_parquet, "saved": rows.save_to_disk}[kind](
        file
    )
    found = read_text(file)
    assert len(found.validation) == 20 and sorted(found.train + found.validation) == sorted(POEM)
    assert read_text(file, "other").train[0] == b"x"
    with pytest.raises(DataError, match="no column 'words' of strings; choose one with --text-column: text"):
        read_text(file, "words")


def test_columns_are_refused_where_there_are_none() -> None:
    with pytest.raises(DataError, match="has no columns: leave it out"):
        read_text(None, "text")
