"""`chunked_loss`: a model whose output layer makes logits in pieces, where its loss is taken of them."""

from __future__ import annotations

import inspect
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from lowtide import private
from lowtide.errors import LowtideError, expect
from lowtide.extensions.tiles.products import Product, Products, piece_length
from lowtide.extensions.tiles.stand_in import Logits
from lowtide.run.messages import warn

_LABELS = ("labels", "shift_labels", "targets")
"""Arguments of a model that make it compute a loss."""


class ChunkedLoss:
    """The handle of a model whose loss is computed in pieces. `chunked_loss` returns it.

    Attributes:
        reference: calls without gradients and without labels return the stand-in, too.
        chosen: a limit has chosen the pieces (`lowtide.extensions.tiles.chosen`).
        told: places that got logits in one piece, and other things that were said once.
    """

    def __init__(self, pieces: int | None = None, reference: bool = False) -> None:
        self.pieces = pieces
        self.reference, self.chosen = reference, False
        self.told: set[str] = set()
        self._hooks: list[RemovableHandle] = []
        self._forwards: list[_Forward] = []
        self._calls = defaultdict[int, list[bool]](list)

    def __repr__(self) -> str:
        return f"<ChunkedLoss in {self.pieces or 'as many pieces as are needed'}>"

    @property
    def pieces(self) -> int | None:
        """In how many pieces the tokens go through the output layer, from the next call of the model on."""
        return self._pieces

    @pieces.setter
    def pieces(self, pieces: int | None) -> None:
        fits = pieces is None or (isinstance(pieces, int) and not isinstance(pieces, bool) and pieces > 0)
        expect(fits, "chunked_loss(pieces=)", pieces, "a whole number of at least 1, or None")
        self._pieces = pieces

    def remove(self) -> None:
        """Give the output layer its own forward back."""
        for hook in self._hooks:
            hook.remove()
        for forward in self._forwards:
            forward.remove()

    def place(self, layers: Iterable[torch.nn.Module]) -> bool:
        """Put a forward into each layer that has none; whether there is a layer."""
        found = list(layers)
        for layer in found:
            if _forward_of(layer) is None:
                layer.__dict__["forward"] = _Forward(layer, self)
                self._forwards.append(layer.__dict__["forward"])
        return bool(found)

    def follow(self, model: torch.nn.Module) -> None:
        """Look at each call of the model: whether it computes a loss."""
        self._hooks.append(model.register_forward_pre_hook(self._begins, with_kwargs=True))
        self._hooks.append(model.register_forward_hook(self._ends, always_call=True))

    def _begins(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            return
        self.place(_layers(model))
        given = dict(zip(inspect.signature(model.forward).parameters, args, strict=False)) | kwargs
        self.calls.append(any(given.get(name) is not None for name in _LABELS))

    def _ends(self, *_: Any) -> None:
        if not torch.compiler.is_compiling() and self.calls:
            self.calls.pop()

    @property
    def calls(self) -> list[bool]:
        """Of this thread's calls of the model, the innermost last, whether each computes a loss."""
        return self._calls[threading.get_ident()]

    def say(self, text: str) -> None:
        """Warn of it once."""
        if text not in self.told:
            self.told.add(text)
            warn(text)


class _Forward:
    """Takes the place of an output layer's forward. It is copied and pickled with the layer."""

    __name__ = "forward"

    def __init__(self, layer: torch.nn.Module, handle: ChunkedLoss) -> None:
        self.layer, self.handle = layer, handle
        self.earlier = layer.__dict__.get("forward")
        self.compared = type(layer).forward is torch.nn.Linear.forward or _is_parallel(layer)

    @property
    def own(self) -> Callable[..., Any]:
        """The layer's own forward."""
        if self.earlier is not None:
            return self.earlier
        return type(self.layer).forward.__get__(self.layer)

    def remove(self) -> None:
        """Give the layer its own forward back."""
        if _forward_of(self.layer) is not self:
            return
        del self.layer.__dict__["forward"]
        if self.earlier is not None:
            self.layer.__dict__["forward"] = self.earlier

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.own)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            _say_compiled()
            return self.own(*args, **kwargs)
        product = self.product(args[0]) if len(args) == 1 and not kwargs and self.stands_in(args[0]) else None
        if product is None:
            return self.own(*args, **kwargs)
        length = piece_length(product.hidden.shape[:-1].numel(), self.handle.pieces)
        return Logits.of(Products((product,)), length, self.handle.told)

    def product(self, hidden: Tensor) -> Product | None:
        """What makes the logits; ``None`` where the layer's output is no tensor."""
        weight: Any = self.layer.weight
        bias: Any = self.layer.bias
        dtype = torch.promote_types(hidden.dtype, weight.dtype)
        if torch.is_autocast_enabled(hidden.device.type):
            dtype = torch.get_autocast_dtype(hidden.device.type)
        if not _is_parallel(self.layer):
            return Product(hidden, weight, bias, dtype)
        from lowtide.extensions.tiles.shared import product_of

        return product_of(self.layer, self.earlier, hidden, dtype)

    def stands_in(self, hidden: Any) -> bool:
        """Whether logits that the layer would make of this are left out."""
        if not isinstance(hidden, Tensor) or isinstance(hidden, Logits):
            return False
        weight: Any = self.layer.weight
        calls = self.handle.calls
        learns = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
        if not learns and not (calls and calls[-1]) and not self.handle.reference:
            return False
        if private.may_shard() and private.is_unit(self.layer):
            self.handle.say(
                "lowtide.chunked_loss has no effect here: fully_shard around the output layer frees "
                "its weight before the loss is computed. Leave the layer to the unit of the whole model"
            )
            return False
        if private.is_transformed(fakes=False) or any(map(_is_shared, (hidden, weight))):
            self.handle.say(
                "lowtide.chunked_loss has no effect here: the output layer or its input is a DTensor, or "
                "functorch or a trace transforms the model"
            )
            return False
        if not self.compared:
            self.compare(hidden)
        return True

    @torch.no_grad()
    def compare(self, hidden: Tensor) -> None:
        """Compare a layer that has a forward of its own with a matrix product.

        Raises:
            LowtideError: it is another function.
        """
        row = hidden.detach().reshape(-1, hidden.shape[-1])[:1]
        bias: Any = self.layer.bias
        own = self.own(row)
        other = torch.nn.functional.linear(row, self.layer.weight, bias)  # type: ignore[arg-type]
        near = 1e-4 if own.dtype in (torch.float32, torch.float64) else 5e-2
        if own.shape != other.shape or not torch.allclose(own.float(), other.float(), near, near, True):
            raise LowtideError(
                f"the output layer, a {type(self.layer).__name__}, is no matrix product of its input and its "
                "weight: lowtide.chunked_loss cannot make its logits in pieces. Call remove() of its handle"
            )
        self.compared = True


