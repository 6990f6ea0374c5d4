"""Numbers of each row (token) of logits that are not there, and their gradients.

A rule says what is read off a piece. `row_numbers` makes each piece again in backward: how much a row counts
is not known before. `summed_loss` takes the gradients while a piece is there, and runs no product twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lowtide.errors import LowtideError
from lowtide.extensions.tiles.products import Pieces, Products, Term, spans
from lowtide.private.hollow import keeps_graph


class Rule(Protocol):
    """What numbers each row has, by what is known of the row (its label)."""

    def numbers(self, values: Tensor, known: Tensor) -> tuple[Tensor, ...]:
        """Of each row its numbers; the first are those that `gradient_` needs. It may overwrite the piece."""
        ...

    def gradient_(self, values: Tensor, known: Tensor, first: Tensor, by: Sequence[Any]) -> None:
        """Overwrite a piece with its gradient. ``by`` are the gradients by its rows' numbers, or ``None``."""
        ...


class LossRule(Rule, Protocol):
    """A loss of each row, the second of its numbers."""

    def losses_(self, values: Tensor, known: Tensor) -> Tensor:
        """The loss of each row; the piece is overwritten with the gradient of their sum."""
        ...


class _Read(NamedTuple):
    """What is read off a piece, whose elements are the exponentials of their distance to the largest then."""

    sums: Tensor
    totals: Tensor
    means: Tensor | None
    chosen: Tensor

    @classmethod
    def off_(cls, values: Tensor, index: Tensor, mean: bool) -> _Read:
        """Of each row the sum of exponentials, the log of their true sum, the mean, and elements at an
        index.
        """
        chosen = values.gather(-1, index)
        means = values.mean(-1) if mean else None
        largest = values.amax(-1)
        sums = values.sub_(largest.unsqueeze(-1)).exp_().sum(-1)
        return cls(sums, sums.log().add_(largest), means, chosen)


class Elements:
    """Of each row the log of the sum of exponentials, the mean, and the elements at an index (rows, any)."""

    def numbers(self, values: Tensor, known: Tensor) -> tuple[Tensor, ...]:
        """As named."""
        read = _Read.off_(values, known, True)
        assert read.means is not None
        return read.totals, read.means, read.chosen

    def gradient_(self, values: Tensor, known: Tensor, first: Tensor, by: Sequence[Any]) -> None:
        """Of whichever numbers have gradients."""
        if by[0] is None:
            values.zero_()
        else:
            values.sub_(first.unsqueeze(-1)).exp_().mul_(by[0].unsqueeze(-1))
        _add_gradient_(values, known, *by[1:])


def _add_gradient_(values: Tensor, index: Tensor, by_mean: Tensor | None, by_chosen: Tensor | None) -> None:
    """To a piece's gradient that of its rows' means, and of the elements at an index."""
    if by_mean is not None:
        values.add_((by_mean / values.shape[-1]).unsqueeze(-1))
    if by_chosen is not None:
        values.scatter_add_(-1, index, by_chosen)


@dataclass(frozen=True, slots=True)
class CrossEntropy:
    """The cross entropy of each row against its label.

    Attributes:
        ignore_index: the label of rows that do not count.
        smoothing: share of the probability that goes to all tokens alike.
        weights: of the tokens, or ``None``.
    """

    ignore_index: int = -100
    smoothing: float = 0.0
    weights: Tensor | None = None

    def factors(self, labels: Tensor, dtype: torch.dtype) -> Tensor:
        """How much each row counts."""
        counted = labels != self.ignore_index
        if self.weights is None:
            return counted.to(dtype)
        return self.weights[labels.masked_fill(~counted, 0)].to(dtype).mul_(counted)

    def numbers(self, values: Tensor, known: Tensor) -> tuple[Tensor, ...]:
        """The log of the sum of exponentials, and the loss."""
        read = _Read.off_(values, self._index(known), self.smoothing > 0)
        return read.totals, self._losses(read, known)

    def gradient_(self, values: Tensor, known: Tensor, first: Tensor, by: Sequence[Any]) -> None:
        """By the losses."""
        factors = by[1] * self.factors(known, values.dtype)
        Elements().gradient_(values, self._index(known), first, (factors, *self._by(factors)))

    def losses_(self, values: Tensor, known: Tensor) -> Tensor:
        """The losses, and the gradient of their sum."""
        index, factors = self._index(known), self.factors(known, values.dtype)
        read = _Read.off_(values, index, self.smoothing > 0)
        _add_gradient_(values.mul_((factors / read.sums).unsqueeze(-1)), index, *self._by(factors))
        return self._losses(read, known)

    def _index(self, labels: Tensor) -> Tensor:
        return labels.masked_fill(labels == self.ignore_index, 0).unsqueeze(-1)

    def _losses(self, read: _Read, labels: Tensor) -> Tensor:
        losses = read.totals - (1 - self.smoothing) * read.chosen.squeeze(-1)
        if read.means is not None:
            losses = losses - self.smoothing * read.means
        return (losses * self.factors(labels, losses.dtype)).masked_fill_(labels == self.ignore_index, 0)

    def _by(self, factors: Tensor) -> tuple[Tensor | None, Tensor]:
        """The gradients by the means and by the labels' elements, of rows that count so much."""
        by_mean = -self.smoothing * factors if self.smoothing else None
        return by_mean, ((self.smoothing - 1) * factors).unsqueeze(-1)


