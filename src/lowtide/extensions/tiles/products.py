"""Logits that are not there: the products that would make them, and the arithmetic of a piece of them.

In: hidden states and weights of the output layer. Out: pieces of the logits, and from the gradients of pieces
those of the hidden states and the weights. At most one piece exists at a time, forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True, slots=True)
class Step:
    """An operation on each element.

    Attributes:
        kind: what is done.
        by: the dtype, the factor, or what is added: a number, or a tensor that is added to every row.
    """

    kind: Literal["cast", "scale", "add", "tanh"]
    by: Any = None

    def __call__(self, values: Tensor, in_place: bool = False) -> Tensor:
        """The operation as PyTorch has it; a cast is never in place."""
        if self.kind == "cast":
            return values.to(self.by)
        name = {"tanh": "tanh", "scale": "mul", "add": "add"}[self.kind] + "_" * in_place
        return getattr(values, name)(*() if self.kind == "tanh" else (self.by,))

    @property
    def adds_row(self) -> bool:
        """Whether tokens of the vocabulary are treated differently."""
        return isinstance(self.by, Tensor) and self.by.dim() > 0

    def dtype_after(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of its result."""
        if self.kind == "cast":
            return self.by
        return torch.promote_types(dtype, self.by.dtype) if self.adds_row else dtype

    def at(self, index: Tensor) -> Step:
        """The same for some elements of each row."""
        return replace(self, by=self.by[index]) if self.adds_row else self


def _through(values: Tensor, steps: Sequence[Step]) -> Tensor:
    """Values through steps, as autograd can follow it."""
    for step in steps:
        values = step(values)
    return values


def _forward(values: Tensor, steps: Sequence[Step], tape: list[Any], held: bool) -> tuple[Tensor, bool]:
    """Values through steps, in place where nothing else needs them; whether the tape holds the result."""
    for step in steps:
        is_free = not held and step.dtype_after(values.dtype) == values.dtype
        made = step(values, is_free)
        held = step.kind == "tanh" or (held and made is values)
        tape.append(made if step.kind == "tanh" else values.dtype)
        values = made
    return values, held


def _backward(gradient: Tensor, steps: Sequence[Step], tape: list[Any]) -> Tensor:
    """The gradient by what went into `_forward`, whose tape is taken from its end."""
    for step in reversed(steps):
        known = tape.pop()
        if step.kind == "tanh":
            gradient = gradient.mul_(known.square_().neg_().add_(1))
            continue
        if step.kind == "scale":
            gradient = gradient.mul_(step.by)
        gradient = gradient.to(known)
    return gradient