@torch.compiler.assume_constant_result
def _say_compiled() -> bool:
    """Warn, when Dynamo traces the output layer."""
    warn(
        "lowtide.chunked_loss has no effect here: torch.compile is around the output layer. Compile the "
        "blocks of the model instead, and leave the output layer and the loss out"
    )
    return True


def _is_shared(tensor: Any) -> bool:
    return private.is_distributed(tensor) if private.may_shard() else False


def chunked_loss(
    model: torch.nn.Module, pieces: int | None = None, *, reference: bool = False
) -> ChunkedLoss:
    """Compute a model's loss in pieces of tokens, so that the logits of all tokens never exist.

    The output layer returns a tensor that stands for the logits. The loss function makes them: one piece of
    tokens after another, with the gradients of the piece. A loss that is one number (``cross_entropy`` with
    ``mean`` or ``sum``) runs no matrix product twice. A loss that gives each token a number of its own
    (``reduction="none"``, log-probabilities) makes the logits of a piece again in backward.

    The stand-in may be sliced, reshaped, cast, scaled, capped by ``tanh``, and added to a row or another
    stand-in. Any other use gets the logits in one piece, and a warning names its place. Calls without
    gradients and without labels (generation) return logits.

    Args:
        model: a model of transformers, bare, wrapped by peft or before DDP and FSDP2; a model of lowtide; or
            a module whose output layer is its attribute ``head``.
        pieces: in how many pieces the tokens are divided. More pieces take less memory, and smaller matrix
            products. ``None`` makes pieces of 1,024 tokens, at any length of the sequence.
        reference: calls without gradients and without labels return the stand-in, too: for the reference
            model of DPO, of whose ``logits`` log-probabilities are taken.

    Returns:
        A handle with the attribute ``pieces``, which may be set at any time, and the method ``remove()``.

    Raises:
        LowtideError: the model has no output layer that lowtide knows. When the model runs: its output layer
            is no matrix product of its input and its weight.

    Example:
        >>> class Model(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.head = torch.nn.Linear(8, 1000)
        ...     def forward(self, x, labels):
        ...         return torch.nn.functional.cross_entropy(self.head(x), labels)
        >>> model = Model()
        >>> handle = chunked_loss(model, pieces=4)
        >>> model(torch.randn(64, 8), torch.randint(1000, (64,))).backward()
        >>> handle.remove()
    """
    expect(isinstance(model, torch.nn.Module), "chunked_loss(model)", model, "a torch.nn.Module")
    handle = ChunkedLoss(pieces, reference)
    for earlier in set(_handles(model)):
        earlier.remove()
    if not handle.place(_layers(model)):
        kind, known = type(model).__name__, output_layer(model)
        why = (
            f"{kind} has no output layer that lowtide knows (get_output_embeddings() of transformers, or an "
            "attribute 'head'): give the module that has one"
        )
        if known is not None:
            why = (
                f"the output layer of {kind}, a {type(known).__name__}, is no linear layer, or something has "
                "replaced its forward, as lowtide.tile does: take that off first"
            )
        raise LowtideError(f"chunked_loss(model): {why}")
    handle.follow(model)
    return handle


