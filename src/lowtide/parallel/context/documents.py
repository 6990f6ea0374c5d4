"""Which tokens a token may attend to: from the first token of its document, or of its window, to itself.

A causal mask, a sliding window, packed documents and padding at either end all give each token an interval
that ends in the token itself. So one number for each token says all of a mask but the window, and two numbers
for each chunk say whether a chunk sees all of another one, nothing, or a part.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lowtide.parallel.errors import ParallelError


class Documents(NamedTuple):
    """The documents of a batch of sequences.

    Attributes:
        first: (batch, sequence), the place of the first token of each token's document.
        bounds: (chunks, 2), on the CPU: the least ``first`` of any row at the first token of a chunk, and the
            greatest at its last token.
    """

    first: Tensor
    bounds: Tensor


class Kind:
    """How much of a chunk of keys a chunk of queries sees."""

    NONE, SOME, TRIANGLE, WHOLE = range(4)


def find_documents(
    position_ids: Tensor | None, attention_mask: Tensor | None, length: int, chunks: int
) -> Documents | None:
    """The documents of sequences that are padded to ``length``; ``None`` if each is a single one.

    Args:
        position_ids: (batch, sequence) or ``None``: a document begins where they do not go on by one.
        attention_mask: (batch, sequence) or ``None``: 1 for tokens, 0 for padding before or behind them.
        length: of the padded sequence.
        chunks: into how many chunks it is cut.

    Raises:
        ParallelError: the mask has another shape, or padding between tokens.

    >>> find_documents(torch.tensor([[0, 1, 2, 0, 1, 2]]), None, 6, 2).first.tolist()
    [[0, 0, 0, 3, 3, 3]]
    """
    begins = None
    if attention_mask is not None:
        if attention_mask.ndim != 2:
            raise ParallelError(
                f"attention_mask has {attention_mask.ndim} dimensions: under context parallelism give "
                "(batch, sequence) with 1 for tokens and 0 for padding, or position_ids that begin anew "
                "with each document"
            )
        begins = attention_mask.bool().int().diff(dim=1) != 0
        if bool((begins.sum(1) > 2).any()) or bool(
            ((begins.sum(1) == 2) & (attention_mask[:, 0] != 0)).any()
        ):
            raise ParallelError(
                "attention_mask has padding between tokens: under context parallelism padding may stand "
                "before or behind the tokens of a sequence"
            )
    elif position_ids is not None:
        begins = position_ids.diff(dim=1) != 1
    if begins is None or not bool(begins.any()):
        return None
    rows = begins.shape[0]
    places = torch.arange(begins.shape[1] + 1, dtype=torch.int32, device=begins.device)
    first = torch.where(begins, places[1:], 0).cummax(1).values.int()
    first = torch.cat([first.new_zeros(rows, 1), first], 1)
    more = length - first.shape[1]
    if more:
        first = torch.cat([first, first[:, -1:].expand(rows, more)], 1)
    each = length // chunks
    bounds = torch.stack([first[:, ::each].amin(0), first[:, each - 1 :: each].amax(0)], 1)
    return Documents(first.contiguous(), bounds.long().cpu())


def seen(query: int, key: int, length: int, bounds: list[list[int]] | None, window: int) -> int:
    """How much the chunk ``query`` sees of the chunk ``key``: a `Kind`.

    Args:
        query, key: numbers of chunks.
        length: of a chunk.
        bounds: those of `Documents`, or ``None``.
        window: how many tokens a token sees at most, itself among them; 0 for all.

    >>> seen(1, 0, 4, None, 0) == Kind.WHOLE, seen(1, 1, 4, None, 0) == Kind.TRIANGLE
    (True, True)
    >>> seen(2, 0, 4, None, 4) == Kind.NONE, seen(1, 0, 4, None, 4) == Kind.SOME
    (True, True)
    """
    if key > query:
        return Kind.NONE
    begin, end = query * length, (query + 1) * length - 1
    low, high = (0, 0) if bounds is None else bounds[query]
    if window:
        low, high = max(low, begin - window + 1), max(high, end - window + 1)
    if (key + 1) * length - 1 < low:
        return Kind.NONE
    if key * length < high:
        return Kind.SOME
    return Kind.TRIANGLE if key == query else Kind.WHOLE
