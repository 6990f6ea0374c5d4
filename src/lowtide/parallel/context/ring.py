"""Attention of a sequence whose chunks the ranks of a group hold: keys and values travel, queries stay.

In step s of c a rank attends to what the rank s places before it holds. It gets these keys and values from
that rank at once, beside the work of the step before, so that no more than two ranks' keys and values are
there at a time. Only chunks travel that the receiving rank's queries see: under a causal mask three quarters
of them, under a sliding window those that lie within it. The parts of each row's softmax are merged by their
log-sum-exp. Backward does the same, and sends the gradients of keys and values back to the rank that they are
of.

Source: Ring Attention (arXiv 2310.01889); its blockwise backward is that of FlashAttention-2 (arXiv
2307.08691).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from lowtide.parallel.collectives import exchange
from lowtide.parallel.context.blocks import Mask, Rows, accumulated_in, attend, attend_backward
from lowtide.parallel.context.documents import Kind, seen
from lowtide.parallel.context.layout import Layout
from lowtide.parallel.groups import TensorGroup

Pair = tuple[Tensor, Tensor]
Chunks = dict[int, Pair]
"""Keys and values, or their gradients, by numbers of chunks."""


class Ring:
    """The exchange of one attention.

    Args:
        group: the ranks.
        layout: which chunks each of them holds.
        length: of a chunk.
        mask: what rows see.
        bounds: those of `lowtide.parallel.context.documents.Documents`, as lists, or ``None``.
    """

    def __init__(
        self, group: TensorGroup, layout: Layout, length: int, mask: Mask, bounds: list[list[int]] | None
    ) -> None:
        self.group, self.layout, self.length, self.mask = group, layout, length, mask
        self._bounds = bounds
        self.own = layout.of(group.rank)

    def kind(self, query: int, key: int) -> int:
        """How much of a chunk another one sees."""
        return seen(query, key, self.length, self._bounds, self.mask.window)

    def needed(self, rank: int, holder: int) -> list[int]:
        """Which chunks of ``holder`` the queries of ``rank`` see."""
        queries = self.layout.of(rank)
        return [key for key in self.layout.of(holder) if any(self.kind(query, key) for query in queries)]

    def chunk(self, x: Tensor, number: int) -> Tensor:
        """A chunk that this rank holds, of a tensor with its part of the sequence."""
        return x.narrow(2, self.own.index(number) * self.length, self.length)

    def steps(self) -> list[int]:
        """The steps in which anything travels; all ranks have the same ones."""
        ranks = range(self.group.size)
        return [
            step
            for step in range(1, self.group.size)
            if any(self.needed(rank, (rank - step) % self.group.size) for rank in ranks)
        ]

    def fetch(self, step: int, k: Tensor, v: Tensor) -> Callable[[], Chunks]:
        """Begin to exchange the keys and values of a step; what is returned waits, and gives those that
        came.
        """
        rank, size = self.group.rank, self.group.size
        source, target = (rank - step) % size, (rank + step) % size
        sent = [self.chunk(x, number).reshape(-1) for number in self.needed(target, rank) for x in (k, v)]
        flat = torch.cat(sent) if sent else k.new_empty(0)
        return self._exchange(flat, target, source, self.needed(rank, source), k, v)

    def give_back(self, step: int, flat: Tensor, k: Tensor, v: Tensor) -> Chunks:
        """Send the gradients of the keys and values of a step to the rank that holds these, and get those of
        this rank's own.
        """
        rank, size = self.group.rank, self.group.size
        source, target = (rank - step) % size, (rank + step) % size
        return self._exchange(flat, source, target, self.needed(target, rank), k, v)()

    def _exchange(
        self, flat: Tensor, target: int, source: int, wanted: Sequence[int], k: Tensor, v: Tensor
    ) -> Callable[[], Chunks]:
        """Send a flat tensor, which ends with that, and get chunks."""
        length = sum(x[:, :, : self.length].numel() for x in (k, v)) * len(wanted)
        pending = exchange(flat, target, length, source, self.group)
        return lambda: self._chunks(pending.wait(), wanted, k, v)

    def _chunks(self, flat: Tensor, numbers: Sequence[int], k: Tensor, v: Tensor) -> Chunks:
        """Keys and values of chunks, one behind the other in a flat tensor."""
        shapes = [(*x.shape[:2], self.length, x.shape[3]) for x in (k, v)]
        parts = iter(flat.split([math.prod(shape) for shape in shapes] * len(numbers)) if numbers else ())
        pairs = [[next(parts).view(shape) for shape in shapes] for _ in numbers]
        return {number: (key, value) for number, (key, value) in zip(numbers, pairs, strict=True)}

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Pair:
        """What this rank's queries make of all that they see, and the log-sum-exp of each row."""
        parts: Chunks = {}
        for held in self._rounds(k, v):
            for query, number, kind, places in self._blocks(held):
                parts[query] = merged(
                    parts.get(query), attend(self.chunk(q, query), *held[number], self.mask, kind, places)
                )
            held.clear()
        # in memory as the layers before and behind make it: (batch, sequence, heads, features)
        out = torch.cat([parts[number][0].to(q.dtype).transpose(1, 2) for number in self.own], 1)
        return out.transpose(1, 2), torch.cat([parts[number][1] for number in self.own], 2)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of this rank's queries, keys and values."""
        dtype = accumulated_in(q.dtype)
        # in memory as forward's result
        sums = [x.new_zeros(x.transpose(1, 2).shape, dtype=dtype).transpose(1, 2) for x in (q, k, v)]
        rows = {number: Rows(*(self.chunk(x, number) for x in (grad, q, out, lse))) for number in self.own}

        def own_sums(number: int) -> Pair:
            return self.chunk(sums[1], number), self.chunk(sums[2], number)

        def add_blocks(held: Chunks, sums_of: Chunks) -> None:
            for query, number, kind, places in self._blocks(held):
                found = attend_backward(rows[query], *held[number], self.mask, kind, places)
                _add((self.chunk(sums[0], query), *sums_of[number]), found)
                del found  # it would be there beside that of the next block
            held.clear()

        def add_of_others(step: int, held: Chunks) -> None:
            elements = sum(x.numel() for pair in held.values() for x in pair)
            flat = torch.zeros(elements, dtype=dtype, device=q.device)
            add_blocks(held, self._chunks(flat, list(held), k, v))
            for number, pair in self.give_back(step, flat, k, v).items():
                _add(own_sums(number), pair)

        for step, held in zip([0, *self.steps()], self._rounds(k, v), strict=True):
            if step:
                add_of_others(step, held)
            else:
                add_blocks(held, {number: own_sums(number) for number in self.own})
        return tuple(sums.pop(0).to(x.dtype) for x in (q, k, v))  # type: ignore[return-value]

    def _blocks(self, held: Chunks) -> Iterator[tuple[int, int, int, tuple[int, int]]]:
        """Chunks of queries and of keys of which the one sees the other, its own first; how much of it; and
        where both begin.
        """
        for query in self.own:
            for number in sorted(held, key=lambda key: key != query):
                kind = self.kind(query, number)
                if kind != Kind.NONE:
                    yield query, number, kind, (query * self.length, number * self.length)

    def _rounds(self, k: Tensor, v: Tensor) -> Iterator[Chunks]:
        """The keys and values that are there in each step; who takes them clears them. The next step's are on
        their way meanwhile.
        """
        held = {number: (self.chunk(k, number), self.chunk(v, number)) for number in self.own}
        for step in self.steps():
            coming = self.fetch(step, k, v)
            yield held
            held = coming()
            del coming
        yield held


def _add(totals: Sequence[Tensor], parts: Sequence[Tensor]) -> None:
    for total, part in zip(totals, parts, strict=True):
        total.add_(part)


def merged(part: Pair | None, other: Pair) -> Pair:
    """Attention to two sets of keys, from attention to each, which is overwritten; rows of the first see
    something.
    """
    if part is None:
        return other
    (out, lse), (more, more_lse) = part, other
    dtype = accumulated_in(out.dtype)
    total = torch.logaddexp(lse, more_lse)
    out = out.to(dtype).mul_((lse - total).exp()[..., None])
    return out.add_(more.to(dtype).mul_((more_lse - total).exp()[..., None])), total
