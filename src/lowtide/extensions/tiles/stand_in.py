"""A tensor that stands for logits which are not there.

The output layer returns it (`lowtide.extensions.tiles.loss`). A loss that is taken of it runs in pieces of
tokens: cross entropy, log-softmax with the labels' elements, log-sum-exp. Choosing rows, casts, scales and
soft caps only change what it stands for. Anything else gets the logits, made in one piece, and a warning says
where.
"""

from __future__ import annotations

import inspect
import math
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lowtide import private
from lowtide.errors import LowtideError
from lowtide.extensions.tiles.products import Pieces, Products, Step
from lowtide.extensions.tiles.rows import (
    CrossEntropy,
    Elements,
    LossRule,
    row_by_row,
    row_numbers,
    summed_loss,
)
from lowtide.private.hollow import hollow
from lowtide.run.messages import warn
from lowtide.trace.modules import calling_line
from lowtide.words import format_bytes


class _Make(torch.autograd.Function):
    """Gives a stand-in its history, for what takes it as any other tensor."""

    @staticmethod
    def forward(ctx: Any, made: Callable[[], Any], products: Products, axis: int, *_: Tensor) -> Any:
        ctx.products, ctx.axis = products, axis
        return made()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        own: Products = ctx.products.detached()
        work = Pieces(own, ctx.needs_input_grad[3:])
        rows = slice(0, own.rows.numel())
        tape = work.piece(rows)[1]
        work.take(rows, tape, grad.movedim(ctx.axis, -1).reshape(-1, own.width).clone())
        return (None, None, None, *work.results(own.tensors()))


