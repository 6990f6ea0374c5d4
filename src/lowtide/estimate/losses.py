"""Cross entropy as it is computed: what is live of the logits in each way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Loss = Literal[
    "auto", "torch", "torch-uncast", "upcast", "float32", "transformers", "in-place", "in-place-copy",
    "in-place-fused", "compiled", "chunked", "chunked-forward", "chunked-vocabulary", "vocabulary-eager",
    "fused-linear",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Form:
    """A way to compute cross entropy.

    Attributes:
        what: in words, for tables.
        kept: bytes a logit that autograd keeps for backward, of the bytes of an element that products give
            (``e``), and of the same where that is below float32, else 0 (``low``).
        above: bytes a logit above these, at the fullest moment of the loss and its backward.
        parallel: bytes a logit more, or fewer, where tensor-parallel ranks share the vocabulary (DTensor's
            ``loss_parallel``).
        pieces: ``tokens`` or ``vocabulary`` where the logits are only there piece by piece: ``above`` is of
            a piece then.
        again: whether backward runs the output layer's product again.
        moved: bytes a logit that its operations move, forward and backward; where 0 twice what is live.
        in_forward: where the output layer's gradients are made in forward, and kept: whether that of its
            weight is summed in the dtype of the ``weights``, or in float32 (``wide``).
    """

    what: str
    kept: Callable[[int, int], int]
    above: Callable[[int, int], int]
    parallel: Callable[[int], int] = lambda e: 0
    pieces: Literal["", "tokens", "vocabulary"] = ""
    again: bool = False
    moved: int = 0
    in_forward: Literal["", "weights", "wide"] = ""


CHUNKED = ("chunked", "chunked-forward", "chunked-vocabulary", "vocabulary-eager")
"""Those that have as many pieces as ``--loss-chunks`` says."""

LOSSES: dict[str, Form] = {
    "torch": Form(
        "PyTorch's, on logits cast to float32 within it; the model's output holds the others",
        lambda e, low: 4, lambda e, low: 8 + low, lambda e: 4,
    ),
    "torch-uncast": Form(
        "PyTorch's, on logits in the dtype that they have",
        lambda e, low: e, lambda e, low: 3 * e, lambda e: e,
    ),
    "upcast": Form(
        "PyTorch's, on a float32 copy that the caller holds beside the logits",
        lambda e, low: 8 if low else 4, lambda e, low: 8 + low, lambda e: 4,
    ),
    "float32": Form(
        "PyTorch's, on float32 logits that the caller holds, and no others (FSDP's output dtype)",
        lambda e, low: 8 if low else 4, lambda e, low: 8, lambda e: 4,
    ),
    "transformers": Form(
        "PyTorch's, on float32 logits that nobody holds (transformers in its Trainer)",
        lambda e, low: 4, lambda e, low: 8, lambda e: 4,
    ),
    "in-place": Form(
        "in place, on float32 logits beside the others (Megatron, lowtide)",
        lambda e, low: 4, lambda e, low: e,
    ),
    "in-place-copy": Form(
        "in place, on shifted float32 logits whose gradient is padded back (Unsloth's in transformers)",
        lambda e, low: 4, lambda e, low: 4,
    ),
    "in-place-fused": Form(
        "Megatron's fused: its kernels make the exponentials beside the float32 logits",
        lambda e, low: 4, lambda e, low: 4 + e,
    ),
    "compiled": Form(
        "PyTorch's, compiled: one kernel from logits to their gradient",
        lambda e, low: e, lambda e, low: e,
    ),
    "chunked": Form(
        "PyTorch's, tokens in pieces, each with its logits, which backward computes again",
        lambda e, low: 0, lambda e, low: 12, lambda e: e - 8, pieces="tokens", again=True,
    ),
    "chunked-forward": Form(
        "in place, tokens in pieces, each with its logits and their gradients in forward (lowtide)",
        lambda e, low: 0, lambda e, low: 4 + low, lambda e: e, pieces="tokens", in_forward="wide",
    ),
    "chunked-vocabulary": Form(
        "vocabulary in pieces: log-sum-exp kept, logits computed again in backward (cut cross entropy)",
        lambda e, low: 0, lambda e, low: 4 + e, pieces="vocabulary", again=True,
    ),
    "vocabulary-eager": Form(
        "the same in separate float32 operations (prime-rl's)",
        lambda e, low: 0, lambda e, low: 16 + e, pieces="vocabulary", again=True, moved=112,
    ),
    "fused-linear": Form(
        "with the output layer, tokens in pieces, their gradients made in forward (Liger)",
        lambda e, low: 0, lambda e, low: e, pieces="tokens", in_forward="weights",
    ),
}  # fmt: skip
"""By name; the liveness of each. In bfloat16 14, 8, 18, 16, 12, 6, 8, 10 and 4 bytes a logit, and 12, 6, 6,
18 and 2 of a piece's."""