# ---- numbers of each row -------------------------------------------------------------------------


class _RowNumbers(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, products: Products, rule: Rule, length: int, known: Tensor, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        work = Pieces(products.given(tensors))
        with torch.autocast(known.device.type, enabled=False):
            made = [rule.numbers(work.piece(rows)[0], known[rows]) for rows in spans(len(known), length)]
        numbers = tuple(map(torch.cat, zip(*made, strict=True)))
        ctx.set_materialize_grads(False)
        ctx.given = products, rule, length
        ctx.save_for_backward(known, numbers[0], *tensors)
        return numbers

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        known, first, *tensors = ctx.saved_tensors
        products, rule, length = ctx.given
        work = Pieces(products.given(tensors), ctx.needs_input_grad[4:])
        with torch.autocast(known.device.type, enabled=False):
            for rows in spans(len(known), length):
                values, tape = work.piece(rows)
                by = [None if grad is None else grad[rows] for grad in grads]
                rule.gradient_(values, known[rows], first[rows], by)
                work.take(rows, tape, values)
                del values, tape
        return (None, None, None, None, *work.results(tensors))


def row_numbers(products: Products, rule: Rule, known: Tensor, length: int) -> tuple[Tensor, ...]:
    """The numbers of each row by a rule, in float32 or wider.

    Args:
        products, length: the logits, and the rows of a piece.
        rule, known: what is read off a piece, and what is known of each row.
    """
    wide = products.widened()
    return _RowNumbers.apply(wide.without_tensors(), rule, length, known, *wide.tensors())  # type: ignore


# ---- one number of all rows ----------------------------------------------------------------------


class _SummedLoss(torch.autograd.Function):
    """Gradients are scaled in backward. Their rows are not scaled before, so that float16 holds them."""

    @staticmethod
    def forward(
        ctx: Any, products: Products, rule: LossRule, length: int, term: Any, known: Tensor, *tensors: Tensor
    ) -> Tensor:
        work = Pieces(products.given(tensors), ctx.needs_input_grad[5:], term)
        ctx.forms = [None if one is None else (one.dtype, one.shape) for one in tensors]
        losses = []
        with torch.autocast(known.device.type, enabled=False):
            for rows in spans(len(known), length):
                values, tape = work.piece(rows)
                if work.needed:
                    losses.append(rule.losses_(values, known[rows]))
                    work.take(rows, tape, values)
                else:
                    losses.append(rule.numbers(values, known[rows])[1])
                del values, tape
        # no saved tensors: nothing brings them back sooner than it needs them
        ctx.gradients = work.gradients()
        return torch.cat(losses).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        gradients, kept = ctx.gradients, keeps_graph()
        if gradients is None:
            raise LowtideError(
                "a second backward through a loss that lowtide.chunked_loss computed: its gradients were "
                "scaled in place by the first one. Call the first with retain_graph=True"
            )
        if not kept:
            ctx.gradients = None
        found = list[Tensor | None]()
        for place, like in enumerate(ctx.forms):
            found.append(None if like is None else _scaled(gradients[place], grad, not kept, *like))
            if not kept:
                gradients[place] = None  # the wide one goes before the next is cast
        return (None, None, None, None, None, *found)


def _scaled(
    one: Tensor | None, grad: Tensor, may_write: bool, dtype: torch.dtype, shape: torch.Size
) -> Tensor | None:
    if one is None:
        return None
    wide = one.to(torch.promote_types(one.dtype, dtype))
    wide = wide.mul_(grad) if may_write or wide is not one else wide * grad
    return wide.to(dtype).view(shape)


def summed_loss(
    products: Products, rule: LossRule, known: Tensor, length: int, term: Callable[..., Term] | None = None
) -> Tensor:
    """The sum of the losses of all rows by a rule, in float32 or wider.

    Args:
        products, length: the logits, and the rows of a piece.
        rule, known: what is read off a piece, and what is known of each row.
        term: as of `lowtide.extensions.tiles.products.Pieces`.
    """
    wide = products.widened()
    found: Any = _SummedLoss.apply(wide.without_tensors(), rule, length, term, known, *wide.tensors())
    return found


# ---- without gradients ---------------------------------------------------------------------------


def row_by_row(products: Products, length: int, function: Callable[[Tensor], Any]) -> Any:
    """What a function gives of each row, a tensor or several."""
    with torch.no_grad(), torch.autocast(products.device.type, enabled=False):
        work = Pieces(products)
        made = [function(work.piece(rows)[0]) for rows in spans(products.rows.numel(), length)]
    if isinstance(made[0], Tensor):
        return torch.cat(made)
    return type(made[0])(map(torch.cat, zip(*made, strict=True)))
