"""`chunked_loss`: a model whose output layer makes logits in pieces, where its loss is taken of them."""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from lowtide import private
from lowtide.errors import LowtideError, expect
from lowtide.extensions.tiles.products import Product, Products
from lowtide.extensions.tiles.stand_in import Logits
from lowtide.run.messages import warn

_LABELS = ("labels", "shift_labels", "targets")
"""Arguments of a model that make it compute a loss."""


class _Settings:
    """What the output layers of a model share.

    Attributes:
        pieces: in how many the tokens are divided.
        told: places that got logits in one piece, and other things that were said once.
        reference: calls without gradients and without labels return the stand-in, too.
        hooks: of the model. A copied model's settings have those of the copy.
        chosen: as of `ChunkedLoss`.
        calls: of the model that are under way on each thread: whether each computes a loss.
    """

    def __init__(self, pieces: int, reference: bool = False) -> None:
        self.__setstate__({"pieces": pieces, "reference": reference, "hooks": (), "chosen": False})

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("pieces", "reference", "hooks", "chosen")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.pieces: int = state["pieces"]
        self.reference: bool = state["reference"]
        self.chosen: bool = state["chosen"]
        self.hooks: tuple[RemovableHandle, ...] = state["hooks"]
        self.told: set[str] = set()
        self.calls = threading.local()

    def under_way(self) -> list[bool]:
        """Of this thread's calls of the model, the innermost last, whether each computes a loss."""
        found: list[bool] = self.calls.__dict__.setdefault("found", [])
        return found

    def say(self, text: str) -> None:
        """Warn of it once."""
        if text not in self.told:
            self.told.add(text)
            warn(text)


