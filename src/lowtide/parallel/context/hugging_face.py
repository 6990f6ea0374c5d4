"""Decoders of Hugging Face transformers whose ranks share every sequence.

The model's forward is replaced by one that takes this rank's part of what it is given, and says which tokens
these are (``position_ids``). Its attention becomes a function of transformers' attention interface, which
finds the ranks, and the documents of the batch, among the arguments that the model hands to its attention.
Labels are shifted before they are shared out, and the loss is divided by the number of those of all ranks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lowtide.parallel.context.context import IGNORED, Context
from lowtide.parallel.context.documents import Documents, find_documents
from lowtide.parallel.context.operations import Seen
from lowtide.parallel.errors import ParallelError
from lowtide.parallel.random import RandomTracker

NAME = "lowtide_context"
"""Of the attention function, and of the argument by which it finds the sequence."""
_OF_TOKENS = {"input_ids": 0, "inputs_embeds": 0, "token_type_ids": 0}
"""Arguments with a number or vector for each token, and what padding has."""
_OWN_MASKS = ("attention_chunk_size",)
"""Settings of models whose tokens see other ones than a window has."""
_UNKNOWN = ("s_aux", "position_bias", "cache", "head_mask")
"""Arguments of attention functions that change what the attention is."""
_PLAIN = ("sdpa", "eager")
_ROUTERS = "router_aux_loss_coef"
"""The attribute of models by which the loss of their routers counts."""
_INSTEAD = "share its layers (lowtide.parallel.parallelize) or its parameters (FSDP2) instead of sequences"


@dataclass(frozen=True)
class Shared:
    """The sequences that a forward was given.

    Attributes:
        context: the ranks that share them.
        documents: see `lowtide.parallel.context.documents`.
        position_ids: of the whole sequences.
        attention: the name of the model's own attention function.
    """

    context: Context
    documents: Documents | None
    position_ids: Tensor
    attention: str


def share(model: nn.Module, context: Context) -> None:
    """Share a model's sequences among ranks.

    Raises:
        ParallelError: the model is no decoder whose attention can be replaced.
    """
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    whole: Any = _decoder(model)
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, no_mask)
    own = getattr(whole.config, "_attn_implementation", None) or "sdpa"
    whole.set_attn_implementation(NAME)
    loss = Loss(whole.loss_function)
    whole.loss_function = loss
    if hasattr(
        whole, _ROUTERS
    ):  # the sum of the ranks' losses then holds the mean of these, which are no sums over tokens
        whole.router_aux_loss_coef /= context.group.size
    model.forward = SharedForward(model, model.forward, context, own, loss)  # type: ignore[assignment]


def _decoder(model: nn.Module) -> nn.Module:
    """The transformers model that is, or is wrapped in, ``model``.

    Raises:
        ParallelError: there is none, or it does not do.
    """
    found: Any = next((m for m in model.modules() if hasattr(m, "set_attn_implementation")), None)
    name = type(model if found is None else found).__name__
    if found is None:
        raise ParallelError(
            f"{name}: context_parallel takes lowtide's GPT and Llama, and decoders of Hugging Face "
            "transformers"
        )
    config = found.config
    if not getattr(found, "_supports_attention_backend", False) or getattr(
        config, "is_encoder_decoder", False
    ):
        raise ParallelError(
            f"{name} does not hand the arguments of its forward to its attention (its class has no "
            f"_supports_attention_backend), or has an encoder: {_INSTEAD}"
        )
    if config.get_text_config() is not config:
        raise ParallelError(
            f"{name} has other inputs than text: call context_parallel on its language model alone, and give "
            "that inputs_embeds"
        )
    for setting in _OWN_MASKS:
        if getattr(config, setting, None):
            raise ParallelError(
                f"{name} has config.{setting}: tokens see others than those of a sliding window or document, "
                f"which no exchange of lowtide knows: {_INSTEAD}"
            )
    return found


class SharedForward:
    """A model's forward for whole sequences, of which this rank works on its part.

    It is the instance's ``forward`` attribute, so hooks, wrappers and ``state_dict`` see the module that they
    know. A limit that was there before is found below it (`lowtide.handle_of`).
    """

    def __init__(
        self, model: nn.Module, forward: Callable[..., Any], context: Context, attention: str, loss: Loss
    ) -> None:
        self.model, self.__wrapped__, self.context = model, forward, context
        self.attention, self.loss = attention, loss
        self.__signature__ = inspect.signature(forward)
        self.__doc__ = forward.__doc__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = self._named(args, kwargs)
        _refuse(given)
        tokens = given.get("input_ids")
        tokens = given.get("inputs_embeds") if tokens is None else tokens
        if tokens is None:
            raise ParallelError("a model whose ranks share sequences needs input_ids or inputs_embeds")
        whole = self._parts(given, tokens.shape[0], tokens.shape[1], tokens.device)
        labels = given.get("labels") is not None or given.get("shift_labels") is not None
        calls = self.loss.calls
        dropping = self.model.training and any(
            isinstance(module, nn.Dropout) and module.p for module in self.model.modules()
        )
        random = RandomTracker(self.context.group, tokens.device).per_rank() if dropping else nullcontext()
        with random:
            output = self.__wrapped__(**given, **{NAME: whole})
        if labels:
            if self.loss.calls == calls or output.loss is None:
                raise ParallelError(
                    f"{type(self.model).__name__} made no loss of its labels by its loss_function, which "
                    "knows the parts of a sequence: leave labels out, and make the loss of the logits "
                    "(lowtide.parallel.shard_sequence has this rank's labels)"
                )
            output.loss = self.context.total(output.loss)
            if getattr(output, "aux_loss", None) is not None:
                if not any(hasattr(module, _ROUTERS) for module in self.model.modules()):
                    raise ParallelError(
                        f"{type(self.model).__name__} adds a loss of its routers without a {_ROUTERS}, "
                        "by which the ranks' would be averaged: set config.output_router_logits to False"
                    )
                output.aux_loss = self.context.total(output.aux_loss.detach() / self.context.group.size)
        return output

    def _named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments by name."""
        bound = self.__signature__.bind_partial(*args, **kwargs)
        named: dict[str, Any] = {}
        for name, value in bound.arguments.items():
            if self.__signature__.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
                named.update(value)
            else:
                named[name] = value
        return named

    def _parts(self, given: dict[str, Any], rows: int, length: int, device: torch.device) -> Shared:
        """Put this rank's parts in the place of whole tensors among ``given``; what the whole is."""
        context = self.context
        positions, mask = given.get("position_ids"), given.pop("attention_mask", None)
        layout = context.layout
        documents = find_documents(
            positions if positions is None or positions.ndim == 2 else None,
            mask,
            layout.padded(length),
            layout.chunks,
        )
        if positions is None:
            positions = torch.arange(length, device=device)[None]
        given["position_ids"] = context.take(positions, -1)
        if "use_cache" in self.__signature__.parameters:
            given["use_cache"] = False
        for name, fill in _OF_TOKENS.items():
            if given.get(name) is not None:
                given[name] = context.take(given[name], 1, fill)
        labels: Any = given.get("labels")
        shifted: Any = given.get("shift_labels")
        if labels is not None or shifted is not None:
            if shifted is None:
                assert labels is not None
                shifted = F.pad(labels, (0, 1), value=IGNORED)[..., 1:]
            ignored = given.get("ignore_index", IGNORED)
            if given.get("num_items_in_batch") is None:
                given["num_items_in_batch"] = (shifted != ignored).sum()
            given["labels"] = given["shift_labels"] = context.take(shifted, 1, ignored)
        for name, value in given.items():
            known = {*_OF_TOKENS, "position_ids", "labels", "shift_labels"}
            if name not in known and isinstance(value, Tensor) and value.shape[:2] == (rows, length):
                raise ParallelError(
                    f"{name} has something for each token, and it is not known how ranks share it: leave "
                    "it out"
                )
        return Shared(context, documents, positions, self.attention)


