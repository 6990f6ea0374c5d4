"""Cross entropy over a vocabulary that the ranks share: the logits of one rank are its part of the
vocabulary, and never leave it.

Three numbers a token travel, in two all-reduces: its largest logit, then the sum of exponentials and the
logit of the target together. For backward the logits are kept as they came (2 bytes each in bfloat16, where
the softmax would take 4) with one number a token.

The chunked form takes the projection in as well: it goes through the tokens in pieces, and computes a piece's
gradient while its logits are there, so that neither the logits of all tokens nor, under sequence parallelism,
the gathered hidden states ever exist.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lowtide.errors import expect
from lowtide.extensions.tiles.products import Product, Products, Term, piece_length
from lowtide.extensions.tiles.rows import summed_loss
from lowtide.extensions.tiles.stand_in import Logits
from lowtide.parallel.collectives import Pending, all_reduce, gather, reduce_scatter
from lowtide.parallel.errors import ParallelError
from lowtide.parallel.given import check_counts, check_dtypes, check_numbers, check_tensors
from lowtide.parallel.groups import TensorGroup, tensor_group
from lowtide.parallel.mappings import check_sequence_dimension
from lowtide.parallel.vocabulary import check_tokens

_PIECE_ELEMENTS = 2**24  # of logits that are made float32 at a time


class Vocabulary:
    """This rank's part of the vocabulary, and the arithmetic of cross entropy on it.

    Args:
        group: the ranks.
        width: how many tokens this rank's logits are for, padding included.
        vocabulary: how many tokens there are.
        label_smoothing: share of the probability that goes to all tokens alike.
        ignore_index: targets that do not count.
    """

    def __init__(
        self,
        group: TensorGroup,
        width: int,
        vocabulary: int | None,
        label_smoothing: float,
        ignore_index: int,
    ) -> None:
        self.group = group
        if vocabulary is not None:
            check_counts("cross entropy", 1, vocabulary=vocabulary)
        whole = isinstance(ignore_index, int)
        expect(whole, "cross entropy(ignore_index=)", ignore_index, "a whole number", ParallelError)
        self.size = vocabulary if vocabulary is not None else width * group.size
        if not 0 < self.size <= width * group.size:
            raise ParallelError(
                f"vocabulary={vocabulary}: {group.size} ranks with logits for {width} tokens each have at "
                f"most {width * group.size}"
            )
        check_numbers("cross entropy", 0, label_smoothing=label_smoothing)
        if not label_smoothing < 1.0:
            raise ParallelError(
                f"label_smoothing={label_smoothing}: a share of at least 0 and below 1 is needed"
            )
        self.start = min(group.rank * width, self.size)
        self.valid = min(self.start + width, self.size) - self.start
        self.smoothing = label_smoothing
        self.ignore_index = ignore_index

    def check(self, target: Tensor) -> None:
        """Refuse a target that is no token."""
        check_tokens(target, self.size, "target", self.ignore_index)

    def places(self, target: Tensor) -> tuple[Tensor, Tensor]:
        """For each target its column here, and whether it has one."""
        mine = (target >= self.start) & (target < self.start + self.valid)
        return (target - self.start).masked_fill(~mine, 0), mine

    def numbers(self, values: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
        """Of each row of float32 (or wider) logits the log of the sum of exponentials, and the loss.

        Args:
            values: (rows, width); what is padding counts for nothing.
            known: the targets; with two dimensions (tokens of a rank, ranks), whose rows are rank by rank.
        """
        logits, target = values[:, : self.valid], known.t().flatten()
        column, mine = self.places(target)
        if self.valid:
            largest = logits.amax(-1)
            hit = logits.gather(-1, column.unsqueeze(-1)).squeeze(-1).masked_fill(~mine, 0)
        else:
            largest = logits.new_full(target.shape, float("-inf"))
            hit = logits.new_zeros(target.shape)
        largest = all_reduce(largest, self.group, op="max", in_place=True).wait()
        parts = [(logits - largest.unsqueeze(-1)).exp_().sum(-1), hit]
        if self.smoothing:
            parts.append(logits.sum(-1))
        parts = all_reduce(torch.stack(parts), self.group, in_place=True).wait()
        total = largest + parts[0].log()
        loss = total - parts[1]
        if self.smoothing:
            loss = (1 - self.smoothing) * loss + self.smoothing * (total - parts[2] / self.size)
        return total, loss.masked_fill(target == self.ignore_index, 0)

    def gradient_(self, values: Tensor, known: Tensor, first: Tensor, by: Sequence[Any]) -> None:
        """Overwrite logits with their gradient.

        Args:
            values, known: as of `numbers`.
            first: the log of the sum of exponentials.
            by: ends in the gradients by the losses.
        """
        logits, target = values[:, : self.valid], known.t().flatten()
        values[:, self.valid :].zero_()
        if not self.valid:
            return
        column, mine = self.places(target)
        logits.sub_(first.unsqueeze(-1)).exp_()
        if self.smoothing:
            logits.sub_(self.smoothing / self.size)
        logits.scatter_add_(
            -1, column.unsqueeze(-1), (mine.to(logits.dtype) * (self.smoothing - 1)).unsqueeze(-1)
        )
        logits.mul_(by[-1].masked_fill(target == self.ignore_index, 0).unsqueeze(-1))

    def losses_(self, values: Tensor, known: Tensor) -> Tensor:
        """The loss of each row; the logits are overwritten with the gradient of their sum."""
        totals, losses = self.numbers(values, known)
        self.gradient_(values, known, totals, [torch.ones_like(losses)])
        return losses


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, part: Vocabulary) -> Tensor:
        rows, labels = logits.reshape(-1, logits.shape[-1]), target.reshape(-1)
        wide = torch.promote_types(logits.dtype, torch.float32)
        losses = torch.empty(labels.shape, dtype=wide, device=logits.device)
        totals = torch.empty_like(losses)
        for piece in _pieces(rows):
            totals[piece], losses[piece] = part.numbers(rows[piece].to(wide), labels[piece])
        ctx.part = part
        ctx.save_for_backward(logits, target, totals)
        return losses.view(target.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        logits, target, totals = ctx.saved_tensors
        rows, labels, scale = logits.reshape(-1, logits.shape[-1]), target.reshape(-1), grad.reshape(-1)
        result = torch.empty_like(rows)
        for piece in _pieces(rows):
            values = rows[piece].to(totals.dtype, copy=True)
            ctx.part.gradient_(values, labels[piece], totals[piece], [scale[piece]])
            result[piece] = values
        return result.view(logits.shape), None, None


def _pieces(rows: Tensor) -> list[slice]:
    length = max(1, _PIECE_ELEMENTS // max(1, rows.shape[-1]))
    return [slice(at, at + length) for at in range(0, rows.shape[0], length)]


def parallel_cross_entropy(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    label_smoothing: float = 0.0,
    *,
    ignore_index: int = -100,
    vocabulary: int | None = None,
    tensor_model_parallel_group: Any = None,
) -> Tensor:
    """The cross entropy of each token, from logits of which every rank has its part of the vocabulary.

    Args:
        vocab_parallel_logits: (..., vocabulary / t).
        target: (...), whole numbers, the same on every rank.
        label_smoothing: as in ``torch.nn.functional.cross_entropy``, over the whole vocabulary.
            (neuronx-distributed's smoothing leaves the target out and counts only one rank's part.)
        ignore_index: the loss of such a target is 0, and so is its gradient.
        vocabulary: size of the vocabulary without padding, where the last ranks' logits are padded.
        tensor_model_parallel_group: see `lowtide.parallel.tensor_group`.

    Returns:
        (...), float32 or wider, the same on every rank. It is not reduced: divide its sum by the number of
        targets that count.

    Raises:
        ParallelError: shapes do not fit, or a target is no token.

    >>> parallel_cross_entropy(torch.zeros(1, 4), torch.tensor([2])).exp()
    tensor([4.])
    """
    check_tensors("parallel_cross_entropy", vocab_parallel_logits=vocab_parallel_logits, target=target)
    if vocab_parallel_logits.shape[:-1] != target.shape or not vocab_parallel_logits.ndim:
        raise ParallelError(
            f"logits of shape {tuple(vocab_parallel_logits.shape)} need targets of shape "
            f"{tuple(vocab_parallel_logits.shape[:-1])}, not {tuple(target.shape)}"
        )
    part = Vocabulary(
        tensor_group(tensor_model_parallel_group),
        vocab_parallel_logits.shape[-1],
        vocabulary,
        label_smoothing,
        ignore_index,
    )
    part.check(target)
    if isinstance(vocab_parallel_logits, Logits):
        if vocab_parallel_logits.is_plain:
            return vocab_parallel_logits.losses(part, target)
        vocab_parallel_logits = vocab_parallel_logits.real()
    return _CrossEntropy.apply(vocab_parallel_logits, target, part)  # type: ignore[return-value]


def from_parallel_logits_to_logprobs(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    inference: bool = True,
    *,
    vocabulary: int | None = None,
    tensor_model_parallel_group: Any = None,
) -> Tensor:
    """The log-probability of each next token, from logits of which every rank has its part of the vocabulary.

    Args:
        vocab_parallel_logits: (batch, sequence, vocabulary / t).
        target: (batch, sequence), the tokens of the sequence itself, the same on every rank: the logits at
            one place are for the token at the next one.
        inference: without gradients; for training pass ``False``.
        vocabulary: size of the vocabulary without padding, where the last ranks' logits are padded.
        tensor_model_parallel_group: see `lowtide.parallel.tensor_group`.

    Returns:
        (batch, sequence - 1), float32 or wider, the same on every rank.

    Raises:
        ParallelError: shapes do not fit, or a target is no token.

    >>> from_parallel_logits_to_logprobs(torch.zeros(1, 3, 4), torch.tensor([[2, 0, 1]])).exp()
    tensor([[0.2500, 0.2500]])

    Source: neuronx-distributed, ``parallel_layers.loss_functions.from_parallel_logits_to_logprobs``.
    """
    name = "from_parallel_logits_to_logprobs"
    check_tensors(name, vocab_parallel_logits=vocab_parallel_logits, target=target)
    given, allowed = tuple(target.shape), "(batch, sequence)"
    expect(len(given) == 2, f"{name}(target of shape)", given, allowed, ParallelError)
    logits = vocab_parallel_logits.detach() if inference else vocab_parallel_logits
    losses = parallel_cross_entropy(
        logits,
        target.roll(-1, -1),  # the last place, whose next token is not there, is cut off below
        vocabulary=vocabulary,
        tensor_model_parallel_group=tensor_model_parallel_group,
    )
    return -losses[:, :-1]


class _RanksTerm(Term):
    """A rank's part of the logits. The hidden states of a piece come from all ranks, and their gradients
    leave for all ranks, each beside the products of another piece.
    """

    def __init__(
        self, product: Product, needs: Sequence[bool], *, valid: int, group: TensorGroup, sharded: bool,
        reduce_dtype: torch.dtype | None,
    ) -> None:  # fmt: skip
        super().__init__(product, needs, valid)
        self._group, self._sharded, self._reduce_dtype = group, sharded, reduce_dtype
        self._here: tuple[slice, Tensor] | None = None
        self._coming: Pending | None = None
        self._leaving: tuple[slice, Pending] | None = None

    def inputs(self, rows: slice) -> Tensor:
        if self._here is None or self._here[0] != rows:
            self._here = rows, (self._coming or self._ask(rows)).wait()
            more = rows.stop < self.rows.shape[0]
            self._coming = self._ask(slice(rows.stop, 2 * rows.stop - rows.start)) if more else None
        return self._here[1]

    def _ask(self, rows: slice) -> Pending:
        own = super().inputs(rows)
        return gather(own, self._group) if self._sharded else Pending(own, running=False)

    def put(self, rows: slice, gradient: Tensor) -> None:
        self._land()
        if self._sharded:
            self._leaving = rows, reduce_scatter(gradient, self._group, 0, self._reduce_dtype)
        else:
            self._leaving = rows, all_reduce(gradient, self._group, self._reduce_dtype, in_place=True)

    def _land(self) -> None:
        if self._leaving is not None:
            super().put(self._leaving[0], self._leaving[1].wait())
            self._leaving = None

    def gradients(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        self._land()
        return super().gradients()


def parallel_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    chunks: int | None = None,
    reduction: Literal["mean", "sum"] = "mean",
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    vocabulary: int | None = None,
    sequence_dimension: int | None = None,
    reduce_dtype: torch.dtype | None = torch.float32,
    tensor_model_parallel_group: Any = None,
) -> Tensor:
    """The cross entropy of ``hidden @ weight.T``, without the logits of more than one piece of the tokens at
    a time.

    Gradients are made in forward, while a piece's logits are there: nothing is computed twice, and what is
    kept for backward has the size of ``hidden`` and ``weight``.

    Args:
        hidden: (..., width): what goes into the output layer, the same on every rank, or this rank's piece of
            the sequence.
        weight: (vocabulary / t, width), this rank's rows of the output layer.
        target: the tokens, the whole sequence on every rank: (...), or (sequence, batch) or (batch, sequence)
            under sequence parallelism.
        bias: (vocabulary / t), this rank's part.
        chunks: in how many pieces the tokens go through. ``None`` makes pieces of 1,024 tokens.
        reduction: ``mean`` over the targets that count, or ``sum``.
        label_smoothing, ignore_index, vocabulary, tensor_model_parallel_group: as in
            `parallel_cross_entropy`.
        sequence_dimension: 0 or 1 if ``hidden`` is a shard of the sequence.
        reduce_dtype: sum the gradient of ``hidden`` over the ranks in this dtype if it is wider.

    Returns:
        A number, the same on every rank.

    Raises:
        ParallelError: shapes do not fit, or a target is no token.

    >>> hidden, weight = torch.zeros(5, 2), torch.ones(4, 2)
    >>> parallel_linear_cross_entropy(hidden, weight, torch.zeros(5, dtype=torch.long)).exp()
    tensor(4.)
    """
    group = tensor_group(tensor_model_parallel_group)
    if reduction not in ("mean", "sum"):
        raise ParallelError(
            f"reduction={reduction!r}: gradients are made in forward, so the loss is one number: use 'mean' "
            "or 'sum'"
        )
    name = "parallel_linear_cross_entropy"
    if chunks is not None:
        check_counts(name, 1, chunks=chunks)
    check_tensors(name, hidden=hidden, weight=weight, target=target)
    check_dtypes(name, reduce_dtype=reduce_dtype)
    if bias is not None:
        check_tensors(name, bias=bias)
        fits = bias.shape == weight.shape[:1]
        expect(fits, f"{name}(bias of shape)", tuple(bias.shape), f"{tuple(weight.shape[:1])}", ParallelError)
    wide = weight.ndim == 2 and hidden.ndim > 0 and hidden.shape[-1] == weight.shape[1]
    shapes = tuple(hidden.shape), tuple(weight.shape)
    allowed = "(..., width) and (vocabulary / t, width)"
    expect(wide, f"{name}(hidden and weight of shapes)", shapes, allowed, ParallelError)
    if sequence_dimension is not None:
        check_sequence_dimension(sequence_dimension)
    expected = list(hidden.shape[:-1])
    if sequence_dimension is not None:
        expected[sequence_dimension] *= group.size
    if list(target.shape) != expected:
        raise ParallelError(
            f"hidden states of shape {tuple(hidden.shape)} on {group.size} ranks need targets of shape "
            f"{tuple(expected)}, not {tuple(target.shape)}"
        )
    part = Vocabulary(group, weight.shape[0], vocabulary, label_smoothing, ignore_index)
    part.check(target)
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    labels, ranks = target.flatten(), 1
    if sequence_dimension is not None and group.size > 1:
        hidden, ranks = hidden.movedim(sequence_dimension, 0), group.size
        labels = target.movedim(sequence_dimension, 0).reshape(ranks, -1).t()
    products = Products((Product(hidden, weight, bias, dtype),))
    length = -(-piece_length(labels.numel(), chunks) // ranks)
    term = partial(_RanksTerm, valid=part.valid, group=group, sharded=ranks > 1, reduce_dtype=reduce_dtype)
    loss = summed_loss(products, part, labels, length, term)
    return loss if reduction == "sum" else loss / (target != ignore_index).sum()
