"""Logits that are not there: the products that would make them, and the arithmetic of a piece of them.

In: hidden states and weights of the output layer. Out: numbers of each row (token), and the gradients of the
hidden states and the weights. At most one piece of the logits exists at a time, forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from lowtide.errors import LowtideError
from lowtide.private.hollow import keeps_graph


@dataclass(frozen=True, slots=True)
class Step:
    """An operation on each element.

    Attributes:
        kind: ``cast``, ``multiply``, ``divide``, ``add`` or ``tanh``.
        by: the dtype, the number, or the tensor that is added to every row.
    """

    kind: str
    by: Any = None

    def plain(self, values: Tensor) -> Tensor:
        """The operation as PyTorch has it."""
        if self.kind == "cast":
            return values.to(self.by)
        if self.kind == "tanh":
            return values.tanh()
        made = {"multiply": torch.mul, "divide": torch.div, "add": torch.add}[self.kind]
        return made(values, self.by)


class Shared(Protocol):
    """How ranks share the weight of an output layer whose logits every rank has."""

    width: int
    """The whole vocabulary."""

    own_rows: int
    """Of the weight, without padding."""

    def gathered(self, own: Tensor) -> Tensor:
        """The logits of all ranks' rows of the weight, from this rank's."""
        ...

    def own(self, gradient: Tensor) -> Tensor:
        """This rank's part of a gradient of all logits."""
        ...

    def whole(self, hidden: Tensor) -> Tensor:
        """The logits, with their history."""
        ...