def _refuse(given: dict[str, Any]) -> None:
    """Refuse what cannot be done with a part of a sequence."""
    if given.get("past_key_values") is not None or given.get("use_cache"):
        raise ParallelError(
            "use_cache and past_key_values are for generating tokens, which ranks that share sequences do "
            "not do: leave them out, or generate with a model of one process"
        )
    keep = given.get("logits_to_keep", 0)
    if isinstance(keep, Tensor) or keep:
        raise ParallelError("logits_to_keep counts from the end of a sequence that ranks share: leave it out")
    if given.get("output_attentions"):
        raise ParallelError("output_attentions: no rank has the weights of a whole sequence: leave it out")
    if given.get("return_dict") is False:
        raise ParallelError("return_dict=False: the loss is found by its name: leave it out")
    given.pop("logits_to_keep", None)


class Loss:
    """A model's loss function, which is to get this rank's labels, shifted already.

    Attributes:
        calls: how often it was called.
    """

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self.function, self.calls = function, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        shared = kwargs.pop(NAME, None)
        if shared is not None and kwargs.get("shift_labels") is None:
            raise ParallelError(
                "the model does not hand shift_labels to its loss function, which would shift labels at the "
                "end of each rank's part: leave labels out, and make the loss of the logits "
                "(lowtide.parallel.shard_sequence has this rank's labels)"
            )
        self.calls += 1
        return self.function(*args, **kwargs)