class _Forward:
    """Takes the place of an output layer's forward. It is copied and pickled with the layer."""

    __name__ = "forward"

    def __init__(self, layer: torch.nn.Module, settings: _Settings) -> None:
        self.layer, self.settings = layer, settings
        self.earlier = layer.__dict__.get("forward")
        self.compared = type(layer).forward is torch.nn.Linear.forward or _is_parallel(layer)

    @property
    def pieces(self) -> int:
        """In how many pieces the tokens are divided."""
        return self.settings.pieces

    @property
    def own(self) -> Callable[..., Any]:
        """The layer's own forward."""
        if self.earlier is not None:
            return self.earlier
        return type(self.layer).forward.__get__(self.layer)

    def remove(self) -> None:
        """Give the layer its own forward back."""
        if self.earlier is None:
            del self.layer.__dict__["forward"]
        else:
            self.layer.__dict__["forward"] = self.earlier

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.own)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            _say_compiled()
            return self.own(*args, **kwargs)
        if len(args) != 1 or kwargs or not self.stands_in(args[0]):
            return self.own(*args, **kwargs)
        hidden, weight, bias = args[0], self.layer.weight, self.layer.bias
        dtype = torch.promote_types(hidden.dtype, weight.dtype)  # type: ignore[arg-type]
        device = hidden.device.type
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        product: Product | None = Product(hidden, weight, bias, dtype)  # type: ignore[arg-type]
        if _is_parallel(self.layer):
            from lowtide.extensions.tiles.shared import product_of

            product = product_of(self.layer, self.earlier, hidden, dtype)
            if product is None:
                return self.own(hidden)
        rows = product.hidden.shape[:-1].numel()
        length = max(1, -(-rows // self.settings.pieces))
        return Logits.of(Products((product,)), length, self.settings.told)

    def stands_in(self, hidden: Any) -> bool:
        """Whether logits that the layer would make of this are left out."""
        if not isinstance(hidden, Tensor) or isinstance(hidden, Logits):
            return False
        weight: Any = self.layer.weight
        calls = self.settings.under_way()
        learns = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
        if not learns and not (calls and calls[-1]) and not self.settings.reference:
            return False
        if private.may_shard() and private.is_unit(self.layer):
            self.settings.say(
                "lowtide.chunked_loss has no effect here: fully_shard around the output layer frees "
                "its weight before the loss is computed. Leave the layer to the unit of the whole model"
            )
            return False
        if private.is_transformed(fakes=False) or any(map(_is_shared, (hidden, weight))):
            self.settings.say(
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


class _Begins:
    """Before a call of the model: whether it computes a loss."""

    def __init__(self, settings: _Settings) -> None:
        self.settings = settings

    def __call__(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            return
        _place(model, self.settings)
        labelled = any(kwargs.get(name) is not None for name in _LABELS)
        if not labelled and args:
            names = list(inspect.signature(model.forward).parameters)
            labelled = any(
                name in _LABELS and one is not None for name, one in zip(names, args, strict=False)
            )
        self.settings.under_way().append(labelled)


class _Ends:
    """Behind a call of the model."""

    def __init__(self, settings: _Settings) -> None:
        self.settings = settings

    def __call__(self, *_: Any) -> None:
        if not torch.compiler.is_compiling() and self.settings.under_way():
            self.settings.under_way().pop()


class ChunkedLoss:
    """The handle of a model whose loss is computed in pieces. `chunked_loss` returns it."""

    def __init__(self, model: torch.nn.Module, settings: _Settings) -> None:
        self._model, self._settings = model, settings

    def __repr__(self) -> str:
        return f"<ChunkedLoss of {type(self._model).__name__}, {self.pieces} pieces>"

    @property
    def chosen(self) -> bool:
        """Whether a limit has chosen the pieces (`lowtide.extensions.tiles.chosen`)."""
        return self._settings.chosen

    @chosen.setter
    def chosen(self, chosen: bool) -> None:
        self._settings.chosen = chosen

    @property
    def pieces(self) -> int:
        """In how many pieces the tokens go through the output layer, from the next call of the model on."""
        return self._settings.pieces

    @pieces.setter
    def pieces(self, pieces: int) -> None:
        self._settings.pieces = _checked(pieces)

    def remove(self) -> None:
        """Give the output layer its own forward back."""
        _take_away(self._model, self._settings)


def chunked_loss(model: torch.nn.Module, pieces: int = 8, *, reference: bool = False) -> ChunkedLoss:
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
            products.
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
    settings = _Settings(_checked(pieces), reference)
    for earlier in {id(one.settings): one.settings for one in map(_forward_of, _placed(model))}.values():
        _take_away(model, earlier)
    if not _place(model, settings):
        raise LowtideError(
            f"chunked_loss(model): {type(model).__name__} has no output layer that lowtide knows "
            "(get_output_embeddings() of transformers, or an attribute 'head'): give the module that has one"
        )
    settings.hooks = (
        model.register_forward_pre_hook(_Begins(settings), with_kwargs=True),
        model.register_forward_hook(_Ends(settings), always_call=True),
    )
    return ChunkedLoss(model, settings)


def chunked_loss_of(model: torch.nn.Module) -> ChunkedLoss | None:
    """What computes a model's loss in pieces, where something does."""
    placed = _placed(model)
    return ChunkedLoss(model, _forward_of(placed[0]).settings) if placed else None


def has_output_layer(model: torch.nn.Module) -> bool:
    """Whether `chunked_loss` knows the model's output layer."""
    return next(_layers(model), None) is not None


def _checked(pieces: Any) -> int:
    whole = isinstance(pieces, int) and not isinstance(pieces, bool) and pieces > 0
    expect(whole, "chunked_loss(pieces=)", pieces, "a whole number of at least 1")
    return pieces


def _place(model: torch.nn.Module, settings: _Settings) -> bool:
    """Put a forward into each linear layer that makes logits; whether there is one."""
    layers = list(_layers(model))
    for layer in layers:
        if not isinstance(layer.__dict__.get("forward"), _Forward):
            layer.__dict__["forward"] = _Forward(layer, settings)
    return bool(layers)


def _placed(model: torch.nn.Module) -> list[torch.nn.Module]:
    return [one for one in model.modules() if isinstance(one.__dict__.get("forward"), _Forward)]


def _forward_of(layer: torch.nn.Module) -> _Forward:
    return layer.__dict__["forward"]


def _take_away(model: torch.nn.Module, settings: _Settings) -> None:
    """Take these settings away from a model."""
    for hook in settings.hooks:
        hook.remove()
    for layer in _placed(model):
        if _forward_of(layer).settings is settings:
            _forward_of(layer).remove()


def _layers(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The linear layers that make logits: the output layer, or those inside it (of adapters)."""
    head = None
    find = getattr(model, "get_output_embeddings", None)
    if find is not None:
        head = find()
    if head is None:
        head = getattr(model, "head", None)
    if not isinstance(head, torch.nn.Module):
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
