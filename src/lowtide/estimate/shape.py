"""The shape of a transformer as far as bytes and FLOPs go. Pure data: no torch, no tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lowtide.estimate.errors import EstimateError, divisors

Mlp = Literal["gelu", "swiglu", "squared-relu"]
Norm = Literal["layernorm", "rmsnorm"]
Positions = Literal["learned", "rotary"]

MOST = {
    "layers": 100_000,
    "hidden": 1 << 22,
    "heads": 1 << 16,
    "kv_heads": 1 << 16,
    "ffn": 1 << 24,
    "vocab": 1 << 28,
    "sequence": 1 << 30,
}
"""Sizes above these are taken for mistakes."""


def check_size(flag: str, value: object, most: int, least: int = 1) -> None:
    """Raise an `EstimateError` unless ``value`` is a whole number between ``least`` and ``most``."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise EstimateError(f"{flag}={value!r}: a whole number is needed")
    if not least <= value <= most:
        raise EstimateError(f"{flag}={value}: a whole number from {least:,} to {most:,} is needed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A decoder-only transformer's shape, in the symbols of arXiv 2205.05198, Table 1, and what came after
    it.

    Attributes:
        layers, hidden, heads, vocab: L, h, a and v.
        kv_heads: heads of keys and values; fewer than ``heads`` is grouped-query attention.
        head_width: size of one head; h / a unless the model says otherwise.
        ffn: inner size of the MLP.
        mlp: ``gelu`` and ``squared-relu`` have two matrices, ``swiglu`` three.
        norm: ``layernorm`` has two vectors, ``rmsnorm`` one.
        positions: ``learned`` adds a table of ``sequence`` rows to the embedding, ``rotary`` turns queries
            and keys.
        sequence: the longest sequence, and the default one.
        bias, qkv_bias: whether the linear layers have biases, and those of q, k and v.
        qk_norm: whether queries and keys are normalised (Qwen 3).
        tied: whether the output layer shares the embedding's matrix.

    Example:
        >>> Shape(layers=48, hidden=6144, heads=64, vocab=51200, sequence=2048).parameters()
        22074273792
    """

    layers: int
    hidden: int
    heads: int
    vocab: int = 51200
    kv_heads: int = 0
    head_width: int = 0
    ffn: int = 0
    mlp: Mlp = "gelu"
    norm: Norm = "layernorm"
    positions: Positions = "learned"
    sequence: int = 2048
    bias: bool = True
    qkv_bias: bool | None = None
    qk_norm: bool = False
    tied: bool = True

    def __post_init__(self) -> None:
        for name, given in (("kv_heads", self.heads), ("ffn", self._usual_ffn())):
            if getattr(self, name) == 0:
                object.__setattr__(self, name, given)
        if self.qkv_bias is None:
            object.__setattr__(self, "qkv_bias", self.bias)
        for name, most in MOST.items():
            check_size(_flag(name), getattr(self, name), most)
        for name, known in (("mlp", ("gelu", "swiglu", "squared-relu")), ("norm", ("layernorm", "rmsnorm"))):
            if getattr(self, name) not in known:
                raise EstimateError(f"--{name}={getattr(self, name)!r}: choose {' or '.join(known)}")
        if self.positions not in ("learned", "rotary"):
            raise EstimateError(f"--positions={self.positions!r}: choose learned or rotary")
        if self.head_width == 0:
            if self.hidden % self.heads:
                raise EstimateError(
                    f"--hidden={self.hidden} does not divide into --heads={self.heads}: choose a divisor of "
                    f"the hidden size ({divisors(self.hidden, 512)})"
                )
            object.__setattr__(self, "head_width", self.hidden // self.heads)
        check_size("--head-width", self.head_width, 1 << 16)
        if self.heads % self.kv_heads:
            raise EstimateError(
                f"--kv-heads={self.kv_heads} does not divide --heads={self.heads}: choose a divisor of the "
                f"heads ({divisors(self.heads)})"
            )

    def _usual_ffn(self) -> int:
        """4h, or for SwiGLU two thirds of that, rounded up to a multiple of 256 (arXiv 2002.05202 and
        Llama).
        """
        if not isinstance(self.hidden, int) or self.mlp != "swiglu":
            return 4 * self.hidden
        return -(-8 * self.hidden // 3 // 256) * 256

    @property
    def query_width(self) -> int:
        """Elements of one token's queries: h in most models."""
        return self.heads * self.head_width

    @property
    def kv_width(self) -> int:
        """Elements of one token's keys, and of its values."""
        return self.kv_heads * self.head_width

    @property
    def mlp_matrices(self) -> int:
        """Number of h x ffn matrices in an MLP."""
        return 3 if self.mlp == "swiglu" else 2

    @property
    def norm_vectors(self) -> int:
        """Vectors in one norm: weight and bias, or the weight alone."""
        return 2 if self.norm == "layernorm" else 1

    def layer_matrix_parameters(self, tp: int = 1) -> int:
        """Parameters of one layer that tensor parallelism splits, on one rank: the matrices and the
        column-parallel biases.
        """
        kv_width = kv_heads_per_rank(self.kv_heads, tp) * self.head_width
        queries, ffn = self.query_width // tp, self.ffn // tp
        return (
            self.layer_weight_elements(tp)
            + (queries + 2 * kv_width if self.qkv_bias else 0)
            + ((self.mlp_matrices - 1) * ffn if self.bias else 0)
        )

    def layer_weight_elements(self, tp: int = 1) -> int:
        """Elements of one layer's matrices on one rank."""
        kv_width = kv_heads_per_rank(self.kv_heads, tp) * self.head_width
        return self.hidden * (2 * self.query_width // tp + 2 * kv_width + self.mlp_matrices * self.ffn // tp)

    def layer_shared_parameters(self) -> int:
        """Parameters of one layer that every tensor-parallel rank holds: norms and the biases behind a
        reduction.
        """
        shared = 2 * self.norm_vectors * self.hidden + (2 * self.hidden if self.bias else 0)
        return shared + (2 * self.head_width if self.qk_norm else 0)

    def layer_parameters(self) -> int:
        """Parameters of one whole layer."""
        return self.layer_matrix_parameters() + self.layer_shared_parameters()

    def parameters(self) -> int:
        """Parameters of the whole model, tied ones counted once."""
        embeddings = self.vocab * self.hidden * (1 if self.tied else 2)
        positions = self.sequence * self.hidden if self.positions == "learned" else 0
        return (
            embeddings + positions + self.layers * self.layer_parameters() + self.norm_vectors * self.hidden
        )


def kv_heads_per_rank(kv_heads: int, tp: int) -> int:
    """Key-value heads that one tensor-parallel rank holds: with fewer heads than ranks each head is held more
    than once.

    >>> kv_heads_per_rank(8, 4), kv_heads_per_rank(2, 8)
    (2, 1)
    """
    return max(1, kv_heads // tp)


def _flag(name: str) -> str:
    return "--" + {"sequence": "seq"}.get(name, name).replace("_", "-")
