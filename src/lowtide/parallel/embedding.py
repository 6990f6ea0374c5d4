"""`ParallelEmbedding`: a table of vectors whose rows (the vocabulary) or columns the ranks share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lowtide.errors import expect, is_count
from lowtide.parallel.errors import ParallelError
from lowtide.parallel.given import check_counts, check_input, check_made, check_numbers
from lowtide.parallel.mappings import (
    check_sequence_dimension,
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from lowtide.parallel.module import ParallelModule
from lowtide.parallel.partition import initialize, partition
from lowtide.parallel.vocabulary import check_tokens


class ParallelEmbedding(ParallelModule):
    """An embedding that is split among the ranks.

    Args:
        num_embeddings: size of the vocabulary.
        embedding_dim: size of a vector.
        padding_idx: this token's vector starts as zero and is not trained; 0 is a token like any other, and
            -1 is the last.
        max_norm, norm_type: rescale the vectors that are looked up, in place, to at most this norm. Not with
            ``shard_across_embedding``, where no rank sees a whole vector.
        scale_grad_by_freq: divide a vector's gradient by how often it was looked up.
        sparse: make a sparse gradient.
        init_method: fills the whole table in place.
        device, dtype: of the table.
        shard_across_embedding: split the vectors' features and not the vocabulary.
        pad: make the shared size divide by zeros, which are never trained.
        sequence_parallel_enabled: give each rank its shard of the sequence.
        tensor_model_parallel_group: see `lowtide.parallel.tensor_group`.
        sequence_dimension: 0 (the default then) for tokens of shape (sequence, batch), or 1 for (batch,
            sequence).
        collect_output: without it the output is this rank's: its tokens' vectors and zeros for the others, a
            part of a sum, which `reduce_from_tensor_model_parallel_region` makes; or with
            ``shard_across_embedding`` its features, which `gather_from_tensor_model_parallel_region` joins.
            Needs ``sequence_parallel_enabled=False``.
        pad_alignment_size_per_rank: pad until each rank's part of the shared size is a multiple of this.
            Needs ``pad``.

    Shapes:
        in: whole numbers of any shape, the same on every rank.
        out: the input's shape and ``embedding_dim``; under sequence parallelism this rank's shard of the
            sequence. Without ``collect_output`` and with ``shard_across_embedding`` its last size is
            ``embedding_dim / t``, with the padding.

    Raises:
        ParallelError: a size does not divide, or options exclude each other; in forward, a token outside the
            vocabulary (on a GPU by a device-side assertion).

    Example:
        >>> ParallelEmbedding(10, 4)(torch.tensor([[1, 2, 3]])).shape
        torch.Size([1, 3, 4])

    Source: neuronx-distributed's layer of that name. Under sequence parallelism it swaps the first two
        dimensions of its output. Here the output has the layout of the input.
    """

    weight: nn.Parameter

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        init_method: Callable[[Tensor], Any] | None = nn.init.normal_,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
        shard_across_embedding: bool = False,
        pad: bool = False,
        sequence_parallel_enabled: bool = False,
        tensor_model_parallel_group: Any = None,
        sequence_dimension: int | None = None,
        collect_output: bool = True,
        pad_alignment_size_per_rank: int = 1,
    ) -> None:
        name = type(self).__name__
        check_counts(name, 1, num_embeddings=num_embeddings, embedding_dim=embedding_dim)
        check_made(name, dtype, device, init_method)
        check_numbers(name, 0, max_norm=0 if max_norm is None else max_norm, norm_type=norm_type)
        super().__init__(tensor_model_parallel_group)
        token = padding_idx is None or (
            is_count(padding_idx, -num_embeddings) and padding_idx < num_embeddings
        )
        allowed = f"a token of the vocabulary of {num_embeddings}, or None"
        expect(token, f"{name}(padding_idx=)", padding_idx, allowed, ParallelError)
        if shard_across_embedding and max_norm is not None:
            raise ParallelError(
                "max_norm needs whole vectors: share the vocabulary (shard_across_embedding=False), or "
                "leave max_norm out"
            )
        if sequence_dimension is not None and not sequence_parallel_enabled:
            raise ParallelError(
                f"sequence_dimension={sequence_dimension} does nothing without "
                "sequence_parallel_enabled=True: leave one out"
            )
        if sequence_parallel_enabled and not collect_output:
            raise ParallelError(
                "sequence_parallel_enabled=True gives each rank its shard of the collected output: "
                "collect_output=False contradicts it. Leave one out"
            )
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.padding_idx = None if padding_idx is None else padding_idx % num_embeddings
        self.max_norm, self.norm_type = max_norm, norm_type
        self.scale_grad_by_freq, self.sparse = scale_grad_by_freq, sparse
        self.shard_across_embedding = shard_across_embedding
        self.collect_output = collect_output
        self.sequence_parallel_enabled = sequence_parallel_enabled
        self.sequence_dimension = (
            check_sequence_dimension(sequence_dimension or 0) if sequence_parallel_enabled else None
        )
        what = "embedding_dim" if shard_across_embedding else "num_embeddings"
        where = partition(
            (num_embeddings, embedding_dim),
            int(shard_across_embedding),
            self.group,
            pad=pad,
            alignment=pad_alignment_size_per_rank,
            what=what,
        )
        self._fill("weight", where, self._with_padding(init_method or nn.init.normal_), dtype, device)

    def _with_padding(self, init_method: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
        def fill(table: Tensor) -> None:
            init_method(table)
            if self.padding_idx is not None:
                table[self.padding_idx].zero_()

        return fill

    def reset_parameters(self, weight: Callable[[Tensor], Any] = nn.init.normal_) -> None:
        """Initialize again: the whole table is drawn on every rank, and each keeps its part."""
        initialize(self.weight, self.partitions["weight"], self._with_padding(weight))

    def forward(self, input_: Tensor) -> Tensor:
        """Look up the vectors of the tokens."""
        check_input(self, input_)
        whole = input_.dtype in (torch.int64, torch.int32)
        if not whole:
            expect(whole, "tokens of dtype", input_.dtype, "torch.int64 or torch.int32", ParallelError)
        if self.shard_across_embedding:
            return self._features(input_)
        if self.partitions["weight"].is_whole:
            return self._look_up(input_, self.padding_idx)
        rows = self._rows(input_)
        if not self.collect_output:
            return rows
        if self.sequence_dimension is None:
            return reduce_from_tensor_model_parallel_region(rows, self.group)
        return reduce_scatter_to_sequence_parallel_region(rows, self.sequence_dimension, self.group)

    def _features(self, tokens: Tensor) -> Tensor:
        """This rank's features of every vector, or the gathered ones."""
        own = self._look_up(tokens, self.padding_idx)
        if not self.collect_output:
            return self.partitions["weight"].blank(own, -1)
        vectors = gather_from_tensor_model_parallel_region(own, self.group)[..., : self.embedding_dim]
        if self.sequence_dimension is None:
            return vectors
        return scatter_to_sequence_parallel_region(vectors, self.sequence_dimension, self.group)

    def _rows(self, tokens: Tensor) -> Tensor:
        """The vectors of this rank's tokens, and zeros for all others."""
        where = self.partitions["weight"]
        ((start, stop),) = where.slices()
        check_tokens(tokens, self.num_embeddings, "token")
        mine = (tokens >= start) & (tokens < stop)
        own_padding = None
        if self.padding_idx is not None and start <= self.padding_idx < stop:
            own_padding = self.padding_idx - start
        if self.max_norm is not None or self.scale_grad_by_freq or self.sparse:
            # these look at, count or touch every row that is looked up, so no other rank's tokens may stand
            # in
            found = self._look_up(tokens[mine] - start, own_padding)
            vectors = found.new_zeros((*tokens.shape, self.embedding_dim))
            return vectors.index_put((mine,), found)
        local = (tokens - start).masked_fill(~mine, 0)
        return self._look_up(local, own_padding).masked_fill(~mine.unsqueeze(-1), 0)

    def _look_up(self, tokens: Tensor, padding_idx: int | None) -> Tensor:
        return F.embedding(
            tokens,
            self.weight,
            padding_idx,
            self.max_norm,
            self.norm_type,
            self.scale_grad_by_freq,
            self.sparse,
        )

    def extra_repr(self) -> str:
        what = "features" if self.shard_across_embedding else "vocabulary"
        return (
            f"{self.num_embeddings}, {self.embedding_dim}, {what} shared, rank {self.group.rank} of "
            f"{self.group.size}"
        )
