"""The shape of a transformer as far as bytes and FLOPs go. Pure data: no torch, no tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from typing import Any, Literal, get_args

from lowtide.estimate.errors import EstimateError, divisors

Mlp = Literal["gelu", "swiglu", "swiglu-clamped", "squared-relu", "relu"]
Norm = Literal["layernorm", "rmsnorm"]
Positions = Literal["learned", "rotary"]
Router = Literal["softmax", "sigmoid", "chosen"]

_CHOICES: dict[str, Any] = {"mlp": Mlp, "norm": Norm, "positions": Positions, "router": Router}
GATED = {"swiglu": 1, "swiglu-clamped": 4}
"""MLPs with a gate, and how many tensors more of the inner size they keep in separate operations."""
SEPARATE = {**GATED, "gelu": 3}
"""All that keep more in separate operations. GELU does where it is written out with its tanh (gelu_new)."""

MOST = {
    "layers": 100_000, "hidden": 1 << 22, "heads": 1 << 16, "kv_heads": 1 << 16, "ffn": 1 << 24,
    "vocab": 1 << 28, "sequence": 1 << 30,
}  # fmt: skip
"""Sizes above these are taken for mistakes."""
_NONE = (
    "experts", "experts_per_token", "shared_experts", "dense_layers", "dense_ffn", "query_latent",
    "kv_latent", "rope_width", "more",
)  # fmt: skip
"""Sizes that are 0 in a model that has no such thing."""


def check_size(flag: str, value: object, most: int, least: int = 1) -> None:
    """Raise an `EstimateError` unless ``value`` is a whole number between ``least`` and ``most``."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise EstimateError(f"{flag}={value!r}: a whole number is needed")
    if not least <= value <= most:
        raise EstimateError(f"{flag}={value}: a whole number from {least:,} to {most:,} is needed")