@dataclass(frozen=True, slots=True)
class Product:
    """A matrix product that makes logits, and what is done to it.

    Attributes:
        hidden: (..., width).
        weight: (vocabulary, width).
        bias: (vocabulary), or ``None``.
        dtype: of the product, the one that autocast asks for included.
        steps: operations on its elements.
        shared: how ranks share the weight, where they do. The gradient of the hidden states is then this
            rank's part of a sum.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    dtype: torch.dtype
    steps: tuple[Step, ...] = ()
    shared: Shared | None = None

    @property
    def width(self) -> int:
        """The vocabulary."""
        return self.weight.shape[0] if self.shared is None else self.shared.width

    def whole(self) -> Tensor:
        """All of it, with its history."""
        if self.shared is not None:
            return _plainly(self.shared.whole(self.hidden), self.steps)
        bias = None if self.bias is None else self.bias.to(self.dtype)
        made = F.linear(self.hidden.to(self.dtype), self.weight.to(self.dtype), bias)
        return _plainly(made, self.steps)

    def detached(self) -> Product:
        """The same without its history."""
        bias = None if self.bias is None else self.bias.detach()
        return replace(self, hidden=self.hidden.detach(), weight=self.weight.detach(), bias=bias)


@dataclass(frozen=True, slots=True)
class Products:
    """The logits as a sum of products (an adapter of the output layer adds one).

    Attributes:
        terms: the products. The steps of a single one are its own.
        steps: operations on the elements of a sum.
    """

    terms: tuple[Product, ...]
    steps: tuple[Step, ...] = ()

    @property
    def dtype(self) -> torch.dtype:
        """Of the logits."""
        made = [_dtype_after(term.dtype, term.steps) for term in self.terms]
        return _dtype_after(reduce(torch.promote_types, made), self.steps)

    @property
    def rows(self) -> torch.Size:
        """The shape of the logits without the vocabulary."""
        return self.terms[0].hidden.shape[:-1]

    @property
    def width(self) -> int:
        """The vocabulary."""
        return self.terms[0].width

    def with_step(self, step: Step) -> Products:
        """Each element through one more operation."""
        if len(self.terms) > 1:
            return replace(self, steps=(*self.steps, step))
        return replace(self, terms=tuple(replace(one, steps=(*one.steps, step)) for one in self.terms))

    def widened(self) -> Products:
        """The same in float32 or wider."""
        dtype = torch.promote_types(self.dtype, torch.float32)
        return self if dtype == self.dtype else self.with_step(Step("cast", dtype))

    def plus(self, other: Products) -> Products | None:
        """The sum, or ``None`` where it is no sum of products."""
        if self.steps or other.steps or self.rows != other.rows or self.width != other.width:
            return None
        return Products((*self.terms, *other.terms))

    def of_rows(self, choose: Callable[[Tensor], Tensor]) -> Products:
        """Some rows, or the same rows in another shape.

        Args:
            choose: does to hidden states what is done to the logits.
        """
        return replace(self, terms=tuple(replace(term, hidden=choose(term.hidden)) for term in self.terms))

    def given_hidden(self, hidden: Sequence[Tensor]) -> Products:
        """The same of other hidden states, one for each product."""
        terms = zip(self.terms, hidden, strict=True)
        return replace(self, terms=tuple(replace(term, hidden=own) for term, own in terms))

    def of_columns(self, columns: slice) -> Products | None:
        """A part of the vocabulary, or ``None`` where something is added to each row, or ranks share it."""
        steps = (*self.steps, *(step for term in self.terms for step in term.steps))
        rows = any(isinstance(step.by, Tensor) and step.by.dim() for step in steps)
        if rows or any(term.shared is not None for term in self.terms):
            return None
        terms = tuple(
            replace(term, weight=term.weight[columns], bias=None if term.bias is None else term.bias[columns])
            for term in self.terms
        )
        return replace(self, terms=terms)

    def whole(self) -> Tensor:
        """The logits, with their history."""
        with torch.autocast(self.terms[0].hidden.device.type, enabled=False):
            total = self.terms[0].whole()
            for term in self.terms[1:]:
                total = total + term.whole()
            return _plainly(total, self.steps)

    def detached(self) -> Products:
        """The same without their history."""
        return replace(self, terms=tuple(term.detached() for term in self.terms))

    def tensors(self) -> tuple[Tensor | None, ...]:
        """Hidden states, weight and bias of each product in turn."""
        return tuple(one for term in self.terms for one in (term.hidden, term.weight, term.bias))

    def given(self, tensors: Sequence[Tensor | None]) -> Products:
        """The same products of other tensors, as `tensors` returns them."""
        threes = zip(self.terms, tensors[::3], tensors[1::3], tensors[2::3], strict=True)
        terms = tuple(replace(term, hidden=h, weight=w, bias=b) for term, h, w, b in threes)
        return replace(self, terms=terms)  # type: ignore[arg-type]

    def without_tensors(self) -> Products:
        """What these products are, without what they are made of: nothing is held by it."""
        return self.given([None] * (3 * len(self.terms)))


def _plainly(values: Tensor, steps: Sequence[Step]) -> Tensor:
    for step in steps:
        values = step.plain(values)
    return values


def _dtype_after(dtype: torch.dtype, steps: Sequence[Step]) -> torch.dtype:
    for step in steps:
        if step.kind == "cast":
            dtype = step.by
        elif isinstance(step.by, Tensor) and step.by.dim():
            dtype = torch.promote_types(dtype, step.by.dtype)
    return dtype


# ---- pieces --------------------------------------------------------------------------------------


def spans(rows: int, length: int) -> list[slice]:
    """The rows of each piece.

    >>> spans(5, 3)
    [slice(0, 3, None), slice(3, 5, None)]
    """
    length = max(1, length)
    return [slice(at, min(at + length, rows)) for at in range(0, rows, length)]


class Pieces:
    """Makes pieces of logits, and takes the gradients of pieces back to what made them.

    Args:
        products: the logits.
        needs: for each of `Products.tensors` whether its gradient is needed.
    """

    def __init__(self, products: Products, needs: Sequence[bool]) -> None:
        self.products = products
        self.terms = []
        for term, own in zip(products.terms, zip(*[iter(needs)] * 3, strict=True), strict=True):
            self.terms.append(_Term(term, own))
        self.needed = any(needs)

    def piece(self, rows: slice) -> tuple[Tensor, list[Any]]:
        """A piece of the logits, whose memory is the caller's, and what `take` needs to know of it."""
        tape: list[Any] = []
        total, held = self.terms[0].piece(rows, tape)
        for term in self.terms[1:]:
            other, _ = term.piece(rows, tape)
            total, held = total + other, False
        total, held = _forward(total, self.products.steps, tape, held)
        return (total.clone() if held else total), tape

    def take(self, rows: slice, tape: list[Any], gradient: Tensor) -> None:
        """Add a piece's part of the gradients.

        Args:
            gradient: by the piece; it is overwritten.
        """
        gradient = _backward(gradient, self.products.steps, tape)
        for term in reversed(self.terms):
            own = gradient.clone() if len(self.terms) > 1 and term.term.steps else gradient
            term.take(rows, _backward(own, term.term.steps, tape))

    def results(self, tensors: Sequence[Tensor | None]) -> Iterator[Tensor | None]:
        """The gradients, each like the tensor that it is of."""
        for gradient, one in zip(self.gradients(), tensors, strict=True):
            yield None if gradient is None or one is None else gradient.to(one.dtype).view(one.shape)

    def gradients(self) -> list[Tensor | None]:
        """The gradients by `Products.tensors`, those of weights wider than the weights are."""
        return [one for term in self.terms for one in (term.by_hidden, term.by_weight, term.by_bias)]


