"""`context_parallel`: a model whose ranks share every sequence, for contexts that one device does not hold.

Every rank has the whole model, or its part of it, and is given whole sequences. It embeds and works on its
own tokens only (`Layout`). In attention the ranks exchange keys and values in a ring, or heads for the
sequence. The loss is that of the whole batch on every rank, and its gradients are this rank's part.
"""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor, nn

from lowtide.errors import expect
from lowtide.parallel.context.context import Context
from lowtide.parallel.context.heads import sends_less
from lowtide.parallel.context.sums import ContextMarker
from lowtide.parallel.errors import ParallelError
from lowtide.parallel.given import check_counts, check_tensors
from lowtide.parallel.groups import tensor_group
from lowtide.parallel.module import ParallelModule

EXCHANGES = ("ring", "all-to-all", "auto")


def context_parallel(
    model: nn.Module, mesh: Any = None, exchange: Literal["ring", "all-to-all", "auto"] = "auto"
) -> nn.Module:
    """Share a model's sequences among the ranks of ``mesh``, in place. Every rank gives the same whole inputs
    and gets the same loss; logits are those of this rank's tokens (`gather_sequence` has all of them).

    Parameters that nobody else averages over these ranks (DDP or FSDP2 over a mesh with them) are marked:
    call `allreduce_sequence_parallel_gradients` after backward, before clipping.

    Args:
        model: lowtide's GPT or Llama, or a decoder of Hugging Face transformers that hands the arguments of
            its forward to its attention. `parallelize` comes first, FSDP2 and DDP come afterwards.
        mesh: as `lowtide.parallel.tensor_group` takes it.
        exchange: ``ring``: keys and values travel, for any number of heads. ``all-to-all``: heads are
            exchanged for the sequence, which sends as much for any number of ranks, and needs numbers of
            heads that the ranks divide. ``auto``: ``all-to-all`` where the heads of queries and of keys
            divide and it does not send more, else ``ring``.

    Returns:
        The model. With one rank it is left as it is.

    Raises:
        ParallelError: the model's attention cannot be exchanged, it is shared already, or the heads do not
            divide.

    Example:
        >>> from lowtide.models import preset
        >>> from lowtide.models.gpt import GPT
        >>> model = context_parallel(GPT(preset("gpt-nano")))

    Source: Ring Attention (arXiv 2310.01889), DeepSpeed-Ulysses (arXiv 2309.14509).
    """
    expect(
        isinstance(model, nn.Module), "context_parallel(model=)", model, "a torch.nn.Module", ParallelError
    )
    expect(
        exchange in EXCHANGES, "context_parallel(exchange=)", exchange, ", ".join(EXCHANGES), ParallelError
    )
    if context_of(model, required=False) is not None:
        raise ParallelError("the ranks share this model's sequences already: call context_parallel once")
    group = tensor_group(mesh)
    if group.size == 1:
        return model
    heads = _heads(model)
    if exchange == "auto":
        exchange = "all-to-all" if sends_less(*heads, group.size) else "ring"
    context = Context(group, exchange)
    sharing = getattr(model, "sharing", None)
    if sharing is not None:
        sharing.share_context(context)
    else:
        from lowtide.parallel.context.hugging_face import share  # transformers' own imports take seconds

        share(model, context)
    model.context = context  # type: ignore[assignment]
    ContextMarker(model, context)
    return model


def shard_sequence(tensor: Tensor, model: nn.Module, dimension: int = 1, fill: float = 0) -> Tensor:
    """This rank's part of a tensor with the whole sequence along ``dimension``, as the model's logits have
    it.

    Args:
        tensor: the same on every rank.
        model: what `context_parallel` returned.
        dimension: that of the sequence.
        fill: stands where the sequence is padded so that it divides.

    >>> import torch
    >>> shard_sequence(torch.ones(1, 4), torch.nn.Linear(2, 2)).shape
    torch.Size([1, 4])
    """
    check_tensors("shard_sequence", tensor=tensor)
    context = context_of(model, required=False)
    return tensor if context is None else context.take(tensor, dimension, fill)


def gather_sequence(tensor: Tensor, model: nn.Module, length: int, dimension: int = 1) -> Tensor:
    """The whole sequence in its order, from what each rank's tokens have: logits, or losses of tokens. A
    collective; autograd goes through it, where every rank makes the same loss of the result.

    Args:
        tensor: this rank's part.
        model: what `context_parallel` returned.
        length: tokens of the sequence.
        dimension: that of the sequence.

    >>> import torch
    >>> gather_sequence(torch.ones(1, 4), torch.nn.Linear(2, 2), 4).shape
    torch.Size([1, 4])
    """
    check_tensors("gather_sequence", tensor=tensor)
    check_counts("gather_sequence", 1, length=length)
    context = context_of(model, required=False)
    return tensor if context is None else context.join(tensor, length, dimension)


def context_of(model: nn.Module, required: bool = True) -> Context | None:
    """The ranks that share a model's sequences, of whatever wraps it, too.

    Raises:
        ParallelError: there are none, and ``required``.
    """
    for module in model.modules():
        found = getattr(module, "context", None)
        if isinstance(found, Context):
            return found
    if required:
        raise ParallelError("no ranks share this model's sequences: call lowtide.parallel.context_parallel")
    return None


def _heads(model: nn.Module) -> tuple[int, int]:
    """Heads of queries, and of keys and values, of this rank."""
    config: Any = getattr(model, "config", None)
    queries = getattr(config, "num_attention_heads", None) or getattr(config, "heads", None)
    keys = getattr(config, "num_key_value_heads", None) or getattr(config, "key_value_heads", None) or queries
    if not isinstance(queries, int) or not isinstance(keys, int):
        raise ParallelError(
            f"{type(model).__name__} does not say how many attention heads it has "
            "(config.num_attention_heads): context_parallel takes lowtide's GPT and Llama, and decoders of "
            "Hugging Face transformers"
        )
    ranks = next((layer.group.size for layer in model.modules() if isinstance(layer, ParallelModule)), 1)
    return max(1, queries // ranks), max(1, keys // ranks)
