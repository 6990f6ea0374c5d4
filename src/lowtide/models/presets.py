"""Shapes of language models, from ones that train in seconds to GPT-3's. Pure data: no torch, no tensors."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from lowtide.errors import LowtideError, expect
from lowtide.model_names import HUB, HUGGING_FACE, meant


class ModelError(LowtideError):
    """A model's name, shape or input does not fit."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a built-in model.

    Attributes:
        family: ``gpt`` (learned positions, layer norm, GELU) or ``llama`` (rotary positions, RMS norm,
            SwiGLU).
        layers, width, heads: number of blocks, size of the residual stream, attention heads.
        hidden_width: inner size of the MLP.
        key_value_heads: heads of keys and values; fewer than ``heads`` is grouped-query attention (Llama
            only).
        vocabulary: number of tokens; 256 for bytes.
        positions: longest sequence.
        tied: whether the output head shares the embedding's matrix.
        rotary_base: base of the rotary frequencies (Llama only).
        norm_epsilon: epsilon of the RMS norm (Llama only).
        dropout: probability, on embeddings (GPT), attention weights and both branches of a block.
        fused_attention: PyTorch's fused kernel, or the plain operations with their quadratic score matrix.
        loss_chunks: in how many pieces the loss makes logits (`lowtide.chunked_loss`); 1 is all at once.
    """

    family: Literal["gpt", "llama"]
    layers: int
    width: int
    heads: int
    hidden_width: int
    key_value_heads: int
    vocabulary: int = 256
    positions: int = 1024
    tied: bool = True
    rotary_base: float = 10_000.0
    norm_epsilon: float = 1e-5
    dropout: float = 0.0
    fused_attention: bool = True
    loss_chunks: int = 1

    def __post_init__(self) -> None:
        for name in (
            "layers",
            "width",
            "heads",
            "hidden_width",
            "key_value_heads",
            "vocabulary",
            "positions",
            "loss_chunks",
        ):
            if getattr(self, name) < 1:
                raise ModelError(f"{name}={getattr(self, name)}: at least 1 is needed")
        if self.width % self.heads:
            raise ModelError(
                f"width={self.width} does not divide into heads={self.heads}: choose a width that is a "
                "multiple of the heads"
            )
        if self.heads % self.key_value_heads:
            raise ModelError(
                f"heads={self.heads} do not divide into key_value_heads={self.key_value_heads} groups"
            )
        if self.family == "gpt" and self.key_value_heads != self.heads:
            raise ModelError(
                f"key_value_heads={self.key_value_heads}: the GPT has one per head ({self.heads}); use a "
                "llama preset"
            )
        if self.family == "llama" and self.width // self.heads % 2:
            raise ModelError(
                f"width={self.width} over heads={self.heads} is odd: rotary positions turn pairs, choose an "
                "even head width"
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ModelError(f"dropout={self.dropout}: a probability of at least 0 and below 1 is needed")

    def parameters(self) -> int:
        """Number of parameters, tied ones counted once.

        >>> preset("gpt2").parameters()
        124439808
        """
        width, hidden = self.width, self.hidden_width
        embeddings = self.vocabulary * width * (1 if self.tied else 2)
        if self.family == "gpt":
            attention, mlp, norms = (
                4 * width * width + 4 * width,
                2 * width * hidden + hidden + width,
                4 * width,
            )
            return embeddings + self.positions * width + self.layers * (attention + mlp + norms) + 2 * width
        attention = 2 * width * width + 2 * width * width * self.key_value_heads // self.heads
        return embeddings + self.layers * (attention + 3 * width * hidden + 2 * width) + width


def _gpt(layers: int, width: int, heads: int, **rest: Any) -> ModelConfig:
    return ModelConfig("gpt", layers, width, heads, hidden_width=4 * width, key_value_heads=heads, **rest)


def _llama(
    layers: int, width: int, heads: int, hidden_width: int, key_value_heads: int, **rest: Any
) -> ModelConfig:
    return ModelConfig("llama", layers, width, heads, hidden_width, key_value_heads, **rest)


PRESETS: dict[str, ModelConfig] = {
    "gpt-nano": _gpt(2, 64, 2),
    "gpt-tiny": _gpt(4, 128, 4),
    "gpt-mini": _gpt(6, 256, 4),
    "gpt-small": _gpt(6, 384, 6),
    "gpt2": _gpt(12, 768, 12, vocabulary=50257),
    "gpt2-medium": _gpt(24, 1024, 16, vocabulary=50257),
    "gpt2-large": _gpt(36, 1280, 20, vocabulary=50257),
    "gpt2-xl": _gpt(48, 1600, 25, vocabulary=50257),
    # Vocabulary and sequence of the 22B and 175B models are those of arXiv 2205.05198, table 3 (GPT-3's 50257
    # rounded up).
    "gpt-22b": _gpt(48, 6144, 64, vocabulary=51200, positions=2048),
    "gpt3-175b": _gpt(96, 12288, 96, vocabulary=51200, positions=2048),
    "llama-nano": _llama(2, 64, 4, 192, 2, positions=2048),
    "llama-tiny": _llama(4, 128, 4, 384, 2, positions=2048),
    "llama-mini": _llama(6, 256, 8, 704, 4, positions=2048),
    "llama-small": _llama(6, 384, 6, 1024, 2, positions=2048),
    "llama-160m": _llama(12, 768, 12, 3072, 12, vocabulary=32000, positions=2048, tied=False),
    "llama-1b": _llama(16, 2048, 32, 8192, 8, vocabulary=128256, positions=8192, rotary_base=500_000.0),
    "llama2-7b": _llama(32, 4096, 32, 11008, 32, vocabulary=32000, positions=4096, tied=False),
    "llama3-8b": _llama(
        32, 4096, 32, 14336, 8, vocabulary=128256, positions=8192, tied=False, rotary_base=500_000.0
    ),
    "llama3-70b": _llama(
        80, 8192, 64, 28672, 8, vocabulary=128256, positions=8192, tied=False, rotary_base=500_000.0
    ),
}


def preset(name: str, **changes: Any) -> ModelConfig:
    """The preset called ``name`` in either case, with some settings changed.

    >>> preset("gpt-tiny", dropout=0.1).dropout
    0.1

    Raises:
        ModelError: there is no such preset or no such setting, or the settings do not fit together.
    """
    expect(isinstance(name, str), "preset(name=)", name, "a name, as in 'gpt-small'", ModelError)
    found = meant(name, PRESETS)
    if found is None:
        raise ModelError(f"there is no model {name!r}: {_instead(name)}")
    known = {field.name for field in fields(ModelConfig)}
    for key in changes:
        if key not in known:
            raise ModelError(f"a model has no setting {key!r}: the settings are {', '.join(sorted(known))}")
    return replace(PRESETS[found], **changes)


def _instead(name: str) -> str:
    """What to give in place of a name that is none."""
    published = meant(name, HUB)
    near = difflib.get_close_matches(name.lower(), (*PRESETS, *HUGGING_FACE), n=1)
    hint = f"did you mean {near[0]!r}? Else " if near else ""
    if published is not None:
        hint = f"its name on the hub is {HUB[published]}, and lowtide estimate, simulate and suggest know "
        hint += f"{published!r}. Else "
    return (
        f"{hint}the built-in ones are {', '.join(PRESETS)}; transformers builds {', '.join(HUGGING_FACE)}, "
        "and any other of its models as hf:TYPE[:key=value,...], a config.json or a name on the hub"
    )


def check_config(model: str, config: Any) -> None:
    """Refuse what is no configuration of a model."""
    allowed = "a ModelConfig, as preset('gpt-small') is"
    expect(isinstance(config, ModelConfig), f"{model}(config=)", config, allowed, ModelError)