class _Term:
    """A product, row by row."""

    def __init__(self, term: Product, needs: Sequence[bool]) -> None:
        self.term = term
        self.rows = term.hidden.reshape(-1, term.hidden.shape[-1])
        self.own_rows = term.weight.shape[0] if term.shared is None else term.shared.own_rows
        self.weight = term.weight[: self.own_rows].to(term.dtype)
        self.bias = None if term.bias is None else term.bias.to(term.dtype)
        wide = torch.promote_types(term.dtype, torch.float32)
        self.by_hidden = torch.empty_like(self.rows, dtype=term.dtype) if needs[0] else None
        self.by_weight = torch.zeros_like(term.weight, dtype=wide) if needs[1] else None
        self.by_bias = torch.zeros_like(term.bias, dtype=wide) if needs[2] and term.bias is not None else None

    def piece(self, rows: slice, tape: list[Any]) -> tuple[Tensor, bool]:
        inputs = self.rows[rows].to(self.term.dtype)
        if self.term.shared is None:
            made = F.linear(inputs, self.weight, self.bias)
        else:
            made = self.term.shared.gathered(F.linear(inputs, self.weight))
            made = made if self.bias is None else made.add_(self.bias)
        return _forward(made, self.term.steps, tape, False)

    def take(self, rows: slice, gradient: Tensor) -> None:
        if self.by_bias is not None:
            self.by_bias.add_(gradient.sum(0, dtype=self.by_bias.dtype))
        gradient = gradient.to(self.term.dtype)
        if self.term.shared is not None:
            gradient = self.term.shared.own(gradient)
        if self.by_hidden is not None:
            self.by_hidden[rows] = gradient @ self.weight
        if self.by_weight is None:
            return
        inputs = self.rows[rows].to(self.term.dtype)
        if self.by_weight.dtype == self.term.dtype:
            self.by_weight[: self.own_rows].addmm_(gradient.t(), inputs)
            return
        for part in spans(self.own_rows, -(-self.own_rows // _PARTS)):  # no copy of the whole
            self.by_weight[part].add_(gradient[:, part].t() @ inputs)


_PARTS = 8
"""Parts of a low-precision weight whose gradients are added up in float32 one after another."""


def _forward(values: Tensor, steps: Sequence[Step], tape: list[Any], held: bool) -> tuple[Tensor, bool]:
    """Values through steps, in place where nothing else needs them; whether the tape holds the result."""
    for step in steps:
        if step.kind == "cast":
            tape.append(values.dtype)
            cast = values.to(step.by)
            held &= cast is values
            values = cast
        elif step.kind == "tanh":
            values = values.tanh() if held else values.tanh_()
            tape.append(values)
            held = True
        else:
            tape.append(values.dtype)
            in_place = not held and torch.result_type(values, step.by) == values.dtype
            names = {"multiply": "mul", "divide": "div", "add": "add"}
            values = getattr(values, names[step.kind] + "_" * in_place)(step.by)
            held = False
    return values, held


def _backward(gradient: Tensor, steps: Sequence[Step], tape: list[Any]) -> Tensor:
    """The gradient by what went into `_forward`, whose tape is taken from its end."""
    for step in reversed(steps):
        known = tape.pop()
        if step.kind == "tanh":
            gradient = gradient.mul_(known.square_().neg_().add_(1))
            continue
        if step.kind == "multiply":
            gradient = gradient.mul_(step.by)
        elif step.kind == "divide":
            gradient = gradient.div_(step.by)
        gradient = gradient.to(known)
    return gradient


# ---- one number of all rows ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Targets:
    """What cross entropy is taken against.

    Attributes:
        labels: a token for each row.
        ignore_index: the label of rows that do not count.
        smoothing: share of the probability that goes to all tokens alike.
        weights: of the tokens, or ``None``.
    """

    labels: Tensor
    ignore_index: int = -100
    smoothing: float = 0.0
    weights: Tensor | None = None

    def factors(self, rows: slice, dtype: torch.dtype) -> Tensor:
        """How much each row counts."""
        labels = self.labels[rows]
        counted = labels != self.ignore_index
        if self.weights is None:
            return counted.to(dtype)
        return self.weights[labels.masked_fill(~counted, 0)].to(dtype).mul_(counted)

    def losses_(self, values: Tensor, rows: slice, needed: bool) -> tuple[Tensor, Tensor]:
        """The loss of each row, and its gradient by the piece, which it overwrites."""
        labels = self.labels[rows]
        factors = self.factors(rows, values.dtype)
        column = labels.masked_fill(labels == self.ignore_index, 0).unsqueeze(-1)
        chosen = values.gather(-1, column).squeeze(-1)
        mean = values.mean(-1) if self.smoothing else None
        largest = values.amax(-1)
        total = values.sub_(largest.unsqueeze(-1)).exp_().sum(-1)
        losses = total.log().add_(largest)
        if mean is None:
            losses = losses - chosen
        else:
            losses = losses - (1 - self.smoothing) * chosen - self.smoothing * mean
        losses = (losses * factors).masked_fill_(labels == self.ignore_index, 0)
        if needed:
            values.mul_((factors / total).unsqueeze(-1))
            if self.smoothing:
                values.sub_((self.smoothing / values.shape[-1] * factors).unsqueeze(-1))
            values.scatter_add_(-1, column, ((self.smoothing - 1) * factors).unsqueeze(-1))
        return losses, values


class SummedLoss(torch.autograd.Function):
    """The sum of the losses. Gradients are made while a piece is there, and scaled in backward: no product
    runs twice. Their rows are not scaled before, so that float16 holds them.
    """

    @staticmethod
    def forward(ctx: Any, products: Products, targets: Targets, length: int, *tensors: Tensor) -> Tensor:
        own = products.given(tensors)
        work = Pieces(own, ctx.needs_input_grad[3:])
        ctx.dtypes = [None if one is None else one.dtype for one in tensors]
        ctx.shapes = [None if one is None else one.shape for one in tensors]
        labels = targets.labels
        losses = torch.empty(labels.shape, dtype=own.dtype, device=labels.device)
        with torch.autocast(labels.device.type, enabled=False):
            for rows in spans(labels.shape[0], length):
                values, tape = work.piece(rows)
                losses[rows], gradient = targets.losses_(values, rows, work.needed)
                if work.needed:
                    work.take(rows, tape, gradient)
                del values, gradient, tape
        # no saved tensors: nothing brings them back sooner than it needs them
        ctx.gradients = work.gradients()
        return losses.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        gradients = ctx.gradients
        if gradients is None:
            raise LowtideError(
                "a second backward through a loss that lowtide.chunked_loss computed: its gradients were "
                "scaled in place by the first one. Call the first with retain_graph=True"
            )
        kept = keeps_graph()
        if not kept:
            ctx.gradients = None
        found: list[Tensor | None] = []
        for place, shape in enumerate(ctx.shapes):
            one, dtype = gradients[place], ctx.dtypes[place]
            if not kept:
                gradients[place] = None
            if one is not None:
                wide = one.to(torch.promote_types(one.dtype, dtype))
                one = (wide * grad if kept and wide is one else wide.mul_(grad)).to(dtype).view(shape)
                del wide
            found.append(one)
        return (None, None, None, *found)


def summed_loss(products: Products, targets: Targets, length: int) -> Tensor:
    """The sum over rows of cross entropy, in float32 or wider."""
    wide = products.widened()
    return SummedLoss.apply(wide.without_tensors(), targets, length, *wide.tensors())  # type: ignore


# ---- numbers of each row -------------------------------------------------------------------------


class RowNumbers(torch.autograd.Function):
    """Of each row the log of the sum of exponentials, the mean, and the elements at an index. Backward makes
    each piece again: how much a row's gradient counts is not known before.
    """

    @staticmethod
    def forward(
        ctx: Any, products: Products, index: Tensor | None, mean: bool, length: int, *tensors: Tensor
    ) -> Any:
        own = products.given(tensors)
        work = Pieces(own, [False] * len(tensors))
        count, device, dtype = own.rows.numel(), tensors[0].device, own.dtype
        totals = torch.empty(count, dtype=dtype, device=device)
        means = torch.empty_like(totals) if mean else None
        chosen = None if index is None else torch.empty(index.shape, dtype=dtype, device=device)
        with torch.autocast(device.type, enabled=False):
            for rows in spans(count, length):
                values, _ = work.piece(rows)
                if means is not None:
                    means[rows] = values.mean(-1)
                if chosen is not None and index is not None:
                    chosen[rows] = values.gather(-1, index[rows])
                largest = values.amax(-1)
                total = values.sub_(largest.unsqueeze(-1)).exp_().sum(-1)
                totals[rows] = total.log_().add_(largest)
        ctx.set_materialize_grads(False)
        ctx.products, ctx.length = products, length
        ctx.save_for_backward(totals, index, *tensors)
        return totals, means, chosen

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_total: Tensor | None, by_mean: Tensor | None, by_chosen: Tensor | None) -> Any:
        totals, index, *tensors = ctx.saved_tensors
        work = Pieces(ctx.products.given(tensors), ctx.needs_input_grad[4:])
        with torch.autocast(totals.device.type, enabled=False):
            for rows in spans(totals.shape[0], ctx.length):
                values, tape = work.piece(rows)
                if by_total is None:
                    values.zero_()
                else:
                    values.sub_(totals[rows].unsqueeze(-1)).exp_().mul_(by_total[rows].unsqueeze(-1))
                if by_mean is not None:
                    values.add_((by_mean[rows] / values.shape[-1]).unsqueeze(-1))
                if by_chosen is not None:
                    values.scatter_add_(-1, index[rows], by_chosen[rows])
                work.take(rows, tape, values)
                del values, tape
        return (None, None, None, None, *work.results(tensors))


def row_numbers(
    products: Products, length: int, index: Tensor | None = None, mean: bool = False
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Of each row the log of the sum of exponentials, the mean where it is asked for, and the elements at
    ``index`` (rows, any), in float32 or wider.
    """
    wide = products.widened()
    return RowNumbers.apply(wide.without_tensors(), index, mean, length, *wide.tensors())  # type: ignore


class _Dots(torch.autograd.Function):
    """The elements of a product at an index: of each row the product with those weights that it asks for."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, index: Tensor, dtype: torch.dtype,
        length: int,
    ) -> Tensor:  # fmt: skip
        wide = torch.promote_types(dtype, torch.float32)
        found = torch.empty(index.shape, dtype=dtype, device=hidden.device)
        for rows in spans(index.shape[0], length):
            chosen = weight[index[rows]].to(dtype).to(wide)
            made = (chosen * hidden[rows].to(dtype).to(wide).unsqueeze(1)).sum(-1)
            found[rows] = made if bias is None else made + bias[index[rows]].to(dtype)
        ctx.save_for_backward(hidden, weight, index)
        ctx.length, ctx.bias_dtype, ctx.wide = length, None if bias is None else bias.dtype, wide
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        hidden, weight, index = ctx.saved_tensors
        by_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        by_weight = torch.zeros_like(weight, dtype=ctx.wide) if ctx.needs_input_grad[1] else None
        by_bias = None
        if ctx.needs_input_grad[2]:
            by_bias = weight.new_zeros(weight.shape[0], dtype=ctx.wide)
            by_bias.index_add_(0, index.flatten(), grad.flatten().to(ctx.wide))
        for rows in spans(index.shape[0], ctx.length):
            part = grad[rows].to(ctx.wide).unsqueeze(-1)
            if by_hidden is not None:
                by_hidden[rows] = (part * weight[index[rows]]).sum(1).to(hidden.dtype)
            if by_weight is not None:
                by_row = part * hidden[rows].to(ctx.wide).unsqueeze(1)
                by_weight.index_add_(0, index[rows].flatten(), by_row.flatten(0, 1))
        return (
            by_hidden,
            None if by_weight is None else by_weight.to(weight.dtype),
            None if by_bias is None else by_bias.to(ctx.bias_dtype),
            None, None, None,
        )  # fmt: skip


def elements(products: Products, index: Tensor, length: int) -> Tensor:
    """The logits at ``index`` (rows, any). Where few are asked for, no product is made for it."""
    width = max(term.hidden.shape[-1] for term in products.terms)
    shared = any(term.shared is not None for term in products.terms)
    if shared or index.shape[-1] * width > products.width:
        return row_numbers(products, length, index)[2].to(products.dtype)  # type: ignore[union-attr]
    total = None
    with torch.autocast(index.device.type, enabled=False):
        for term in products.terms:
            rows = term.hidden.reshape(-1, term.hidden.shape[-1])
            made: Any = _Dots.apply(rows, term.weight, term.bias, index, term.dtype, length)
            made = _plainly(made, _at(term.steps, index))
            total = made if total is None else total + made
        assert total is not None
        return _plainly(total, _at(products.steps, index))


def _at(steps: Sequence[Step], index: Tensor) -> list[Step]:
    return [
        replace(step, by=step.by.flatten()[index]) if isinstance(step.by, Tensor) and step.by.dim() else step
        for step in steps
    ]


def row_by_row(products: Products, length: int, function: Callable[[Tensor], Any]) -> Any:
    """What a function of each row gives, without gradients."""
    with torch.no_grad(), torch.autocast(products.terms[0].hidden.device.type, enabled=False):
        work = Pieces(products, [False] * (3 * len(products.terms)))
        made = [function(work.piece(rows)[0]) for rows in spans(products.rows.numel(), length)]
        if isinstance(made[0], Tensor):
            return torch.cat(made)
        return type(made[0])(map(torch.cat, zip(*made, strict=True)))
