"""A tensor that stands for logits which are not there.

The output layer returns it (`lowtide.extensions.tiles.loss`). A loss that is taken of it runs in pieces of
tokens: cross entropy, log-softmax with the labels' elements, log-sum-exp. Choosing rows, casts, scales and
soft caps only change what it stands for. Anything else gets the logits, made in one piece, and a warning says
where.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lowtide import private
from lowtide.errors import LowtideError
from lowtide.extensions.tiles.products import (
    Pieces,
    Products,
    Step,
    Targets,
    elements,
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
        dtype, device = products.dtype, products.terms[0].hidden.device

        def made() -> Logits:
            return hollow(Logits, torch.Size(shape), dtype, device)

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

    def totals(self) -> tuple[Tensor, Tensor]:
        """Of each row the log of the sum of exponentials, and the mean; computed once."""
        if self._totals is None or (torch.is_grad_enabled() and self._totals[0].grad_fn is None):
            self.check()
            self._totals = row_numbers(self.products, self.length, mean=True)[:2]
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
        in_full(function, args, kwargs)
        self._real, self._written = real, True
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # pyright: ignore
        words = "logits" if self.factor is None else "log-probabilities"
        return f"<{words} of shape {tuple(self.shape)} that lowtide.chunked_loss did not make>"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return answer(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch.no_grad():
            return in_full(func, args, kwargs or {})


def _versions(products: Products) -> tuple[int, ...]:
    return tuple(one._version for one in products.tensors() if one is not None)


# ---- what is done to it --------------------------------------------------------------------------


def answer(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a function of PyTorch gives for stand-ins among its arguments."""
    name = _name(function)
    if name in _METADATA:
        with private.without_torch_function():
            return function(*args, **kwargs)
    first = args[0] if args else None
    if (name.endswith("_") and not name.endswith("__")) or name in _WRITES:
        if isinstance(first, Logits):
            return first.write(function, args, kwargs)
        return in_full(function, args, kwargs)
    found = [one for one in private.tree_leaves((args, kwargs)) if isinstance(one, Logits)]
    known = _ANSWERS.get(name)
    mine = name in _EITHER or isinstance(first if args else kwargs.get("input"), Logits)
    if known is not None and mine and not any(one._written for one in found):
        try:
            _SIGNATURES[name].bind(*args, **kwargs)
        except TypeError:
            return in_full(function, args, kwargs)
        result = known(*args, **kwargs)
        if result is not NotImplemented:
            return result
    return in_full(function, args, kwargs)