def chunked_loss_of(model: torch.nn.Module) -> ChunkedLoss | None:
    """What computes a model's loss in pieces, where something does."""
    return next(_handles(model), None)


def in_pieces(layer: torch.nn.Module, pieces: int) -> torch.nn.Module:
    """The output layer, whose logits are made in pieces."""
    ChunkedLoss(pieces).place([layer])
    return layer


def logits_for_loss(layer: torch.nn.Module, hidden: Tensor) -> Tensor:
    """The logits of an output layer, or their stand-in also without gradients, for a loss."""
    forward = _forward_of(layer)
    if forward is None or torch.compiler.is_compiling():
        return layer(hidden)
    forward.handle.calls.append(True)
    try:
        return layer(hidden)
    finally:
        forward.handle.calls.pop()


def has_output_layer(model: torch.nn.Module) -> bool:
    """Whether `chunked_loss` knows the model's output layer."""
    return next(_layers(model), None) is not None


def output_layer(model: torch.nn.Module) -> torch.nn.Module | None:
    """What makes the model's logits."""
    head: Any = None
    if (find := getattr(model, "get_output_embeddings", None)) is not None:
        head = find()
    if head is None:
        head = getattr(model, "head", None)
    return head if isinstance(head, torch.nn.Module) else None


def _handles(model: torch.nn.Module) -> Iterator[ChunkedLoss]:
    return (forward.handle for forward in map(_forward_of, model.modules()) if forward is not None)


def _forward_of(layer: torch.nn.Module) -> _Forward | None:
    found = layer.__dict__.get("forward")
    return found if isinstance(found, _Forward) else None


def _layers(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The linear layers that make logits: the output layer, or those inside it (of adapters)."""
    head = output_layer(model)
    if head is None:
        return
    linear: list[Any] = [
        one for one in head.modules() if isinstance(one, torch.nn.Linear) or _is_parallel(one)
    ]
    most = max((one.weight.shape[0] for one in linear), default=0)
    for one in linear:
        own = one.__dict__.get("forward")
        if one.weight.shape[0] == most and (own is None or isinstance(own, _Forward) or _is_parallel(one)):
            yield one


def _is_parallel(layer: torch.nn.Module) -> bool:
    """Whether this is a column-parallel layer of `lowtide.parallel`, which may not be loaded."""
    layers: Any = sys.modules.get("lowtide.parallel.layers")
    return layers is not None and isinstance(layer, layers.ColumnParallelLinear)