class Shared(Protocol):
    """How ranks share the weight of an output layer whose logits every rank has."""

    width: int
    """The whole vocabulary."""

    def term(self, product: Product, needs: Sequence[bool]) -> Term:
        """The product, row by row."""
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

    @property
    def rows(self) -> Tensor:
        """The hidden states, row by row."""
        return self.hidden.reshape(-1, self.hidden.shape[-1])

    def whole(self) -> Tensor:
        """All of it, with its history."""
        if self.shared is not None:
            return _through(self.shared.whole(self.hidden), self.steps)
        bias = None if self.bias is None else self.bias.to(self.dtype)
        return _through(F.linear(self.hidden.to(self.dtype), self.weight.to(self.dtype), bias), self.steps)

    def at(self, index: Tensor) -> Tensor:
        """The elements at an index (rows, any), with their history: of each row the product with the weights
        that it asks for.
        """
        chosen = F.embedding(index, self.weight).to(self.dtype)
        made = torch.bmm(chosen, self.rows.to(self.dtype).unsqueeze(-1)).squeeze(-1)
        if self.bias is not None:
            made = made + self.bias[index].to(self.dtype)
        return _through(made, [step.at(index) for step in self.steps])


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
        made = [
            reduce(lambda dtype, step: step.dtype_after(dtype), one.steps, one.dtype) for one in self.terms
        ]
        return reduce(
            lambda dtype, step: step.dtype_after(dtype), self.steps, reduce(torch.promote_types, made)
        )

    @property
    def device(self) -> torch.device:
        """Of the logits."""
        return self.terms[0].hidden.device

    @property
    def rows(self) -> torch.Size:
        """The shape of the logits without the vocabulary."""
        return self.terms[0].hidden.shape[:-1]

    @property
    def width(self) -> int:
        """The vocabulary."""
        return self.terms[0].width

    @property
    def is_shared(self) -> bool:
        """Whether ranks share a weight."""
        return any(term.shared is not None for term in self.terms)

    def tensors(self) -> tuple[Tensor | None, ...]:
        """Hidden states, weight and bias of each product in turn."""
        return tuple(one for term in self.terms for one in (term.hidden, term.weight, term.bias))

    # ---- others that come of them --------------------------------------------------------------------

    def given(self, tensors: Sequence[Tensor | None]) -> Products:
        """The same products of other tensors, as `tensors` returns them."""
        threes = zip(self.terms, tensors[::3], tensors[1::3], tensors[2::3], strict=True)
        terms = tuple(replace(term, hidden=h, weight=w, bias=b) for term, h, w, b in threes)
        return replace(self, terms=terms)  # type: ignore[arg-type]

    def without_tensors(self) -> Products:
        """What these products are, without what they are made of: nothing is held by it."""
        return self.given([None] * (3 * len(self.terms)))

    def detached(self) -> Products:
        """The same without their history."""
        return self.given([None if one is None else one.detach() for one in self.tensors()])

    def of_rows(self, arrange: Callable[[Tensor], Any]) -> list[Products]:
        """Some rows, or the same rows in another shape; several if the function gives several tensors.

        Args:
            arrange: does to hidden states what is done to the logits.
        """
        made = [arrange(term.hidden) for term in self.terms]
        parts = zip(*[[one] if isinstance(one, Tensor) else one for one in made], strict=True)
        return [
            replace(
                self, terms=tuple(replace(term, hidden=h) for term, h in zip(self.terms, part, strict=True))
            )
            for part in parts
        ]

    def of_columns(self, columns: slice) -> Products | None:
        """A part of the vocabulary, or ``None`` where something is added to each row, or ranks share it."""
        steps = (*self.steps, *(step for term in self.terms for step in term.steps))
        if self.is_shared or any(step.adds_row for step in steps):
            return None
        tensors = self.tensors()
        part = [one if at % 3 == 0 or one is None else one[columns] for at, one in enumerate(tensors)]
        return self.given(part)

    def with_step(self, step: Step) -> Products:
        """Each element through one more operation."""
        first, *others = self.terms
        if others:
            return replace(self, steps=(*self.steps, step))
        return replace(self, terms=(replace(first, steps=(*first.steps, step)),))

    def widened(self) -> Products:
        """The same in float32 or wider."""
        dtype = torch.promote_types(self.dtype, torch.float32)
        return self if dtype == self.dtype else self.with_step(Step("cast", dtype))

    def plus(self, other: Products) -> Products | None:
        """The sum, or ``None`` where it is no sum of products."""
        if self.steps or other.steps or self.rows != other.rows or self.width != other.width:
            return None
        return Products((*self.terms, *other.terms))

    # ---- tensors that are made of them ---------------------------------------------------------------

    def whole(self) -> Tensor:
        """The logits, with their history."""
        with torch.autocast(self.device.type, enabled=False):
            return _through(reduce(torch.add, [term.whole() for term in self.terms]), self.steps)

    def at(self, index: Tensor) -> Tensor:
        """The logits at an index (rows, any), with their history."""
        with torch.autocast(self.device.type, enabled=False):
            total = reduce(torch.add, [term.at(index) for term in self.terms])
            return _through(total, [step.at(index) for step in self.steps])


# ---- pieces --------------------------------------------------------------------------------------

_ROWS = 1024
"""Rows of a piece where nobody says how many pieces there are: enough to keep a GPU busy, and few enough for
logits below the gradient of the output layer's weight, which is there anyway.
"""


