"""How a built-in model is shared among ranks: which layers take the place of ``torch.nn``'s.

A model is written once. Without a group its parts are ``torch.nn``'s own. With one, a linear layer that
widens becomes column parallel, one that narrows row parallel, the embedding and the head share the
vocabulary, and under sequence parallelism everything between them works on this rank's piece of the sequence
(arXiv 2205.05198, figure 5). Weights are drawn alike at every number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lowtide.extensions.tiles.loss import chunked_loss_of, in_pieces, logits_for_loss
from lowtide.models.presets import ModelError

SEQUENCE = 1  # tensors are (batch, sequence, features)


class Sharing:
    """Makes the parts of a model for a group of ranks, or for one process.

    Args:
        group: as `lowtide.parallel.tensor_group` takes it, or ``None`` for ``torch.nn``'s own layers.
        sequence_parallel: between the linear layers each rank holds a piece of the sequence.

    Raises:
        ModelError: sequence parallelism without a group.
    """

    def __init__(self, group: Any = None, sequence_parallel: bool = False) -> None:
        if sequence_parallel and group is None:
            raise ModelError(
                "sequence_parallel=True needs a group of ranks to share the sequence: pass group="
            )
        self.sequence_parallel = sequence_parallel
        self.group: Any = None
        self.context: Any = None
        if group is not None:
            from lowtide.parallel import tensor_group

            self.group = tensor_group(group)

    @property
    def size(self) -> int:
        """How many ranks share the model."""
        return 1 if self.group is None else self.group.size

    def share_context(self, context: Any) -> None:
        """Work on this rank's part of each sequence (`lowtide.parallel.context_parallel`)."""
        self.context = context

    def places(self, tokens: Tensor) -> Tensor:
        """The places in the sequence of the tokens that the first layer sees."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return places if self.context is None else self.context.take(places, 0)

    def own(self, tokens: Tensor) -> Tensor:
        """This rank's part of (batch, sequence), where ranks share the sequence from the first layer on."""
        return tokens if self.context is None else self.context.take(tokens)

    def rows(self, table: Tensor, length: int) -> Tensor:
        """Of a table with a row for each place of a sequence, those of ``length`` tokens that the first layer
        sees.
        """
        if self.context is None:
            return table[:length]
        places = self.context.places(length, table.device)
        return table[places.clamp_max(len(table) - 1)]  # the sequence may be padded

    def _options(self) -> dict[str, Any]:
        return {
            "sequence_parallel_enabled": self.sequence_parallel,
            "tensor_model_parallel_group": self.group,
        }

    def _linear(self) -> dict[str, Any]:
        return {
            "sequence_dimension": SEQUENCE if self.sequence_parallel else None,
            "dtype": torch.get_default_dtype(),
            **self._options(),
        }

    def heads(self, heads: int) -> int:
        """How many of the attention heads are this rank's.

        Raises:
            ModelError: they do not divide among the ranks.
        """
        if heads % self.size:
            raise ModelError(
                f"{heads} attention heads do not divide among {self.size} ranks: use a number of ranks that "
                "divides them"
            )
        return heads // self.size

    def widen(self, size: int, out: int, bias: bool = True, blocks: int = 1) -> nn.Module:
        """A linear layer each rank of which gives its part of the features; ``blocks`` of them one above the
        other.
        """
        if self.group is None:
            return nn.Linear(size, out, bias)
        from lowtide.parallel import ColumnParallelLinear

        return ColumnParallelLinear(
            size, out, bias, gather_output=False, stride=blocks, pad=blocks == 1, **self._linear()
        )

    def heads_in(self, size: int, heads: int, head_width: int, bias: bool = True) -> nn.Module:
        """A linear layer that makes keys or values for ``heads`` heads, of which there may be fewer than
        ranks.
        """
        if self.group is None or heads % self.size == 0:
            return self.widen(size, heads * head_width, bias)
        from lowtide.parallel import SharedHeadsLinear

        return SharedHeadsLinear(size, heads, head_width, bias, **self._linear())

    def narrow(self, size: int, out: int, bias: bool = True) -> nn.Module:
        """A linear layer that sums over the ranks' features."""
        if self.group is None:
            return nn.Linear(size, out, bias)
        from lowtide.parallel import RowParallelLinear

        return RowParallelLinear(size, out, bias, input_is_parallel=True, pad=True, **self._linear())

    def layer_norm(self, size: int) -> nn.Module:
        """Layer norm of what lies between the linear layers."""
        if self.group is None:
            return nn.LayerNorm(size)
        from lowtide.parallel import LayerNorm

        return LayerNorm(size, **self._options())

    def rms_norm(self, size: int, eps: float) -> nn.Module:
        """RMS norm of what lies between the linear layers."""
        if self.group is None:
            return nn.RMSNorm(size, eps=eps)
        from lowtide.parallel import RMSNorm

        return RMSNorm(size, eps=eps, **self._options())

    def embedding(self, vocabulary: int, size: int) -> nn.Module:
        """The vectors of tokens (batch, sequence); with sequence parallelism of this rank's piece of the
        sequence.
        """
        if self.group is None:
            return nn.Embedding(vocabulary, size)
        from lowtide.parallel import ParallelEmbedding

        return ParallelEmbedding(vocabulary, size, pad=True, **self._linear())

    def head(self, size: int, vocabulary: int, pieces: int = 1) -> nn.Module:
        """The output layer, which gives each rank the logits of its part of the vocabulary; those that a loss
        is taken of in so many pieces.
        """
        if self.group is None:
            layer = nn.Linear(size, vocabulary, bias=False)
        else:
            from lowtide.parallel import ColumnParallelLinear

            options = {"gather_output": False, "pad": True, **self._linear()}
            layer = ColumnParallelLinear(size, vocabulary, False, **options)
        return layer if pieces == 1 else in_pieces(layer, pieces)

    def together(self, x: Tensor, *layers: nn.Module) -> tuple[Tensor, ...]:
        """What several widening layers make of one input, which travels once."""
        if self.group is None:
            return tuple(layer(x) for layer in layers)
        from lowtide.parallel import column_parallel

        return column_parallel(x, layers)  # type: ignore[arg-type]

    def piece(self, x: Tensor) -> Tensor:
        """This rank's piece of (sequence, features), where the sequence is shared."""
        if not self.sequence_parallel:
            return x
        from lowtide.parallel import scatter_to_sequence_parallel_region

        return scatter_to_sequence_parallel_region(x, 0, self.group)

    def own_random_numbers(self, x: Tensor, sharded: bool) -> Any:
        """A context for random numbers on ``x``: each rank its own where it holds its own part, else the same
        on all.
        """
        groups = [self.group] if self.group is not None and sharded else []
        groups += [] if self.context is None else [self.context.group]
        if not groups:
            return nullcontext()
        from lowtide.parallel import RandomTracker

        streams = ExitStack()
        for group in groups:
            streams.enter_context(RandomTracker(group, x.device).per_rank())
        return streams

    def logits(self, logits: Tensor, vocabulary: int) -> Tensor:
        """The whole vocabulary's logits."""
        if self.group is None:
            return logits
        from lowtide.parallel import gather_from_tensor_model_parallel_region

        return gather_from_tensor_model_parallel_region(logits, self.group)[..., :vocabulary]

    def loss(self, hidden: Tensor, head: nn.Module, targets: Tensor, vocabulary: int) -> Tensor:
        """As `next_token_loss`, with a head that the ranks may share, and of the ``targets`` of whole
        sequences, which they may share, too.
        """
        if self.context is None:
            return self._loss(hidden, head, targets, vocabulary, None)
        counted, own = (targets != -100).sum(), self.context.take(targets, 1, -100)
        return self.context.total(self._loss(hidden, head, own, vocabulary, counted))

    def _loss(
        self, hidden: Tensor, head: Any, targets: Tensor, vocabulary: int, counted: Tensor | None
    ) -> Tensor:
        if self.group is None:
            return next_token_loss(hidden, head, targets, counted)
        from lowtide.parallel import parallel_cross_entropy, parallel_linear_cross_entropy

        options: dict[str, Any] = {"vocabulary": vocabulary, "tensor_model_parallel_group": self.group}
        if _is_changed(head) and (loss := chunked_loss_of(head)) is not None:
            options |= {"sequence_dimension": SEQUENCE if self.sequence_parallel else None}
            options |= {"chunks": loss.pieces, "reduction": "sum"}
            total = parallel_linear_cross_entropy(hidden, head.weight, targets, **options)
        else:
            total = parallel_cross_entropy(head(hidden), targets, **options).sum()
        return total / ((targets != -100).sum() if counted is None else counted)