@dataclass(frozen=True, slots=True)
class Matrix:
    """A linear layer of a transformer layer, on one rank.

    Attributes:
        part: ``attention`` or ``mlp``.
        inputs, outputs: its sizes.
        copies: how many there are: one for each expert.
        rows: how many of them a token passes through.
    """

    part: Literal["attention", "mlp"]
    inputs: int
    outputs: int
    copies: int = 1
    rows: int = 1

    @property
    def elements(self) -> int:
        """Elements of all copies."""
        return self.copies * self.inputs * self.outputs

    @property
    def active(self) -> int:
        """Elements that a token is multiplied with."""
        return self.rows * self.inputs * self.outputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The sizes of a decoder-only transformer. L, h, a and v are the symbols of arXiv 2205.05198, Table 1.

    Attributes:
        layers, hidden, heads, vocab: number of layers (L), hidden size (h), number of heads (a), and size of
            the vocabulary (v).
        kv_heads: number of heads of keys and values. The default is ``heads``; fewer heads mean
            grouped-query attention.
        head_width: size of one head of queries and keys. The default is h / a.
        value_width: size of one head of values. The default is ``head_width``.
        ffn: inner size of the MLP, or of one expert. The default is 4h, or about 8h / 3 for ``swiglu``.
        mlp: ``gelu``, ``relu`` and ``squared-relu`` have two matrices. ``swiglu`` has three, and any smooth
            function on its gate. ``swiglu-clamped`` has three, and clamps its gate and product (gpt-oss).
        norm: ``layernorm`` has a weight and a bias, ``rmsnorm`` only a weight.
        positions: ``learned`` adds a table of ``sequence`` rows to the parameters. ``rotary`` rotates queries
            and keys, and has no parameters.
        sequence: the longest sequence that the model takes. Estimates use it by default.
        parallel: attention and MLP read the same residual stream (GPT-NeoX). By default the MLP reads the
            output of attention.
        norms: norms of a layer, 2 or 1. With 1, attention and MLP read the output of the same norm (Falcon,
            Phi); this needs ``parallel``.
        more: number of parameters outside the layers that no other attribute counts, such as the bias of the
            output layer or a norm after the embedding.
        bias, qkv_bias: whether the linear layers have biases, and whether q, k and v have. The default of
            ``qkv_bias`` is ``bias``.
        qk_norm: whether queries and keys are normalised (Qwen 3).
        tied: whether the output layer shares the embedding's matrix.
        experts: number of routed experts of a layer (a mixture of experts, 1701.06538). 0 means one MLP that
            all tokens use.
        experts_per_token: number of routed experts that the router chooses for each token.
        shared_experts: number of further experts that every token uses (2401.06066).
        router: ``softmax`` over all experts (Mixtral, Qwen), ``sigmoid`` in float32 (DeepSeek), or
            ``chosen``: a softmax over the experts chosen for the token (gpt-oss).
        dense_layers, dense_ffn: in a mixture of experts, the number of layers that have one MLP and no
            experts, and the inner size of this MLP.
        query_latent, kv_latent, rope_width: sizes of multi-head latent attention (2405.04434, Section 2.1):
            of the latent vector of queries, of the latent vector of keys and values, and of the part of a
            head that has rotary positions.
        sinks: whether each head has a learned attention sink: one more score in its softmax (gpt-oss).

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
    value_width: int = 0
    ffn: int = 0
    mlp: Mlp = "gelu"
    norm: Norm = "layernorm"
    positions: Positions = "learned"
    sequence: int = 2048
    parallel: bool = False
    norms: int = 2
    more: int = 0
    bias: bool = True
    qkv_bias: bool | None = None
    qk_norm: bool = False
    tied: bool = True
    experts: int = 0
    experts_per_token: int = 0
    shared_experts: int = 0
    router: Router = "softmax"
    dense_layers: int = 0
    dense_ffn: int = 0
    query_latent: int = 0
    kv_latent: int = 0
    rope_width: int = 0
    sinks: bool = False

    def __post_init__(self) -> None:
        for name, given in (("kv_heads", self.heads), ("ffn", self._usual_ffn())):
            if getattr(self, name) == 0:
                object.__setattr__(self, name, given)
        if self.qkv_bias is None:
            object.__setattr__(self, "qkv_bias", self.bias)
        for name, most in MOST.items():
            check_size(_flag(name), getattr(self, name), most)
        for name in _NONE:
            check_size(_flag(name), getattr(self, name), MOST["ffn"], least=0)
        for name, kind in _CHOICES.items():
            if getattr(self, name) not in get_args(kind):
                known = " or ".join(get_args(kind))
                raise EstimateError(f"--{name}={getattr(self, name)!r}: choose {known}")
        if self.norms not in (1, 2) or (self.norms == 1 and not self.parallel):
            raise EstimateError(f"norms={self.norms}, parallel={self.parallel}: 2, or 1 where both read it")
        if self.head_width == 0:
            if self.hidden % self.heads:
                raise EstimateError(
                    f"--hidden={self.hidden} does not divide into --heads={self.heads}: choose a divisor of "
                    f"the hidden size ({divisors(self.hidden, 512)})"
                )
            object.__setattr__(self, "head_width", self.hidden // self.heads)
        check_size("--head-width", self.head_width, 1 << 16)
        if self.value_width == 0:
            object.__setattr__(self, "value_width", self.head_width)
        if self.heads % self.kv_heads:
            raise EstimateError(
                f"--kv-heads={self.kv_heads} does not divide --heads={self.heads}: choose a divisor of the "
                f"heads ({divisors(self.heads)})"
            )
        self._check_experts()

    def _check_experts(self) -> None:
        if not 0 < self.experts_per_token <= self.experts and (self.experts or self.experts_per_token):
            raise EstimateError(
                f"--experts={self.experts} --experts-per-token={self.experts_per_token}: give both; a token "
                "goes to at least 1 of the experts, and to each at most once"
            )
        for name in ("shared_experts", "dense_layers"):
            if getattr(self, name) and not self.experts:
                raise EstimateError(f"{_flag(name)}={getattr(self, name)} without --experts: give both")
        if self.dense_layers and not (0 < self.dense_layers < self.layers and self.dense_ffn):
            raise EstimateError(
                f"dense_layers={self.dense_layers}, dense_ffn={self.dense_ffn}: fewer than the "
                f"{self.layers} layers, and their inner size, are needed"
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
    def output_width(self) -> int:
        """Elements of attention's output for one token."""
        return self.heads * self.value_width

    @property
    def mlp_matrices(self) -> int:
        """Matrices in an MLP."""
        return 3 if self.mlp in GATED else 2

    @property
    def norm_vectors(self) -> int:
        """Vectors in one norm: weight and bias, or the weight alone."""
        return 2 if self.norm == "layernorm" else 1

    @property
    def kinds(self) -> tuple[tuple[Fraction, Shape], ...]:
        """The kinds of layers: of each its share of the layers, and the shape that has none but these."""
        if not self.dense_layers:
            return ((Fraction(1), self),)
        share = Fraction(self.dense_layers, self.layers)
        one = dict(dense_layers=0, experts=0, experts_per_token=0, shared_experts=0, ffn=self.dense_ffn)
        plain: Any = one
        return ((share, replace(self, **plain)), (1 - share, replace(self, dense_layers=0)))

    def matrices(self, tp: int = 1, ep: int = 1) -> dict[str, Matrix]:
        """The linear layers of a layer by name, on one tensor- and expert-parallel rank: what is counted of
        weights, adapters and FLOPs. A router is none of them.

        >>> Shape(layers=1, hidden=64, heads=4, kv_heads=2).matrices()["k"].outputs
        32
        """
        return _matrices(self, tp, ep)

    def layer_matrix_parameters(self, tp: int = 1, ep: int = 1) -> int:
        """Parameters of one layer that tensor parallelism splits, on one rank: the matrices and the
        column-parallel biases.
        """
        biases = ("q", "k", "v") * bool(self.qkv_bias) + ("gate", "up") * self.bias
        own = [matrix for name, matrix in self.matrices(tp, ep).items() if name in biases]
        return self.layer_weight_elements(tp, ep) + sum(one.copies * one.outputs for one in own)

    def layer_weight_elements(self, tp: int = 1, ep: int = 1) -> int:
        """Elements of one layer's matrices on one rank."""
        return sum(matrix.elements for matrix in self.matrices(tp, ep).values())

    def layer_shared_parameters(self, ep: int = 1) -> int:
        """Parameters of one layer that every tensor-parallel rank holds: norms, the router, and the biases
        behind a reduction.
        """
        shared = self.norms * self.norm_vectors * self.hidden + self.query_latent + self.kv_latent
        shared += self.experts * self.hidden + self.heads * self.sinks
        if self.bias:
            shared += self.hidden * (1 + max(1, self.experts // ep)) + self.experts
        return shared + (2 * self.head_width if self.qk_norm else 0)

    def layer_parameters(self) -> int:
        """Parameters of one whole layer."""
        return self.layer_matrix_parameters() + self.layer_shared_parameters()

    def parameters(self) -> int:
        """Parameters of the whole model, tied ones counted once."""
        embeddings = self.vocab * self.hidden * (1 if self.tied else 2)
        embeddings += self.sequence * self.hidden if self.positions == "learned" else 0
        layers = sum(share * self.layers * kind.layer_parameters() for share, kind in self.kinds)
        return embeddings + int(layers) + self.norm_vectors * self.hidden + self.more

    def active_parameters(self) -> int:
        """Parameters that work on each token: without the experts that a token does not go to."""
        idle = sum(
            share * (one.elements - one.active)
            for share, kind in self.kinds
            for one in kind.matrices().values()
        )
        return self.parameters() - int(self.layers * idle)


def kv_heads_per_rank(kv_heads: int, tp: int) -> int:
    """Key-value heads that one tensor-parallel rank holds: with fewer heads than ranks each head is held more
    than once.

    >>> kv_heads_per_rank(8, 4), kv_heads_per_rank(2, 8)
    (2, 1)
    """
    return max(1, kv_heads // tp)


def _flag(name: str) -> str:
    return "--" + {"sequence": "seq"}.get(name, name).replace("_", "-")


@lru_cache(maxsize=256)
def _matrices(shape: Shape, tp: int, ep: int) -> dict[str, Matrix]:
    """`Shape.matrices`; searches ask for the same ones often."""
    h, heads, kv = shape.hidden, shape.heads // tp, kv_heads_per_rank(shape.kv_heads, tp)
    if shape.kv_latent:
        first = {
            "q": (h, 0 if shape.query_latent else heads * shape.head_width),
            "q_a": (h, shape.query_latent), "q_b": (shape.query_latent, heads * shape.head_width),
            "kv_a": (h, shape.kv_latent + shape.rope_width),
            "kv_b": (shape.kv_latent, heads * (shape.head_width - shape.rope_width + shape.value_width)),
        }  # fmt: skip
    else:
        first = {"q": (h, heads * shape.head_width), "k": (h, kv * shape.head_width)}
        first["v"] = (h, kv * shape.value_width)
    first["o"] = (heads * shape.value_width, h)
    found = {name: Matrix("attention", *sizes) for name, sizes in first.items() if all(sizes)}
    mlps = [("", shape.ffn // tp, max(1, shape.experts // ep), max(1, shape.experts_per_token))]
    if shape.shared_experts:
        mlps.append(("shared_", shape.shared_experts * shape.ffn // tp, 1, 1))
    for prefix, inner, copies, rows in mlps:
        for name in ("gate", "up", "down")[3 - shape.mlp_matrices :]:
            sizes = (inner, h) if name == "down" else (h, inner)
            found[prefix + name] = Matrix("mlp", *sizes, copies, rows)
    return found