def piece_length(rows: int, pieces: int | None) -> int:
    """How many rows a piece has; all but the last as many.

    >>> piece_length(10, 4), piece_length(100_000, None)
    (3, 1024)
    """
    return _ROWS if pieces is None else max(1, -(-rows // pieces))


def spans(rows: int, length: int) -> list[slice]:
    """The rows of each piece; without rows one piece that is empty.

    >>> spans(5, 3)
    [slice(0, 3, None), slice(3, 5, None)]
    """
    return [slice(at, min(at + length, rows)) for at in range(0, max(1, rows), max(1, length))]


class Pieces:
    """Makes pieces of logits, and takes the gradients of pieces back to what made them.

    Args:
        products: the logits.
        needs: for each of `Products.tensors` whether its gradient is needed; of none where it is left out.
        term: makes a product row by row, where this is not `Term` or what its ranks have for it.
    """

    def __init__(
        self, products: Products, needs: Sequence[bool] = (), term: Callable[..., Term] | None = None
    ) -> None:
        self.steps, self.needed = products.steps, any(needs)
        needs = needs or [False] * len(products.tensors())
        threes = zip(needs[::3], needs[1::3], needs[2::3], strict=True)
        self.terms = [
            (term or (Term if one.shared is None else one.shared.term))(one, own)
            for one, own in zip(products.terms, threes, strict=True)
        ]

    def piece(self, rows: slice) -> tuple[Tensor, list[Any]]:
        """A piece of the logits, whose memory is the caller's, and what `take` needs to know of it."""
        tape: list[Any] = []
        total, held = self.terms[0].piece(rows, tape)
        for term in self.terms[1:]:
            total, held = total + term.piece(rows, tape)[0], False
        total, held = _forward(total, self.steps, tape, held)
        return (total.clone() if held else total), tape

    def take(self, rows: slice, tape: list[Any], gradient: Tensor) -> None:
        """Add a piece's part of the gradients.

        Args:
            gradient: by the piece; it is overwritten.
        """
        gradient = _backward(gradient, self.steps, tape)
        for term in reversed(self.terms):
            own = gradient.clone() if len(self.terms) > 1 and term.product.steps else gradient
            term.take(rows, _backward(own, term.product.steps, tape))

    def results(self, tensors: Sequence[Tensor | None]) -> Iterator[Tensor | None]:
        """The gradients, each like the tensor that it is of."""
        for gradient, one in zip(self.gradients(), tensors, strict=True):
            yield None if gradient is None or one is None else gradient.to(one.dtype).view(one.shape)

    def gradients(self) -> list[Tensor | None]:
        """The gradients by `Products.tensors`, those of weights wider than the weights are."""
        return [one for term in self.terms for one in term.gradients()]


class Term:
    """A product, row by row, and the gradients of what makes it.

    Args:
        product: with at least the rows of its weight that count.
        needs: whether the gradients of hidden states, weight and bias are needed.
        own_rows: of the weight, without padding.
    """

    def __init__(self, product: Product, needs: Sequence[bool], own_rows: int | None = None) -> None:
        self.product, self.rows = product, product.rows
        dtype, wide = product.dtype, torch.promote_types(product.dtype, torch.float32)
        self.own_rows = product.weight.shape[0] if own_rows is None else own_rows
        self.weight = product.weight[: self.own_rows].to(dtype)
        self.bias = None if product.bias is None else product.bias.to(dtype)
        self.by_hidden = torch.empty_like(self.rows, dtype=dtype) if needs[0] else None
        self.by_weight = torch.zeros_like(product.weight, dtype=wide) if needs[1] else None
        self.by_bias = None
        if needs[2] and product.bias is not None:
            self.by_bias = torch.zeros_like(product.bias, dtype=wide)

    def inputs(self, rows: slice) -> Tensor:
        """What goes into the product."""
        return self.rows[rows].to(self.product.dtype)

    def logits(self, rows: slice) -> Tensor:
        """What comes out of it."""
        return F.linear(
            self.inputs(rows), self.weight, None if self.bias is None else self.bias[: self.own_rows]
        )

    def own(self, gradient: Tensor) -> Tensor:
        """Of a gradient by `logits` the part that is by the product."""
        return gradient

    def put(self, rows: slice, gradient: Tensor) -> None:
        """Keep the gradient of what went in."""
        assert self.by_hidden is not None
        self.by_hidden[rows] = gradient

    def gradients(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """By hidden states, weight and bias."""
        return self.by_hidden, self.by_weight, self.by_bias

    def piece(self, rows: slice, tape: list[Any]) -> tuple[Tensor, bool]:
        """Some rows behind their steps, and whether the tape holds them."""
        return _forward(self.logits(rows), self.product.steps, tape, False)

    def take(self, rows: slice, gradient: Tensor) -> None:
        """Add what the gradient of some rows gives."""
        if self.by_bias is not None:
            self.by_bias[: gradient.shape[-1]].add_(gradient.sum(0, dtype=self.by_bias.dtype))
        gradient = self.own(gradient.to(self.product.dtype))
        if self.by_hidden is not None:
            self.put(rows, gradient @ self.weight)
        if self.by_weight is None:
            return
        inputs = self.inputs(rows)
        if self.by_weight.dtype == self.product.dtype:
            self.by_weight[: self.own_rows].addmm_(gradient.t(), inputs)
            return
        for part in spans(self.own_rows, -(-self.own_rows // _PARTS)):  # no copy of the whole
            self.by_weight[part].add_(gradient[:, part].t() @ inputs)


_PARTS = 8
"""Parts of a low-precision weight whose gradients are added up in float32 one after another."""
