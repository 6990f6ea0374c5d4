"""Tokenizers: trained, saved, found again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from trained import POEM

from lowtide.train.tokenizer import (
    Bytes,
    HuggingFaceTokenizer,
    TokenizerError,
    find_tokenizer,
    train_tokenizer,
)


def test_a_tokenizer_is_trained_on_the_text_saved_and_found_again(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    made = train_tokenizer(POEM, 300)
    tokens = made.encode(POEM)
    assert 256 < made.vocabulary <= 300 and tokens.size < sum(map(len, POEM))
    ends = [made.tokenizer.eos_token_id]
    assert np.isin(tokens, ends).sum() == len(POEM), "an end after each document"
    text = made.tokenizer.decode([t for t in tokens.tolist() if t not in ends])
    assert text.encode() == b"".join(POEM), "it can write any text"
    made.save(tmp_path)
    expected = np.array(made.tokenizer("7 squared")["input_ids"])
    for asked, model, run in (
        (str(tmp_path), "gpt-nano", None),
        (str(tmp_path / "tokenizer.json"), "gpt-nano", None),
        (None, str(tmp_path), None),
        ("train:300", "gpt-nano", tmp_path),
    ):
        found = find_tokenizer(asked, model, None, [b"other text"], run)
        assert isinstance(found, HuggingFaceTokenizer)
        assert np.array_equal(found.encode([b"7 squared"])[: expected.size], expected)


@pytest.mark.parametrize(
    ("asked", "message"), [("train:100", "give more"), ("./nowhere", "there is no tokenizer in './nowhere'")]
)
def test_a_tokenizer_that_cannot_be_is_refused(asked: str, message: str) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(TokenizerError, match=message):
        find_tokenizer(asked, "gpt-nano", None, POEM)


def test_a_built_in_model_reads_bytes_unless_told_otherwise() -> None:
    assert isinstance(find_tokenizer(None, "gpt2", None, POEM), Bytes)
