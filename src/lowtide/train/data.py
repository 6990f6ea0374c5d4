"""A text as tokens, and the batches of it, in an order that a resumed run goes on with."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler
from torchdata.stateful_dataloader import StatefulDataLoader

from lowtide.train.text import DataError, Text
from lowtide.train.tokenizer import Bytes, Tokenizer

Batch = tuple[Tensor, Tensor]
"""Tokens and, one place later, targets: both (batch, sequence)."""


@dataclass(frozen=True, eq=False)
class Corpus:
    """Tokens to train on and tokens to validate on.

    Attributes:
        name: what it is, for people.
        train, validation: the tokens.
        vocabulary: of the tokenizer.
        bytes_per_token: of the validation text.
        digest: of both; a resumed run checks it.
    """

    name: str
    train: np.ndarray
    validation: np.ndarray
    vocabulary: int
    bytes_per_token: float
    digest: str

    def __str__(self) -> str:
        unit = "MB" if self.vocabulary == Bytes.vocabulary else "M tokens"
        return (
            f"{self.name}: {self.train.size / 1e6:.1f} {unit} to train on, {self.validation.size / 1e6:.1f} "
            f"{unit} to validate on"
        )


def tokenize(text: Text, tokenizer: Tokenizer) -> Corpus:
    """The corpus that a tokenizer makes of a text.

    >>> str(tokenize(Text("a poem", [b"..."], [b"."]), Bytes()))
    'a poem: 0.0 MB to train on, 0.0 MB to validate on'
    """
    train, validation = tokenizer.encode(text.train), tokenizer.encode(text.validation)
    digest = hashlib.sha256(train.tobytes() + b"\0" + validation.tobytes()).hexdigest()[:16]
    size = sum(len(document) for document in text.validation) / max(1, validation.size)
    name = text.name if isinstance(tokenizer, Bytes) else f"{text.name}, {tokenizer.name}"
    return Corpus(name, train, validation, tokenizer.vocabulary, size, digest)


class Blocks(Dataset[Batch]):
    """Tokens cut into blocks of one sequence each, that overlap by the token that is only a target.

    Args:
        tokens: 1-D.
        sequence: tokens in a block.
        what: of which text they are, for people.

    Raises:
        DataError: there are too few for one block.

    >>> blocks = Blocks(np.arange(10), sequence=4)
    >>> [block.tolist() for block in blocks.__getitems__([1])]
    [[[4, 5, 6, 7]], [[5, 6, 7, 8]]]
    """

    def __init__(self, tokens: np.ndarray, sequence: int, what: str = "training") -> None:
        if tokens.size < sequence + 1:
            raise DataError(
                f"the {what} text has {tokens.size} tokens, and --seq {sequence} needs at least "
                f"{sequence + 1}: pass more text or a smaller --seq"
            )
        self._tokens, self._sequence = tokens, sequence

    def __len__(self) -> int:
        return (self._tokens.size - 1) // self._sequence

    def __getitem__(self, index: int) -> Batch:
        tokens, targets = self.__getitems__([index])
        return tokens[0], targets[0]

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        """The batch of some blocks; what a loader asks for."""
        starts = np.asarray(indices)[:, None] * self._sequence
        window = self._tokens[starts + np.arange(self._sequence + 1)].astype(np.int64)
        return torch.from_numpy(window[:, :-1].copy()), torch.from_numpy(window[:, 1:].copy())

    def spread(self, count: int, batch: int) -> Iterator[Batch]:
        """``count`` batches spread evenly over the text, the same ones every time."""
        places = np.linspace(0, len(self) - 1, num=count * batch).astype(np.int64)
        for first in range(0, len(places), batch):
            yield self.__getitems__(places[first : first + batch].tolist())


class Shuffled(Sampler[int]):
    """Every block once an epoch, without end, in an order that seed and epoch alone decide. Its state is how
    many it has given.

    >>> sampler = Shuffled(3, seed=0)
    >>> from itertools import islice
    >>> first = list(islice(sampler, 5))
    >>> sorted(first[:3]), sampler.state_dict()
    ([0, 1, 2], {'given': 5})
    """

    def __init__(self, length: int, seed: int) -> None:
        self._length, self._seed, self._given = length, seed, 0

    def __iter__(self) -> Iterator[int]:
        while True:
            epoch, place = divmod(self._given, self._length)
            order = np.random.default_rng([self._seed, epoch]).permutation(self._length)
            for index in order[place:].tolist():
                self._given += 1
                yield index

    def state_dict(self) -> dict[str, int]:
        """Where it stands."""
        return {"given": self._given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from there."""
        self._given = state["given"]


def batches(blocks: Blocks, batch: int, seed: int) -> StatefulDataLoader[Batch]:
    """A loader of shuffled batches without end; its state belongs into a checkpoint. It draws no random
    numbers but its own.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "'set_vital'")  # torchdata's, of a call that does nothing
        return StatefulDataLoader(
            blocks,
            batch_size=batch,
            sampler=Shuffled(len(blocks), seed),
            collate_fn=_as_it_is,
            generator=torch.Generator(),
        )


def _as_it_is(batch: Any) -> Any:
    return batch
