"""From text to tokens: bytes, a tokenizer of Hugging Face, or one that is trained on the text.

Bytes need nothing and fit every model. The others come as transformers has them, whatever made them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lowtide.errors import LowtideError

BYTES = 256
TRAINED = 4096
"""Tokens of a tokenizer that is trained for a built-in model and was given no size."""

FILE = "tokenizer.json"
_END = "<|endoftext|>"
_TRAIN = re.compile(r"train(?::(\d+))?")


class TokenizerError(LowtideError):
    """There is no such tokenizer, or it cannot be trained."""


class Bytes:
    """A token a byte.

    >>> Bytes().encode([b"to"]).tolist()
    [116, 111]
    """

    name = "bytes"
    vocabulary = BYTES

    def encode(self, documents: Sequence[bytes]) -> np.ndarray:
        """The tokens of all documents, one after the other."""
        return np.frombuffer(b"".join(documents), np.uint8)


class HuggingFaceTokenizer:
    """A tokenizer as transformers has it; after each document comes its end token, where it has one.

    Args:
        tokenizer: a ``PreTrainedTokenizerBase``.
        name: what it is, for people.
    """

    def __init__(self, tokenizer: Any, name: str) -> None:
        self.tokenizer, self.name = tokenizer, name
        self.vocabulary = len(tokenizer)

    def encode(self, documents: Sequence[bytes]) -> np.ndarray:
        """The tokens of all documents, one after the other."""
        texts = [document.decode("utf-8", "replace") for document in documents]
        rows = self.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        end = [] if self.tokenizer.eos_token_id is None else [self.tokenizer.eos_token_id]
        kind = np.uint16 if self.vocabulary <= 1 << 16 else np.uint32
        return np.concatenate([np.array(row + end, dtype=kind) for row in rows])

    def save(self, folder: Path) -> None:
        """Write it where ``AutoTokenizer.from_pretrained`` and `find_tokenizer` read it."""
        self.tokenizer.save_pretrained(folder)


Tokenizer = Bytes | HuggingFaceTokenizer


def find_tokenizer(
    asked: str | None,
    model: str,
    vocabulary: int | None,
    documents: Sequence[bytes],
    run: Path | None = None,
) -> Tokenizer:
    """The tokenizer of a run.

    Args:
        asked: ``bytes``; ``train`` or ``train:8192`` for a byte-level BPE of the text itself, of that many
            tokens; a ``tokenizer.json`` (which names no end token), a folder with one, or a name on the hub;
            ``None`` is the model's own, where its folder or its page on the hub has one, else bytes.
        model: what ``--model`` says.
        vocabulary: of a model that cannot have another one; ``None`` for a built-in one.
        documents: to train it on.
        run: the run's folder: what was trained for it is there when it goes on.

    Raises:
        TokenizerError: there is none, or what reads it is missing.
    """
    if asked == "bytes" or (asked is None and not _has_own(model)):
        return Bytes()
    if match := _TRAIN.fullmatch(asked or ""):
        if run is not None and (run / FILE).exists():
            return _read(str(run), f"BPE of {run / FILE}")
        return train_tokenizer(documents, int(match[1] or vocabulary or TRAINED))
    return _read(asked or model, asked or model)


def train_tokenizer(documents: Sequence[bytes], size: int) -> HuggingFaceTokenizer:
    """A byte-level BPE (as GPT-2's, Radford et al. 2019, section 2.2) of ``size`` tokens, learned from text.
    It can write any text. Small texts give fewer tokens.

    Raises:
        TokenizerError: ``size`` is too small for the bytes, or ``tokenizers`` is missing.
    """
    if size <= BYTES:
        raise TokenizerError(f"--tokenizer train:{size}: {BYTES} bytes and an end are tokens, too: give more")
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
        from transformers import PreTrainedTokenizerFast
    except ImportError as error:
        raise _missing("train") from error
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    made.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=size,  # pyright: ignore[reportCallIssue]
        special_tokens=[_END],  # pyright: ignore[reportCallIssue]
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),  # pyright: ignore[reportCallIssue]
        show_progress=False,  # pyright: ignore[reportCallIssue]
    )
    made.train_from_iterator((document.decode("utf-8", "replace") for document in documents), trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token=_END)
    return HuggingFaceTokenizer(tokenizer, f"BPE of {len(tokenizer):,} tokens, trained on the text")


def _has_own(model: str) -> bool:
    """Whether a model comes with a tokenizer: its folder has one, or it is a name on the hub."""
    from lowtide.models.build import is_hub_name

    folder = Path(model).parent if model.endswith(".json") else Path(model)
    found = any((folder / name).exists() for name in (FILE, "tokenizer.model", "vocab.json", "vocab.txt"))
    return (found and Path(model).exists()) or is_hub_name(model)


def _read(source: str, name: str) -> HuggingFaceTokenizer:
    try:
        from transformers import AutoTokenizer, PreTrainedTokenizerFast
    except ImportError as error:
        raise _missing(source) from error
    path = Path(source)
    try:
        if path.is_file() and path.name != "config.json":
            return HuggingFaceTokenizer(PreTrainedTokenizerFast(tokenizer_file=source), name)
        folder = path.parent if path.is_file() else path
        local = folder.is_dir()
        return HuggingFaceTokenizer(
            AutoTokenizer.from_pretrained(str(folder) if local else source, local_files_only=local), name
        )
    except Exception as error:  # the hub's, the network's and the readers' own, of many types
        first = next(iter(str(error).splitlines()), type(error).__name__)
        raise TokenizerError(
            f"there is no tokenizer in {source!r} ({first}): pass --tokenizer bytes, train, a tokenizer.json"
            ", a folder with one or a name on the hub"
        ) from error


def _missing(source: str) -> TokenizerError:
    return TokenizerError(
        f"--tokenizer {source} needs transformers: pip install 'lowtide[hf]', or leave it out for bytes"
    )