def in_full(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a function gives for the logits in one piece. A warning names the place, once."""
    for one in private.tree_leaves((args, kwargs)):
        if isinstance(one, Logits) and one._real is None:
            small = one.products.rows.numel() <= one.length
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


_METADATA = {
    "shape", "dtype", "device", "requires_grad", "layout", "ndim", "names", "is_leaf", "itemsize", "nbytes",
    "is_cuda", "is_cpu", "is_meta", "is_sparse", "is_sparse_csr", "is_quantized", "is_nested", "is_mkldnn",
    "is_mps", "is_xpu", "is_mtia", "is_xla", "is_ipu", "is_maia", "is_vulkan", "output_nr", "_version",
    "_base", "_backward_hooks", "retains_grad", "size", "dim", "ndimension", "numel", "nelement",
    "is_floating_point", "is_complex", "is_signed", "is_inference", "is_contiguous", "element_size",
    "get_device", "is_same_size", "stride", "storage_offset", "is_conj", "is_neg", "_is_zerotensor",
    "_is_view", "__hash__", "__len__", "__repr__", "__format__", "name", "is_shared", "is_pinned",
    "is_distributed", "type_str", "_has_symbolic_sizes_strides",
}  # fmt: skip
"""What is asked of a tensor without looking at its numbers."""

_WRITES = {
    "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__imod__", "__ipow__", "__iand__",
    "__ior__", "__ixor__", "__ilshift__", "__irshift__", "__setitem__", "__delitem__",
}  # fmt: skip
"""What writes into a tensor and does not end in an underscore."""


def _dim(one: Logits, dim: int) -> int:
    return dim % (len(one.products.rows) + 1)


def _parts(one: Logits, function: Callable[[Tensor], Any]) -> tuple[Logits, ...]:
    """The stand-ins of several parts of the rows."""
    each = [function(term.hidden) for term in one.products.terms]
    return tuple(one.derive(one.products.given_hidden(part), axis=None) for part in zip(*each, strict=True))


def _rows(one: Logits, choose: Callable[[Tensor], Tensor]) -> Logits:
    return one.derive(one.products.of_rows(choose), axis=None)


def _view(self: Any, *shape: Any) -> Any:
    if len(shape) == 1 and isinstance(shape[0], (tuple, list, torch.Size)):
        shape = tuple(shape[0])
    if not isinstance(self, Logits) or not self.is_last or not all(isinstance(n, int) for n in shape):
        return NotImplemented
    width, rows = self.products.width, self.products.rows.numel()
    if not shape or shape[-1] not in (width, -1):
        return NotImplemented
    if shape[-1] == -1 and (-1 in shape[:-1] or _product(shape[:-1]) != rows):
        return NotImplemented
    return _rows(self, lambda hidden: hidden.reshape(*shape[:-1], hidden.shape[-1]))


def _product(numbers: Any) -> int:
    total = 1
    for number in numbers:
        total *= number
    return total


def _reshape(input: Any, *shape: Any) -> Any:
    return _view(input, *shape)


def _flatten(input: Any, start_dim: int = 0, end_dim: int = -1) -> Any:
    start, end = _dim(input, start_dim), _dim(input, end_dim)
    if not input.is_last or end == input.axis:
        return NotImplemented
    return _rows(input, lambda hidden: hidden.flatten(start, end))


def _unsqueeze(input: Any, dim: int) -> Any:
    place = dim % (len(input.products.rows) + 2)
    if not input.is_last or place > input.axis:
        return NotImplemented
    return _rows(input, lambda hidden: hidden.unsqueeze(place))


def _squeeze(input: Any, dim: int) -> Any:
    place = _dim(input, dim)
    if not input.is_last or place == input.axis:
        return NotImplemented
    return _rows(input, lambda hidden: hidden.squeeze(place))


def _itself(input: Any, memory_format: Any = None) -> Any:
    return input


def _clone(input: Any, *, memory_format: Any = None) -> Any:
    return input.derive(family=None)


def _detach(input: Any) -> Any:
    return input.derive(input.products.detached())


def _getitem(self: Any, key: Any) -> Any:
    if not isinstance(self, Logits) or not self.is_last:
        return NotImplemented
    keys = list(key) if isinstance(key, tuple) else [key]
    if any(isinstance(k, Logits) for k in keys):
        return NotImplemented
    taken = [k for k in keys if k is not None and k is not Ellipsis]
    dims = sum(k.dim() if isinstance(k, Tensor) and k.dtype == torch.bool else 1 for k in taken)
    if dims < self.axis + 1 and not (Ellipsis in keys and keys[-1] is not Ellipsis and taken):
        return _rows(self, lambda hidden: hidden[key]) if keys[-1] is not None else NotImplemented
    # the last key is the vocabulary's
    if not isinstance(keys[-1], slice) or any(isinstance(k, Tensor) for k in keys[:-1]):
        return NotImplemented
    columns = keys[-1]
    products = self.products.of_rows(lambda hidden: hidden[(*keys[:-1], slice(None))])
    if columns != slice(None):
        products = products.of_columns(columns)
    return NotImplemented if products is None else self.derive(products, axis=None)


def _split(tensor: Any, split_size: Any, dim: int = 0) -> Any:
    place = _dim(tensor, dim)
    if not tensor.is_last or place == tensor.axis:
        return NotImplemented
    return _parts(tensor, lambda hidden: hidden.split(split_size, place))


def _chunk(input: Any, chunks: int, dim: int = 0) -> Any:
    place = _dim(input, dim)
    if not input.is_last or place == input.axis:
        return NotImplemented
    return _parts(input, lambda hidden: hidden.chunk(chunks, place))


def _unbind(input: Any, dim: int = 0) -> Any:
    place = _dim(input, dim)
    if not input.is_last or place == input.axis:
        return NotImplemented
    return _parts(input, lambda hidden: hidden.unbind(place))


def _iter(self: Any) -> Any:
    parts = _unbind(self)
    return parts if parts is NotImplemented else iter(parts)


def _narrow(input: Any, dim: int, start: int, length: int) -> Any:
    place = _dim(input, dim)
    if not input.is_last or place == input.axis:
        return NotImplemented
    return _rows(input, lambda hidden: hidden.narrow(place, start, length))


def _select(input: Any, dim: int, index: int) -> Any:
    place = _dim(input, dim)
    if not input.is_last or place == input.axis:
        return NotImplemented
    return _rows(input, lambda hidden: hidden.select(place, index))


def _permute(input: Any, *dims: Any) -> Any:
    if len(dims) == 1 and isinstance(dims[0], (tuple, list)):
        dims = tuple(dims[0])
    order = [_dim(input, dim) for dim in dims]
    if sorted(order) != list(range(len(order))) or len(order) != len(input.products.rows) + 1:
        return NotImplemented
    rows = [dim - (dim > input.axis) for dim in order if dim != input.axis]
    products = input.products
    if rows != sorted(rows):
        products = products.of_rows(lambda hidden: hidden.permute(*rows, len(rows)))
    return input.derive(products, axis=order.index(input.axis))


def _transpose(input: Any, dim0: int, dim1: int) -> Any:
    order = list(range(len(input.products.rows) + 1))
    first, second = _dim(input, dim0), _dim(input, dim1)
    order[first], order[second] = order[second], order[first]
    return _permute(input, *order)


def _to(self: Any, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(self, Logits):
        return NotImplemented
    dtype, device = kwargs.get("dtype"), kwargs.get("device")
    for one in args:
        if isinstance(one, torch.dtype):
            dtype = one
        elif isinstance(one, Tensor):
            dtype, device = one.dtype, one.device
        elif isinstance(one, (str, torch.device)):
            device = one
    if device is not None and not _is_here(self, torch.device(device)):
        return NotImplemented
    return _cast(self, dtype or self.dtype)


def _is_here(one: Logits, device: torch.device) -> bool:
    return one.device.type == device.type and device.index in (None, one.device.index)


def _cast(one: Any, dtype: torch.dtype) -> Any:
    if dtype == one.dtype:
        return one
    if not dtype.is_floating_point or one.factor is not None:
        return NotImplemented
    return one.derive(one.products.with_step(Step("cast", dtype)), family=None)


def _type_as(self: Any, other: Any) -> Any:
    return _to(self, other)


def _is_number(one: Any) -> bool:
    if isinstance(one, Tensor):
        return not one.dim() and not one.requires_grad and not isinstance(one, Logits)
    return isinstance(one, (int, float)) and not isinstance(one, bool)


def _step(one: Any, kind: str, by: Any = None) -> Any:
    if not isinstance(one, Logits):
        return NotImplemented
    if one.factor is not None:
        if kind not in ("multiply", "divide") or not isinstance(by, (int, float)):
            return NotImplemented
        factor = one.factor * by if kind == "multiply" else one.factor / by
        made = one.derive(factor=factor, family=None)
        made._totals = one._totals
        return made
    return one.derive(one.products.with_step(Step(kind, by)), family=None)


def _mul(input: Any, other: Any) -> Any:
    if _is_number(input):
        input, other = other, input
    return _step(input, "multiply", other) if _is_number(other) else NotImplemented


def _div(input: Any, other: Any, *, rounding_mode: Any = None) -> Any:
    if rounding_mode is not None or not _is_number(other):
        return NotImplemented
    return _step(input, "divide", other)


def _neg(input: Any) -> Any:
    return _step(input, "multiply", -1)


def _tanh(input: Any) -> Any:
    return _step(input, "tanh")


def _add(input: Any, other: Any, *, alpha: Any = 1) -> Any:
    if alpha != 1:
        return NotImplemented
    if not isinstance(input, Logits):
        input, other = other, input
    if isinstance(other, Logits):
        if input.factor is not None or other.factor is not None or not (input.is_last and other.is_last):
            return NotImplemented
        products = input.products.plus(other.products)
        return NotImplemented if products is None else input.derive(products, family=None)
    if input.factor is None and (_is_number(other) or _is_row(input, other)):
        return _step(input, "add", other.flatten() if isinstance(other, Tensor) and other.dim() else other)
    return NotImplemented


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


def _sub(input: Any, other: Any, *, alpha: Any = 1) -> Any:
    if alpha != 1 or not isinstance(other, (int, float)) or isinstance(other, bool):
        return NotImplemented
    return _add(input, -other)


def _log_softmax(input: Any, dim: Any = None, _stacklevel: int = 3, dtype: torch.dtype | None = None) -> Any:
    if dim is None or _dim(input, dim) != input.axis or input.factor is not None:
        return NotImplemented
    dtype = dtype or _wide_dtype(input)
    made = _cast(input, dtype)
    return made if made is NotImplemented else made.derive(factor=1.0, family=None)


def _wide_dtype(one: Logits) -> torch.dtype:
    """The dtype that autocast gives what a loss makes."""
    if torch.is_autocast_enabled(one.device.type):
        return torch.promote_types(one.dtype, torch.float32)
    return one.dtype


def _targets(one: Logits, target: Any) -> Tensor | None:
    """The labels row by row, where that is what a loss of PyTorch takes them for."""
    rows = one.products.rows
    axis = min(1, len(rows))
    if one.axis != axis or not isinstance(target, Tensor) or isinstance(target, Logits):
        return None
    if target.is_floating_point() or target.shape != rows or target.device != one.device:
        return None
    return target.reshape(-1)


def _cross_entropy(
    input: Any, target: Any, weight: Any = None, size_average: Any = None, ignore_index: int = -100,
    reduce: Any = None, reduction: str = "mean", label_smoothing: float = 0.0,
) -> Any:  # fmt: skip
    if not isinstance(input, Logits) or input.factor is not None:
        return NotImplemented
    return _loss(input, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing)


def _nll_loss(
    input: Any, target: Any, weight: Any = None, size_average: Any = None, ignore_index: int = -100,
    reduce: Any = None, reduction: str = "mean",
) -> Any:  # fmt: skip
    if not isinstance(input, Logits) or input.factor is None:
        return NotImplemented
    loss = _loss(input, target, weight, size_average, ignore_index, reduce, reduction, 0.0)
    return loss if loss is NotImplemented else loss * input.factor


def _loss(
    one: Logits, target: Any, weights: Any, size_average: Any, ignore_index: int, reduce: Any, reduction: str,
    smoothing: float,
) -> Any:  # fmt: skip
    labels = _targets(one, target)
    odd = size_average is not None or reduce is not None or not 0 <= smoothing <= 1
    if labels is None or odd or reduction not in ("mean", "sum", "none"):
        return NotImplemented
    if weights is not None and (smoothing or weights.requires_grad):
        return NotImplemented
    one.check()
    targets, dtype = Targets(labels, ignore_index, smoothing, weights), _wide_dtype(one)
    wide = torch.promote_types(dtype, torch.float32)
    everything = slice(0, labels.shape[0])
    if reduction != "none":
        total = summed_loss(one.products, targets, one.length)
        if reduction == "mean":
            total = total / targets.factors(everything, wide).sum()
        return total.to(dtype)
    index = labels.masked_fill(labels == ignore_index, 0).unsqueeze(-1)
    sums, mean, chosen = row_numbers(one.products, one.length, index, bool(smoothing))
    assert chosen is not None
    losses = sums - (1 - smoothing) * chosen.squeeze(-1)
    if mean is not None:
        losses = losses - smoothing * mean
    losses = (losses * targets.factors(everything, wide)).masked_fill(labels == ignore_index, 0)
    return losses.to(dtype).view(target.shape)


def _parallel_cross_entropy(
    vocab_parallel_logits: Any, target: Any, label_smoothing: float = 0.0, *, ignore_index: int = -100,
    vocabulary: int | None = None, tensor_model_parallel_group: Any = None,
) -> Any:  # fmt: skip
    """`lowtide.parallel.parallel_cross_entropy`."""
    from lowtide.extensions.tiles.shared import row_losses
    from lowtide.parallel.groups import tensor_group
    from lowtide.parallel.loss import Vocabulary

    one: Logits = vocab_parallel_logits
    products = one.products
    if one.factor is not None or not one.is_last or target.shape != products.rows:
        return NotImplemented
    if any(term.shared is not None for term in products.terms):
        return NotImplemented
    one.check()
    group = tensor_group(tensor_model_parallel_group)
    part = Vocabulary(group, products.width, vocabulary, label_smoothing, ignore_index)
    part.check(target)
    return row_losses(products, target, part, one.length)


def _reduces_vocabulary(one: Logits, dim: Any) -> bool:
    dims = dim if isinstance(dim, (tuple, list)) else [dim]
    return len(dims) == 1 and isinstance(dims[0], int) and _dim(one, dims[0]) == one.axis and one.is_last


def _shaped(one: Logits, numbers: Tensor, keepdim: bool | None) -> Tensor:
    """Numbers of the rows in their shape; of ``None`` several each."""
    if keepdim is None:
        return numbers.view(*one.products.rows, numbers.shape[-1])
    shaped = numbers.view(one.products.rows)
    return shaped.unsqueeze(-1) if keepdim else shaped


def _logsumexp(input: Any, dim: Any, keepdim: bool = False) -> Any:
    if not _reduces_vocabulary(input, dim) or input.factor is not None:
        return NotImplemented
    input.check()
    numbers = row_numbers(input.products, input.length)[0]
    return _shaped(input, numbers, keepdim).to(_wide_dtype(input))


def _sum(input: Any, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    if not _reduces_vocabulary(input, dim):
        return NotImplemented
    sums, mean = input.totals()
    total = mean if input.factor is None else input.factor * (mean - sums)
    return _shaped(input, total * input.products.width, keepdim).to(dtype or input.dtype)


def _gather(input: Any, dim: Any, index: Any, *, sparse_grad: bool = False) -> Any:
    if not isinstance(input, Logits) or not _reduces_vocabulary(input, dim) or isinstance(index, Logits):
        return NotImplemented
    rows = input.products.rows
    if index.shape[:-1] != rows or index.dim() != len(rows) + 1:
        return NotImplemented
    input.check()
    found = elements(input.products, index.reshape(-1, index.shape[-1]), input.length)
    if input.factor is not None:
        found = input.factor * (found - input.totals()[0].unsqueeze(-1))
    return found.view(index.shape).to(input.dtype)


def _take_along_dim(input: Any, indices: Any, dim: Any = None) -> Any:
    return NotImplemented if dim is None else _gather(input, dim, indices)


def _argmax(input: Any, dim: Any = None, keepdim: bool = False) -> Any:
    if dim is None or not _reduces_vocabulary(input, dim) or (input.factor or 1) <= 0:
        return NotImplemented
    input.check()
    found = row_by_row(input.products.detached(), input.length, lambda piece: piece.argmax(-1))
    return _shaped(input, found, keepdim)


def _without_gradients(input: Any, dim: Any, function: Callable[[Tensor], Any], keepdim: bool | None) -> Any:
    learns = torch.is_grad_enabled() and input.requires_grad
    if learns or input.factor is not None or not _reduces_vocabulary(input, dim):
        return NotImplemented
    input.check()
    found = row_by_row(input.products.detached(), input.length, function)
    if isinstance(found, Tensor):
        return _shaped(input, found, keepdim)
    return type(found)([_shaped(input, one, keepdim) for one in found])


def _max(input: Any, dim: Any, keepdim: bool = False) -> Any:
    return _without_gradients(input, dim, lambda piece: piece.max(-1), keepdim)


def _amax(input: Any, dim: Any, keepdim: bool = False) -> Any:
    return _without_gradients(input, dim, lambda piece: piece.amax(-1), keepdim)


def _topk(input: Any, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    return _without_gradients(input, dim, lambda piece: piece.topk(k, -1, largest, sorted), None)


def _grad_fn(self: Any) -> Any:
    """The node that backward reaches: what is returned by a limited model is watched by it."""
    node = self.products.terms[0].hidden.grad_fn
    if node is not None:
        return node
    with private.without_torch_function():
        return self.grad_fn


def _grad(self: Any) -> Any:
    return None if self._real is None else self._real.grad


def _register_hook(self: Any, hook: Any) -> Any:
    """A wrapper (FSDP2) asks to be called when backward begins, a user for the gradient."""
    place = str(getattr(getattr(hook, "func", hook), "__module__", ""))
    hidden = self.products.terms[0].hidden
    if place.partition(".")[0] not in ("torch", "lowtide") or not hidden.requires_grad:
        return NotImplemented
    return hidden.register_hook(hook)


_ANSWERS: dict[str, Callable[..., Any]] = {
    "view": _view, "reshape": _reshape, "flatten": _flatten, "unsqueeze": _unsqueeze, "squeeze": _squeeze,
    "contiguous": _itself, "clone": _clone, "detach": _detach, "__getitem__": _getitem, "split": _split,
    "chunk": _chunk, "unbind": _unbind, "__iter__": _iter, "narrow": _narrow, "select": _select,
    "permute": _permute, "transpose": _transpose, "swapaxes": _transpose,
    "to": _to, "type_as": _type_as,
    "float": lambda self: _cast(self, torch.float32), "double": lambda self: _cast(self, torch.float64),
    "half": lambda self: _cast(self, torch.float16), "bfloat16": lambda self: _cast(self, torch.bfloat16),
    "cpu": lambda self: _to(self, "cpu"),
    "mul": _mul, "multiply": _mul, "__mul__": _mul, "__rmul__": _mul, "div": _div, "divide": _div,
    "true_divide": _div, "__truediv__": _div, "__div__": _div, "neg": _neg, "negative": _neg,
    "__neg__": _neg, "tanh": _tanh, "add": _add, "__add__": _add, "__radd__": _add, "sub": _sub,
    "subtract": _sub, "__sub__": _sub,
    "log_softmax": _log_softmax, "cross_entropy": _cross_entropy, "nll_loss": _nll_loss,
    "nll_loss_nd": _nll_loss, "parallel_cross_entropy": _parallel_cross_entropy,
    "logsumexp": _logsumexp, "sum": _sum, "gather": _gather,
    "take_along_dim": _take_along_dim, "argmax": _argmax, "max": _max, "amax": _amax, "topk": _topk,
    "grad_fn": _grad_fn, "grad": _grad, "register_hook": _register_hook,
}  # fmt: skip
"""What is known of functions of PyTorch, by their names. Each may return ``NotImplemented``."""

_EITHER = {"mul", "multiply", "__mul__", "__rmul__", "add", "__add__", "__radd__"}
"""Functions in which the stand-in may come second."""

_SIGNATURES = {name: inspect.signature(function) for name, function in _ANSWERS.items()}
