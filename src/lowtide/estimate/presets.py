"""Published models by name."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

from lowtide.errors import expect
from lowtide.estimate.errors import EstimateError, unknown
from lowtide.estimate.shape import Shape
from lowtide.model_names import meant


@dataclass(frozen=True, slots=True)
class Preset:
    """A published model.

    Attributes:
        shape: its shape.
        usual: settings of a run that belong to the model rather than to the machine (attention, dropout,
            precision of gradients).
        published: the parallel sizes and batches of its publication, which ``--as-published`` takes over.
    """

    shape: Shape
    usual: dict[str, Any] = field(default_factory=dict)
    published: dict[str, Any] = field(default_factory=dict)


PAPER = {"attention": "unfused", "dropout": 0.1, "reentrant": True}
"""The model of arXiv 2205.05198, Section 4: attention in separate operations, dropout everywhere, Megatron's
recomputation.
"""
MODERN = {"attention": "fused", "dropout": 0.0}


def _megatron(
    layers: int,
    hidden: int,
    heads: int,
    tp: int,
    pp: int,
    interleave: int,
    global_batch: int,
    micro_batch: int,
) -> Preset:
    """A row of arXiv 2205.05198, Table 3."""
    sizes = dict(
        tp=tp, pp=pp, interleave=interleave, global_batch=global_batch, micro_batch=micro_batch, seq=2048
    )
    return Preset(
        Shape(layers=layers, hidden=hidden, heads=heads, vocab=51200, sequence=2048), dict(PAPER), sizes
    )


def _gpt2(layers: int, hidden: int, heads: int) -> Preset:
    return Preset(
        Shape(layers=layers, hidden=hidden, heads=heads, vocab=50257, sequence=1024),
        {"attention": "fused", "dropout": 0.1},
    )


def _small_gpt(layers: int, hidden: int, heads: int) -> Preset:
    return Preset(Shape(layers=layers, hidden=hidden, heads=heads, vocab=256, sequence=1024), dict(MODERN))


def _llama(
    layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int, sequence: int, **rest: Any
) -> Preset:
    style: dict[str, Any] = (
        dict(mlp="swiglu", norm="rmsnorm", positions="rotary", bias=False, tied=False) | rest
    )
    shape = Shape(
        layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, ffn=ffn, vocab=vocab,
        sequence=sequence, **style,
    )  # fmt: skip
    return Preset(shape, dict(MODERN))


def _gpt_oss(layers: int, experts: int) -> Preset:
    return _llama(
        layers, 2880, 64, 8, 2880, 201088, 131072, head_width=64, mlp="swiglu-clamped", bias=True, sinks=True,
        experts=experts, experts_per_token=4, router="chosen",
    )  # fmt: skip


def _nemotron(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int) -> Preset:
    shape = Shape(
        layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, ffn=ffn, vocab=256000, sequence=4096,
        mlp="squared-relu", positions="rotary", bias=False, tied=False,
    )  # fmt: skip
    return Preset(shape, dict(MODERN))


def _plain(
    layers: int, hidden: int, heads: int, vocab: int, sequence: int = 2048, run: Any = (), **rest: Any
) -> Preset:
    """A decoder whose MLP has two matrices and whose linear layers have biases."""
    style: dict[str, Any] = dict(positions="rotary", tied=False) | rest
    shape = Shape(layers=layers, hidden=hidden, heads=heads, vocab=vocab, sequence=sequence, **style)
    return Preset(shape, MODERN | dict(run))


def _neox(layers: int, hidden: int, heads: int, vocab: int, **rest: Any) -> Preset:
    """GPT-NeoX: attention and MLP side by side, values a part of one product."""
    return _plain(layers, hidden, heads, vocab, run={"fused_qkv": True}, parallel=True, **rest)


def _phi(layers: int, hidden: int, heads: int) -> Preset:
    return _plain(layers, hidden, heads, 51200, parallel=True, norms=1, more=51200)


def _falcon(layers: int, hidden: int, heads: int, kv_heads: int, norms: int) -> Preset:
    style: dict[str, Any] = dict(bias=False, tied=True, norms=norms)
    return _neox(layers, hidden, heads, 65024, kv_heads=kv_heads, **style)


def _opt(layers: int, hidden: int, heads: int) -> Preset:
    style: dict[str, Any] = dict(mlp="relu", positions="learned", tied=True, more=2 * hidden)
    return _plain(layers, hidden, heads, 50272, run={"dropout": 0.1}, **style)


def _bloom(layers: int, hidden: int, heads: int) -> Preset:
    run = {"attention": "unfused"}
    return _plain(layers, hidden, heads, 250880, run=run, tied=True, more=2 * hidden)


def _starcoder2(layers: int, hidden: int, heads: int, kv_heads: int) -> Preset:
    return _plain(layers, hidden, heads, 49152, 16384, kv_heads=kv_heads, tied=True)


def _qwen(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, **rest: Any) -> Preset:
    given: dict[str, Any] = dict(vocab=151936, sequence=8192) | rest
    return _llama(layers, hidden, heads, kv_heads, ffn, given.pop("vocab"), qkv_bias=True, **given)


def _mpt(layers: int, hidden: int, heads: int) -> Preset:
    """A model of MosaicML's benchmarks, without its learned positions: they are as many as a run's tokens."""
    shape = Shape(
        layers=layers, hidden=hidden, heads=heads, vocab=50368, sequence=2048, positions="rotary", bias=False
    )
    return Preset(shape, dict(MODERN))


SMALL: dict[str, Preset] = {
    "gpt-nano": _small_gpt(2, 64, 2),
    "gpt-tiny": _small_gpt(4, 128, 4),
    "gpt-mini": _small_gpt(6, 256, 4),
    "gpt-small": _small_gpt(6, 384, 6),
    "llama-nano": _llama(2, 64, 4, 2, 192, 256, 2048, tied=True),
    "llama-tiny": _llama(4, 128, 4, 2, 384, 256, 2048, tied=True),
    "llama-mini": _llama(6, 256, 8, 4, 704, 256, 2048, tied=True),
    "llama-small": _llama(6, 384, 6, 2, 1024, 256, 2048, tied=True),
    "llama-160m": _llama(12, 768, 12, 12, 3072, 32000, 2048),
}
"""What ``lowtide train`` and ``plan`` build of their own (`lowtide.models.presets`)."""

PRESETS: dict[str, Preset] = {
    "22b": _megatron(48, 6144, 64, tp=8, pp=1, interleave=1, global_batch=4, micro_batch=4),
    "175b": _megatron(96, 12288, 96, tp=8, pp=8, interleave=3, global_batch=64, micro_batch=1),
    "530b": _megatron(105, 20480, 128, tp=8, pp=35, interleave=3, global_batch=280, micro_batch=1),
    "1t": _megatron(128, 25600, 160, tp=8, pp=64, interleave=1, global_batch=512, micro_batch=1),
    "gpt2": _gpt2(12, 768, 12),
    "gpt2-medium": _gpt2(24, 1024, 16),
    "gpt2-large": _gpt2(36, 1280, 20),
    "gpt2-xl": _gpt2(48, 1600, 25),
    "llama-7b": _llama(32, 4096, 32, 32, 11008, 32000, 2048),
    "llama-13b": _llama(40, 5120, 40, 40, 13824, 32000, 2048),
    "llama-30b": _llama(60, 6656, 52, 52, 17920, 32000, 2048),
    "llama-65b": _llama(80, 8192, 64, 64, 22016, 32000, 2048),
    "llama2-7b": _llama(32, 4096, 32, 32, 11008, 32000, 4096),
    "llama2-13b": _llama(40, 5120, 40, 40, 13824, 32000, 4096),
    "llama2-70b": _llama(80, 8192, 64, 8, 28672, 32000, 4096),
    "llama3-1b": _llama(16, 2048, 32, 8, 8192, 128256, 8192, tied=True),
    "llama3-3b": _llama(28, 3072, 24, 8, 8192, 128256, 8192, tied=True),
    "llama3-8b": _llama(32, 4096, 32, 8, 14336, 128256, 8192),
    "llama3-70b": _llama(80, 8192, 64, 8, 28672, 128256, 8192),
    "llama3-405b": _llama(126, 16384, 128, 8, 53248, 128256, 8192),
    "codellama-34b": _llama(48, 8192, 64, 8, 22016, 32000, 16384),
    "mistral-7b": _llama(32, 4096, 32, 8, 14336, 32000, 8192),
    "qwen2-7b": _llama(28, 3584, 28, 4, 18944, 152064, 8192, qkv_bias=True),
    "qwen2-72b": _llama(80, 8192, 64, 8, 29568, 152064, 8192, qkv_bias=True),
    "qwen-1.8b": _qwen(24, 2048, 16, 16, 5504),
    "qwen-7b": _qwen(32, 4096, 32, 32, 11008),
    "qwen-14b": _qwen(40, 5120, 40, 40, 13696, vocab=152064),
    "qwen-72b": _qwen(80, 8192, 64, 64, 24576, vocab=152064),
    "qwen2-0.5b": _qwen(24, 896, 14, 2, 4864, tied=True),
    "qwen2-1.5b": _qwen(28, 1536, 12, 2, 8960, tied=True),
    "qwen2.5-3b": _qwen(36, 2048, 16, 2, 11008, tied=True),
    "qwen2.5-14b": _qwen(48, 5120, 40, 8, 13824, vocab=152064),
    "qwen2.5-32b": _qwen(64, 5120, 40, 8, 27648, vocab=152064),
    "qwen3-0.6b": _llama(28, 1024, 16, 8, 3072, 151936, 8192, head_width=128, qk_norm=True, tied=True),
    "qwen3-1.7b": _llama(28, 2048, 16, 8, 6144, 151936, 8192, head_width=128, qk_norm=True, tied=True),
    "qwen3-4b": _llama(36, 2560, 32, 8, 9728, 151936, 8192, head_width=128, qk_norm=True, tied=True),
    "qwen3-8b": _llama(36, 4096, 32, 8, 12288, 151936, 8192, qk_norm=True),
    "qwen3-14b": _llama(40, 5120, 40, 8, 17408, 151936, 8192, qk_norm=True),
    "qwen3-32b": _llama(64, 5120, 64, 8, 25600, 151936, 8192, head_width=128, qk_norm=True),
    "mixtral-8x7b": _llama(32, 4096, 32, 8, 14336, 32000, 32768, experts=8, experts_per_token=2),
    "mixtral-8x22b": _llama(56, 6144, 48, 8, 16384, 32000, 65536, experts=8, experts_per_token=2),
    "qwen3-30b-a3b": _llama(
        48, 2048, 32, 4, 768, 151936, 40960, head_width=128, qk_norm=True, experts=128, experts_per_token=8
    ),
    "qwen3-235b-a22b": _llama(
        94, 4096, 64, 4, 1536, 151936, 40960, head_width=128, qk_norm=True, experts=128, experts_per_token=8
    ),
    "deepseek-v3": _llama(
        61, 7168, 128, 128, 2048, 129280, 4096, head_width=192, value_width=128, query_latent=1536,
        kv_latent=512, rope_width=64, router="sigmoid", experts=256, experts_per_token=8, shared_experts=1,
        dense_layers=3, dense_ffn=18432,
    ),
    "glm4.5-air": _llama(
        46, 4096, 96, 8, 1408, 151552, 131072, head_width=128, qkv_bias=True, router="sigmoid",
        experts=128, experts_per_token=8, shared_experts=1, dense_layers=1, dense_ffn=10944,
    ),
    "tinyllama-1.1b": _llama(22, 2048, 32, 4, 5632, 32000, 2048),
    "yi-6b": _llama(32, 4096, 32, 4, 11008, 64000, 4096),
    "yi-9b": _llama(48, 4096, 32, 4, 11008, 64000, 4096),
    "yi-34b": _llama(60, 7168, 56, 8, 20480, 64000, 4096),
    "deepseek-7b": _llama(30, 4096, 32, 32, 11008, 102400, 4096),
    "mistral-nemo-12b": _llama(40, 5120, 32, 8, 14336, 131072, 131072, head_width=128),
    "mistral-small-24b": _llama(40, 5120, 32, 8, 32768, 131072, 32768, head_width=128),
    "codellama-7b": _llama(32, 4096, 32, 32, 11008, 32016, 16384),
    "codellama-13b": _llama(40, 5120, 40, 40, 13824, 32016, 16384),
    "powerlm-3b": _llama(40, 2304, 36, 36, 9216, 49152, 4096, tied=True),
    "gemma-2b": _llama(18, 2048, 8, 1, 16384, 256000, 8192, head_width=256, tied=True),
    "gemma-7b": _llama(28, 3072, 16, 16, 24576, 256000, 8192, head_width=256, tied=True),
    "phi-1.5": _phi(24, 2048, 32),
    "phi-2": _phi(32, 2560, 32),
    "phi-3-mini": _llama(32, 3072, 32, 32, 8192, 32064, 4096),
    "phi-3-medium": _llama(40, 5120, 40, 10, 17920, 32064, 4096),
    "phi-4": _llama(40, 5120, 40, 10, 17920, 100352, 16384),
    "phi-4-mini": _llama(32, 3072, 24, 8, 8192, 200064, 131072, tied=True),
    "stablelm-alpha-3b": _neox(16, 4096, 32, 50688),
    "stablelm-alpha-7b": _neox(16, 6144, 48, 50432),
    "stablelm-3b": _llama(32, 2560, 32, 32, 6912, 50304, 4096, norm="layernorm"),
    "stablelm2-1.6b": _llama(24, 2048, 32, 32, 5632, 100352, 4096, norm="layernorm", qkv_bias=True),
    "falcon-7b": _falcon(32, 4544, 71, 1, norms=1),
    "falcon-40b": _falcon(60, 8192, 128, 8, norms=2),
    "gpt-neox-20b": _neox(44, 6144, 64, 50432),
    **{f"pythia-{size}": _neox(*sizes) for size, sizes in {
        "70m": (6, 512, 8, 50304), "160m": (12, 768, 12, 50304), "410m": (24, 1024, 16, 50304),
        "1b": (16, 2048, 8, 50304), "1.4b": (24, 2048, 16, 50304), "2.8b": (32, 2560, 32, 50304),
        "6.9b": (32, 4096, 32, 50432), "12b": (36, 5120, 40, 50688)}.items()},
    **{f"opt-{size}": _opt(*sizes) for size, sizes in {
        "125m": (12, 768, 12), "1.3b": (24, 2048, 32), "2.7b": (32, 2560, 32), "6.7b": (32, 4096, 32),
        "13b": (40, 5120, 40), "30b": (48, 7168, 56), "66b": (64, 9216, 72)}.items()},
    **{f"bloom-{size}": _bloom(*sizes) for size, sizes in {
        "560m": (24, 1024, 16), "1b1": (24, 1536, 16), "1b7": (24, 2048, 16), "3b": (30, 2560, 32),
        "7b1": (30, 4096, 32), "176b": (70, 14336, 112)}.items()},
    "starcoder2-3b": _starcoder2(30, 3072, 24, 2),
    "starcoder2-7b": _starcoder2(32, 4608, 36, 4),
    "starcoder2-15b": _starcoder2(40, 6144, 48, 4),
    "santacoder-1b": _plain(24, 2048, 16, 49280, kv_heads=1, positions="learned", tied=True),
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
    "mpt-125m": _mpt(12, 768, 12),
    "mpt-350m": _mpt(24, 1024, 16),
    "mpt-760m": _mpt(24, 1536, 12),
    "mpt-1b": _mpt(24, 2048, 16),
    "mpt-3b": _mpt(32, 2560, 20),
    "mpt-7b": _mpt(32, 4096, 32),
    "mpt-13b": _mpt(40, 5120, 40),
    "mpt-30b": _mpt(48, 7168, 56),
    "mpt-70b": _mpt(80, 8192, 64),
    "nemotron-15b": _nemotron(32, 6144, 48, 8, 24576),
    "nemotron-340b": _nemotron(96, 18432, 96, 8, 73728),
    **SMALL,
}  # fmt: skip
"""Published models: 22b to 1t are arXiv 2205.05198, Table 3; the others their own model cards; and those of
`SMALL`."""


def preset(name: str) -> Preset:
    """The preset called ``name``; case does not matter.

    >>> preset("22B").shape.hidden
    6144

    Raises:
        EstimateError: there is none; the message lists those there are.
    """
    expect(isinstance(name, str), "preset(name=)", name, "a name, as in 'llama3-8b'", EstimateError)
    key = preset_name(name)
    if key not in PRESETS:
        raise EstimateError(
            f"{unknown('model', name, PRESETS)}. Any other Hugging Face model is hf:TYPE[:key=value,...], or "
            "has its config.json (lowtide estimate --from-hf), which is traced where no formula fits"
        )
    return PRESETS[key]


def preset_name(name: str) -> str:
    """What the preset is called that ``name`` means; ``name`` itself where there is none.

    >>> preset_name("Llama3.1-8B"), preset_name("config.json")
    ('llama3-8b', 'config.json')
    """
    return meant(name, PRESETS) or name


def changed(shape: Shape, **changes: Any) -> Shape:
    """The shape with some sizes changed; what follows from a changed size (head width, MLP size, key-value
    heads) follows again.

    >>> changed(preset("llama3-8b").shape, layers=16).layers
    16
    >>> changed(preset("gpt2").shape, hidden=1024, heads=16).ffn
    4096
    """
    if not changes:
        return shape
    if "hidden" in changes and "ffn" not in changes:
        changes["ffn"] = 0 if shape.ffn == 4 * shape.hidden or shape.mlp == "swiglu" else shape.ffn
    if ("hidden" in changes or "heads" in changes) and "head_width" not in changes:
        changes["head_width"] = 0
    if "head_width" in changes and shape.value_width == shape.head_width:
        changes.setdefault("value_width", 0)
    if "heads" in changes and "kv_heads" not in changes and shape.kv_heads == shape.heads:
        changes["kv_heads"] = 0
    if "bias" in changes and "qkv_bias" not in changes:
        changes["qkv_bias"] = None
    known = {f.name for f in fields(Shape)}
    for key in changes:
        if key not in known:
            raise unknown("setting of a model", key, known)
    return replace(shape, **changes)