def no_mask(*args: Any, use_vmap: bool = False, **kwargs: Any) -> None:
    """In the place of transformers' mask: what a token sees, `attention` knows.

    Raises:
        ParallelError: the model sees more or less than a causal mask, a window and documents say.
    """
    if use_vmap:
        raise ParallelError(
            "the model has a mask of its own (or_mask_function, and_mask_function), which no exchange of "
            f"lowtide knows: {_INSTEAD}"
        )


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """A function of transformers' attention interface.

    Raises:
        ParallelError: the attention does what the exchange cannot do.
    """
    shared: Shared | None = kwargs.pop(NAME, None)
    if shared is None:
        raise ParallelError(
            f"{type(module).__name__} was called without the sequence that its ranks share: call the model "
            "that context_parallel returned; other models need a configuration of their own"
        )
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    unknown = [name for name in _UNKNOWN if kwargs.get(name) is not None]
    if attention_mask is not None or not causal or unknown:
        what = ", ".join(unknown) or ("a mask of its own" if causal else "attention that is not causal")
        raise ParallelError(
            f"{type(module).__name__} has {what}, which no exchange of lowtide knows: {_INSTEAD}"
        )
    context, scale = shared.context, query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    if not dropout and shared.attention in _PLAIN:
        seen = Seen(shared.documents, scale, softcap or 0.0, sliding_window or 0)
        return context.attend(query, key, value, seen).transpose(1, 2), None
    why = "dropout in attention" if dropout else f"the attention function {shared.attention!r}"
    if softcap and dropout:
        raise ParallelError("dropout in attention with capped scores: set config.attention_dropout to 0")

    def own(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        plain = shared.attention in _PLAIN
        function = ALL_ATTENTION_FUNCTIONS["sdpa" if plain else shared.attention]
        mask = _mask(shared.documents, sliding_window or 0, q) if plain else None
        more = {**kwargs, "position_ids": shared.position_ids}
        if not plain:
            more |= {"sliding_window": sliding_window, "softcap": softcap}
        out = function(module, q, k, v, mask, dropout=dropout, scaling=scaling, **more)[0]
        return out.transpose(1, 2)

    if key.shape[1] % context.group.size:
        raise ParallelError(
            f"{why} with {key.shape[1]} key-value heads on {context.group.size} ranks: use a number of ranks "
            "that divides the heads"
        )
    random = RandomTracker(context.group, query.device).per_rank() if dropout else nullcontext()
    with random:
        return context.attend_with(own, query, key, value, why).transpose(1, 2).contiguous(), None


def _mask(documents: Documents | None, window: int, q: Tensor) -> Tensor | None:
    """What each token of the whole sequence sees, where that is not all before it."""
    if documents is None and not window:
        return None
    place = torch.arange(q.shape[2], device=q.device)
    seen = (place <= place[:, None])[None]
    if window:
        seen = seen & (place > place[:, None] - window)
    if documents is not None:
        seen = seen & (place >= documents.first[..., None])
    return seen[:, None]