def next_token_loss(
    hidden: Tensor, head: nn.Module, targets: Tensor, counted: Tensor | None = None
) -> Tensor:
    """The cross entropy of ``head(hidden)`` against the ``targets`` that count (all but -100), in float32 or
    wider: their mean, or their sum divided by ``counted``.
    """
    wide = torch.promote_types(hidden.dtype, torch.float32)
    tokens, labels = hidden.flatten(0, -2), targets.flatten()
    logits = (logits_for_loss(head, tokens) if _is_changed(head) else head(tokens)).to(wide)
    if counted is None:
        return F.cross_entropy(logits, labels)
    return F.cross_entropy(logits, labels, reduction="sum") / counted


def _is_changed(head: nn.Module) -> bool:
    """Whether the output layer has another forward: what a loss in pieces does, Dynamo does not trace."""
    return head.__dict__.get("forward") is not None


def fill(module: nn.Module, name: str, init_method: Callable[[Tensor], Any]) -> None:
    """Initialize one parameter; where ranks share it, each draws the whole and keeps its part."""
    parameter = getattr(module, name)
    partitions = getattr(module, "partitions", None)
    if partitions is None:
        init_method(parameter)
    elif parameter.device.type != "meta":
        from lowtide.parallel.partition import initialize

        initialize(parameter, partitions[name], init_method)


def is_linear(module: nn.Module) -> bool:
    """Whether the module is a linear layer, shared or not."""
    return isinstance(module, nn.Linear) or hasattr(module, "master_weight")


def is_embedding(module: nn.Module) -> bool:
    """Whether the module is an embedding, shared or not."""
    return isinstance(module, nn.Embedding) or hasattr(module, "shard_across_embedding")