class Logits(Tensor):
    """Logits that are not there.

    Attributes:
        products: what would make them.
        length: rows of a piece.
        axis: the dimension of the vocabulary.
        factor: where these are log-probabilities, what they are multiplied by; else ``None``.
        told: places that got logits in one piece, and were told so.
    """

    products: Products
    length: int
    axis: int
    factor: float | None
    told: set[str]
    _real: Tensor | None
    _written: bool
    _versions: tuple[int, ...]
    _family: list[weakref.ref[Logits]]
    _totals: Any

    @staticmethod
    def of(
        products: Products, length: int, told: set[str], axis: int | None = None, factor: float | None = None,
        family: list[weakref.ref[Logits]] | None = None,
    ) -> Logits:  # fmt: skip
        """A stand-in for these products.

        Args:
            products, length, told, axis, factor: its attributes; the vocabulary is the last dimension if no
                other is named.
            family: stand-ins that would share its memory.
        """
        shape = list(products.rows)
        axis = len(shape) if axis is None else axis
        shape.insert(axis, products.width)

        def made() -> Logits:
            return hollow(Logits, torch.Size(shape), products.dtype, products.device)

        one: Logits = _Make.apply(made, products, axis, *products.tensors())  # type: ignore[assignment]
        one.products, one.length, one.told, one.axis, one.factor = products, length, told, axis, factor
        one._real, one._written, one._totals = None, False, None
        one._versions = _versions(products)
        one._family = [] if family is None else family
        one._family.append(weakref.ref(one))
        return one

    @property
    def is_last(self) -> bool:
        """Whether the vocabulary is the last dimension."""
        return self.axis == len(self.products.rows)

    @property
    def is_plain(self) -> bool:
        """Whether these are logits that this process has, and the vocabulary is the last dimension."""
        return self.factor is None and self.is_last and not self.products.is_shared

    def derive(self, products: Products | None = None, **changes: Any) -> Logits:
        """Another stand-in that comes of this one. The vocabulary stays where it is."""
        self.check()
        given = {"axis": None if self.is_last else self.axis, "factor": self.factor, "family": self._family}
        return Logits.of(products or self.products, self.length, self.told, **given | changes)

    def check(self) -> None:
        """Refuse logits whose making was overwritten.

        Raises:
            LowtideError: it was.
        """
        if _versions(self.products) != self._versions:
            raise LowtideError(
                "these logits are made where they are used (lowtide.chunked_loss), and the weight of the "
                "output layer or its input was written since the model returned them: use them before the "
                "optimizer's step, or call handle.remove() before the model"
            )

    def real(self) -> Tensor:
        """The logits, in one piece."""
        if self._real is not None and self._written:
            return self._real
        self.check()
        if self._real is None or (torch.is_grad_enabled() and self._real.grad_fn is None):
            whole = self.products.whole()
            if self.factor is not None:
                whole = torch.log_softmax(whole, -1) * self.factor
            self._real = whole.movedim(-1, self.axis)
        return self._real

    def elements(self, index: Tensor) -> Tensor:
        """The logits at an index (rows, any)."""
        self.check()
        if index.shape[-1] == 1 and not self.products.is_shared:
            return self.products.at(index)  # no product of the whole for it
        return row_numbers(self.products, Elements(), index, self.length)[2].to(self.products.dtype)

    def losses(self, rule: LossRule, target: Tensor) -> Tensor:
        """The loss of each row against its target, by a rule, in float32 or wider."""
        self.check()
        return row_numbers(self.products, rule, target.reshape(-1), self.length)[1].view(target.shape)

    def totals(self) -> tuple[Tensor, Tensor]:
        """Of each row the log of the sum of exponentials, and the mean; computed once."""
        if self._totals is None or (torch.is_grad_enabled() and self._totals[0].grad_fn is None):
            self.check()
            no_index = torch.empty(self.products.rows.numel(), 0, dtype=torch.long, device=self.device)
            self._totals = row_numbers(self.products, Elements(), no_index, self.length)[:2]
        return self._totals

    def write(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Logits:
        """Write into the logits, which are there from then on.

        Raises:
            LowtideError: others would share the memory that is written.
        """
        if sum(other() is not None for other in self._family) > 1:
            raise LowtideError(
                f"{_name(function)} writes into logits of which other parts are in use, and none of them are "
                "there (lowtide.chunked_loss): write into logits.clone(), or call handle.remove() before the "
                "model"
            )
        if self._real is None:
            _tell(self, _name(function))
        real = self.real()
        _in_full(function, args, kwargs)
        self._real, self._written = real, True
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # pyright: ignore
        words = "logits" if self.factor is None else "log-probabilities"
        return f"<{words} of shape {tuple(self.shape)} that lowtide.chunked_loss did not make>"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _answer(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch.no_grad():
            return _in_full(func, args, kwargs or {})


def _versions(products: Products) -> tuple[int, ...]:
    return tuple(one._version for one in products.tensors() if one is not None)


# ---- what is done to it --------------------------------------------------------------------------


class _Whole(Exception):
    """A function needs the logits in one piece."""


def _need(condition: bool) -> None:
    if not condition:
        raise _Whole


def _answer(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a function of PyTorch gives for stand-ins among its arguments."""
    name = _name(function)
    if _asks_no_number(function, name):
        with private.without_torch_function():
            return function(*args, **kwargs)
    first = args[0] if args else kwargs.get("input")
    if name in _WRITES or (name.endswith("_") and not name.endswith("__")):
        if isinstance(first, Logits):
            return first.write(function, args, kwargs)
        return _in_full(function, args, kwargs)
    found = [one for one in private.tree_leaves((args, kwargs)) if isinstance(one, Logits)]
    try:
        _need(name in _ANSWERS and (isinstance(first, Logits) or name in _EITHER))
        _need(not any(one._written for one in found))
        signature, known = _ANSWERS[name]
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            raise _Whole from error
        return known(*args, **kwargs)
    except _Whole:
        return _in_full(function, args, kwargs)


def _in_full(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a function gives for the logits in one piece. A warning names the place, once."""
    for one in private.tree_leaves((args, kwargs)):
        if isinstance(one, Logits) and one._real is None:
            small = one.products.rows.numel() <= one.length
            if private.is_fake_mode_active():
                continue  # a trace, which makes none
            if not small or (torch.is_grad_enabled() and one.requires_grad):
                _tell(one, _name(function))
    args, kwargs = private.tree_map(lambda x: x.real() if isinstance(x, Logits) else x, (args, kwargs))
    return function(*args, **kwargs)


def _tell(one: Logits, name: str) -> None:
    place = calling_line({})
    if place in one.told:
        return
    one.told.add(place)
    size = format_bytes(one.numel() * one.itemsize)
    warn(
        f"{place or 'a call'} ({name}) needs the logits in one piece, {size}: lowtide.chunked_loss leaves "
        "them out where their loss is taken by cross_entropy, nll_loss, log_softmax and gather, or logsumexp"
    )


def _name(function: Any) -> str:
    name = getattr(function, "__name__", str(function))
    if name in ("__get__", "__set__", "__delete__"):
        own = getattr(function.__self__, "__name__", "")
        return own if name == "__get__" else f"{own}.{name}"
    return name


def _asks_no_number(function: Any, name: str) -> bool:
    """Whether a tensor answers this without its elements: all attributes but a few, and some methods."""
    if getattr(function, "__name__", "") == "__get__":
        return name not in _OF_NUMBERS
    return name in _OF_SHAPE or (name.startswith("is_") and name != "is_nonzero")


_OF_NUMBERS = {"", "data", "grad", "grad_fn", "T", "H", "mT", "mH", "real", "imag"}
"""Attributes of tensors that are tensors, or come of their history; and those that have no name."""

_OF_SHAPE = {
    "size", "dim", "ndimension", "numel", "nelement", "element_size", "get_device", "stride",
    "storage_offset", "type_str", "_is_zerotensor", "_is_view", "_has_symbolic_sizes_strides",
    "__hash__", "__len__", "__repr__", "__format__",
}  # fmt: skip

_WRITES = {
    "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__imod__", "__ipow__", "__iand__",
    "__ior__", "__ixor__", "__ilshift__", "__irshift__", "__setitem__", "__delitem__",
}  # fmt: skip
"""What writes into a tensor and does not end in an underscore."""

_EITHER = {"mul", "multiply", "__mul__", "__rmul__", "add", "__add__", "__radd__"}
"""Functions in which the stand-in may come second."""

_ANSWERS: dict[str, tuple[inspect.Signature, Callable[..., Any]]] = {}
"""What is known of functions of PyTorch, by their names. Each may raise `_Whole`."""


def _answers(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator: the answer for functions of these names."""

    def keep(function: Callable[..., Any]) -> Callable[..., Any]:
        _ANSWERS.update(dict.fromkeys(names, (inspect.signature(function), function)))
        return function

    return keep


# ---- rows ----------------------------------------------------------------------------------------


def _place(one: Logits, dim: Any) -> int:
    """Which dimension that is, from the first."""
    _need(isinstance(dim, int))
    return dim % one.dim()


def _arranges(name: str, dim_of: Callable[..., Any]) -> None:
    """A method that chooses or arranges rows is done to the hidden states.

    Args:
        name: of the method.
        dim_of: takes its arguments, and returns the dimension that may not be the vocabulary.
    """

    def answer(one: Logits, *args: Any, **kwargs: Any) -> Any:
        dims = one.dim() + (name == "unsqueeze")
        dim = dim_of(one, *args, **kwargs)
        _need(one.is_last and isinstance(dim, int) and dim % dims != dims - 1)
        made = one.products.of_rows(lambda hidden: getattr(hidden, name)(*args, **kwargs))
        parts = tuple(one.derive(products) for products in made)
        return parts if name in ("split", "chunk", "unbind") else parts[0]

    _ANSWERS[name] = inspect.signature(dim_of), answer


_arranges("flatten", lambda input, start_dim=0, end_dim=-1: end_dim)
_arranges("unsqueeze", lambda input, dim: dim)
_arranges("squeeze", lambda input, dim: dim)
_arranges("split", lambda tensor, split_size, dim=0: dim)
_arranges("chunk", lambda input, chunks, dim=0: dim)
_arranges("unbind", lambda input, dim=0: dim)
_arranges("narrow", lambda input, dim, start, length: dim)
_arranges("select", lambda input, dim, index: dim)


_answers("__iter__")(lambda self: iter(self.unbind(0)))


@_answers("view", "reshape")
def _view(input: Any, *shape: Any) -> Any:
    if len(shape) == 1 and isinstance(shape[0], (tuple, list, torch.Size)):
        shape = tuple(shape[0])
    _need(input.is_last and shape != () and all(isinstance(n, int) for n in shape))
    *rows, last = shape
    is_rest = last == -1 and -1 not in rows and math.prod(rows) == input.products.rows.numel()
    _need(last == input.products.width or is_rest)
    return input.derive(*input.products.of_rows(lambda hidden: hidden.reshape(*rows, hidden.shape[-1])))


@_answers("__getitem__")
def _getitem(self: Any, key: Any) -> Any:
    keys = key if isinstance(key, tuple) else (key,)
    *before, last = keys
    _need(self.is_last and last is not None and not any(isinstance(k, Logits) for k in keys))
    taken = [k for k in keys if k is not None and k is not Ellipsis]
    dims = sum(k.dim() if isinstance(k, Tensor) and k.dtype == torch.bool else 1 for k in taken)
    if dims <= self.axis and (last is Ellipsis or Ellipsis not in keys):
        return self.derive(*self.products.of_rows(lambda hidden: hidden[key]))
    # the last key is the vocabulary's
    _need(isinstance(last, slice) and not any(isinstance(k, Tensor) for k in before))
    (products,) = self.products.of_rows(lambda hidden: hidden[(*before, slice(None))])
    products = products if last == slice(None) else products.of_columns(last)
    _need(products is not None)
    return self.derive(products)


@_answers("permute")
def _permute(input: Any, *dims: Any) -> Any:
    if len(dims) == 1 and isinstance(dims[0], (tuple, list)):
        dims = tuple(dims[0])
    order = [_place(input, dim) for dim in dims]
    _need(sorted(order) == list(range(input.dim())))
    rows = [dim - (dim > input.axis) for dim in order if dim != input.axis]
    products = input.products
    if rows != sorted(rows):
        (products,) = products.of_rows(lambda hidden: hidden.permute(*rows, len(rows)))
    return input.derive(products, axis=order.index(input.axis))


@_answers("transpose", "swapaxes")
def _transpose(input: Any, dim0: int, dim1: int) -> Any:
    order = list(range(input.dim()))
    first, second = _place(input, dim0), _place(input, dim1)
    order[first], order[second] = order[second], order[first]
    return _permute(input, *order)


_answers("contiguous")(lambda input, memory_format=None: input)
_answers("clone")(lambda input, *, memory_format=None: input.derive(family=None))
_answers("detach")(lambda input: input.derive(input.products.detached()))


# ---- elements ------------------------------------------------------------------------------------


def _cast(one: Any, dtype: torch.dtype) -> Any:
    return one if dtype == one.dtype else _step(one, "cast", dtype)


_answers("float")(lambda self: _cast(self, torch.float32))
_answers("double")(lambda self: _cast(self, torch.float64))
_answers("half")(lambda self: _cast(self, torch.float16))
_answers("bfloat16")(lambda self: _cast(self, torch.bfloat16))


@_answers("to", "type_as")
def _to(self: Any, *args: Any, **kwargs: Any) -> Any:
    dtype, device = kwargs.get("dtype"), kwargs.get("device")
    for one in args:
        if isinstance(one, torch.dtype):
            dtype = one
        elif isinstance(one, Tensor):
            dtype, device = one.dtype, one.device
        elif isinstance(one, (str, torch.device)):
            device = one
    if device is not None:
        device = torch.device(device)
        _need(self.device.type == device.type and device.index in (None, self.device.index))
    return _cast(self, dtype or self.dtype)


_answers("cpu")(lambda self: _to(self, "cpu"))


def _step(one: Any, kind: Any, by: Any = None) -> Any:
    """One more operation on each element."""
    if one.factor is None:
        _need(kind != "cast" or by.is_floating_point)
        return one.derive(one.products.with_step(Step(kind, by)), family=None)
    _need(kind == "scale" and isinstance(by, (int, float)))
    made = one.derive(factor=one.factor * by, family=None)
    made._totals = one._totals
    return made


def _is_number(one: Any) -> bool:
    if isinstance(one, Tensor):
        return not one.dim() and not one.requires_grad and not isinstance(one, Logits)
    return isinstance(one, (int, float)) and not isinstance(one, bool)


@_answers("mul", "multiply", "__mul__", "__rmul__")
def _mul(input: Any, other: Any) -> Any:
    if _is_number(input):
        input, other = other, input
    _need(_is_number(other))
    return _step(input, "scale", other)


@_answers("div", "divide", "true_divide", "__truediv__", "__div__")
def _div(input: Any, other: Any, *, rounding_mode: Any = None) -> Any:
    _need(rounding_mode is None and _is_number(other) and (isinstance(other, Tensor) or other != 0))
    return _step(input, "scale", 1 / other)


_answers("neg", "negative", "__neg__")(lambda input: _step(input, "scale", -1))
_answers("tanh")(lambda input: _step(input, "tanh"))


@_answers("add", "__add__", "__radd__")
def _add(input: Any, other: Any, *, alpha: Any = 1) -> Any:
    if not isinstance(input, Logits):
        input, other = other, input
    _need(alpha == 1 and input.factor is None)
    if isinstance(other, Logits):
        _need(other.factor is None and input.is_last and other.is_last)
        products = input.products.plus(other.products)
        _need(products is not None)
        return input.derive(products, family=None)
    _need(_is_number(other) or _is_row(input, other))
    return _step(input, "add", other.flatten() if isinstance(other, Tensor) and other.dim() else other)


def _is_row(one: Logits, other: Any) -> bool:
    """Whether the tensor is one row, which is added to each."""
    return (
        one.is_last
        and isinstance(other, Tensor)
        and not other.requires_grad
        and other.shape[-1:] == (one.products.width,)
        and other.numel() == one.products.width
        and other.dim() <= one.dim()
        and other.is_floating_point()
    )


@_answers("sub", "subtract", "__sub__")
def _sub(input: Any, other: Any, *, alpha: Any = 1) -> Any:
    _need(alpha == 1 and isinstance(other, (int, float)) and not isinstance(other, bool))
    return _add(input, -other)


# ---- losses --------------------------------------------------------------------------------------


@_answers("log_softmax")
def _log_softmax(input: Any, dim: Any = None, _stacklevel: int = 3, dtype: torch.dtype | None = None) -> Any:
    _need(_place(input, dim) == input.axis and input.factor is None)
    return _cast(input, dtype or _wide_dtype(input)).derive(factor=1.0, family=None)


def _wide_dtype(one: Logits) -> torch.dtype:
    """The dtype that autocast gives what a loss makes."""
    if torch.is_autocast_enabled(one.device.type):
        return torch.promote_types(one.dtype, torch.float32)
    return one.dtype


@_answers("cross_entropy")
def _cross_entropy(
    input: Any, target: Any, weight: Any = None, size_average: Any = None, ignore_index: int = -100,
    reduce: Any = None, reduction: str = "mean", label_smoothing: float = 0.0,
) -> Any:  # fmt: skip
    _need(input.factor is None and size_average is None and reduce is None)
    return _loss(input, target, CrossEntropy(ignore_index, label_smoothing, weight), reduction)


@_answers("nll_loss", "nll_loss_nd")
def _nll_loss(
    input: Any, target: Any, weight: Any = None, size_average: Any = None, ignore_index: int = -100,
    reduce: Any = None, reduction: str = "mean",
) -> Any:  # fmt: skip
    _need(input.factor is not None and size_average is None and reduce is None)
    return _loss(input, target, CrossEntropy(ignore_index, 0.0, weight), reduction) * input.factor


def _loss(one: Logits, target: Any, rule: CrossEntropy, reduction: str) -> Any:
    rows = one.products.rows
    _need(isinstance(target, Tensor) and not isinstance(target, Logits) and not target.is_floating_point())
    _need(one.axis == min(1, len(rows)) and target.shape == rows and target.device == one.device)
    _need(reduction in ("mean", "sum", "none") and 0 <= rule.smoothing <= 1)
    _need(rule.weights is None or not (rule.smoothing or rule.weights.requires_grad))
    one.check()
    labels, dtype = target.reshape(-1), _wide_dtype(one)
    if reduction == "none":
        return one.losses(rule, target).to(dtype)
    total = summed_loss(one.products, rule, labels, one.length)
    if reduction == "mean":
        total = total / rule.factors(labels, total.dtype).sum()
    return total.to(dtype)


# ---- numbers of each row -------------------------------------------------------------------------


def _need_vocabulary(one: Logits, dim: Any) -> None:
    """That a function is about the last dimension, which is the vocabulary."""
    if isinstance(dim, (tuple, list)) and len(dim) == 1:
        dim = dim[0]
    _need(one.is_last and _place(one, dim) == one.axis)


def _shaped(one: Logits, numbers: Tensor, keepdim: bool) -> Tensor:
    """Numbers of the rows, (rows, any), in the shape of the rows."""
    shaped = numbers.view(*one.products.rows, numbers.shape[-1])
    return shaped if keepdim else shaped.squeeze(-1)


@_answers("logsumexp")
def _logsumexp(input: Any, dim: Any, keepdim: bool = False) -> Any:
    _need_vocabulary(input, dim)
    _need(input.factor is None)
    return _shaped(input, input.totals()[0].unsqueeze(-1), keepdim).to(_wide_dtype(input))


@_answers("sum")
def _sum(input: Any, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    _need_vocabulary(input, dim)
    log_sums, means = input.totals()
    total = means if input.factor is None else input.factor * (means - log_sums)
    sums = (total * input.products.width).unsqueeze(-1)
    return _shaped(input, sums, keepdim).to(dtype or input.dtype)


@_answers("gather")
def _gather(input: Any, dim: Any, index: Any, *, sparse_grad: bool = False) -> Any:
    _need_vocabulary(input, dim)
    _need(not isinstance(index, Logits) and index.dim() == input.dim())
    _need(index.shape[:-1] == input.products.rows)
    found = input.elements(index.reshape(-1, index.shape[-1]))
    if input.factor is not None:
        found = input.factor * (found - input.totals()[0].unsqueeze(-1))
    return found.view(index.shape).to(input.dtype)


_answers("take_along_dim")(lambda input, indices, dim=None: _gather(input, dim, indices))


@_answers("argmax")
def _argmax(input: Any, dim: Any = None, keepdim: bool = False) -> Any:
    _need((input.factor or 1) > 0)
    return _row_by_row(input, dim, keepdim, lambda piece: piece.argmax(-1, True))


@_answers("max")
def _max(input: Any, dim: Any, keepdim: bool = False) -> Any:
    _need(_has_no_gradient(input))
    return _row_by_row(input, dim, keepdim, lambda piece: piece.max(-1, True))


@_answers("topk")
def _topk(input: Any, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    _need(_has_no_gradient(input))
    return _row_by_row(input, dim, True, lambda piece: piece.topk(k, -1, largest, sorted))


def _has_no_gradient(one: Logits) -> bool:
    """Whether these are logits, of which no gradient is taken."""
    return one.factor is None and not (torch.is_grad_enabled() and one.requires_grad)


def _row_by_row(one: Logits, dim: Any, keepdim: bool, function: Callable[[Tensor], Any]) -> Any:
    """What a function gives of each row, (rows, any)."""
    _need_vocabulary(one, dim)
    one.check()
    found = row_by_row(one.products.detached(), one.length, function)
    if isinstance(found, Tensor):
        return _shaped(one, found, keepdim)
    return type(found)([_shaped(one, each, keepdim) for each in found])


# ---- gradients -----------------------------------------------------------------------------------


@_answers("grad_fn")
def _grad_fn(self: Any) -> Any:
    """The node that backward reaches: what is returned by a limited model is watched by it."""
    node = self.products.terms[0].hidden.grad_fn
    if node is not None:
        return node
    with private.without_torch_function():
        return self.grad_fn


_answers("grad")(lambda self: None if self._real is None else self._real.grad)


@_answers("register_hook")
def _register_hook(self: Any, hook: Any) -> Any:
    """A wrapper (FSDP2) asks to be called when backward begins, a user for the gradient."""
    place = str(getattr(getattr(hook, "func", hook), "__module__", ""))
    hidden = self.products.terms[0].hidden
    _need(place.partition(".")[0] in ("torch", "lowtide") and hidden.requires_grad)
    return hidden.register_hook(hook)
